"""Cuts of a CPU kernel: blocks that threads take, and register tiles within them.

Every extent is a number known while the kernel is written. What is left over at the end of an axis gets a register
tile of its own size, so that nothing is computed twice and no inner loop asks where it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from codegen.tir.lowered import LoweringError
from codegen.tir.values import Expr


@dataclass(frozen=True)
class Cut:
    """An output axis of ``size`` elements, in blocks of ``block`` elements, in register tiles of ``tile`` elements."""

    axis: str
    size: int
    block: int
    tile: int

    @property
    def blocks(self) -> int:
        """Blocks along the axis, the last one maybe shorter."""
        return -(-self.size // self.block)

    @property
    def tiles_per_block(self) -> int:
        """Register tiles of a block, the last one maybe shorter."""
        return -(-min(self.block, self.size) // self.tile)

    @property
    def rest(self) -> int:
        """Elements of the last register tile where it is no whole one, otherwise 0."""
        return self.size % self.tile


def cut(axis: str, size: int, block: int, tile: int) -> Cut:
    """The axis cut into blocks of ``block`` elements and register tiles of ``tile``, none longer than the axis.

    Raises:
        LoweringError: register tiles do not divide a block.
    """
    if block % tile and block < size:
        raise LoweringError(f"{tile} elements of {axis} per thread do not divide a block of {block}")
    tile = min(tile, size)
    return Cut(axis, size, size if block >= size else block // tile * tile, tile)


def vectors(extent: int, lanes: int) -> list[tuple[int, int]]:
    """``extent`` elements as (start, width) of vectors: whole ones of ``lanes``, then falling powers of two:
    21 elements in lanes of 8 are (0, 8), (8, 8), (16, 4), (20, 1)."""
    pieces, start, width = [], 0, lanes
    while start < extent:
        while width > extent - start:
            width //= 2
        pieces.append((start, width))
        start += width
    return pieces


def points(extents: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """All points of a box, the last axis fastest."""
    for indices in itertools.product(*(range(extent) for extent in extents.values())):
        yield dict(zip(extents, indices, strict=True))


def position(indices: Sequence[Expr], shape: Sequence[int]) -> Expr:
    """Row-major position of an element."""
    total: Expr = tirx.const(0, "int32")
    for index, extent in zip(indices, shape, strict=True):
        total = total * extent + index
    return total
