"""Times of the algorithms by which cuDNN computes a two-dimensional convolution, from shape and board.

Three families cover what cuDNN 8.9 runs in float32: the implicit GEMM, whose kernel gathers the input patches while it
multiplies; the fused Winograd convolution F(2x2, 3x3), one kernel that multiplies 16 numbers where the GEMM has 36;
and the non-fused Winograd convolution F(4x4, 3x3), which writes transformed input and filters to memory and multiplies
them in 36 GEMMs, 36 numbers where the GEMM has 144 (Lavin and Gray, 'Fast Algorithms for Convolutional Neural
Networks', CVPR 2016). Depthwise convolutions run PyTorch's own kernel, bound by memory.

All times are seconds of device time; all sizes are floating-point arrays of one shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.arrays import Floats
from roller.library.streaming.elementwise import integer_seconds, kernel_seconds_floor

#: Weight (of logarithms) of the GEMM rate under a long load against the best rate: convolutions of milliseconds do not
#: pull the clock down as far as the longest GEMMs of the data set did. Matters on power-limited boards.
LONG_LOAD = 0.15

#: Threads per float32 lane that keep a unit's pipelines full; with less, rate falls in proportion (Volkov's law: four
#: schedulers of sixteen lanes need two warps each, with the independent instructions of a register tile).
SATURATION = 2.35

#: Threads of a unit's resident GEMM blocks: 100 to 128 registers per thread leave room for no more.
RESIDENT_THREADS = 512

#: Latency of L2 for which ``SATURATION`` is given.
TYPICAL_L2_CYCLES = 200.0

#: GEMM kernels walk the reduction in steps of eight.
REDUCTION_STEP = 8

#: Norm in which arithmetic and traffic of one kernel add; infinity would be full overlap.
OVERLAP = 2.0

#: Inner-loop rate over the library's GEMM rate. The batched GEMMs of the non-fused algorithm are short.
IMPLICIT_EFFICIENCY, FUSED_EFFICIENCY, GEMM_EFFICIENCY = 1.04, 0.96, 0.85

#: Rate of the implicit and fused kernels from Ampere on over that before: cuDNN's native kernels there are for TF32 and
#: 16-bit types, those for float32 kept the design of Volta, whose hand-placed registers no longer fit the pipelines.
SINCE_AMPERE = 0.80

#: Prologue and epilogue of a block in units of reduction elements.
IMPLICIT_FILL, FUSED_FILL, GEMM_FILL = 14.0, 19.0, 33.0

#: Traffic of the Winograd transforms over one perfect pass; filters are gathered with a stride. Below one, L2 still
#: holds what the GEMM wrote.
TRANSFORM_PASSES, FILTER_PASSES, OUTPUT_PASSES = 1.27, 2.6, 0.65

FUSED_FILTERS, FUSED_TILES = 32, 32
#: Images, rows and columns of output per block of the fused kernel (tile148 ... tile442 in the kernels' names, counted
#: in 2x2 tiles). cuDNN 8.9 uses the later ones before Volta only.
FUSED_REGIONS: Sequence[tuple[int, int, int]] = ((1, 8, 16), (2, 8, 8), (2, 4, 16), (4, 4, 8), (4, 2, 16), (4, 8, 4))

#: Filters per block of the implicit GEMM kernels, all with 128 pixels; Ampere has no 128x128.
IMPLICIT_TILES = (32.0, 64.0, 128.0)

#: Fewest filters per block of the kernels for volumes (``implicit_convolveNd_sgemm``), and their rate over that of the
#: kernels for planes.
VOLUME_TILE, VOLUME_EFFICIENCY = 64.0, 0.85

#: PyTorch's depthwise kernel: integer instructions for the place of a result, whose indices take divisions, and for an
#: element of the window. Chosen on KernelBench's 84.
PLACE_INTEGERS, TAP_INTEGERS = 100.0, 6.5

BATCHED_TILES: Sequence[tuple[int, int, int]] = ((64, 64, 64), (32, 128, 128), (128, 64, 128))
#: Rows, columns and threads of the batched GEMM kernels that cuDNN 8.9 brings along, before and from Ampere on.
BATCHED_TILES_AMPERE: Sequence[tuple[int, int, int]] = ((128, 128, 256),)


@dataclass(frozen=True, kw_only=True)
class ConvolutionProblem:
    """A convolution, or the convolution that one of its gradients is.

    Attributes:
        n: images.
        c: input channels.
        f: output channels (filters).
        h: input rows.
        w: input columns.
        out_h: output rows.
        out_w: output columns.
        window: elements of the window, kh * kw.
        groups: groups of channels.
        volume: 1 where images are volumes.
        dtype_bytes: bytes per element.
    """

    n: Floats
    c: Floats
    f: Floats
    h: Floats
    w: Floats
    out_h: Floats
    out_w: Floats
    window: Floats
    groups: Floats
    volume: Floats
    dtype_bytes: int = 4

    @property
    def input_bytes(self) -> Floats:
        """Bytes of the input."""
        return self.n * self.c * self.h * self.w * self.dtype_bytes

    @property
    def output_bytes(self) -> Floats:
        """Bytes of the output."""
        return self.n * self.f * self.out_h * self.out_w * self.dtype_bytes

    @property
    def filter_bytes(self) -> Floats:
        """Bytes of the filters."""
        return self.f * self.c / self.groups * self.window * self.dtype_bytes


@dataclass(frozen=True)
class Algorithm:
    """One way to compute it: stages that run one after the other, and the number of kernels."""

    stages: Mapping[str, Floats]
    kernels: int

    @property
    def seconds(self) -> Floats:
        """Seconds of all stages."""
        return np.sum(list(self.stages.values()), axis=0)


def gemm_rate(device: DeviceSpec, dtype_bytes: int = 4) -> float:
    """FLOP/s of a good library kernel during milliseconds: tensor cores for 16-bit types where there are any."""
    matrix = device.best_matrix_instruction("float16") if dtype_bytes == 2 else None
    if matrix is not None:
        return matrix.sustained_flops
    return device.sustained_flops("float32") ** LONG_LOAD * device.best_flops("float32") ** (1 - LONG_LOAD)


def tiled_seconds(device: DeviceSpec, blocks: Floats, work: Floats, threads: float, rate: float) -> Floats:
    """Time of blocks of equal work (FLOP) on all units, in waves.

    A unit runs as many blocks at a time as its registers hold. A wave of few blocks, the last one or the only one,
    lacks the threads to keep the pipelines full and takes longer per block.
    """
    alone = min(1.0, threads / _saturating_threads(device))
    resident = max(1.0, RESIDENT_THREADS // threads)
    per_unit = np.ceil(blocks / device.unit_count)
    last_blocks = per_unit % resident
    full = (per_unit - last_blocks) / min(1.0, resident * alone)
    last = np.where(last_blocks > 0, last_blocks / np.minimum(1.0, np.maximum(last_blocks, 1.0) * alone), 0.0)
    return work * (full + last) / (rate / device.unit_count)


def implicit_gemm(device: DeviceSpec, problem: ConvolutionProblem) -> Algorithm:
    """GEMM of pixels by filters over channels times window, its input gathered on the way."""
    pixels = problem.n * problem.out_h * problem.out_w
    depth = steps(problem.c / problem.groups * problem.window)
    filters = problem.f / problem.groups
    rate = _inner_rate(device, IMPLICIT_EFFICIENCY, problem.dtype_bytes)
    times = []
    slower = np.where(problem.volume == 1, VOLUME_EFFICIENCY, 1.0)
    for tile in IMPLICIT_TILES[: 2 if _ampere(device) else 3]:
        blocks = np.ceil(pixels / 128) * np.ceil(filters / tile) * problem.groups
        each = tiled_seconds(device, blocks, 2 * 128 * tile * (depth + IMPLICIT_FILL), 2 * tile, rate) / slower
        times.append(np.where((problem.volume == 1) & (tile < VOLUME_TILE), np.inf, each))
    traffic = _transfer(device, problem.input_bytes + problem.output_bytes + problem.filter_bytes)
    return Algorithm({"multiply": overlapped(np.min(times, axis=0), traffic), "gaps": gaps(device, pixels, 2)}, 2)


def fused_winograd(device: DeviceSpec, problem: ConvolutionProblem) -> Algorithm:
    """F(2x2, 3x3): a filter transform, then one kernel of 32 filters by 32 tiles of 2x2 outputs per block."""
    regions = FUSED_REGIONS if _before_volta(device) else FUSED_REGIONS[:1]
    cover = [np.ceil(problem.n / i) * np.ceil(problem.out_h / y) * np.ceil(problem.out_w / x) for i, y, x in regions]
    blocks = np.ceil(problem.f / FUSED_FILTERS) * np.min(cover, axis=0)
    work = 2 * 16 * FUSED_FILTERS * FUSED_TILES * (steps(problem.c) + FUSED_FILL)
    arithmetic = tiled_seconds(device, blocks, work, 256, _inner_rate(device, FUSED_EFFICIENCY))
    traffic = _transfer(device, problem.input_bytes + problem.output_bytes + problem.filter_bytes)
    stages = {
        "transform": _transfer(device, problem.filter_bytes * (1 + 16 / 9)),
        "multiply": overlapped(arithmetic, traffic),
        "gaps": gaps(device, blocks, 2),
    }
    return Algorithm(stages, 2)


def nonfused_winograd(device: DeviceSpec, problem: ConvolutionProblem, weight_gradient: bool = False) -> Algorithm:
    """F(4x4, 3x3): input and filters to memory, 36 GEMMs of 4x4 tiles by filters over channels, result back.

    The gradient of the filters has the same three sides: both activations are transformed, the GEMMs reduce over the
    tiles, and the small result is turned into filters.
    """
    tiles = problem.n * np.ceil(problem.out_h / 4) * np.ceil(problem.out_w / 4)
    data, result = 36 * 4 * tiles * problem.c, 36 * 4 * tiles * problem.f
    kernel = 36 * 4 * problem.c * problem.f
    rows, columns, depth = (problem.c, problem.f, tiles) if weight_gradient else (tiles, problem.f, problem.c)
    rate = gemm_rate(device) * GEMM_EFFICIENCY
    times = []
    for m, n, threads in BATCHED_TILES_AMPERE if _ampere(device) else BATCHED_TILES:
        blocks = 36 * np.ceil(rows / m) * np.ceil(columns / n)
        times.append(tiled_seconds(device, blocks, 2.0 * m * n * (steps(depth) + GEMM_FILL), threads, rate))
    stages = {
        "transform": _transfer(device, problem.input_bytes + data) * TRANSFORM_PASSES
        + _transfer(device, problem.filter_bytes + kernel) * FILTER_PASSES,
        "multiply": overlapped(np.min(times, axis=0), _transfer(device, data + kernel + result)),
        "output": _transfer(device, result + problem.output_bytes) * OUTPUT_PASSES,
        "gaps": gaps(device, tiles, 4),
    }
    return Algorithm(stages, 4)


def weight_gradient_gemm(device: DeviceSpec, problem: ConvolutionProblem) -> Algorithm:
    """Filters by channels times window, reduced over all pixels, which are split until the units are full."""
    pixels = problem.n * problem.out_h * problem.out_w
    tiles = np.ceil(problem.f / problem.groups / 64) * np.ceil(problem.c / problem.groups * problem.window / 128)
    blocks = tiles * problem.groups
    resident = device.unit_count * RESIDENT_THREADS / 128
    splits = np.clip(np.floor(resident / blocks), 1, np.maximum(np.floor(pixels / 256), 1))
    rate = _inner_rate(device, IMPLICIT_EFFICIENCY, problem.dtype_bytes)
    work = 2 * 128 * 64 * (steps(pixels / splits) + IMPLICIT_FILL)
    arithmetic = tiled_seconds(device, blocks * splits, work, 128, rate)
    traffic = _transfer(device, problem.input_bytes + problem.output_bytes)
    # Every split writes its sums, and a second kernel adds them up.
    sums = _transfer(device, problem.filter_bytes * np.where(splits > 1, 2 * splits + 1, 1))
    stages = {"multiply": overlapped(arithmetic, traffic), "output": sums, "gaps": gaps(device, pixels, 2)}
    return Algorithm(stages, 2)


def depthwise(device: DeviceSpec, problem: ConvolutionProblem) -> Algorithm:
    """One output per thread: its place by divisions, window elements from L1."""
    outputs = problem.n * problem.f * problem.out_h * problem.out_w
    traffic = _transfer(device, problem.input_bytes + problem.output_bytes + problem.filter_bytes)
    integers = outputs * (PLACE_INTEGERS + TAP_INTEGERS * problem.window)
    busy = overlapped(integer_seconds(device, integers), traffic)
    return Algorithm({"multiply": busy, "gaps": gaps(device, outputs, 1)}, 1)


def overlapped(arithmetic: Floats, traffic: Floats) -> Floats:
    """Seconds of a kernel whose arithmetic and traffic run beside each other, in the norm :data:`OVERLAP`.

    >>> float(overlapped(np.array(3.0), np.array(4.0)))
    5.0
    """
    return (arithmetic**OVERLAP + traffic**OVERLAP) ** (1 / OVERLAP)


def steps(depth: Floats) -> Floats:
    """Elements of a reduction in whole steps.

    >>> steps(np.array([8.0, 9.0])).tolist()
    [8.0, 16.0]
    """
    return np.ceil(depth / REDUCTION_STEP) * REDUCTION_STEP


def gaps(device: DeviceSpec, like: Floats, kernels: int) -> Floats:
    """Seconds of starting ``kernels`` kernels and of the pauses between them, in the shape of ``like``."""
    between = kernels * kernel_seconds_floor(device) + (kernels - 1) * device.launch_overhead_seconds / 2
    return np.full(np.shape(like), between)


def _inner_rate(device: DeviceSpec, efficiency: float, dtype_bytes: int = 4) -> float:
    """Inner-loop rate of cuDNN's own kernels."""
    aged = SINCE_AMPERE if dtype_bytes == 4 and _ampere(device) else 1.0
    return gemm_rate(device, dtype_bytes) * efficiency * aged


def _saturating_threads(device: DeviceSpec) -> float:
    """Threads of a unit that hide the latency of L2: in proportion to lanes and to cycles of latency."""
    lanes = device.peak_flops("float32") / 2 / device.clocks.boost_hz / device.unit_count
    latency = device.l2.latency_seconds if device.l2 is not None else None
    cycles = device.clocks.boost_hz * latency if latency is not None else TYPICAL_L2_CYCLES
    return SATURATION * lanes * cycles / TYPICAL_L2_CYCLES


def _transfer(device: DeviceSpec, moved: Floats) -> Floats:
    return moved / device.dram.bandwidth_bytes_per_second


def _ampere(device: DeviceSpec) -> bool:
    return device.compute_capability is not None and device.compute_capability >= (8, 0)


def _before_volta(device: DeviceSpec) -> bool:
    return device.compute_capability is not None and device.compute_capability < (7, 0)
