"""How long PyTorch's two-dimensional convolutions take with cuDNN 8.9, forward and backward.

cuDNN's heuristics pick an algorithm per shape; the model takes the fastest of those it knows (see
``convolution_algorithms``), which agrees with what ran in three calls of four and costs a few percent where it does
not. Winograd algorithms are for float32 windows of 3x3 with stride 1 and one group.

A call costs the host several element-wise calls, and more the more different convolutions the process has run: in the
NeuSight data set the smallest calls grow in the order of measurement from 2.2 element-wise calls to over ten after
5000 shapes. ``shapes_seen`` says where a process stands; the default is the middle of that data set.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from hal.spec.device import DeviceSpec
from roller.library.convolution_algorithms import (
    Algorithm,
    Problem,
    depthwise,
    fused_winograd,
    implicit_gemm,
    nonfused_winograd,
    weight_gradient_gemm,
)
from roller.library.elementwise import Direction, Floats, LibraryTime, host_seconds, library_time

HOST = 2.2
"""Host time of a convolution call in units of ``framework.call_seconds`` in a fresh process."""

HOST_PER_SHAPE = 1.6e-3
"""What every different convolution that the process ran before adds to it, in the same units; 1.5e-3 (V100) to 5e-3
(P4) on the boards of the data set."""

SHAPES_SEEN = 2300
"""Middle of the NeuSight runs, 5000 shapes in one process."""


def convolution_seconds(
    n: ArrayLike,
    c: ArrayLike,
    f: ArrayLike,
    h: ArrayLike,
    w: ArrayLike,
    kh: ArrayLike,
    kw: ArrayLike,
    stride: ArrayLike,
    pad: ArrayLike,
    device: DeviceSpec,
    groups: ArrayLike = 1,
    dtype_bytes: int = 4,
    direction: Direction = "forward",
    input_gradient: bool = True,
    shapes_seen: float = SHAPES_SEEN,
    out_h: ArrayLike | None = None,
    out_w: ArrayLike | None = None,
    dilation: ArrayLike = 1,
) -> LibraryTime:
    """Time of convolution calls without bias, tensors in NCHW order.

    Args:
        n: images.
        c: input channels.
        f: output channels.
        h: input rows.
        w: input columns.
        kh: window rows.
        kw: window columns.
        stride: step of the window, both ways.
        pad: zeros added on every side.
        device: the board.
        groups: groups of channels; ``c`` of them make the convolution depthwise.
        dtype_bytes: 4 for float32 without TF32, 2 for float16 with tensor cores where the board has them.
        direction: forward, or the backward pass: gradients of input and filters.
        input_gradient: whether the backward pass makes the gradient of the input; the first layer of a net does not.
        shapes_seen: different convolutions the process ran before; raises the host time, never the kernels'.
        out_h: output rows where ``pad`` does not tell them: padding that differs between the sides.
        out_w: output columns, likewise.
        dilation: step within the window, both ways; needs ``out_h`` and ``out_w`` where it is not 1.
    """
    sizes = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (n, c, f, h, w, kh, kw, stride, pad)))
    n_, c_, f_, h_, w_, kh_, kw_, stride_, pad_ = sizes
    rows = np.floor((h_ + 2 * pad_ - kh_) / stride_) + 1 if out_h is None else np.asarray(out_h, dtype=np.float64)
    columns = np.floor((w_ + 2 * pad_ - kw_) / stride_) + 1 if out_w is None else np.asarray(out_w, dtype=np.float64)
    rows, columns = np.broadcast_to(rows, n_.shape), np.broadcast_to(columns, n_.shape)
    grouped = np.broadcast_to(np.asarray(groups, dtype=np.float64), n_.shape)
    problem = Problem(
        n=n_,
        c=c_,
        f=f_,
        h=h_,
        w=w_,
        out_h=rows,
        out_w=columns,
        window=kh_ * kw_,
        groups=grouped,
        dtype_bytes=dtype_bytes,
    )
    winograd = (kh_ == 3) & (kw_ == 3) & (stride_ == 1) & (grouped == 1) & (dtype_bytes == 4)
    winograd &= np.broadcast_to(np.asarray(dilation) == 1, n_.shape)
    if direction == "backward":
        back = Problem(
            n=n_,
            c=f_,
            f=c_,
            h=rows,
            w=columns,
            out_h=h_,
            out_w=w_,
            window=kh_ * kw_ / stride_**2,
            groups=grouped,
            dtype_bytes=dtype_bytes,
        )
        parts = [("weight_", weight_algorithms(device, problem))]
        if input_gradient:
            parts.insert(0, ("data_", forward_algorithms(device, back)))
    else:
        parts = [("", forward_algorithms(device, problem))]
    return _call(device, parts, winograd, grouped == c_, HOST + HOST_PER_SHAPE * shapes_seen)


def forward_algorithms(device: DeviceSpec, problem: Problem) -> Mapping[str, Algorithm]:
    """Candidates for a convolution or for the gradient of its input, which is one too."""
    return {
        "implicit_gemm": implicit_gemm(device, problem),
        "winograd_fused": fused_winograd(device, problem),
        "winograd_nonfused": nonfused_winograd(device, problem),
        "depthwise": depthwise(device, problem),
    }


def weight_algorithms(device: DeviceSpec, problem: Problem) -> Mapping[str, Algorithm]:
    """Candidates for the gradient of the filters."""
    return {
        "implicit_gemm": weight_gradient_gemm(device, problem),
        "winograd_nonfused": nonfused_winograd(device, problem, weight_gradient=True),
        "depthwise": depthwise(device, problem),
    }


def _call(
    device: DeviceSpec,
    parts: list[tuple[str, Mapping[str, Algorithm]]],
    winograd: np.typing.NDArray[np.bool_],
    single: np.typing.NDArray[np.bool_],
    host_units: float,
) -> LibraryTime:
    """Chooses an algorithm for every part and adds the parts up."""
    stages: dict[str, Floats] = {}
    names = np.full(winograd.shape, "", dtype=np.str_)
    kernels = np.zeros(winograd.shape)
    for prefix, candidates in parts:
        chosen = _fastest(candidates, winograd, single)
        for stage in ("transform", "multiply", "output", "gaps"):
            each = [item.stages.get(stage, np.zeros(winograd.shape)) for item in candidates.values()]
            stages[prefix + stage] = np.take_along_axis(np.stack(each), chosen[None], axis=0)[0]
        kernels = kernels + np.array([item.kernels for item in candidates.values()])[chosen]
        joined = np.where(names == "", "", "+")
        names = np.char.add(np.char.add(names, joined), np.array(list(candidates))[chosen])
    host = host_seconds(device, np.full(winograd.shape, host_units * len(parts)))
    kernel = np.sum(list(stages.values()), axis=0)
    return library_time(device, {"host": host, **stages}, kernel, kernels, names)


def _fastest(
    candidates: Mapping[str, Algorithm],
    winograd: np.typing.NDArray[np.bool_],
    single: np.typing.NDArray[np.bool_],
) -> np.typing.NDArray[np.intp]:
    """Index of the fastest candidate that can compute the convolution."""
    times = []
    for name, algorithm in candidates.items():
        possible = winograd if name.startswith("winograd") else single if name == "depthwise" else True
        times.append(np.where(possible, algorithm.seconds, np.inf))
    return np.argmin(np.stack(times), axis=0)
