"""Operands of ``mma.sync`` kernels: where their elements lie in shared memory, and how fragments come into registers.

A fragment is 16 rows (of A; columns of B) by 32 bytes of the depth, four words a lane. Which instruction loads it
depends on the direction in which the depth runs in the tile, and on the size of an element:

==================  =====================================================================================
along the rows      ``ldmatrix``: four matrices of eight rows by 16 bytes, whatever the elements
down, two bytes     ``ldmatrix.trans``, which turns elements of two bytes
down, four bytes    four loads of a word; what ``ldmatrix`` turns would tear them apart
down, one byte      ``ldmatrix.trans`` brings pairs of neighbours in two steps of the depth; bytes of two such words are
                    permuted into four steps of the depth each. Neighbours land in different products
==================  =====================================================================================

Pieces of 16 bytes are permuted within a row by an exclusive or (swizzled), and single bytes that lie across are stored
in the order of rows in which the matrices take them, so that neither loads nor copies meet in a bank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sokoban.kernel.matrix import FRAGMENT, MatrixRoles, swizzle_of
from sokoban.language.expression import Load

#: A TVM expression; or a number, or an array of one per lane, for who wants the addresses themselves.
Expr = Any

#: Bytes that ``ldmatrix`` reads as a whole, of eight rows at a time.
PIECE_BYTES, MATRIX_ROWS = 16, 8


@dataclass(frozen=True, kw_only=True)
class OperandTile:
    """The staged tile of one operand.

    Attributes:
        load: the operand.
        is_a: m indexes it rather than n.
        turned: the depth runs down the rows rather than along them.
        columns: elements of a row.
        element_bytes: of an element.
        start: byte where the tile starts within its stage.
    """

    load: Load
    is_a: bool
    turned: bool
    columns: int
    element_bytes: int
    start: int

    @staticmethod
    def of(roles: MatrixRoles, load: Load, columns: int, element_bytes: int, start: int) -> OperandTile:
        return OperandTile(
            load=load,
            is_a=load == roles.a,
            turned=roles.is_turned(load),
            columns=columns,
            element_bytes=element_bytes,
            start=start,
        )

    @property
    def piece(self) -> int:
        """Elements of a piece."""
        return PIECE_BYTES // self.element_bytes

    def offset(self, stage: Expr, row: Expr, column: Expr) -> Expr:
        """Byte of an element in shared memory, of the stage that starts at byte ``stage``."""
        if self.turned and self.element_bytes == 1:
            row = row // 16 * 16 + row // 2 % 2 * 8 + row // 4 % 4 * 2 + row % 2
        return self._offset(stage, row, column)

    def _offset(self, stage: Expr, row: Expr, column: Expr) -> Expr:
        """:meth:`offset` by the place of the element's row."""
        divisor, pieces = swizzle_of(self.columns // self.piece)
        piece = column // self.piece
        if self.turned and self.element_bytes == 4:
            # Lanes read eight words of four rows at a time: two pieces each.
            piece = piece ^ (row // divisor % (pieces // 2) * 2) if pieces > 2 else piece
        elif pieces > 1:
            piece = piece ^ (row // divisor % pieces)
        return stage + self.start + (row * self.columns + piece * self.piece + column % self.piece) * self.element_bytes

    def fragment(self, stage: Expr, lane: Expr, spatial: Expr, depth: int) -> tuple[str, tuple[Expr, ...]]:
        """The device function that loads the fragment at row (of B: column) ``spatial`` and step ``depth`` of the
        product's depth, both multiples of a fragment's size; and its offsets in shared memory, in bytes."""
        operand = "a" if self.is_a else "b"
        if self.turned and self.element_bytes == 4:
            columns = (spatial + lane // 4, spatial + lane // 4 + FRAGMENT // 2)
            first, second = (self._offset(stage, depth + lane % 4, column) for column in columns)
            # The swizzle repeats after four rows: the other half of the depth is as far away in every lane.
            return f"load_words_{operand}", (first, second, 4 * self.columns * self.element_bytes)
        if self.turned and self.element_bytes == 1:
            return f"load_bytes_{operand}", (self._offset(stage, depth + lane, spatial),)
        matrix, row = lane // MATRIX_ROWS, lane % MATRIX_ROWS
        # The registers want the matrices of A by m first, then k; of B by k first, then n.
        halves = (matrix % 2, matrix // 2) if self.is_a else (matrix // 2, matrix % 2)
        spatial = spatial + halves[0] * (FRAGMENT // 2)
        if self.turned:
            return "load_matrix_x4_trans", (self._offset(stage, halves[1] * MATRIX_ROWS + row + depth, spatial),)
        return "load_matrix_x4", (self._offset(stage, spatial + row, halves[1] * self.piece + depth),)
