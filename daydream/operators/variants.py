"""Which of several library kernels a job runs for the same operator: versions of attention, narrower products.

PyTorch's ``scaled_dot_product_attention`` is FlashAttention 2 on every board from sm_80 on (``aten/.../flash_attn``);
FlashAttention 3, cuDNN's kernels and those in Triton run where a job asks for them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from daydream.operators.work import EVEN, Work, WorkPart
from hal.support.errors import InputError
from sokoban.language.layers import SCALED_PRECISIONS

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: Versions of attention by the names of ``--attention``; those before the last two compute scores by kernels of their
#: own (``efficient``), or write them out (``math``).
VERSIONS = ("auto", "flash", "flash2", "flash3", "cudnn", "triton", "efficient", "math", "eager")

#: What a capture of each dispatches: ``eager`` writes attention out.
CAPTURED = {
    "flash2": "flash", "flash3": "fused", "cudnn": "fused", "triton": "flash", "math": "eager",
}  # fmt: skip

#: Names of ``--precision``: 16 bits, and those of narrow linear layers.
PRECISIONS = ("16-bit", *SCALED_PRECISIONS)

#: Names of ``--expert-kernels``: PyTorch's grouped product, or cuBLAS on several streams, a product an expert, as
#: Transformer Engine runs them: at the pace of a batch of products.
EXPERT_KERNELS = ("pytorch", "cublas")

#: Numbers of grouped products by ``--precision``; matrix units scale MXFP8's blocks themselves.
_GROUPED = {
    "fp8-tensorwise": "fp8-tensorwise", "fp8-rowwise": "fp8-tensorwise", "fp8-block": "fp8-block",
    "mxfp8": "fp8-tensorwise", "nvfp4": "nvfp4",
}  # fmt: skip

#: Multiple that rows and columns of narrow operands must be.
_SIDE = 16

_WIDE = ("bfloat16", "float16")

#: The first boards with FlashAttention, the only ones that run FlashAttention 3, those with FlashAttention 4.
_AMPERE, _HOPPER, _BLACKWELL = (8, 0), 9, 10


def attention_kernels(version: str, device: DeviceSpec) -> str:
    """The family of kernels (:data:`roller.library.attention.tiles.Family`) of a version on a board.

    cuDNN's fused attention has numbers of its own on Blackwell and Hopper, where it is faster than FlashAttention 4 and
    3 (its own benchmark on GB200, GB300 and H200; Shah et al. 2024, figures 5 to 7), and is about FlashAttention 2
    before.

    Raises:
        InputError: the board does not run it.

    >>> from hal.catalog import load_device
    >>> [attention_kernels(each, load_device("h100")) for each in ("auto", "flash3", "cudnn", "triton")]
    ['', 'FlashAttention 3', 'cuDNN', 'Triton']
    """
    if version not in ("flash3", "cudnn", "triton"):
        return ""
    capability = device.compute_capability or (0, 0)
    if version == "flash3" and capability[0] != _HOPPER:
        raise InputError("--attention", f"{device.name} runs no FlashAttention 3", "use flash2 or cudnn")
    if capability < _AMPERE:
        raise InputError("--attention", f"{device.name} runs no {version} attention", "use efficient or math")
    if version == "triton":
        return "Triton"
    if capability[0] == _BLACKWELL:
        return "cuDNN, unit pairs"
    if capability[0] == _HOPPER:
        return "cuDNN" if version == "cudnn" else "FlashAttention 3"
    return "FlashAttention 2"


def varied(work: Work, attention: str, *, tf32: bool, experts: str = "pytorch") -> Work:
    """The work by the kernels that a job runs.

    Args:
        work: of an operator.
        attention: family of fused attention; empty for PyTorch's own.
        tf32: whether products of float32 are multiplied as TensorFloat-32.
        experts: kernels of grouped products, one of :data:`EXPERT_KERNELS`.
    """
    if experts == "cublas" and work.assumed == EVEN:
        return replace(work, parts=tuple(replace(part, variant="") for part in work.parts))
    if attention and work.kind == "attention" and not any(part.efficient for part in work.parts):
        return replace(work, parts=tuple(replace(part, variant=attention) for part in work.parts))
    if tf32 and work.dtype == "float32" and work.kind == "matrix product":
        parts = tuple(replace(part, variant="tfloat32") if part.data else part for part in work.parts)
        return replace(work, parts=parts)
    return work


def in_documents(work: Work, tokens: int) -> Work:
    """The work of attention over samples packed of documents of so many tokens, each of which sees itself alone.

    Kernels take the documents as sequences that lie one behind the other (``cu_seqlens``).
    """
    from daydream.operators.attention import seen_pairs

    data = work.parts[0].data
    if work.kind != "attention" or data["queries"] != data["keys"] or data["keys"] <= tokens:
        return work
    count = -(-data["keys"] // tokens)
    length = -(-data["keys"] // count)
    each = data | {"b": data["b"] * count, "queries": length, "keys": length}
    before, after = (
        part["b"] * seen_pairs(part["queries"], part["keys"], part.get("window", 0), causal=part["causal"])
        for part in (data, each)
    )
    parts = tuple(replace(part, data=each) for part in work.parts)
    return replace(work, parts=parts, flops=work.flops * after / before)


def narrowed(work: Work, precision: str) -> Work:
    """The work of an operator whose products of two matrices run in a precision, as training frameworks run them.

    Every product's activations, or gradients, are quantised before it. Products whose sides are no multiples of 16 stay
    as they are: matrix units do not take them.
    """
    if work.kind != "matrix product":
        return work
    if work.assumed == EVEN:
        return replace(work, parts=tuple(_narrow_groups(part, precision) for part in work.parts))
    return replace(work, parts=tuple(_narrowed(part, precision) for part in work.parts))


def _narrow_groups(part: WorkPart, precision: str) -> WorkPart:
    """Products of experts' rows by their weights; that of the weights' gradient sums along rows, at the same price."""
    data = part.data
    numbers = _GROUPED.get(precision)
    if numbers is None or data.get("dtype") not in _WIDE or any(data[name] % _SIDE for name in ("n", "k")):
        return part
    if not part.variant and not data["m"] % _SIDE:
        # Products of cuBLAS on several streams fill the board as one of all rows does.
        return _narrowed(replace(part, data=data | {"op": "matmul", "m": data["m"] * data["b"]}), precision)
    rows, groups = data["m"] * data["b"], data["b"]
    sizes = {"m": rows, "groups": groups, "n": data["n"], "k": data["k"], "precision": numbers}
    return replace(part, data={"op": "grouped_matmul", **sizes}, variant="")


def _narrowed(part: WorkPart, precision: str) -> WorkPart:
    data: dict[str, Any] = part.data
    if data.get("op") != "matmul" or data.get("dtype") not in _WIDE:
        return part
    sizes = {name: data[name] for name in ("m", "n", "k")}
    if any(size % _SIDE for size in sizes.values()):
        return part
    return replace(part, data={"op": "scaled_matmul", **sizes, "precision": precision, "kernels": "training"})
