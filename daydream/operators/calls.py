"""Prices of captured operators on a board: the kernels that PyTorch launches for each, all priced together.

Equal operators are described once per process and priced once per board. What no rule knows costs the bytes of its
arguments and results at the rate at which copies run, and says so (``bytes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, get_args

from daydream.operators.attention import counted_flops
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.operators.part_prices import (
    Choice,
    KernelPrice,
    PartKey,
    PartPrice,
    part_key,
    part_prices,
)
from daydream.operators.rules import describe, launches_nothing
from daydream.operators.traffic import moved_bytes
from daydream.operators.variants import attention_kernels, in_documents, narrowed, varied
from daydream.operators.work import Moved, Work, WorkPart
from hal.support.errors import InputError, listed
from sokoban.language.expression import DTYPE_BYTES

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: An operator: its name, its arguments and its results.
Operator = tuple[str, Inputs, tuple[RecordedTensor, ...]]


@dataclass(frozen=True, kw_only=True)
class OperatorPrice:
    """Price of an operator.

    Attributes:
        kernels: in the order in which they are launched; none for views and allocations.
        work: what it computes; None where it launches nothing.
        flops: arithmetic of products, convolutions and attention as PyTorch's ``FlopCounterMode`` counts it.
    """

    kernels: tuple[KernelPrice, ...] = ()
    work: Work | None = None
    flops: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all kernels one after the other."""
        return sum(kernel.seconds for kernel in self.kernels)


_NOTHING = OperatorPrice()


@lru_cache(maxsize=65536)
def work_of_call(name: str, inputs: Inputs, outputs: tuple[RecordedTensor, ...]) -> Work | None:
    """Work of a captured operator; its bytes where no rule knows it, None where it launches nothing."""
    if launches_nothing(name, inputs, outputs):
        return None
    work = describe(name, inputs, outputs)
    if not isinstance(work, str):
        return work
    total = moved_bytes(inputs, outputs)
    # How many results a block of an unknown kernel makes is unknown, too.
    moved = Moved(kernel=name, bytes=total, outputs=0.0, model="bytes")
    return Work(kind="unknown", parts=(WorkPart({}, moved=moved),), flops=0.0, bytes=total, assumed=work)


def _with_tf32(work: Work) -> Work:
    """The work, whose convolutions of float32 may round their operands to TF32."""
    parts = (
        replace(part, data=part.data | {"allow_tf32": True}) if "conv2d" in part.data.get("op", "") else part
        for part in work.parts
    )
    return replace(work, parts=tuple(parts))


def operator_prices(
    operators: Sequence[Operator],
    device: DeviceSpec,
    implementation: Choice = "library",
    *,
    attention: str = "",
    tf32: bool = True,
    tf32_products: bool = False,
    precision: str = "",
    experts: str = "pytorch",
    packed: int = 0,
) -> list[OperatorPrice]:
    """The price of every operator, in order; equal ones are the same object.

    Args:
        operators: as a captured step has them, without those that run on the host (``launches`` is false), whose
            arguments look alike.
        device: an NVIDIA board.
        implementation: the library's kernels, Roller's ``best`` ones wherever it can build them, or the ``faster`` of
            both.
        attention: version of fused attention (:data:`daydream.operators.variants.VERSIONS`).
        tf32: whether convolutions of float32 may round their operands to TF32, as PyTorch's ``cudnn.allow_tf32`` says
            by default; ``matmul.allow_tf32``, which it does not set, keeps products in float32.
        tf32_products: whether products of float32 may, too: ``torch.set_float32_matmul_precision("high")``.
        experts: kernels of grouped products (:data:`daydream.operators.variants.EXPERT_KERNELS`).
        packed: tokens of the documents that a sample of attention is packed of; 0 where it is one.
        precision: of products of 16 bits (:data:`daydream.operators.variants.PRECISIONS`); empty keeps them.

    Raises:
        InputError: the board runs no such library or attention, or there is no such implementation.
    """
    if implementation not in get_args(Choice):
        names = listed(get_args(Choice))
        raise InputError("implementation", f"there is no {implementation!r}", f"use one of {names}")
    works = [work_of_call(*operator) for operator in operators]
    if tf32:
        rounded = {
            id(work): _with_tf32(work)
            for work in works
            if work is not None and work.kind == "convolution" and work.dtype == "float32"
        }
        works = [rounded.get(id(work), work) for work in works]
    distinct = {id(work): work for work in works if work is not None}
    family = attention_kernels(attention, device)
    if family or tf32_products or experts != "pytorch":
        # Equal operators stay the same object.
        distinct = {key: varied(work, family, tf32=tf32_products, experts=experts) for key, work in distinct.items()}
    if packed:
        distinct = {key: in_documents(work, packed) for key, work in distinct.items()}
    if precision:
        distinct = {key: narrowed(work, precision) for key, work in distinct.items()}
    by_library = part_prices(distinct.values(), device, "library")
    instead = {
        key: _otherwise(work)
        for key, work in distinct.items()
        if any(by_library[part_key(part)].reason for part in work.parts)
    }
    by_library |= part_prices(instead.values(), device, "library")
    prices = {key: _price(work, instead.get(key), by_library, {}) for key, work in distinct.items()}
    if implementation != "library":
        best = part_prices(distinct.values(), device, "best")
        ours = {key: _price(work, instead.get(key), by_library, best) for key, work in distinct.items()}
        if implementation == "faster":
            ours = {key: min(ours[key], prices[key], key=lambda price: price.seconds) for key in ours}
        prices = ours
    return [prices[id(work)] if work is not None else _NOTHING for work in works]


def _otherwise(work: Work) -> Work:
    """Work that no model of the board's library knows: memory-efficient attention, or arithmetic against bytes."""
    if work.kind == "attention" and not work.parts[0].efficient:
        return replace(work, parts=tuple(replace(part, efficient=True) for part in work.parts))
    moved = Moved(
        kernel=work.kind,
        bytes=work.bytes,
        outputs=work.bytes / DTYPE_BYTES[work.dtype],
        flops=work.flops,
        dtype=work.dtype if work.dtype in ("float64", "float32") else "float32",
        model="bytes",
    )
    return replace(work, parts=(WorkPart({}, moved=moved),))


def _price(
    work: Work, instead: Work | None, by_library: dict[PartKey, PartPrice], best: dict[PartKey, PartPrice]
) -> OperatorPrice:
    keys = [(part_key(part), part.times) for part in work.parts]
    if not all(key in best and not best[key].reason for key, _ in keys):
        keys = [(part_key(part), part.times) for part in (instead or work).parts]
    kernels: list[KernelPrice] = []
    for key, times in keys:
        priced = best.get(key)
        kernels += (priced if priced is not None and not priced.reason else by_library[key]).kernels * times
    return OperatorPrice(kernels=tuple(kernels), work=work, flops=counted_flops(work))
