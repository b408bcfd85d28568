"""Tiles of Triton's experts where no table tuned for the board is at hand, by vLLM's rules.

Since vLLM 0.15 rows follow the tokens, 16 to 128; with 128x128 blocks of scales a tile is as wide and deep as a block.
Before, two tiles served all calls; rows of boards of sm_80 were last measured so (0.14). For Mixtral, DBRX and a few
more, vLLM comes with tables that were tuned on such a board.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from roller.library.arrays import Bools, Floats

#: Rows, columns and bytes along k of a tile.
Tile = tuple[int, int, int]

#: First boards whose rows were measured with the rules since 0.15.
FOLLOWING_CAPABILITY = (8, 9)

#: The two tiles before, for as many tokens as experts and fewer, and for more; elements along k are of 16 bits.
_FEW, _MANY = (16, 32, 128), (64, 64, 64)

#: Experts of a board and their columns that vLLM has a table for, tuned on an A100-SXM4-80GB in 16 bits, by its files
#: ``vllm/model_executor/layers/fused_moe/configs/E=...,N=...,device_name=NVIDIA_A100-SXM4-80GB.json``.
_TUNED: Mapping[int, tuple[int, ...]] = {
    1: (1792, 3584, 7168, 14336), 8: (1792, 2048, 3584, 4096, 7168), 16: (1344, 1792, 2688, 3584, 7168, 14336),
    64: (640, 1280), 128: (192,),
}  # fmt: skip

#: Rows of a tile by the most tokens, and the tokens from which it is 128 columns wide and 64 elements deep.
_ROWS = ((32, 16), (96, 32), (512, 64), (np.inf, 128))
_WIDE_TOKENS = 64


def is_tuned(experts: Floats, columns: Floats, capability: tuple[int, int]) -> Bools:
    """Calls for which a table tuned for the board is at hand; ``columns`` of an expert's gate on this board."""
    tuned = np.zeros(np.shape(experts), np.bool_)
    if capability < FOLLOWING_CAPABILITY:
        for count, widths in _TUNED.items():
            tuned |= (experts == count) & np.isin(columns, widths)
    return tuned


def untuned_tiles(
    tokens: Floats, experts: Floats, capability: tuple[int, int], element_bytes: float, *, in_blocks: bool
) -> Iterator[tuple[Bools, Tile]]:
    """Tiles with the calls that take each, which are none for some."""
    if capability < FOLLOWING_CAPABILITY:
        yield tokens <= experts, _FEW
        yield tokens > experts, _MANY
        return
    if in_blocks:
        yield tokens <= _WIDE_TOKENS, (16, 128, 128)
        yield tokens > _WIDE_TOKENS, (64, 128, 128)
        return
    deep = int(128 * element_bytes)
    least = 0.0
    for most, rows in _ROWS:
        here = (tokens > least) & (tokens <= most)
        wide = tokens > _WIDE_TOKENS
        yield here & ~wide, (rows, 64, deep)
        yield here & wide, (rows, 128, deep if element_bytes == 1 else deep // 2)
        least = most
