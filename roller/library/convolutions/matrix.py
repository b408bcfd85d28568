"""Times of convolutions of 16-bit floats with cuDNN 8 and 9 on Tensor Cores, forward and both gradients.

A convolution is a product whose operands are gathered: pixels by filters, summed over channels and window. Its kernels
have the tiles of cuBLAS's (:mod:`roller.library.products.matrix_gemm`) and read the activations once from memory,
however often a window takes them. They work on channels-last tensors in vectors of eight channels: tensors in NCHW are
transposed for them, other numbers of channels filled up. Groups share tiles, of which only the blocks on the diagonal
count. Convolutions with a channel per group have kernels without matrix units, a thread per result.

All arrays have one entry per call; seconds of device time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from roller.library.arrays import Bools, Floats
from roller.library.products.matrix_gemm import CONSTANTS as MATRIX_CONSTANTS
from roller.library.products.matrix_gemm import MatrixConstants, matrix_gemm
from roller.library.streaming.elementwise import kernel_seconds_floor

#: Which of a convolution's three products: the result, the gradient of its data, or that of its weights.
Gradient = Literal["forward", "data", "weights"]

#: Bytes that a thread loads at once.
VECTOR_BYTES = 16

#: Channels of images that have kernels of their own.
_IMAGE = 4

#: Windows of square kernels that PyTorch's depthwise kernel has unrolled loops for, and the widest of cuDNN's.
_UNROLLED, _WIDEST = (1.0, 3.0, 5.0), 7.0


@dataclass(frozen=True, kw_only=True)
class ConvolutionConstants:
    """The numbers of cuDNN's kernels, chosen on every second network of those that pytorch-image-models measured.

    Attributes:
        best_share: pace of the matrix units over the board's best figure, as in ``MatrixConstants``.
        ramp_steps: as in ``FeedConstants``.
        store_cycles: likewise.
        staging: likewise.
        lost: part of that pace that goes on gathering, by gradient and whether the window has one element, on a unit of
            ``unit_flops``. Gathering takes instructions, which weigh more the faster matrix units are.
        unit_flops: of a unit's matrix instructions in a cycle: those of an RTX 3090, on which ``lost`` was chosen.
        transposed: NCHW: what bringing tensors into NHWC and back takes, over reading and writing both activations, by
            whether it is the forward pass and whether the window has one element. Forward cuDNN has kernels that take
            NCHW, mostly for single elements. Backward kernels of TF32 are of one kind with those of halves; forward
            they read what was transposed, but for single elements.
        group_width: channels that groups fill a tile with together.
        few_groups: channels-last groups of whole vectors, fewer than these, have gradients without matrix units, as
            have those whose channels fill no half vectors; eights of groups wide enough for tiles of their own do not.
        plain_groups: their instructions per filter, pixel and window element: of up to 32 channels, and of more.
        plain_pair: instructions per multiply-add of the gradient of data in strided groups of TF32, which has no matrix
            units; chosen on a strided transposed convolution of KernelBench (number 72).
        widest_group: channels of the widest groups that share a kernel.
        block_trips: depthwise: round trips to memory of a block of PyTorch's gradient of the weights, of which there is
            one for every filter and window element.
        base: depthwise: instructions per result, PyTorch's kernel for NCHW and cuDNN's for channels last.
        tap: depthwise: instructions per result and window element, likewise.
        loop: depthwise: likewise, where the window is none of those that the kernel was compiled for.
        tap_weights: depthwise: likewise, of the gradient of the weights.
    """

    best_share: float = 1.224
    ramp_steps: float = 0.87
    store_cycles: float = 3.5
    staging: float = 30.0
    lost: Mapping[tuple[Gradient, bool], float]
    transposed: Mapping[tuple[bool, bool], float]
    unit_flops: float = 512.0
    group_width: float = 32.0
    few_groups: float = 16.0
    plain_groups: tuple[float, float] = (680.0, 1300.0)
    plain_pair: float = 32.0
    widest_group: float = 64.0
    block_trips: float = 4.0
    base: tuple[float, float] = (31.0, 22.5)
    tap: tuple[float, float] = (6.7, 4.6)
    loop: tuple[float, float] = (27.5, 68.0)
    tap_weights: tuple[float, float] = (14.0, 10.7)


#: The constants in use.
CONSTANTS = ConvolutionConstants(
    lost={
        ("forward", True): 0.0, ("forward", False): 0.043, ("data", True): 0.0, ("data", False): 0.2,
        ("weights", True): 0.12, ("weights", False): 0.34,
    },
    transposed={(True, True): 0.32, (True, False): 0.64, (False, True): 1.63, (False, False): 1.07},
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ConvolutionTimes:
    """Seconds of the kernels that multiply, and of those that bring tensors into their layout; their names."""

    multiply: Floats
    transform: Floats
    names: np.ndarray[tuple[int, ...], np.dtype[np.str_]]


def matrix_convolution(
    sizes: Mapping[str, Floats],
    device: DeviceSpec,
    gradient: Gradient,
    *,
    dtype: str,
    channels_last: bool,
    constants: ConvolutionConstants = CONSTANTS,
) -> ConvolutionTimes:
    """Times of one of the products of convolutions.

    Args:
        sizes: by the names of ``ConvolutionSizes``, flat arrays of one length.
        device: a board with a matrix instruction for the type.
        gradient: which product.
        dtype: ``float16`` or ``bfloat16``.
        channels_last: whether the tensors lie in NHWC.
        constants: the kernels' numbers.
    """
    count = len(sizes["n"])
    alone = (sizes["groups"] == sizes["c"]) & (sizes["groups"] > 1)
    shared = (sizes["groups"] > 1) & ~alone
    multiply, transform, names = np.zeros(count), np.zeros(count), np.full(count, "", dtype="<U24")
    kinds: tuple[tuple[str, Bools, Callable[[_Calls], tuple[Floats, Floats]]], ...] = (
        ("implicit_gemm", ~alone & ~shared, _Calls.dense),
        ("implicit_gemm_grouped", shared, _Calls.grouped),
        ("depthwise", alone, _Calls.depthwise),
    )
    for name, members, model in kinds:
        rows = np.flatnonzero(members)
        if rows.size:
            part = {key: value[rows] for key, value in sizes.items()}
            calls = _Calls(part, device, gradient, dtype, channels_last, constants)
            multiply[rows], transform[rows] = model(calls)
            names[rows] = name
    return ConvolutionTimes(multiply=multiply, transform=transform, names=names)


@dataclass(frozen=True, eq=False)
class _Calls:
    """Convolutions of one kind: an entry per call in every array of sizes."""

    sizes: Mapping[str, Floats]
    device: DeviceSpec
    gradient: Gradient
    dtype: str
    channels_last: bool
    constants: ConvolutionConstants

    def dense(self) -> tuple[Floats, Floats]:
        """Convolutions of one group: product, and what it needs of other kernels."""
        multiply, transform = np.zeros(len(self._pixels)), self._transposed + self._filled
        for is_point in (True, False):
            rows = np.flatnonzero((self._window == 1) == is_point)
            if rows.size:
                multiply[rows] = self._product(rows, is_point)
        if self.gradient == "data":
            # The gradient of what a strided window of one element skips is zero, and written before; kernels of TF32
            # have all of it zero before they add to it.
            skips = ((self._window == 1) | (self.dtype == "tfloat32")) & (self.sizes["stride"] > 1)
            transform = transform + np.where(skips, self._x_bytes, 0.0) / self._dram
        return multiply, transform

    def _product(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]], is_point: bool) -> Floats:
        size = {name: value[rows] for name, value in self.sizes.items()}
        pixels, window = self._pixels[rows], self._window[rows]
        width = np.where(size["c"] <= _IMAGE, _IMAGE, self._padded(size["c"]))
        filters, x, y = self._padded(size["f"]), self._x_bytes[rows], self._y_bytes[rows]
        weights = filters * width * window * self._bytes
        touched = np.minimum(x, pixels * size["c"] * self._bytes) if is_point else x
        if self.gradient == "forward":
            m, n, k, operands = pixels, filters, width * window, (touched, weights)
        elif self.gradient == "data":
            m = pixels if is_point else size["n"] * size["h"] * size["w"]
            taps = window if is_point else window / size["stride"] ** 2
            n, k, operands = width, filters * taps, (y, weights)
        else:
            m, n, k, operands = filters, width * window, pixels, (y, touched)
        ones = np.ones_like(pixels)
        constants = self._matrix(is_point)
        times = matrix_gemm(
            ones, m, n, k, self.device, dtype=self.dtype, constants=constants, operand_bytes=operands,
            by_warps=self._by_warps,
        )  # fmt: skip
        return times.seconds

    def grouped(self) -> tuple[Floats, Floats]:
        """Convolutions of several groups of more than one channel: the same."""
        size, c = self.sizes, self.constants
        per, filters_per = size["c"] / size["groups"], size["f"] / size["groups"]
        packed = np.clip(np.floor(c.group_width / per), 1, size["groups"])
        b = np.ceil(size["groups"] / packed)
        width, filters = self._padded(packed * per), self._padded(packed * filters_per)
        weights = size["f"] * width * self._window * self._bytes
        if self.gradient == "forward":
            m, n, k, operands = self._pixels, filters, width * self._window, (self._x_bytes, weights)
        elif self.gradient == "data":
            m, n = size["n"] * size["h"] * size["w"], width
            k, operands = filters * self._window / size["stride"] ** 2, (self._y_bytes, weights)
        else:
            m, n, k, operands = filters, width * self._window, self._pixels, (self._y_bytes, self._x_bytes)
        multiply = matrix_gemm(
            b,
            m,
            n,
            k,
            self.device,
            dtype=self.dtype,
            constants=self._matrix(False),
            operand_bytes=operands,
            by_warps=self._by_warps,
        ).seconds
        # No kernel joins wide groups: they run one after the other.
        wide = np.flatnonzero(per > c.widest_group)
        if wide.size:
            one = matrix_gemm(
                np.ones(wide.size), m[wide], n[wide], k[wide], self.device, dtype=self.dtype,
                constants=self._matrix(False), operand_bytes=(operands[0][wide] / b[wide], operands[1][wide] / b[wide]),
                by_warps=self._by_warps,
            )  # fmt: skip
            multiply[wide] = np.maximum(multiply[wide], size["groups"][wide] * one.seconds)
        if self.channels_last and self.gradient != "forward":
            each = np.where(per > c.group_width, c.plain_groups[1], c.plain_groups[0]) * self._window
            multiply_adds = self._pixels * size["f"] * each / self._lanes
            # Eight groups, each in a tile of its own, have a kernel with matrix units however few they are.
            in_eights = (size["groups"] % self._vector == 0) & (packed == 1) & (per <= c.widest_group)
            is_few = (size["groups"] < c.few_groups) & (per >= self._vector) & ~in_eights
            has_no_matrix_units = is_few | (per % (self._vector / 2) != 0)
            multiply = np.where(has_no_matrix_units, np.maximum(multiply, multiply_adds), multiply)
        elif self.dtype == "tfloat32" and self.gradient == "data":
            multiply_adds = self._pixels * size["f"] * per * self._window * c.plain_pair / self._lanes
            multiply = np.where(size["stride"] > 1, np.maximum(multiply, multiply_adds), multiply)
        return multiply, self._transposed

    def depthwise(self) -> tuple[Floats, Floats]:
        """Convolutions with a channel per group, which nothing has to be transposed for."""
        size, c, layout = self.sizes, self.constants, int(self.channels_last)
        side = np.maximum(size["kh"], size["kw"])
        square = (size["kh"] == size["kw"]) & np.isin(side, _UNROLLED)
        is_compiled = side <= _WIDEST if self.channels_last else square
        results = size["n"] * size["f"] * size["out_h"] * size["out_w"]
        if self.gradient == "weights":
            slower = np.where(is_compiled, 1.0, c.loop[1] / c.tap[1]) if self.channels_last else 1.0
            each = c.tap_weights[layout] * self._window * slower
        else:
            taps = self._window / (size["stride"] ** 2 if self.gradient == "data" else 1.0)
            each = c.base[layout] + np.where(is_compiled, c.tap[layout], c.loop[layout]) * taps
        if self.gradient == "data":
            results = size["n"] * size["c"] * size["h"] * size["w"]
        traffic = (self._x_bytes + self._y_bytes) / self._dram
        busy = np.hypot(traffic, results * each / self._lanes)
        if self.gradient == "weights" and not self.channels_last:
            together = self.device.unit_count * self.device.limits.blocks_per_unit
            trips = c.block_trips * (self.device.dram.latency_seconds or 400e-9)
            # Where one image makes channels of a batch, blocks are many and short: the board starts them one by one.
            each_block = max(trips / together, self.device.block_launch_seconds)
            busy = np.maximum(busy, size["f"] * self._window * each_block)
        return busy + kernel_seconds_floor(self.device), np.zeros_like(busy)

    def _matrix(self, is_point: bool) -> MatrixConstants:
        """The product model's numbers with those of cuDNN's kernels in place of cuBLAS's."""
        c = self.constants
        feeds = dict(MATRIX_CONSTANTS.feeds)
        feeds["warps"] = replace(
            feeds["warps"], ramp_steps=c.ramp_steps, store_cycles=c.store_cycles, staging=c.staging
        )  # fmt: skip
        share = c.best_share / (1 + c.lost[self.gradient, is_point] * self._unit_flops / c.unit_flops)
        return replace(MATRIX_CONSTANTS, feeds=feeds, best_share=share)

    @property
    def _unit_flops(self) -> float:
        """FLOP of a unit's matrix instructions in a cycle."""
        of_warps = self.device.matrix_instruction(self.dtype) if self._by_warps else None
        instruction = of_warps or self.device.best_matrix_instruction(self.dtype)
        assert instruction is not None
        return instruction.peak_flops / self.device.unit_count / self.device.clocks.boost_hz

    @property
    def _pixels(self) -> Floats:
        return self.sizes["n"] * self.sizes["out_h"] * self.sizes["out_w"]

    @property
    def _window(self) -> Floats:
        return self.sizes["kh"] * self.sizes["kw"]

    @property
    def _x_bytes(self) -> Floats:
        return self.sizes["n"] * self.sizes["c"] * self.sizes["h"] * self.sizes["w"] * self._bytes

    @property
    def _y_bytes(self) -> Floats:
        return self._pixels * self.sizes["f"] * self._bytes

    @property
    def _dram(self) -> float:
        return self.device.dram.bandwidth_bytes_per_second

    @property
    def _lanes(self) -> float:
        """Instructions of single threads per second."""
        return self.device.peak_flops("float32") / 2

    @property
    def _transposed(self) -> Floats:
        """Seconds that the layout NCHW costs: both activations are read and written."""
        if self.channels_last:
            return np.zeros(len(self._pixels))
        shares = self.constants.transposed
        forward = self.gradient == "forward"
        if self.dtype == "tfloat32" and forward:
            # Windows of one element are batched products of what lies in NCHW.
            is_product = (self._window == 1) & (self.sizes["stride"] == 1)
            return np.asarray(np.where(is_product, 0.0, 2 * (self._x_bytes + self._y_bytes) / self._dram))
        share = np.where(self._window == 1, shares[forward, True], shares[forward, False])
        return np.asarray(share * 2 * (self._x_bytes + self._y_bytes) / self._dram)

    @property
    def _filled(self) -> Floats:
        """Seconds of copying activations whose channels are no multiple of a vector into ones that are."""
        c, f = self.sizes["c"], self.sizes["f"]
        x = np.where((c % self._vector != 0) & (c > _IMAGE), self._x_bytes, 0.0)
        y = np.where(f % self._vector != 0, self._y_bytes, 0.0)
        return np.asarray(2 * (x + y) / self._dram)

    @property
    def _by_warps(self) -> bool:
        """cuDNN's kernels for TF32 are those of Ampere (``sm80_xmma_fprop_implicit_gemm_tf32f32``) on Hopper too."""
        return self.dtype == "tfloat32"

    @property
    def _bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def _vector(self) -> float:
        """Channels that a thread loads at once."""
        return VECTOR_BYTES / self._bytes

    def _padded(self, channels: Floats) -> Floats:
        """Channels in whole vectors."""
        return np.asarray(np.ceil(channels / self._vector) * self._vector)
