"""Times of PyTorch's two-dimensional convolutions with cuDNN 8.9, forward and backward.

cuDNN's heuristics pick an algorithm per shape; the model takes the fastest of those it knows (see
``convolution_algorithms``), which agrees with what ran in three calls of four and costs a few percent where it does
not. Winograd algorithms are for float32 windows of 3x3 with stride 1 and one group.

A call costs the host several element-wise calls, and more the more different convolutions the process has run: in the
NeuSight data set the smallest calls grow in the order of measurement from 2.2 element-wise calls to over ten after
5000 shapes. ``shapes_seen`` says where a process stands; the default is the middle of that data set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hal.spec.device import DeviceSpec
from roller.library.arrays import Bools, Floats
from roller.library.convolutions.algorithms import (
    Algorithm,
    ConvolutionProblem,
    depthwise,
    fused_winograd,
    implicit_gemm,
    nonfused_winograd,
    weight_gradient_gemm,
)
from roller.library.convolutions.matrix import Gradient, matrix_convolution
from roller.library.products.matrix_gemm import has_matrix_gemm
from roller.library.streaming.elementwise import Direction, LibraryTime, host_seconds, library_time

#: Host time of a convolution call in units of ``framework.call_seconds`` in a fresh process.
HOST = 2.2

#: What every different convolution that the process ran before adds to it, in the same units; 1.5e-3 (V100) to 5e-3
#: (P4) on the boards of the data set.
HOST_PER_SHAPE = 1.6e-3

#: Middle of the NeuSight runs, 5000 shapes in one process.
SHAPES_SEEN = 2300


@dataclass(frozen=True, kw_only=True)
class ConvolutionSizes:
    """Sizes of convolutions of tensors in NCHW order; each is one number for all calls or an array of one per call.

    Attributes:
        n: images.
        c: input channels.
        f: output channels.
        h: input rows.
        w: input columns.
        kh: window rows.
        kw: window columns.
        stride: step of the window, both ways; of two the geometric mean.
        pad: zeros added on every side.
        groups: groups of channels; ``c`` of them make the convolution depthwise.
        dilation: step within the window, both ways; needs ``out_h`` and ``out_w`` where it is not 1.
        out_h: output rows where ``pad`` does not tell them: padding that differs between the sides.
        out_w: output columns, likewise.
        volume: 1 where images are volumes, whose planes lie below one another: rows are those of all planes, of the
            input, the window and the output, and ``stride`` is the root of all three strides' product.
    """

    n: ArrayLike
    c: ArrayLike
    f: ArrayLike
    h: ArrayLike
    w: ArrayLike
    kh: ArrayLike
    kw: ArrayLike
    stride: ArrayLike = 1
    pad: ArrayLike = 0
    groups: ArrayLike = 1
    dilation: ArrayLike = 1
    out_h: ArrayLike | None = None
    out_w: ArrayLike | None = None
    volume: ArrayLike = 0

    def broadcast(self) -> Mapping[str, Floats]:
        """All sizes by name as arrays of one shape, those of the output worked out.

        >>> sizes = ConvolutionSizes(n=8, c=3, f=64, h=[224, 112], w=224, kh=7, kw=7, stride=2, pad=3).broadcast()
        >>> sizes["out_h"].tolist(), sizes["out_w"].tolist()
        ([112.0, 56.0], [112.0, 112.0])
        """
        given = {name: size for name, size in vars(self).items() if size is not None}
        arrays = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in given.values()))
        sizes = dict(zip(given, arrays, strict=True))
        for output, extent, taps in (("out_h", "h", "kh"), ("out_w", "w", "kw")):
            if output not in sizes:
                sizes[output] = np.floor((sizes[extent] + 2 * sizes["pad"] - sizes[taps]) / sizes["stride"]) + 1
        return sizes


def convolution_seconds(
    sizes: ConvolutionSizes,
    device: DeviceSpec,
    *,
    dtype_bytes: int = 4,
    direction: Direction = "forward",
    input_gradient: bool = True,
    shapes_seen: float = SHAPES_SEEN,
    channels_last: bool = False,
    tf32: bool = False,
) -> LibraryTime:
    """Time of convolution calls without bias.

    Args:
        sizes: of every call.
        device: the board.
        dtype_bytes: 4 for float32, 2 for float16 with tensor cores where the board has them.
        direction: forward, or the backward pass: gradients of input and filters.
        input_gradient: whether the backward pass makes the gradient of the input; the first layer of a net does not.
        shapes_seen: different convolutions the process ran before; raises the host time, never the kernels'.
        channels_last: whether tensors lie in NHWC; kernels of float32 without TF32 know NCHW alone.
        tf32: whether operands of float32 may be rounded to TensorFloat-32, where the board multiplies such.
    """
    each = sizes.broadcast()
    if dtype_bytes == 2 and has_matrix_gemm(device, "float16"):
        gradients: tuple[Gradient, ...] = ("forward",)
        if direction == "backward":
            gradients = ("data", "weights") if input_gradient else ("weights",)
        return _of_halves(each, device, gradients, HOST + HOST_PER_SHAPE * shapes_seen, channels_last=channels_last)
    rounded = each if tf32 and dtype_bytes == 4 and has_matrix_gemm(device, "tfloat32") else None
    parts = []
    if direction == "backward" and input_gradient:
        algorithms = forward_algorithms(device, _gradient_problem(each, dtype_bytes))
        parts.append(("data_", {**algorithms, **_of_tf32(rounded, device, "data", channels_last)}))
    if direction == "backward":
        algorithms = weight_algorithms(device, _problem(each, dtype_bytes))
        parts.append(("weight_", {**algorithms, **_of_tf32(rounded, device, "weights", channels_last)}))
    else:
        algorithms = forward_algorithms(device, _problem(each, dtype_bytes))
        parts.append(("", {**algorithms, **_of_tf32(rounded, device, "forward", channels_last)}))
    possible = _possible(each, dtype_bytes, rounds=rounded is not None)
    return _call(device, parts, possible, HOST + HOST_PER_SHAPE * shapes_seen)


def _problem(sizes: Mapping[str, Floats], dtype_bytes: int) -> ConvolutionProblem:
    """The forward convolution."""
    return ConvolutionProblem(
        n=sizes["n"], c=sizes["c"], f=sizes["f"], h=sizes["h"], w=sizes["w"], out_h=sizes["out_h"],
        out_w=sizes["out_w"], window=sizes["kh"] * sizes["kw"], groups=sizes["groups"], volume=sizes["volume"],
        dtype_bytes=dtype_bytes,
    )  # fmt: skip


def _gradient_problem(sizes: Mapping[str, Floats], dtype_bytes: int) -> ConvolutionProblem:
    """The convolution that makes the gradient of the input: of every window the elements that a stride leaves.

    Kernels for planes (``dgrad_engine``) skip in one direction only: strided windows of 1x1 and 3x3 take twice their
    share in the recording of ResNet-50 on a V100 (docs/repricing.md). Those for volumes are taken to skip in all.
    """
    stride = sizes["stride"]
    window = sizes["kh"] * sizes["kw"] / np.where(sizes["volume"] == 1, stride**2, stride)
    return ConvolutionProblem(
        n=sizes["n"], c=sizes["f"], f=sizes["c"], h=sizes["out_h"], w=sizes["out_w"], out_h=sizes["h"],
        out_w=sizes["w"], window=window, groups=sizes["groups"], volume=sizes["volume"], dtype_bytes=dtype_bytes,
    )  # fmt: skip


def _possible(sizes: Mapping[str, Floats], dtype_bytes: int, *, rounds: bool) -> dict[str, Bools]:
    """Which families of algorithms can compute every call.

    PyTorch's own kernels take what has a channel per group, and cuDNN takes Tensor Cores wherever operands may be
    rounded: volumes have no such kernels for channels that fill no vector.
    """
    single = (sizes["groups"] == sizes["c"]) & (sizes["groups"] > 1)
    has_vectors = (sizes["volume"] == 0) | ((sizes["c"] % 4 == 0) & (sizes["f"] % 4 == 0))
    on_tensor_cores = has_vectors & ~single & rounds
    return {
        "winograd": _takes_winograd(sizes) & (dtype_bytes == 4) & ~on_tensor_cores,
        "depthwise": single,
        "implicit": ~single & ~on_tensor_cores,
        "tf32": on_tensor_cores,
    }


def _of_tf32(
    sizes: Mapping[str, Floats] | None, device: DeviceSpec, gradient: Gradient, channels_last: bool
) -> dict[str, Algorithm]:
    """The candidate whose products run on Tensor Cores with operands rounded to TF32; empty without sizes."""
    if sizes is None:
        return {}
    flat = {name: size.ravel() for name, size in sizes.items()}
    times = matrix_convolution(flat, device, gradient, dtype="tfloat32", channels_last=channels_last)
    shape = sizes["n"].shape
    stages = {"transform": times.transform.reshape(shape), "multiply": times.multiply.reshape(shape)}
    return {"tf32_implicit_gemm": Algorithm(stages, 2)}


def _of_halves(
    sizes: Mapping[str, Floats],
    device: DeviceSpec,
    gradients: tuple[Gradient, ...],
    host_units: float,
    *,
    channels_last: bool,
) -> LibraryTime:
    """Calls on Tensor Cores, whose types of sixteen bits have kernels of one pace."""
    shape = sizes["n"].shape
    flat = {name: size.ravel() for name, size in sizes.items()}
    stages: dict[str, Floats] = {}
    names = np.full(shape, "", dtype=np.str_)
    kernels = np.zeros(shape)
    for gradient in gradients:
        times = matrix_convolution(flat, device, gradient, dtype="float16", channels_last=channels_last)
        prefix = {"forward": "", "data": "data_", "weights": "weight_"}[gradient]
        stages[f"{prefix}multiply"] = times.multiply.reshape(shape)
        stages[f"{prefix}transform"] = times.transform.reshape(shape)
        kernels = kernels + 1 + (stages[f"{prefix}transform"] > 0)
        names = np.char.add(np.char.add(names, np.where(names == "", "", "+")), times.names.reshape(shape))
    host = host_seconds(device, np.full(shape, host_units * len(gradients)))
    kernel = np.sum(list(stages.values()), axis=0)
    return library_time(device, {"host": host, **stages}, kernel, kernels, names)


def _takes_winograd(sizes: Mapping[str, Floats]) -> Bools:
    """True if a call has a window of 3x3, with stride, dilation and groups of one."""
    is_square = (sizes["kh"] == 3) & (sizes["kw"] == 3)
    return is_square & (sizes["stride"] == 1) & (sizes["groups"] == 1) & (sizes["dilation"] == 1)


def forward_algorithms(device: DeviceSpec, problem: ConvolutionProblem) -> Mapping[str, Algorithm]:
    """Candidates for a convolution or for the gradient of its input, which is one too."""
    return {
        "implicit_gemm": implicit_gemm(device, problem),
        "winograd_fused": fused_winograd(device, problem),
        "winograd_nonfused": nonfused_winograd(device, problem),
        "depthwise": depthwise(device, problem),
    }


def weight_algorithms(device: DeviceSpec, problem: ConvolutionProblem) -> Mapping[str, Algorithm]:
    """Candidates for the gradient of the filters."""
    return {
        "implicit_gemm": weight_gradient_gemm(device, problem),
        "winograd_nonfused": nonfused_winograd(device, problem, weight_gradient=True),
        "depthwise": depthwise(device, problem),
    }


def _call(
    device: DeviceSpec,
    parts: Sequence[tuple[str, Mapping[str, Algorithm]]],
    possible: Mapping[str, Bools],
    host_units: float,
) -> LibraryTime:
    """Chooses an algorithm for every part and adds the parts up."""
    stages: dict[str, Floats] = {}
    shape = possible["depthwise"].shape
    names = np.full(shape, "", dtype=np.str_)
    kernels = np.zeros(shape)
    for prefix, candidates in parts:
        chosen = _fastest(candidates, possible)
        for stage in ("transform", "multiply", "output", "gaps"):
            each = [item.stages.get(stage, np.zeros(shape)) for item in candidates.values()]
            stages[prefix + stage] = np.take_along_axis(np.stack(each), chosen[None], axis=0)[0]
        kernels = kernels + np.array([item.kernels for item in candidates.values()])[chosen]
        joined = np.where(names == "", "", "+")
        names = np.char.add(np.char.add(names, joined), np.array(list(candidates))[chosen])
    host = host_seconds(device, np.full(shape, host_units * len(parts)))
    kernel = np.sum(list(stages.values()), axis=0)
    return library_time(device, {"host": host, **stages}, kernel, kernels, names)


def _fastest(
    candidates: Mapping[str, Algorithm],
    possible: Mapping[str, Bools],
) -> np.typing.NDArray[np.intp]:
    """Index of the fastest candidate of a family that can compute the convolution."""
    times = [
        np.where(possible[name.partition("_")[0]], algorithm.seconds, np.inf) for name, algorithm in candidates.items()
    ]
    return np.argmin(np.stack(times), axis=0)
