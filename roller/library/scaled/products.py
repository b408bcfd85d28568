"""Time of a linear layer whose product runs on narrow numbers: quantisation of its activations, and the product.

===================  ==========================================  ======================================
precision            scales                                      kernels
===================  ==========================================  ======================================
``fp8-tensorwise``   one a tensor, from its own maximum          two that stream, CUTLASS
``fp8-rowwise``      one a token, one a column of the weights    vLLM's per-token kernel, CUTLASS
``int8-rowwise``     likewise                                    likewise
``fp8-block``        1x128 of activations, 128x128 of weights    DeepGEMM, FlashInfer, CUTLASS or Triton
``mxfp8``            32 elements of either operand               a kernel of groups, DeepGEMM's pace
``nvfp4``            16 elements of either operand               a kernel of groups, CuTe's for four bits
===================  ==========================================  ======================================

Device seconds are those of kernels that follow one another; ``call_seconds`` those of vLLM's layer called from Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.library.arrays import Floats
from roller.library.products.matrix_gemm import WEIGHTS_IN_TURN, matrix_gemm
from roller.library.scaled.families import CONSTANTS, ScaledConstants
from roller.library.scaled.quantise import group_seconds, row_seconds, tensor_seconds
from roller.library.scaled.tiled import MatrixRate, TiledTimes, Tiling, tiled_seconds
from roller.library.scaled.tiles import (
    BULK_WARPS_CAPABILITY,
    CUTE_FP4,
    DEEP_GEMM,
    DEPTH_BYTES,
    TRITON_BLOCK,
    Generation,
    Tiles,
    cutlass_tiles,
)

#: First boards with matrix units for four bits and for scales of 32 elements.
MICROSCALING_CAPABILITY = (10, 0)

#: Boards whose matrix units take four bits at three times the rate of eight (Blackwell Ultra), and that rate.
ULTRA_CAPABILITY, ULTRA_FASTER = (10, 3), 3.0

#: Exponent of the larger of host and device where kernels are launched one by one.
_HOST_OVERLAP = 12.0

#: Rows below which FlashInfer's kernel for blocks serves Hopper.
_FLASHINFER_ROWS = 32


@dataclass(frozen=True)
class Format:
    """Numbers of a precision as they lie in memory.

    Attributes:
        dtype: element type of the matrix instruction, or the one whose rate is a multiple's base.
        element_bytes: as multiplied.
        stored_bytes: of an element with its share of the scales.
        faster: rate over that of ``dtype``.
        needed: first boards that have it.
    """

    dtype: str
    element_bytes: float
    stored_bytes: float
    faster: float = 1.0
    needed: tuple[int, int] = (8, 9)


FORMATS: dict[str, Format] = {
    "fp8-tensorwise": Format("float8_e4m3fn", 1.0, 1.0),
    "fp8-rowwise": Format("float8_e4m3fn", 1.0, 1.0),
    "int8-rowwise": Format("int8", 1.0, 1.0, needed=(7, 5)),
    "fp8-block": Format("float8_e4m3fn", 1.0, 1.0 + 4 / 128),
    "mxfp8": Format("float8_e4m3fn", 1.0, 1.0 + 1 / 32, needed=MICROSCALING_CAPABILITY),
    "nvfp4": Format("float8_e4m3fn", 0.5, 0.5 + 1 / 16, 2.0, MICROSCALING_CAPABILITY),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaledTimes:
    """Times of scaled products, an entry a call.

    Attributes:
        quantise: seconds of the kernels that quantise the activations.
        product: seconds and flows of the product.
        host: seconds of the host between two calls; 0 where it was not measured.
        family: name of the product's kernels.
        tile_m: rows of the product's tile.
        tile_n: columns of it.
        kernels: how many are launched.
    """

    quantise: Floats
    product: TiledTimes
    host: Floats
    family: Sequence[str]
    tile_m: Floats
    tile_n: Floats
    kernels: int

    @property
    def seconds(self) -> Floats:
        """Device time."""
        return np.asarray(self.quantise + self.product.seconds)

    @property
    def eager_seconds(self) -> Floats:
        """Time from call to call where Python launches every kernel."""
        return np.asarray((self.seconds**_HOST_OVERLAP + self.host**_HOST_OVERLAP) ** (1 / _HOST_OVERLAP))


def generation_of(device: DeviceSpec, dtype: str) -> Generation:
    """The way in which a board feeds its matrix units for a type."""
    instruction = device.best_matrix_instruction(dtype)
    if instruction is None or instruction.is_by_warps:
        return "warps"
    return "warp groups" if instruction.is_by_groups else "unit pairs"


def check_format(precision: str, device: DeviceSpec) -> Format:
    """The format of a precision.

    Raises:
        InputError: the board has no matrix units for it.
    """
    chosen = FORMATS[precision]
    if (device.compute_capability or (0, 0)) < chosen.needed or MatrixRate.of(device, chosen.dtype) is None:
        board = "sm_{}{}".format(*chosen.needed)
        problem = f"{device.name} has no matrix units for {precision}, which takes {board} or newer"
        raise InputError("precision", problem, "use bfloat16, or another board")
    return chosen


def scaled_times(
    precision: str, m: Floats, n: Floats, k: Floats, device: DeviceSpec, constants: ScaledConstants = CONSTANTS
) -> ScaledTimes:
    """Times of layers y[m,n] = q(x)[m,k] w[n,k] in one precision.

    Raises:
        InputError: the board has no matrix units for it.
    """
    numbers = check_format(precision, device)
    m, n, k = (np.asarray(sizes, np.float64) for sizes in (m, n, k))
    calls = _Calls(m, n, k, device, numbers, constants)
    quantise = constants.quantise
    if precision in ("fp8-rowwise", "int8-rowwise"):
        return calls.by_cutlass(row_seconds(m, k, device, quantise), 2)
    if precision == "fp8-tensorwise":
        return calls.by_cutlass(tensor_seconds(m, k, device, quantise), 3)
    grouped = group_seconds(m, k, device, quantise, wide=2 + numbers.stored_bytes)
    if precision == "nvfp4":
        return calls.by_best("cute fp4", CUTE_FP4, grouped, np.zeros_like(m))
    return calls.in_blocks(grouped) if precision == "fp8-block" else calls.microscaled(grouped)


def trained_times(
    precision: str, m: Floats, n: Floats, k: Floats, device: DeviceSpec, constants: ScaledConstants = CONSTANTS
) -> ScaledTimes:
    """Times of layers as training frameworks run them: activations, or gradients, are quantised by kernels that stream.

    Scales of a whole tensor are those of the steps before (delayed scaling), so that one kernel converts and
    transposes; products with such scales, and with those of 32 elements, are cuBLAS's. Rows, blocks and four bits take
    the kernels of :func:`scaled_times`.

    Raises:
        InputError: the board has no matrix units for the precision.
    """
    numbers = check_format(precision, device)
    m, n, k = (np.asarray(sizes, np.float64) for sizes in (m, n, k))
    # Read in 16 bits, written along both operands' summands: the gradient of the weights sums along rows.
    quantise = group_seconds(m, k, device, constants.quantise, wide=2 + 2 * numbers.stored_bytes)
    if precision not in ("fp8-tensorwise", "mxfp8"):
        times = scaled_times(precision, m, n, k, device, constants)
        return replace(times, quantise=quantise, host=np.zeros_like(m), kernels=2)
    product = matrix_gemm(np.ones_like(m), m, n, k, device, dtype=numbers.dtype)
    flows = TiledTimes(seconds=product.seconds, **{name: product.stages[name] for name in ("compute", "dram", "l2")})
    return ScaledTimes(
        quantise=quantise, product=flows, host=np.zeros_like(m), family=product.instruction.tolist(),
        tile_m=product.tile_m, tile_n=product.tile_n, kernels=2,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Calls:
    m: Floats
    n: Floats
    k: Floats
    device: DeviceSpec
    numbers: Format
    constants: ScaledConstants

    @property
    def generation(self) -> Generation:
        return generation_of(self.device, self.numbers.dtype)

    @property
    def rate(self) -> MatrixRate:
        base = MatrixRate.of(self.device, self.numbers.dtype)
        assert base is not None
        faster = self.numbers.faster
        is_ultra = faster > 1 and self.device.compute_capability == ULTRA_CAPABILITY
        best = base.best * (ULTRA_FASTER if is_ultra else faster)
        return MatrixRate(best, None if base.limited is None else base.limited * faster)

    def by_cutlass(self, quantise: Floats, kernels: int) -> ScaledTimes:
        """Products by CUTLASS, each with the tile of its rows and columns."""
        capability = self.device.compute_capability or (0, 0)
        tiles = cutlass_tiles(self.generation, capability, self.m, self.n)
        is_bulk = self.generation != "warps" or capability >= BULK_WARPS_CAPABILITY
        family = "cutlass" if is_bulk else "cutlass, warps"
        times = self._times(family, tiles, turns=WEIGHTS_IN_TURN)
        return ScaledTimes(
            quantise=quantise, product=times, host=np.zeros_like(self.m), family=[family] * len(self.m),
            tile_m=tiles.m, tile_n=tiles.n, kernels=kernels,
        )  # fmt: skip

    def by_best(
        self, family: str, menu: Sequence[tuple[int, int]], quantise: Floats, host: Floats, turns: int = 1
    ) -> ScaledTimes:
        """Products by the fastest of some tiles."""
        ones = np.ones_like(self.m)
        candidates = []
        for tile_m, tile_n in menu:
            tiles = Tiles(tile_m * ones, tile_n * ones, DEPTH_BYTES * ones, ones, ones, ones < 0)
            candidates.append(self._times(family, tiles, turns))
        best = np.argmin([each.seconds for each in candidates], axis=0)
        flows = {
            name: np.choose(best, [getattr(each, name) for each in candidates])
            for name in ("seconds", "compute", "dram", "l2")
        }
        sides = np.array(menu, np.float64)[best]
        return ScaledTimes(
            quantise=quantise, product=TiledTimes(**flows), host=host, family=[family] * len(self.m),
            tile_m=sides[:, 0], tile_n=sides[:, 1], kernels=2,
        )  # fmt: skip

    def in_blocks(self, quantise: Floats) -> ScaledTimes:
        """128x128 blocks: DeepGEMM from Hopper on, Triton before; hosts as vLLM dispatches."""
        if self.generation == "warps":
            host = self.constants.host_seconds["triton block"] * np.ones_like(self.m)
            return self.by_best("triton block", TRITON_BLOCK, quantise, host)
        name = f"deepgemm, {self.generation}"
        hosts = self.constants.host_seconds
        is_deep = (self.n % 64 == 0) & (self.k % 128 == 0)
        if self.generation == "unit pairs":
            deep = hosts[name] + np.where((self.m % 4 == 0), 0.0, self.constants.host_pad_seconds)
        else:
            deep = np.where(self.m < _FLASHINFER_ROWS, hosts["flashinfer block"], hosts[name])
        host = np.where(is_deep, deep, hosts["cutlass block"])
        return self.by_best("deepgemm", DEEP_GEMM[self.generation], quantise, host)

    def microscaled(self, quantise: Floats) -> ScaledTimes:
        """Scales of 32 elements, by DeepGEMM's kernels, whose scales the units apply likewise: none was measured."""
        name = "deepgemm" if self.generation != "warps" else "triton block"
        return self.by_best(name, DEEP_GEMM[self.generation], quantise, np.zeros_like(self.m))

    def _times(self, family: str, tiles: Tiles, turns: int) -> TiledTimes:
        numbers = self.numbers
        weights = self.n * self.k * numbers.stored_bytes
        tiling = Tiling(
            m=self.m, n=self.n, k=self.k, tile_m=tiles.m, tile_n=tiles.n, depth_bytes=tiles.depth_bytes,
            blocks=tiles.blocks(self.m, self.n), rows=self.m, weight_bytes=weights,
            activation_bytes=self.m * self.k * numbers.stored_bytes, turn_bytes=turns * weights,
            element_bytes=numbers.element_bytes, resident=self._resident(tiles), ends=tiles.ends,
            threads=tiles.threads,
        )  # fmt: skip
        return tiled_seconds(tiling, self.device, self.rate, self.constants.families[family])

    def _resident(self, tiles: Tiles) -> Floats:
        """Blocks of a unit at a time: by shared memory where warps copy for themselves, else one."""
        if self.generation != "warps":
            return np.ones_like(self.m)
        return np.clip(np.floor(self.device.limits.shared_bytes_per_unit / tiles.buffer_bytes), 1, 4)
