"""The kernels that cuBLAS has for Tensor Cores: tiles of the result by how a board feeds its matrix instructions.

From sm_80 on, warps copy operands to shared memory and read them back as fragments for ``mma.sync``. From sm_90 on,
one thread asks for whole boxes (the Tensor Memory Accelerator, TMA), a cluster of blocks shares what it reads, and
``wgmma`` and ``tcgen05`` take operands from shared memory as they lie. TMA needs rows that are multiples of 16 bytes;
other products run the kernels for warps there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hal.spec.device import DeviceSpec
from hal.spec.parts import WARP_GROUPS, MatrixInstruction
from roller.library.arrays import Bools, Floats

#: How operands come to the matrix units: by the warps' own copies, or by bulk copies (TMA).
Feed = Literal["warps", "bulk"]

#: Rows of a matrix that TMA reads begin at multiples of this.
BULK_ROW_BYTES = 16

#: Slices of k that blocks share between them; products of weights show those up to ``MEASURED_SPLITS``, more are taken
#: for sums that leave each slice ``LONG_SLICE`` steps.
SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128)
MEASURED_SPLITS, LONG_SLICE = 32, 32


@dataclass(frozen=True)
class Menu:
    """Tiles to choose from, an entry each; ``m`` are rows of the result (tokens), ``n`` columns (rows of the weights).

    Attributes:
        m: rows per block.
        n: columns per block.
        depth_bytes: bytes of a row of either operand per step along k.
    """

    m: Floats
    n: Floats
    depth_bytes: Floats

    @staticmethod
    def of(*tiles: tuple[int, int, int]) -> Menu:
        """A menu of ``(m, n, depth_bytes)``."""
        return Menu(*(np.array(column, dtype=np.float64) for column in zip(*tiles, strict=True)))


# What profiles of cuBLAS 12 and 13 show: ``ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_32x3``, CUTLASS tiles
# behind cublasLt, and ``nvjet_hsh_128x256_64x4_2x1`` from sm_90 on, whose side along the tokens has many sizes.
_WARPS = Menu.of(
    (16, 64, 128), (16, 128, 128), (32, 64, 128), (64, 64, 128), (64, 128, 128), (128, 64, 128), (128, 128, 64),
    (64, 256, 64), (256, 64, 64), (128, 256, 64), (256, 128, 64),
)  # fmt: skip
_WARP_GROUPS = Menu.of(
    (8, 64, 128), (16, 64, 128), (32, 64, 128), (64, 64, 128), (128, 64, 128), (256, 64, 128), (16, 128, 128),
    (32, 128, 128), (64, 128, 128), (96, 128, 128), (128, 128, 128), (160, 128, 128), (192, 128, 128),
    (224, 128, 128), (256, 128, 128), (64, 256, 128), (128, 256, 128), (192, 192, 128),
)  # fmt: skip
_UNIT_PAIRS = Menu.of(
    (8, 64, 128), (16, 64, 128), (32, 64, 128), (64, 64, 128), (8, 128, 128), (16, 128, 128), (32, 128, 128),
    (64, 128, 128), (96, 128, 128), (128, 128, 128), (192, 128, 128), (256, 128, 128), (64, 256, 128),
    (128, 256, 128), (192, 256, 128), (256, 256, 128),
)  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """The kernels for one way to feed the matrix units.

    Attributes:
        feed: the way.
        instruction: what multiplies.
        menu: the tiles.
    """

    feed: Feed
    instruction: MatrixInstruction
    menu: Menu

    @property
    def name(self) -> str:
        """The instruction's name as PTX spells it."""
        return "mma.sync" if self.feed == "warps" else self.instruction.name


def kernels_of(device: DeviceSpec, dtype: str, *, is_aligned: bool) -> Kernels | None:
    """The library's kernels for products of a type; None where the board has no matrix instruction for it.

    Args:
        device: the board.
        dtype: element type of the operands.
        is_aligned: whether all rows are multiples of :data:`BULK_ROW_BYTES`.
    """
    instruction = device.best_matrix_instruction(dtype)
    if instruction is not None and is_aligned and not instruction.is_by_warps:
        return Kernels("bulk", instruction, _WARP_GROUPS if instruction.name == WARP_GROUPS else _UNIT_PAIRS)
    by_warps = device.matrix_instruction(dtype)
    return None if by_warps is None else Kernels("warps", by_warps, _WARPS)


def aligned(n: Floats, k: Floats, element_bytes: int) -> Bools:
    """Whether the rows of both operands and of the result can be read in bulk."""
    return np.asarray((k * element_bytes % BULK_ROW_BYTES == 0) & (n * element_bytes % BULK_ROW_BYTES == 0))
