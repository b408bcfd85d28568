"""Prices of the parts of operators: by the library's kernels for them, or by Roller's own best ones.

Parts are priced once per process and board; all that is new goes to the library model in one call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from daydream.operators.attention import efficient_attention_call
from daydream.operators.work import GROUPED, Direction, Model, Moved, Work, WorkPart
from hal.support.errors import InputError
from sokoban.language.expression import DTYPE_BYTES

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec
    from roller.estimate.operators import OperatorEstimate
    from roller.library import LibraryCall
    from roller.library.calls import PricedCall

Implementation = Literal["best", "library"]
#: The same, or for every operator the one that is expected to take less time.
Choice = Literal["best", "library", "faster"]


@dataclass(frozen=True)
class KernelPrice:
    """Price of a kernel.

    Attributes:
        name: the kernel or algorithm that is assumed to run.
        seconds: on the device, within a step.
        bound: the longest part of that.
        model: the kind of model that says so.
        launches: kernels that it stands for where one algorithm takes several.
    """

    name: str
    seconds: float
    bound: str
    model: Model
    launches: int = 1


@dataclass(frozen=True)
class PartPrice:
    """A part priced: its kernels and its name, or why there is no price."""

    kernels: tuple[KernelPrice, ...] = ()
    text: str = ""
    reason: str = ""

    @property
    def microseconds(self) -> float:
        """Of all kernels; NaN where there is no price."""
        return float("nan") if self.reason else sum(kernel.seconds for kernel in self.kernels) * 1e6

    @property
    def kernel(self) -> str:
        """The longest kernel; empty where there is none."""
        return max(self.kernels, key=lambda each: each.seconds).name if self.kernels else ""


class PartKey(NamedTuple):
    """A part by its value, the operator as JSON text."""

    text: str
    direction: Direction
    moved: Moved | None = None
    efficient: bool = False
    channels_last: bool = False
    variant: str = ""
    sizes: tuple[float, ...] = ()


#: Kind of a library call -> the kind of model that prices it.
_MODELS: dict[str, Model] = {
    "gemm": "products", "convolution": "convolutions", "elementwise": "element-wise", "softmax": "row-wise",
    "layer_norm": "row-wise", "attention": "attention", "stream": "streams", "roofline": "bytes",
    "collective": "collectives", "scaled": "products", "experts": "products", "rows": "row-wise",
    "scan": "row-wise", "topk": "row-wise",
    "recurrent": "streams", "latent": "attention",
}  # fmt: skip

#: The type that TensorFloat-32 is by name.
TF32 = "tfloat32"

#: Prices of this process, by board and implementation: construction takes hundredths of a second per operator, and
#: networks repeat themselves.
_PRICES: dict[tuple[Any, ...], dict[PartKey, PartPrice]] = {}


def part_key(part: WorkPart, dtype: str = "") -> PartKey:
    """The part by its value; ``dtype`` in place of its own element type."""
    if not dtype or not part.data:
        text = json.dumps(part.data) if part.data else ""
        return PartKey(text, part.direction, part.moved, part.efficient, part.channels_last, part.variant, part.sizes)
    moved = part.moved
    if moved is not None:
        ratio = DTYPE_BYTES[dtype] / DTYPE_BYTES[part.data["dtype"]]
        moved = replace(moved, bytes=moved.bytes * ratio, again=moved.again * ratio, between=moved.between * ratio)
    text = json.dumps(part.data | {"dtype": dtype})
    return PartKey(text, part.direction, moved, part.efficient, part.channels_last, part.variant, part.sizes)


def part_prices(
    works: Iterable[Work],
    device: DeviceSpec,
    implementation: Implementation,
    *,
    search: str = "roller",
    dtype: str = "",
) -> dict[PartKey, PartPrice]:
    """The price of every part of these operators.

    Raises:
        InputError: the board runs no such library, or there is no such implementation or search.
    """
    if implementation not in ("best", "library"):
        raise InputError("implementation", f"there is no {implementation!r}", "use best or library")
    distinct = {id(work): work for work in works}
    keys = dict.fromkeys(part_key(part, dtype) for work in distinct.values() for part in work.parts)
    price_by_key = _PRICES.setdefault((device, implementation, search if implementation == "best" else ""), {})
    missing = [key for key in keys if key not in price_by_key]
    if implementation == "library":
        results = library_prices(missing, device)
    else:
        from roller.programs import METHODS

        if search not in METHODS:
            raise InputError("search", f"there is no {search!r}", f"use one of {', '.join(METHODS)}")
        results = [_by_best(key, device, search) for key in missing]
    price_by_key.update(zip(missing, results, strict=True))
    return {key: price_by_key[key] for key in keys}


# The library's kernels


def library_prices(keys: Sequence[PartKey], device: DeviceSpec) -> list[PartPrice]:
    """Prices of these parts by the library, in order.

    Raises:
        InputError: the board runs no such library.
    """
    from roller.library.cache import flushed_cache
    from roller.library.calls import price

    prices: list[PartPrice | None] = [None] * len(keys)
    called: list[list[LibraryCall]] = []
    gradients: list[tuple[int, LibraryCall]] = []
    places: list[int] = []
    for place, key in enumerate(keys):
        if key.moved is not None:
            called.append([_stream(key.moved, device)])
            places.append(place)
            continue
        try:
            calls = _calls(key, device)
        except InputError as error:
            prices[place] = PartPrice(reason=str(error))
            continue
        if key.direction.startswith("backward ") and calls[0].kind == "convolution":
            gradients.append((place, calls[0]))
        elif key.direction.startswith("backward "):
            prices[place] = PartPrice((), _stem(key), f"no model of it in {calls[0].dtype}")
        else:
            called.append(calls)
            places.append(place)
    cold = [(moved := keys[place].moved) is not None and moved.is_cold for place in places]
    each = iter(
        price([call for calls, is_cold in zip(called, cold, strict=True) if not is_cold for call in calls], device)
    )
    with flushed_cache():
        new = iter(
            price([call for calls, is_cold in zip(called, cold, strict=True) if is_cold for call in calls], device)
        )
    for place, calls, is_cold in zip(places, called, cold, strict=True):
        kernels = tuple(_kernel(keys[place], call, next(new if is_cold else each)) for call in calls)
        launches = moved.launches if (moved := keys[place].moved) is not None else 1
        prices[place] = PartPrice(kernels * launches, _stem(keys[place]))
    for place, kernel in _gradient_prices(keys, gradients, device):
        prices[place] = PartPrice((kernel,), _stem(keys[place]))
    return [each for each in prices if each is not None]


def _calls(key: PartKey, device: DeviceSpec) -> list[LibraryCall]:
    from daydream.operators.products import SHARED_WEIGHTS
    from roller.library import library_calls
    from roller.library.calls import CHANNELS_LAST, PYTORCH_FLASH, RMS, SHARED, check_call
    from roller.library.products.matrix_gemm import has_matrix_gemm

    data = json.loads(key.text)
    if key.variant == GROUPED:
        return _grouped_calls(data, device)
    if key.efficient:
        return [efficient_attention_call(data, key.direction, device)]
    calls = library_calls(data, "backward" if key.direction == "backward" else "forward")
    for call in calls:
        check_call(call, device)
    if key.variant == TF32 and has_matrix_gemm(device, TF32):
        calls = [replace(call, dtype=TF32) if call.kind == "gemm" else call for call in calls]
    if key.variant == SHARED_WEIGHTS and has_matrix_gemm(device, calls[0].dtype):
        calls = [replace(call, variant=SHARED) for call in calls]
    if key.variant == RMS:
        calls = [replace(call, variant=RMS) for call in calls]
    if key.sizes and calls[0].kind == "convolution":
        calls = [replace(calls[0], sizes=key.sizes)]
    if calls[0].kind == "attention":
        return [replace(call, variant=key.variant or PYTORCH_FLASH) for call in calls]
    if key.channels_last:
        return [replace(call, variant=CHANNELS_LAST) if call.kind == "convolution" else call for call in calls]
    return calls


def _grouped_calls(data: Mapping[str, Any], device: DeviceSpec) -> list[LibraryCall]:
    """One kernel for all groups where PyTorch has it (CUTLASS, from sm_90 on, in bfloat16), else a product for each."""
    from roller.library import library_calls

    instruction = device.best_matrix_instruction(data["dtype"])
    groups, sizes = data["b"], {name: data[name] for name in ("n", "k")}
    if data["dtype"] == "bfloat16" and instruction is not None and not instruction.is_by_warps:
        return library_calls({"op": "grouped_matmul", "m": groups * data["m"], "groups": groups, **sizes})
    return groups * library_calls({"op": "matmul", "m": data["m"], "dtype": data["dtype"], **sizes})


def _stream(moved: Moved, device: DeviceSpec) -> LibraryCall:
    """The call of one of the kernels."""
    from roller.library.calls import LibraryCall
    from roller.library.streaming.elementwise import instruction_seconds, integer_seconds, reuse
    from roller.library.streaming.streams import POINT_INSTRUCTIONS

    if moved.scan:
        sizes = (*moved.walk, moved.bytes)
        return LibraryCall(kind="scan", label=moved.kernel, sizes=sizes, dtype=moved.dtype, variant=moved.scan)
    if moved.walk and moved.kernel == "topk":
        return LibraryCall(kind="topk", label="topk", sizes=moved.walk, dtype=moved.dtype)
    if moved.walk:
        return LibraryCall(kind="rows", label=moved.kernel, sizes=moved.walk, dtype=moved.dtype, variant=moved.kernel)
    total = moved.bytes + moved.again * (1 - float(reuse(device, moved.between)))
    # Integer instructions as so many of the others.
    each = float(integer_seconds(device, 1.0) / instruction_seconds(device, 1.0))
    points = moved.outputs * (moved.instructions + moved.integers * each) / POINT_INSTRUCTIONS
    kind, work = ("roofline", moved.flops) if moved.flops else ("stream", points)
    sizes = tuple(size / moved.launches for size in (total, moved.outputs, work))
    if kind == "stream":
        sizes = (*sizes, moved.scattered / moved.launches, moved.blocks, moved.trips)
    return LibraryCall(kind=kind, label=moved.kernel, sizes=sizes, dtype=moved.dtype, variant=moved.kernel)


def _kernel(key: PartKey, call: LibraryCall, priced: PricedCall) -> KernelPrice:
    if key.moved is not None:
        return KernelPrice(key.moved.kernel, priced.seconds, priced.bound, key.moved.model, priced.kernels)
    # Attention without a model of its own is a roofline call that has its label.
    name, model = (
        (call.label, _MODELS["attention"])
        if key.efficient and call.kind == "roofline"
        else (priced.kernel, _MODELS[call.kind])
    )
    return KernelPrice(name, priced.seconds, priced.bound, model, priced.kernels)


@lru_cache(maxsize=65536)
def _stem_of(text: str) -> str:
    from roller.library.named_calls import named_stem

    return named_stem(json.loads(text)) or ""


def _stem(key: PartKey) -> str:
    """The part as Roller names it, or the kernel's name."""
    if not key.text:
        return key.moved.kernel if key.moved is not None else ""
    return _stem_of(key.text)


def _gradient_prices(
    keys: Sequence[PartKey], gradients: Sequence[tuple[int, LibraryCall]], device: DeviceSpec
) -> list[tuple[int, KernelPrice]]:
    prices = []
    kinds = [(keys[place].direction, call.dtype, keys[place].channels_last) for place, call in gradients]
    for kind in dict.fromkeys(kinds):
        same_kind = [gradient for gradient, its in zip(gradients, kinds, strict=True) if its == kind]
        kernels = _gradient_kernels([call for _, call in same_kind], device, *kind)
        prices += [(place, kernel) for (place, _), kernel in zip(same_kind, kernels, strict=True)]
    return prices


def _gradient_kernels(
    calls: Sequence[LibraryCall], device: DeviceSpec, direction: Direction, dtype: str, channels_last: bool
) -> list[KernelPrice]:
    """One gradient of convolutions: its stages among those of the backward pass."""
    from roller.library.calls import KINDS
    from roller.library.convolutions.float32 import ConvolutionSizes, convolution_seconds

    columns = zip(*(call.sizes for call in calls), strict=True)
    sizes = ConvolutionSizes(**dict(zip(KINDS["convolution"], columns, strict=True)))
    times = convolution_seconds(
        sizes, device, dtype_bytes=DTYPE_BYTES[dtype], direction="backward", channels_last=channels_last,
        tf32=dtype == "tfloat32",
    )  # fmt: skip
    prefix, which = ("data_", 0) if direction == "backward data" else ("weight_", 1)
    stages = {name.removeprefix(prefix): each for name, each in times.stages.items() if name.startswith(prefix)}
    table = np.stack(list(stages.values()))
    bounds = [list(stages)[row] for row in table.argmax(axis=0).tolist()]
    names = [str(algorithm).split("+")[which] for algorithm in times.algorithm.tolist()]
    rows = zip(names, table.sum(axis=0).tolist(), bounds, strict=True)
    return [KernelPrice(name, seconds, bound, "convolutions") for name, seconds, bound in rows]


# Roller's own kernels


def _by_best(key: PartKey, device: DeviceSpec, search: str) -> PartPrice:
    """Roller's best kernels for an operator; of a convolution's backward pass those of one gradient."""
    if not key.text:
        return PartPrice((), _stem(key), "Roller has no kernel of its own for it")
    try:
        result = _best_estimate(key.text, "forward" if key.direction == "forward" else "backward", device, search)
    except InputError as error:
        return PartPrice(reason=str(error))
    label = {"backward data": "gradient of X", "backward weights": "gradient of W"}.get(key.direction, "")
    parts = [part for part in result.parts if part.label.startswith(label)]
    if not parts:
        return PartPrice((), result.name, "Roller has no kernel of its own for it")
    longest = max(parts, key=lambda part: part.seconds)
    count = f", {len(parts)} kernels" if len(parts) > 1 else ""
    # Of our own kernels, not of library calls, every part says who found it.
    method = getattr(longest, "found_by", "construction")
    total = sum(part.seconds for part in parts)
    name = f"{method}, bound by {longest.bound}{count}"
    kernel = KernelPrice(name, total, longest.bound, _model_of(key.text), len(parts))
    return PartPrice((kernel,), result.name)


def _model_of(text: str) -> Model:
    from roller.library import library_calls

    return _MODELS[library_calls(json.loads(text))[0].kind]


@lru_cache(maxsize=4096)
def _best_estimate(
    text: str, direction: Literal["forward", "backward"], device: DeviceSpec, search: str
) -> OperatorEstimate:
    """All kernels of a pass: both gradients of a convolution are wanted as a rule, and are found together."""
    from roller.estimate.operators import Item, estimate_items

    return estimate_items([Item("operator", json.loads(text), direction)], device, "best", search)[0]
