"""Time of a layer of gated experts, and of grouped products alone.

Routing given, libraries sort pairs of a token and an expert by experts, multiply every expert's tokens by its gate and
its way up (one product of twice the columns), apply the activation, multiply by its way down, and add up the experts of
each token. A tile never spans two experts: few tokens an expert make many tiles that are mostly empty. The weights
of every expert with a token are read. Kernels with a map of experts (Triton, Marlin) visit the tiles of experts of
other boards, too, and fill them with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.library.arrays import Bools, Floats
from roller.library.experts.families import FAMILIES, ExpertsConstants
from roller.library.experts.loads import TILE_ROWS
from roller.library.experts.untuned import Tile, is_tuned, untuned_tiles
from roller.library.scaled.products import MICROSCALING_CAPABILITY, generation_of
from roller.library.scaled.tiled import GAP_SECONDS, RESULT_BYTES, MatrixRate, Tiling, kept_share, tiled_seconds


@dataclass(frozen=True)
class Numbers:
    """Operands of a layer of experts: their places in memory, and how they are multiplied.

    Attributes:
        dtype: element type of the matrix instruction, or the one whose rate is a multiple's base.
        activation_bytes: of an element, its share of the scales included.
        weight_bytes: likewise of the weights.
        element_bytes: as multiplied.
        faster: rate over that of ``dtype``.
        needed: first boards that have it.
        quantises: whether activations are quantised.
        multiple: of elements that vLLM pads an expert's intermediate sizes to.
    """

    dtype: str
    activation_bytes: float
    weight_bytes: float
    element_bytes: float
    faster: float = 1.0
    needed: tuple[int, int] = (8, 0)
    quantises: bool = False
    multiple: int = 1


#: Elements that a row's length is a multiple of where Triton copies 16 bytes at once, whatever the type.
ALIGNED_ELEMENTS = 16

#: Of an activation in blocks of 1x128 with a scale each.
_IN_BLOCKS_BYTES = 1 + 4 / 128

NUMBERS: Mapping[str, Numbers] = {
    "bfloat16": Numbers("bfloat16", 2, 2, 2),
    "fp8-tensorwise": Numbers("float8_e4m3fn", 1, 1, 1, needed=(8, 9), quantises=True),
    "fp8-block": Numbers("float8_e4m3fn", _IN_BLOCKS_BYTES, 1, 1, needed=(8, 9), quantises=True),
    "nvfp4": Numbers("float8_e4m3fn", 0.5625, 0.5625, 0.5, 2.0, MICROSCALING_CAPABILITY, quantises=True),
    "mxfp4-mxfp8": Numbers(
        "float8_e4m3fn", 1 + 1 / 32, 0.53, 1, needed=MICROSCALING_CAPABILITY, quantises=True, multiple=256
    ),
    "int4-weights": Numbers("bfloat16", 2, 0.516, 2),
    "mxfp4-weights": Numbers("bfloat16", 2, 0.53, 2),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Routed:
    """Calls of layers of experts, an entry each; see :class:`roller.library.experts.loads.Loads`.

    Attributes:
        tokens: that the layer is given.
        hidden: elements of a token.
        intermediate: of an expert, on this board.
        all_pairs: tokens times their experts, on all boards.
        experts: of this board.
        pairs: of the experts of this board.
        active: experts of this board with a token.
        tiles: of rows, by :data:`roller.library.experts.loads.TILE_ROWS` along the first axis.
        empty_tiles: likewise of experts of other boards.
    """

    tokens: Floats
    hidden: Floats
    intermediate: Floats
    all_pairs: Floats
    experts: Floats
    pairs: Floats
    active: Floats
    tiles: Floats
    empty_tiles: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertsTimes:
    """Seconds of layers of experts by their parts, an entry a call."""

    align: Floats
    up: Floats
    activation: Floats
    down: Floats
    combine: Floats
    family: str

    @property
    def seconds(self) -> Floats:
        """Device time."""
        return np.asarray(self.align + self.up + self.activation + self.down + self.combine)


def family_of(precision: str, device: DeviceSpec, *, is_divided: bool = False) -> str:
    """The kernels that vLLM takes for layers of experts of a precision on a board; ``is_divided`` among boards.

    Raises:
        InputError: the board has no matrix units for it.
    """
    numbers = NUMBERS[precision]
    capability = device.compute_capability or (0, 0)
    if capability < numbers.needed or MatrixRate.of(device, numbers.dtype) is None:
        problem = f"{device.name} has no kernels for experts in {precision}, which takes " + "sm_{}{} or newer".format(
            *numbers.needed
        )
        raise InputError("precision", problem, "use bfloat16, or another board")
    generation = generation_of(device, numbers.dtype)
    if not numbers.quantises and numbers.weight_bytes < 1:
        return "marlin"
    is_block = precision == "fp8-block"
    if generation == "unit pairs":
        return "trtllm block" if is_block else "trtllm"
    if numbers.needed == MICROSCALING_CAPABILITY or (
        generation == "warp groups" and numbers.quantises and not is_block
    ):
        return "cutlass"
    return "cutlass block" if is_block and is_divided and generation == "warp groups" else f"triton, {generation}"


def experts_times(
    precision: str,
    calls: Routed,
    device: DeviceSpec,
    families: Mapping[str, ExpertsConstants] = FAMILIES,
    *,
    is_divided: bool = False,
) -> ExpertsTimes:
    """Times of layers of experts in one precision; ``is_divided``: whether the experts are on several boards.

    Raises:
        InputError: the board has no matrix units for it.
    """
    family = family_of(precision, device, is_divided=is_divided)
    constants, numbers = families[family], NUMBERS[precision]
    tuned = is_tuned(calls.experts, calls.intermediate, device.compute_capability or (0, 0))
    layer = _Layer(calls, device, constants, numbers, tuned)
    rows = calls.all_pairs if constants.is_mapped else calls.pairs
    intermediate = np.ceil(calls.intermediate / numbers.multiple) * numbers.multiple
    moved = 3 * rows * intermediate * 2
    combined = (calls.all_pairs + calls.tokens) * calls.hidden * 2
    quantised = layer.stream_seconds(calls.tokens * calls.hidden * 3) if numbers.quantises else 0.0
    return ExpertsTimes(
        align=constants.align_seconds + constants.pair_seconds * calls.all_pairs + quantised,
        up=layer.product_seconds(2 * intermediate, calls.hidden, 1.5),
        activation=layer.stream_seconds(moved),
        down=layer.product_seconds(calls.hidden, intermediate, 3.0),
        combine=layer.stream_seconds(combined),
        family=family,
    )


def grouped_seconds(
    precision: str,
    calls: Routed,
    n: Floats,
    k: Floats,
    device: DeviceSpec,
    families: Mapping[str, ExpertsConstants] = FAMILIES,
) -> tuple[Floats, str]:
    """Seconds of grouped products y[pairs, n] = x[pairs, k] w[group, n, k], and the family of kernels.

    Raises:
        InputError: the board has no matrix units for the precision.
    """
    family = family_of(precision, device)
    layer = _Layer(calls, device, families[family], NUMBERS[precision], np.zeros(np.shape(n), np.bool_))
    return layer.product_seconds(n, k, 1.0), family


@dataclass(frozen=True, eq=False)
class _Layer:
    calls: Routed
    device: DeviceSpec
    constants: ExpertsConstants
    numbers: Numbers
    tuned: Bools

    def product_seconds(self, n: Floats, k: Floats, turns: float) -> Floats:
        """Grouped products by the fastest tile; ``turns``: weights that are read in turn over those of the product."""
        constants, calls, numbers = self.constants, self.calls, self.numbers
        capability = self.device.compute_capability or (0, 0)
        tuned = self.tuned | (not constants.is_untuned)
        seconds = np.zeros_like(calls.pairs)
        if np.any(tuned):
            seconds = np.min([self._by_tile(tile, n, k, turns) for tile in constants.menu], axis=0)
        if np.all(tuned):
            return seconds
        in_blocks = numbers.activation_bytes == _IN_BLOCKS_BYTES
        rules = untuned_tiles(calls.tokens, calls.experts, capability, numbers.element_bytes, in_blocks=in_blocks)
        for taken, tile in rules:
            if np.any(taken):
                seconds = np.where(taken & ~tuned, self._by_tile(tile, n, k, turns), seconds)
        return seconds

    def _by_tile(self, tile: Tile, n: Floats, k: Floats, turns: float) -> Floats:
        calls, numbers = self.calls, self.numbers
        tile_m, tile_n, depth = tile
        place = TILE_ROWS.index(tile_m)
        tiles, columns = calls.tiles[place], np.ceil(n / tile_n)
        weights = calls.active * n * k * numbers.weight_bytes
        rate = self._rate
        ones = np.ones_like(calls.pairs)
        tiling = Tiling(
            m=np.maximum(calls.pairs, 1e-9), n=n, k=k, tile_m=tile_m * ones, tile_n=tile_n * ones,
            depth_bytes=depth * ones, blocks=tiles * columns, rows=calls.pairs / np.maximum(tiles, 1e-9),
            weight_bytes=weights, activation_bytes=calls.pairs * k * numbers.activation_bytes,
            turn_bytes=turns * weights, element_bytes=numbers.element_bytes, resident=self.constants.resident,
            in_stripes=self.constants.by_warps, is_narrow=k % ALIGNED_ELEMENTS != 0,
        )  # fmt: skip
        seconds = tiled_seconds(tiling, self.device, rate, self.constants.products).seconds
        return np.asarray(seconds + self._empty_seconds(place, tile, n))

    def _empty_seconds(self, place: int, tile: Tile, n: Floats) -> Floats:
        """Tiles of experts of other boards: visited, and by kernels with a map of experts filled with zeros."""
        calls, device = self.calls, self.device
        tiles = calls.empty_tiles[place] * np.ceil(n / tile[1]) / device.unit_count * (tile[0] * tile[1] / 64**2)
        visited = tiles * self.constants.empty_tile_seconds
        if not self.constants.is_mapped:
            return np.asarray(visited)
        zeros = (calls.all_pairs - calls.pairs) * n * RESULT_BYTES
        missed = zeros * (1 - kept_share(zeros, device))
        return np.maximum(visited, missed / device.dram.bandwidth_bytes_per_second)

    @property
    def _rate(self) -> MatrixRate:
        """The board's rate: of single warps where weights are unpacked by them, else its best."""
        numbers, faster = self.numbers, self.numbers.faster
        warps = self.device.matrix_instruction(numbers.dtype) if self.constants.by_warps else None
        if warps is not None:
            return MatrixRate(warps.best_flops or warps.sustained_flops, warps.power_limited_flops)
        base = MatrixRate.of(self.device, numbers.dtype)
        assert base is not None
        return MatrixRate(base.best * faster, None if base.limited is None else base.limited * faster)

    def stream_seconds(self, moved: Floats) -> Floats:
        """A kernel that moves so many bytes between products, the gap before it included."""
        device, share = self.device, self.constants.stream_share
        kept = kept_share(moved, device)
        cache = device.l2 or device.dram
        dram = (1 - kept) / device.dram.bandwidth_bytes_per_second
        seconds = moved * (dram + kept / cache.bandwidth_bytes_per_second) / share
        return np.asarray(GAP_SECONDS + self.constants.stream_seconds + seconds)
