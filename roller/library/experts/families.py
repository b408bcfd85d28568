"""Numbers of the libraries' kernels for layers of experts: one set a family, whatever board, precision and shape.

Chosen on rows of half of the shapes of each board (``today`` of AIConfigurator's performance database), the A100 apart;
docs/accuracy.md has the errors on the other half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roller.library.scaled.tiled import TiledConstants

#: Rows, columns and bytes along k of a tile.
Tile = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class ExpertsConstants:
    """The numbers of one family.

    Attributes:
        products: of its grouped products.
        menu: tiles that it is tuned among.
        untuned: the tile for as many tokens as experts and fewer, and that for more, where no board's table is at hand.
        align_seconds: of the kernels that sort pairs by experts, together.
        pair_seconds: added for each pair of a token and an expert.
        empty_tile_seconds: of a unit for a tile of 64 x 64 results whose expert lives on another board.
        stream_seconds: of a kernel between products, after the gap before it.
        stream_share: of the board's DRAM and L2 rates there.
        resident: blocks of a product on a unit at a time.
        by_warps: whether products run on single warps whatever the board has, and units share their steps evenly.
    """

    products: TiledConstants
    menu: tuple[Tile, ...]
    untuned: tuple[Tile, Tile] | None = None
    align_seconds: float
    pair_seconds: float
    empty_tile_seconds: float
    stream_seconds: float
    stream_share: float
    resident: float = 1.0
    by_warps: bool = False


_FINE: tuple[Tile, ...] = (
    (16, 64, 128), (32, 64, 128), (64, 64, 128), (16, 128, 128), (32, 128, 128), (64, 128, 128), (128, 128, 128),
    (128, 256, 128), (256, 128, 128),
)  # fmt: skip
_ROWS_OF_128: tuple[Tile, ...] = tuple((rows, 128, 128) for rows in (8, 16, 32, 64, 128, 256))

FAMILIES: Mapping[str, ExpertsConstants] = {
    "triton, warp groups": ExpertsConstants(
        products=TiledConstants(
            step_seconds=1.72e-07, staging=30.2, ramp_steps=6.41, store=1.93, port_reuse=0.94, dram_share=0.982,
            start_seconds=6.04e-07, cold_seconds=4e-06, best_share=0.777, written=0.469, overlap=2.62,
        ),
        menu=_FINE, align_seconds=9.79e-06, pair_seconds=2.52e-11, empty_tile_seconds=7.2e-07,
        stream_seconds=1.3e-06, stream_share=1.25,
    ),
    "triton, warps": ExpertsConstants(
        products=TiledConstants(
            step_seconds=1.92e-07, staging=2.8, ramp_steps=2.4, store=0.23, port_reuse=6.03, dram_share=0.931,
            start_seconds=7.23e-07, cold_seconds=2.54e-06, best_share=1.07, written=0.0152, overlap=1.68,
        ),
        menu=_FINE, untuned=((16, 32, 128), (64, 64, 64)), align_seconds=7.36e-06, pair_seconds=5.66e-09,
        empty_tile_seconds=2.58e-07, stream_seconds=1.69e-06, stream_share=0.565, resident=2.52,
    ),
    "cutlass": ExpertsConstants(
        products=TiledConstants(
            step_seconds=6.06e-07, staging=71.9, ramp_steps=16.1, store=0.366, port_reuse=0.109, dram_share=0.203,
            start_seconds=1.42e-07, cold_seconds=1.89e-05, best_share=0.732, written=0.249, overlap=5.3,
        ),
        menu=_ROWS_OF_128[1:], align_seconds=1.23e-06, pair_seconds=6.3e-11, empty_tile_seconds=2.13e-09,
        stream_seconds=6.36e-07, stream_share=2.61,
    ),
    "cutlass block": ExpertsConstants(
        products=TiledConstants(
            step_seconds=1e-07, staging=43.8, ramp_steps=26.4, store=3.85, port_reuse=8.12, dram_share=1.01,
            start_seconds=2.08e-07, cold_seconds=4.85e-06, best_share=1.2, written=6.18, overlap=1.74,
        ),
        menu=_ROWS_OF_128[1:], align_seconds=2.86e-06, pair_seconds=6.28e-10, empty_tile_seconds=1.02e-08,
        stream_seconds=2.08e-06, stream_share=2.68,
    ),
    "trtllm": ExpertsConstants(
        products=TiledConstants(
            step_seconds=9.41e-08, staging=5.02, ramp_steps=5.97, store=1.75, port_reuse=5.36, dram_share=1.1,
            start_seconds=3.21e-07, cold_seconds=6.37e-07, best_share=0.667, written=0.34, overlap=1.87,
        ),
        menu=_ROWS_OF_128, align_seconds=1.36e-06, pair_seconds=5.88e-11, empty_tile_seconds=8.69e-08,
        stream_seconds=2.81e-06, stream_share=12.6,
    ),
    "trtllm block": ExpertsConstants(
        products=TiledConstants(
            step_seconds=7.32e-08, staging=13.4, ramp_steps=3.88, store=0.446, port_reuse=8.33, dram_share=1.1,
            start_seconds=4.89e-06, cold_seconds=3.1e-06, best_share=0.282, written=0.81, overlap=1.68,
        ),
        menu=_ROWS_OF_128, align_seconds=5.16e-06, pair_seconds=1.32e-10, empty_tile_seconds=4.34e-07,
        stream_seconds=9.82e-07, stream_share=8.83,
    ),
    "marlin": ExpertsConstants(
        products=TiledConstants(
            step_seconds=1.3e-07, staging=37.3, ramp_steps=0.807, store=39.9, port_reuse=1.29, dram_share=0.923,
            start_seconds=7.63e-07, cold_seconds=1.05e-05, best_share=0.753, written=2.03, overlap=11.4,
        ),
        menu=_ROWS_OF_128[:4], by_warps=True, align_seconds=1.28e-05, pair_seconds=2.04e-11,
        empty_tile_seconds=7.12e-07, stream_seconds=2.54e-06, stream_share=4.07,
    ),
}  # fmt: skip
