"""Calls of a library: what PyTorch launches for an operator, and the price of many calls at once.

A call is its kind and its sizes; :func:`price` sorts them by what they share and hands every group to its model as
arrays, so that ten thousand cost little more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import numpy as np

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.library.attention.tiles import Family
from roller.library.attention.times import AttentionSizes, attention_seconds
from roller.library.collectives import collective_seconds, node_for
from roller.library.convolutions.float32 import ConvolutionSizes, convolution_seconds
from roller.library.experts.call import SIZES as EXPERTS_SIZES
from roller.library.experts.call import experts_call_time
from roller.library.latent.call import SIZES as LATENT_SIZES
from roller.library.latent.call import latent_call_time
from roller.library.peer_reduce import peer_reduce_seconds
from roller.library.products.gemm import choose_gemm, framework_seconds
from roller.library.products.gemm_tiles import generation
from roller.library.products.matrix_gemm import has_matrix_gemm, matrix_gemm
from roller.library.recurrent.call import SIZES as RECURRENT_SIZES
from roller.library.recurrent.call import recurrent_call_time
from roller.library.scaled.call import scaled_call_time
from roller.library.streaming.elementwise import Direction, LibraryTime, elementwise_seconds
from roller.library.streaming.row_kernels import row_kernel_seconds
from roller.library.streaming.rowwise import layer_norm_seconds, softmax_seconds
from roller.library.streaming.scans import COMBINATIONS, scan_seconds
from roller.library.streaming.selection import topk_seconds
from roller.library.streaming.streams import streamed_seconds
from sokoban.language.expression import DTYPE_BYTES, FLOAT8_DTYPES

#: Kind -> names of its sizes.
KINDS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("b", "m", "n", "k"),
    "convolution": ("n", "c", "f", "h", "w", "kh", "kw", "stride", "groups", "out_h", "out_w", "dilation", "volume"),
    "elementwise": ("elements",),
    "softmax": ("rows", "columns"),
    "layer_norm": ("rows", "columns"),
    "attention": (
        "b", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "causal", "window", "page",
    ),
    "stream": ("moved", "outputs", "points", "scattered", "blocks", "trips"),
    "roofline": ("moved", "outputs", "flops"),
    "collective": ("bytes", "ranks"),
    "scaled": ("m", "n", "k"),
    "experts": EXPERTS_SIZES,
    "recurrent": RECURRENT_SIZES,
    "latent": LATENT_SIZES,
    "rows": ("rows", "columns", "further"),
    "scan": ("rows", "columns", "inner", "moved"),
    "topk": ("rows", "columns", "k"),
}  # fmt: skip

#: Variant of convolutions whose tensors lie in NHWC.
CHANNELS_LAST = "nhwc"

#: Variant of all-reduces by vLLM's kernels.
PEER_REDUCE = "peer_reduce"

#: Variant of batched products by one second operand, on boards with Tensor Cores for the type.
SHARED = "shared"

#: Variant of layer norms without a mean.
RMS = "rms"

#: Kernels that PyTorch's ``scaled_dot_product_attention`` has on every board (``aten/.../flash_attn``, for sm_80): on
#: Hopper and later their products are those of single warps.
PYTORCH_FLASH: Family = "FlashAttention 2"

#: The first boards that FlashAttention runs on, and those whose generation of it multiplies eight-bit floats.
FLASH_CAPABILITY, FLASH_FLOAT8_CAPABILITY = (8, 0), (9, 0)


@dataclass(frozen=True, kw_only=True)
class LibraryCall:
    """One call.

    Attributes:
        kind: one of :data:`KINDS`.
        label: what it computes, for people: ``matmul``, ``relu``, ``gradient of A``.
        sizes: in the order of :data:`KINDS`, in elements; ``moved`` is in bytes.
        dtype: element type of the tensors.
        variant: what calls must share besides to be priced together. ``gemm``: ``bmm``, or ``shared`` by one second
            operand, ``matmul``, or with a bias ``linear`` (second operand stored as [n, k]) or ``addmm`` ([k, n]);
            ``elementwise``: its name in ``elementwise.OPERATORS``; ``stream``: the kernel's name; ``collective``: its
            name, or ``peer_reduce``, and after an ``@`` that of a node which is not the board's usual one;
            ``convolution``: ``nhwc`` where tensors are channels-last; ``attention``: the family of kernels that runs,
            where it is not the fastest that the board has; ``scaled`` and ``experts``: the precision; of experts, after
            an ``@``, ``divided`` among boards, or ``product`` alone; ``recurrent``: its name in
            ``recurrent.call.MODELS``; ``latent``: precision of products, of the cache and of attention, joined by
            ``@``; ``layer_norm``: ``rms`` for RMS norms; ``rows``: its name in ``row_kernels.ROW_KERNELS``;
            ``scan``: its name in ``scans.COMBINATIONS``.
        inputs: ``elementwise``: tensors of full size that it reads; None takes the operator's own number.
        direction: whether the model itself knows the backward pass.
    """

    kind: str
    label: str
    sizes: tuple[float, ...]
    dtype: str = "float32"
    variant: str = ""
    inputs: int | None = None
    direction: Direction = "forward"


class PricedCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Price of a call.

    Attributes:
        label: what it computes.
        kernel: the kernel or algorithm assumed; ``none`` where the call launches nothing, ``roofline`` where no kernel
            is known.
        seconds: device time of its kernels.
        call_seconds: of the framework call: GPU events right before and after it on an idle device.
        bound: the longest part of the device time.
        kernels: how many it launches.
        tile: ``128x64``, columns before rows as in the names of cuBLAS, for matrix products.
        splits: slices of the reduction between blocks, for matrix products.
    """

    label: str
    kernel: str
    seconds: float
    call_seconds: float
    bound: str
    kernels: int
    tile: str | None = None
    splits: int | None = None


def check_call(call: LibraryCall, device: DeviceSpec) -> None:
    """Refuses attention on boards that have no kernels for it.

    Raises:
        InputError: the board's Tensor Cores are too old, or it has none.
    """
    capability = device.compute_capability
    if call.kind != "attention" or capability is None:
        return
    is_narrow = call.dtype in FLOAT8_DTYPES
    needed = FLASH_FLOAT8_CAPABILITY if is_narrow else FLASH_CAPABILITY
    # sm_12x runs FlashAttention 2, which knows no eight-bit floats.
    if capability < needed or (is_narrow and capability >= (11, 0)):
        what = f"FlashAttention for {call.dtype}" if is_narrow else "FlashAttention"
        boards = "sm_90 or sm_100" if is_narrow else f"sm_{needed[0]}{needed[1]} or newer"
        problem = f"{device.name} has no {what}, which takes Tensor Cores of {boards}"
        wider = '"dtype": "bfloat16"' if is_narrow else ""
        eager = '"algorithm": "eager"' if capability < FLASH_CAPABILITY else ""
        raise InputError("--device", problem, f"use {' and '.join(word for word in (wider, eager) if word)}")


def price(calls: Sequence[LibraryCall], device: DeviceSpec) -> list[PricedCall]:
    """The price of every call, in order.

    Raises:
        InputError: the board is no CUDA device, or has no rate for a type.
    """
    if device.compute_capability is None:
        raise InputError(
            "--device",
            f"{device.name} runs no cuBLAS and no cuDNN, whose kernels are modelled",
            "use --implementation best, or an NVIDIA board",
        )
    groups: dict[tuple[str, str, str, int | None, Direction], list[int]] = {}
    for position, call in enumerate(calls):
        key = (call.kind, call.dtype, call.variant, call.inputs, call.direction)
        groups.setdefault(key, []).append(position)
    priced: list[PricedCall | None] = [None] * len(calls)
    for members in groups.values():
        first = calls[members[0]]
        sizes = np.array([calls[position].sizes for position in members], dtype=np.float64).T
        columns = dict(zip(KINDS[first.kind], sizes, strict=True))
        labels = [calls[position].label for position in members]
        for position, result in zip(members, _MODELS[first.kind](first, columns, labels, device), strict=True):
            priced[position] = result
    return [result for result in priced if result is not None]


_Columns = Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]
_Model = Callable[[LibraryCall, _Columns, Sequence[str], DeviceSpec], list[PricedCall]]


def _gemms(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    """Linear layers and batched products have kernels of their own; single products the faster of both.

    The kernels of a linear layer share k between blocks and read weights stored as [n, k], those of ``bmm`` [k, n].
    """
    if has_matrix_gemm(device, first.dtype):
        return _on_tensor_cores(first, sizes, labels, device)
    if first.variant in ("bmm", "linear"):
        return _chosen(first, sizes, labels, device, bias=first.variant == "linear")
    # Whichever kernels they have, the host's work is that of a product with a bias or without.
    calls = device.framework_calls
    host = calls.linear_call_seconds if first.variant == "addmm" else calls.matmul_call_seconds
    same = msgspec.structs.replace(calls, linear_call_seconds=host, matmul_call_seconds=host)
    # A board without measurements has no source for the cost of its framework calls.
    sources = {"framework": "typical", **device.provenance}
    board = msgspec.structs.replace(device, framework=same, provenance=sources)
    both = (_chosen(first, sizes, labels, board, bias=bias) for bias in (True, False))
    return [min(pair, key=lambda call: call.seconds) for pair in zip(*both, strict=True)]


def _chosen(
    first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec, *, bias: bool
) -> list[PricedCall]:
    # Halves are multiplied in float32 where there are no matrix units for them, however fast their own units are.
    dtype = "float64" if first.dtype == "float64" else "float32"
    times = choose_gemm(sizes["b"], sizes["m"], sizes["n"], sizes["k"], device, bias=bias, dtype=dtype)
    bounds = _longest({name: part for name, part in times.stage_seconds.items() if name != "launch"})
    prefix = f"{generation(device)}_{'d' if dtype == 'float64' else 's'}gemm_"
    rows = zip(
        labels, times.launch.tile_names, times.kernel_seconds.tolist(), times.call_seconds.tolist(), bounds,
        times.launch.splits.tolist(), times.launch.reduce.tolist(), strict=True,
    )  # fmt: skip
    return [
        PricedCall(
            label=label, kernel=f"{prefix}{tile}" + "+splitkreduce" * bool(reduce),
            seconds=seconds, call_seconds=call, bound=bound, kernels=1 + bool(reduce),
            tile=tile.partition("_")[0], splits=int(splits),
        )
        for label, tile, seconds, call, bound, splits, reduce in rows
    ]  # fmt: skip


def _on_tensor_cores(
    first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec
) -> list[PricedCall]:
    b, m, n, k = (sizes[name] for name in "bmnk")
    memory = None
    if first.variant == SHARED:
        memory = (b * m * k * DTYPE_BYTES[first.dtype], n * k * DTYPE_BYTES[first.dtype])
    times = matrix_gemm(b, m, n, k, device, dtype=first.dtype, operand_bytes=memory)
    calls = framework_seconds(times.seconds, device, bias=first.variant in ("linear", "addmm"))
    bounds = _longest({name: part for name, part in times.stages.items() if name != "launch"})
    tiles = [f"{int(n)}x{int(m)}" for n, m in zip(times.tile_n, times.tile_m, strict=True)]
    rows = zip(
        labels, times.instruction.tolist(), tiles, times.is_vector.tolist(), times.splits.tolist(),
        times.seconds.tolist(), calls.tolist(), bounds, strict=True,
    )  # fmt: skip
    return [
        PricedCall(label=label, kernel="gemv", seconds=seconds, call_seconds=call, bound=bound, kernels=1)
        if is_vector
        else PricedCall(
            label=label, kernel=f"{instruction}_{tile}" + "+splitkreduce" * (splits > 1), seconds=seconds,
            call_seconds=call, bound=bound, kernels=1 + (splits > 1), tile=tile, splits=int(splits),
        )
        for label, instruction, tile, is_vector, splits, seconds, call, bound in rows
    ]  # fmt: skip


def _convolutions(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    shapes = ConvolutionSizes(**dict(sizes))
    times = convolution_seconds(
        shapes,
        device,
        dtype_bytes=DTYPE_BYTES[first.dtype],
        direction=first.direction,
        channels_last=first.variant == CHANNELS_LAST,
        tf32=first.dtype == "tfloat32",
    )
    return _listed(times, labels)


def _elementwise(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    times = elementwise_seconds(
        first.variant,
        sizes["elements"],
        device,
        inputs=first.inputs,
        dtype_bytes=DTYPE_BYTES[first.dtype],
        direction=first.direction,
    )
    return _listed(times, labels)


def _softmax(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    width = DTYPE_BYTES[first.dtype]
    return _listed(softmax_seconds(sizes["rows"], sizes["columns"], device, first.direction, width), labels)


def _norms(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    width, rms = DTYPE_BYTES[first.dtype], first.variant == RMS
    return _listed(layer_norm_seconds(sizes["rows"], sizes["columns"], device, first.direction, width, rms=rms), labels)


def _attentions(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    check_call(first, device)
    kernels = cast("Family", first.variant) if first.variant else None
    times = attention_seconds(
        AttentionSizes(**dict(sizes)), device, dtype=first.dtype, direction=first.direction, kernels=kernels
    )
    return _listed(times, labels)


def _streams(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    times = streamed_seconds(
        sizes["moved"],
        sizes["outputs"],
        sizes["points"],
        device,
        first.variant,
        scattered=sizes["scattered"],
        blocks=sizes["blocks"],
        trips=sizes["trips"],
    )
    return _listed(times, labels)


def _rooflines(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    times = streamed_seconds(
        sizes["moved"], sizes["outputs"], sizes["flops"], device, "roofline", dtype=first.dtype, roofline=True
    )
    return _listed(times, labels)


def _collectives(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    name, _, node = first.variant.partition("@")
    where = node_for(device, node or None)
    if name == PEER_REDUCE:
        return _listed(peer_reduce_seconds(sizes["bytes"], sizes["ranks"], where, device), labels)
    return _listed(collective_seconds(name, sizes["bytes"], sizes["ranks"], where, dtype=first.dtype), labels)


def _scaled(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    return _listed(scaled_call_time(first.variant, sizes["m"], sizes["n"], sizes["k"], device), labels)


def _experts(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    return _listed(experts_call_time(first.variant, sizes, device), labels)


def _recurrent(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    return _listed(recurrent_call_time(first.variant, sizes, device), labels)


def _latent(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    return _listed(latent_call_time(first.variant, sizes, device), labels)


def _row_kernels(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    times = row_kernel_seconds(
        first.variant, sizes["rows"], sizes["columns"], device, dtype_bytes=DTYPE_BYTES[first.dtype],
        further=sizes["further"],
    )  # fmt: skip
    return _listed(times, labels)


def _scans(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    return _listed(scan_seconds(**sizes, combination=COMBINATIONS[first.variant], device=device), labels)


def _selections(first: LibraryCall, sizes: _Columns, labels: Sequence[str], device: DeviceSpec) -> list[PricedCall]:
    return _listed(topk_seconds(**sizes, item_bytes=DTYPE_BYTES[first.dtype], device=device), labels)


_MODELS: Mapping[str, _Model] = {
    "gemm": _gemms,
    "convolution": _convolutions,
    "elementwise": _elementwise,
    "softmax": _softmax,
    "layer_norm": _norms,
    "attention": _attentions,
    "stream": _streams,
    "roofline": _rooflines,
    "collective": _collectives,
    "scaled": _scaled,
    "experts": _experts,
    "recurrent": _recurrent,
    "latent": _latent,
    "rows": _row_kernels,
    "scan": _scans,
    "topk": _selections,
}


def _listed(times: LibraryTime, labels: Sequence[str]) -> list[PricedCall]:
    bounds = _longest({name: part for name, part in times.stages.items() if name != "host"})
    rows = zip(
        labels, times.algorithm.tolist(), times.kernel_seconds.tolist(), times.call_seconds.tolist(), bounds,
        times.kernels.tolist(), strict=True,
    )  # fmt: skip
    return [
        PricedCall(
            label=label, kernel=kernel, seconds=seconds, call_seconds=call, bound=bound if kernels else "none",
            kernels=kernels,
        )
        for label, kernel, seconds, call, bound, kernels in rows
    ]  # fmt: skip


def _longest(stages: _Columns) -> list[str]:
    names = list(stages)
    chosen = np.argmax(np.stack([np.atleast_1d(stages[name]) for name in names]), axis=0)
    return [names[index] for index in chosen.tolist()]
