"""Texts of products of warp groups, which kernels of attention and of its gradients share.

Tiles lie in shared memory in panels of 64 elements, each as long as the tile. A group has 64 rows of its own; what it
walks is read along its rows, or turned, as the depth of a product whose other factor comes out of registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.gpu.matrix.wgmma_functions import SHARED_START, UNIFORM_DESCRIPTOR
from codegen.gpu.walks.group_functions import logits_name, values_name
from codegen.tensor_map import TensorMap
from hal.spec.parts import DTYPE_BYTES
from sokoban.language.expression import Tensor
from sokoban.schedule.attention import FRAGMENT_DEPTH, padded
from sokoban.schedule.warp_groups import MOVED_REGISTERS, PANEL_BYTES

#: The group of a warp, as a number that the compiler knows to be the same for all of its lanes; where shared memory
#: begins; and by how much a group's own rows lie further.
GROUP = f"""\
const int group = __shfl_sync(0xffffffffu, warp / 4, 0);
    {SHARED_START}
    const unsigned long long own_start = shared_start + (unsigned)group * 512;"""


def panel_map(tensor: Tensor, rows: int) -> TensorMap:
    """Tensor map of one whose rows follow each other in panels, ``rows`` at a time."""
    panel = PANEL_BYTES // DTYPE_BYTES[tensor.dtype]
    shape = tensor.caller_shape  # a dimension for all heads, whatever they share
    return TensorMap(tensor=tensor.name, dtype=tensor.dtype, shape=shape, box=(1, 1, rows, panel))


def moved_registers(groups: int) -> tuple[str, str, str]:
    """Source by which registers move between warp groups: blocks a multiprocessor in the launch bounds, the call by
    which threads that multiply get registers, and that by which threads that copy give them; empty where none move."""
    if groups not in MOVED_REGISTERS:
        return "", "", ""
    most, fewest = MOVED_REGISTERS[groups]
    return ", 1", f"registers_more_{most}();", f"registers_fewer_{fewest}();"


@dataclass(frozen=True)
class Tile:
    """Place of a tile in shared memory.

    Attributes:
        offset: bytes from ``start``, a constant of the text.
        start: name of where they begin, in 16 bytes, the same for all lanes and in all steps.
        moved: 16 bytes by which the tile of a step lies further; empty for none.
    """

    offset: str
    start: str = "shared_start"
    moved: str = ""

    def descriptor(self, leading: str) -> str:
        """Its descriptor. What changes from step to step is added first, so that all tiles of a step have it in common:
        loops are up to a twentieth shorter than where it is added last."""
        moved = f" + (unsigned)({self.moved})" if self.moved else ""
        return f"{UNIFORM_DESCRIPTOR}({self.start}{moved}, {self.offset}, {leading}, 1024)"


def product_of_rows(
    sums: str,
    dtype: str,
    width: int,
    *,
    own: Tile,
    walked: Tile,
    step: int,
    step_name: str,
    begins: bool = True,
    ends: bool = True,
) -> str:
    """The product of a group's own rows and those of a step, along ``width`` elements of both, issued as one group, or
    as a part of the next one where it does not end there.

    Args:
        sums: of 64 rows and ``step`` columns, begun anew where ``begins``, else added to.
        own: where the tile of the group's own rows begins.
        walked: where the tile of the step begins; ``step_name`` is the name of its rows.
    """
    first, more = (logits_name(dtype, step, is_first) for is_first in (True, False))
    lines = []
    for depth in range(0, padded(width), FRAGMENT_DEPTH):
        # Sixteen elements further are 32 bytes; a panel further is a tile of 128 bytes a row. Descriptors count in 16.
        panel, within = divmod(depth * 2, PANEL_BYTES)
        rows, from_step = (
            f"{each} + {panel * PANEL_BYTES // 16} * {name} + {within // 16}" if depth else each
            for each, name in (("own_rows", "ROWS"), ("step_rows", step_name))
        )
        lines.append(f"      {more if depth or not begins else first}({sums}[0][0], {rows}, {from_step});\n")
    return f"""\
    {{
      const unsigned long long own_rows = {own.descriptor("16")};
      const unsigned long long step_rows = {walked.descriptor("16")};
{"".join(lines)}    }}
{"    warp_group_commit();" if ends else ""}"""


def product_of_columns(
    sums: str, factors: str, dtype: str, width: int, *, walked: Tile, step_name: str, ones: str = ""
) -> str:
    """The product of factors in registers and ``width`` columns of a step, added to ``sums``, issued as one group.

    Args:
        ones: bytes from the tile's columns, a panel, to a panel of ones behind it that has the 16 rows of an
            instruction; empty for none. ``width`` counts its columns, too.
    """
    product = values_name(dtype, padded(width, 8))
    # The second panel stays where it is while the first one moves on.
    panels, further = (ones, "(128 - (128LL << 16))") if ones else (f"{step_name} * {PANEL_BYTES}", "128")
    return f"""\
    {{
      const unsigned long long step_columns =
          {walked.descriptor(panels)};
#pragma unroll
      for (int n = 0; n < {step_name} / 16; ++n) {product}({sums}[0][0], {factors}[n], step_columns + n * {further});
    }}
    warp_group_commit();"""


def factors_of(sums: str, factors: str, pair: str, step_name: str) -> str:
    """Sums of a product as factors of the next one, in pairs of elements: their layout is the same."""
    return f"""\
#pragma unroll
    for (int n = 0; n < {step_name} / 16; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        {factors}[n][c] = {pair}({sums}[0][2 * n + c / 2][c % 2 * 2], {sums}[0][2 * n + c / 2][c % 2 * 2 + 1]);"""
