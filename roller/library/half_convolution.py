"""How long convolutions of 16-bit floats take with cuDNN 8 and 9 on Tensor Cores, forward and both gradients.

A convolution is a product whose operands are gathered: pixels by filters, summed over channels and window. Its kernels
have the tiles and the pace of cuBLAS's (:mod:`roller.library.matrix_gemm`), and read the activations once from memory
however often a window takes them. cuDNN's kernels work on NHWC; tensors in NCHW are transposed before and after them.
Grouped ones fill tiles across groups, of which only the blocks on the diagonal count. Convolutions with a channel per
group have kernels without matrix units, in which a thread gathers what one result takes.

All arrays have one entry per call; seconds of device time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.elementwise import kernel_seconds_floor
from roller.library.gemm_types import Bools, Floats
from roller.library.matrix_gemm import CONSTANTS as CM, matrix_gemm

#: Which of a convolution's three products.
Gradient = Literal["forward", "data", "weights"]

#: Bytes of an element, and channels whose elements a thread loads at once.
_BYTES, _VECTOR = 2, 8


@dataclass(frozen=True, kw_only=True)
class HalfConstants:
    """What belongs to the kernels rather than to a board."""

    gather: float = 0.1
    gather_data: float = 0.2
    gather_weights: float = 0.3
    overlap: float = 3.0
    again_overlap: float = 1.421
    point_weights: float = 0.1
    transpose: float = 1.0
    transpose_point: float = 0.5
    transpose_back: float = 1.0
    transpose_point_back: float = 0.5
    ramp_steps: float = 1.227
    store_cycles: float = 5.104
    staging: float = 35.18
    best_share: float = 1.116
    group_back_nhwc: float = 1.0
    group_weights_nhwc: float = 1.0
    group_weights: float = 1.0
    data_taps: float = 1.0
    group_width: float = 32
    tap: float = 6.0
    base: float = 30.0
    tap_nhwc: float = 5.0
    base_nhwc: float = 20.0
    tap_weights: float = 10.0
    tap_weights_nhwc: float = 10.0
    dram_share: float = 0.95


CONSTANTS = HalfConstants()


@dataclass(frozen=True, eq=False)
class HalfProblem:
    """Convolutions with the names of ``ConvolutionSizes``; ``nhwc`` tells those whose tensors are channels-last."""

    sizes: Mapping[str, Floats]
    nhwc: Bools
    device: DeviceSpec
    dtype: str
    constants: HalfConstants = CONSTANTS

    def __getattr__(self, name: str) -> Floats:
        try:
            return self.sizes[name]
        except KeyError as error:
            raise AttributeError(name) from error

    @property
    def window(self):
        return self.kh * self.kw

    @property
    def x_bytes(self):
        return self.n * self.c * self.h * self.w * _BYTES

    @property
    def y_bytes(self):
        return self.n * self.f * self.out_h * self.out_w * _BYTES

    @property
    def rate(self):
        return self.constants.dram_share * self.device.dram.bandwidth_bytes_per_second

    def matrix(self, direction, point):
        c = self.constants
        lost = {"forward": 0.0 if point else c.gather, "data": 0.0 if point else c.gather_data, "weights": c.point_weights if point else c.gather_weights}[direction]
        feed = replace(CM.feeds["warps"], ramp_steps=c.ramp_steps, store_cycles=c.store_cycles, staging=c.staging)
        return replace(CM, feeds={**CM.feeds, "warps": feed}, best_share=c.best_share / (1 + lost), overlap=c.overlap, again_overlap=c.again_overlap)

    def seconds(self, direction: Gradient) -> dict[str, Floats]:
        depthwise = (self.groups == self.c) & (self.groups > 1)
        grouped = (self.groups > 1) & ~depthwise
        dense = ~depthwise & ~grouped
        out = {"kernel": np.zeros(len(self.n)), "transpose": np.zeros(len(self.n))}
        for members, model in ((dense, self._dense), (grouped, self._grouped), (depthwise, self._depthwise)):
            rows = np.flatnonzero(members)
            if rows.size:
                part = HalfProblem({k: v[rows] for k, v in self.sizes.items()}, self.nhwc[rows], self.device, self.dtype, self.constants)
                kernel, transpose = getattr(part, model.__name__)(direction)
                out["kernel"][rows], out["transpose"][rows] = kernel, transpose
        return out

    def _transposes(self, first: Floats, second: Floats, forward: bool) -> Floats:
        c = self.constants
        point = self.window == 1
        if forward:
            share = np.where(point, c.transpose_point, c.transpose)
        else:
            share = np.where(point, c.transpose_point_back, c.transpose_back)
        return np.where(self.nhwc, 0.0, share * 2 * (first + second) / self.rate)

    def _dense(self, direction: Gradient):
        c = self.constants
        width = np.where(self.c <= 4, 4, _whole(self.c, _VECTOR))
        filters = _whole(self.f, _VECTOR)
        pixels = self.n * self.out_h * self.out_w
        point = self.window == 1
        touched = np.where(point, np.minimum(self.x_bytes, pixels * self.c * _BYTES), self.x_bytes)
        weights = self.f * width * self.window * _BYTES
        one = np.ones_like(pixels)
        if direction == "forward":
            m, n, k = pixels, filters, width * self.window
            operands = touched, weights
        elif direction == "data":
            m = np.where(point, pixels, self.n * self.h * self.w)
            k = filters * np.where(point, 1, self.window / self.stride**2)
            n = width
            operands = self.y_bytes, weights
        else:
            m, n = filters, width * self.window
            k = pixels
            operands = self.y_bytes, touched
        seconds = np.zeros_like(pixels)
        for way in (True, False):
            r = np.flatnonzero(point == way)
            if r.size:
                each = (a[r] for a in (one, m, n, k))
                gathered = operands[0][r], operands[1][r]
                times = matrix_gemm(*each, self.device, dtype=self.dtype, operand_bytes=gathered, constants=self.matrix(direction, way))
                seconds[r] = times.seconds
        extra = np.zeros_like(pixels)
        if direction == "data":
            extra = np.where(point & (self.stride > 1), self.x_bytes / self.rate, 0.0)
        first, second = self.x_bytes, self.y_bytes
        return seconds + extra, self._transposes(first, second, direction == 'forward')

    def _grouped(self, direction: Gradient):
        c = self.constants
        per, out_per = self.c / self.groups, self.f / self.groups
        packed = np.clip(np.floor(c.group_width / per), 1, self.groups)
        b = np.ceil(self.groups / packed)
        width, filters = _whole(packed * per, _VECTOR), _whole(packed * out_per, _VECTOR)
        pixels = self.n * self.out_h * self.out_w
        weights = self.f * width * self.window * _BYTES
        if direction == "forward":
            m, n, k, operands = pixels, filters, width * self.window, (self.x_bytes, weights)
        elif direction == "data":
            m, n, k = self.n * self.h * self.w, width, filters * self.window / self.stride**2
            operands = self.y_bytes, weights
        else:
            m, n, k = filters, width * self.window, pixels
            operands = self.y_bytes, self.x_bytes
        times = matrix_gemm(b, m, n, k, self.device, dtype=self.dtype, operand_bytes=operands, constants=self.matrix(direction, False))
        slow = np.ones_like(pixels)
        if direction != "forward":
            slow = np.where(self.nhwc, c.group_back_nhwc * (c.group_weights_nhwc if direction == "weights" else 1), c.group_weights if direction == "weights" else 1)
        return times.seconds * slow, self._transposes(self.x_bytes, self.y_bytes, direction == 'forward')

    def _depthwise(self, direction: Gradient):
        c = self.constants
        lanes = self.device.peak_flops("float32") / 2
        outputs = self.n * (self.f * self.out_h * self.out_w if direction != "data" else self.c * self.h * self.w)
        traffic = (self.x_bytes + self.y_bytes) / self.rate
        if direction == "weights":
            per = np.where(self.nhwc, c.tap_weights_nhwc, c.tap_weights) * self.window
        else:
            taps = self.window / (self.stride**2 if direction == "data" else 1)
            per = np.where(self.nhwc, c.base_nhwc + c.tap_nhwc * taps, c.base + c.tap * taps)
        busy = np.hypot(traffic, outputs * per / lanes)
        return busy + kernel_seconds_floor(self.device), np.zeros_like(busy)


def _whole(size: Floats, step: float) -> Floats:
    return np.ceil(size / step) * step
