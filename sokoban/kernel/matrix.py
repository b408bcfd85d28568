"""Which axes of an operator form a matrix product, so that a matrix instruction can compute it.

A matrix instruction multiplies a fragment of 16 rows of one operand by a fragment of 16 columns of the other; how deep
they are depends on the element type. An operator fits when three of its axes are the rows (m), columns (n) and depth
(k) of such a product; all other axes run in steps of one around it, as the batch axis of a batched product does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from sokoban.kernel.instructions import Instruction, product_factors
from sokoban.language.expression import FLOAT8_DTYPES, GatheredIndex, Load, Reduction, TensorExpr

#: Bytes of the depth that ``mma.sync`` multiplies at a time, whatever the element type: two words of every lane.
DEPTH_BYTES = 32


@dataclass(frozen=True, slots=True)
class MatrixType:
    """An element type of the operands of matrix instructions.

    >>> MATRIX_TYPES["float16"].depth, str(MATRIX_TYPES["int8"].mma)
    (16, 'mma_16x8x32')

    Attributes:
        dtype: its name.
        accumulate: dtype of the sums.
        capability: compute capability of the oldest NVIDIA devices that multiply it by ``mma.sync``.
        wmma: whether ``nvcuda::wmma`` kernels are written for it, too.
    """

    dtype: str
    accumulate: str
    capability: tuple[int, int]
    wmma: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of an element as it is stored."""
        return DTYPE_BYTES[self.dtype]

    @property
    def depth(self) -> int:
        """Elements of the depth that an instruction multiplies."""
        return DEPTH_BYTES // self.element_bytes

    @property
    def mma(self) -> Instruction:
        """The ``mma.sync`` that multiplies it: ``mma_16x8x16`` for halves."""
        return Instruction(f"mma_16x8x{self.depth}")


#: Element types of operands by name. TensorFloat-32 (``tfloat32``) is how products of float32 may be multiplied, stored
#: as float32.
MATRIX_TYPES = {
    kind.dtype: kind
    for kind in (
        MatrixType("float16", "float32", (8, 0), wmma=True),
        MatrixType("bfloat16", "float32", (8, 0), wmma=True),
        MatrixType("tfloat32", "float32", (8, 0)),
        MatrixType("int8", "int32", (8, 0)),
        MatrixType("float8_e4m3fn", "float32", (8, 9)),
        MatrixType("float8_e5m2", "float32", (8, 9)),
    )
}

#: Edge of a fragment in elements; two 16x8 products side by side make one, too. Its depth is the type's own
#: (:attr:`MatrixRoles.depth`), with ``wmma`` as many.
FRAGMENT = 16

#: Most elements of a warp's tile by ``mma.sync``: 64x64 sums take half of all registers.
MMA_SUMS = 64 * 64
#: Registers of a thread by ``mma.sync`` that hold neither sums nor fragments but addresses and counters (read off
#: compiler reports for sm_80 and sm_90, warp tiles of 32x32 to 64x64).
MMA_OTHER_REGISTERS = 36
#: Registers of a thread by ``wgmma`` that hold no sums; its operands are in none (read off compiler reports for sm_90a:
#: 26 to 32 where all are needed).
WGMMA_OTHER_REGISTERS = 32

#: Registers of a thread for the halves that eight-bit floats are widened to
#: (:attr:`sokoban.kernel.placed.PlacedForm.is_widened`).
WIDENED_REGISTERS = 48
#: Instructions that widened operands add (read off the SASS for sm_90): per 16x8 product two more by 16 bits and four
#: additions, and per fragment two for each of its four words.
WIDENED_PRODUCT_INSTRUCTIONS, WIDENED_FRAGMENT_INSTRUCTIONS = 6, 8

#: Pipeline stages worth proposing for ``mma.sync``: more than four hide nothing that four do not.
MMA_STAGES = (2, 3, 4)

#: Elements that pad the rows of the strip of shared memory through which 32-bit sums leave the fragments.
STRIP_PADDING = 8
#: Elements that pad them where a lane has four adjacent sums of a row instead of two
#: (:attr:`MatrixRoles.is_interleaved`).
INTERLEAVED_STRIP_PADDING = 16

#: Largest statically declared shared memory of a block on any CUDA device; the strip is declared so.
STATIC_SHARED_BYTES = 48 * 1024

#: Pieces of 16 bytes that lie side by side in the banks of shared memory.
BANK_PIECES = 8


def swizzle_of(pieces: int) -> tuple[int, int]:
    """Swizzle of rows of ``pieces`` pieces of 16 bytes in shared memory: ``(divisor, count)``.

    Piece ``p`` of row ``r`` lies where ``p ^ (r // divisor % count)`` would, so that eight rows have their piece ``p``
    in different banks. Rows of an odd number of pieces need no swizzle (count 1): their starts already differ.

    >>> swizzle_of(8), swizzle_of(4), swizzle_of(3)
    ((1, 8), (2, 4), (8, 1))
    """
    count = min(BANK_PIECES, pieces & -pieces)
    return BANK_PIECES // count, count


def instruction_for(device: DeviceSpec, dtype: str) -> Instruction | None:
    """The matrix instruction that products of ``dtype`` are written with for ``device``.

    None where the device has none for the type, or none that code is generated for.

    >>> from hal.catalog import load_device
    >>> str(instruction_for(load_device("v100"), "float16")), instruction_for(load_device("v100"), "int8")
    ('wmma_16x16x16', None)
    """
    if device.matrix_instruction(dtype) is None:
        return None
    kind = MATRIX_TYPES[dtype]
    if device.compute_capability is not None and tuple(device.compute_capability) >= kind.capability:
        return kind.mma
    return Instruction.WMMA if kind.wmma else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRoles:
    """``output[… m … n …] = sum(k, a[m, k] * b[k, n])``: m comes before n in the output.

    Attributes:
        m: axis of the product's rows.
        n: axis of its columns.
        k: axis of its depth, which is summed over.
        a: the operand that m indexes.
        b: the operand that n indexes.
        a_layout: ``"row"`` where k is the innermost dimension of ``a``, ``"col"`` where m is.
        b_layout: ``"row"`` where n is the innermost dimension of ``b``, ``"col"`` where k is.
        dtype: the operands' element type, one of :data:`MATRIX_TYPES`.
        scales: factors of float32 that the depth does not index: products of a step are summed by themselves, and their
            sums multiplied by these.
        blocks: axis of the blocks of columns where n counts the columns of one, all of which have a scale in common;
            None where n counts all of them.
    """

    m: str
    n: str
    k: str
    a: Load
    b: Load
    a_layout: str
    b_layout: str
    dtype: str
    scales: tuple[Load, ...] = ()
    blocks: str | None = None

    @property
    def across(self) -> str:
        """Axis along which tiles lie side by side, those along which have rows of A in common."""
        return self.blocks or self.n

    @property
    def depth(self) -> int:
        """Elements of the depth that an instruction multiplies."""
        return MATRIX_TYPES[self.dtype].depth

    def fragment(self, axis: str) -> int:
        """Divisor of every tile's size along ``axis``; 1 for axes outside the product."""
        return self.depth if axis == self.k else FRAGMENT if axis in (self.m, self.n) else 1

    def is_turned(self, load: Load) -> bool:
        """True if the depth of an operand is not its innermost dimension."""
        return (self.a_layout == "col") if load == self.a else (self.b_layout == "row")

    @property
    def is_interleaved(self) -> bool:
        """True if two adjacent 16x8 products have every other column each.

        They do where bytes are turned: ``ldmatrix`` turns pairs of columns.
        """
        return MATRIX_TYPES[self.dtype].element_bytes == 1 and self.is_turned(self.b)

    @property
    def strip_padding(self) -> int:
        """Elements by which rows of results are padded on their way out."""
        return INTERLEAVED_STRIP_PADDING if self.is_interleaved else STRIP_PADDING

    def fragment_loads(self, load: Load) -> int:
        """Reads of shared memory by a warp for a fragment of one depth: one ``ldmatrix``, which turns no words."""
        return 4 if self.is_turned(load) and MATRIX_TYPES[self.dtype].element_bytes == 4 else 1

    def fragment_instructions(self, load: Load) -> int:
        """Instructions of a warp until a fragment of one depth is in its registers, ready to be multiplied.

        Its loads, four permutations of bytes that are turned, two instructions for each of four roundings to
        TensorFloat-32.
        """
        is_permuted = self.is_turned(load) and MATRIX_TYPES[self.dtype].element_bytes == 1
        return self.fragment_loads(load) + (4 if is_permuted else 0) + (8 if self.dtype == "tfloat32" else 0)


def product_roles(expr: TensorExpr, outputs: Sequence[str], reduction: Reduction | None) -> MatrixRoles | None:
    """Roles of the axes of an operator, None where it is no product of matrices.

    The three axes index their operands plainly, and each operand's innermost dimension is one of them. Rows and columns
    may start elsewhere in every step, as those of an image do that filters are moved over, and the depth of one operand
    for every step of an axis outside the product, where nothing is read beyond the tensor. Where several choices are
    left, the output's innermost axis is preferred for n, and large axes for all three.

    Two eight-bit floats may be multiplied by scales, which are the same for all of the depth and all columns:
    ``sum((b, k), A[m,b,k] * B[c,n,b,k] * S[m,b] * T[c,b])`` has blocks b of the depth and c of the columns.

    Args:
        expr: the operator over the axes of its kernel.
        outputs: axes of the output, outermost first.
        reduction: the only one of the operator; None where it has none.
    """
    operands = _operands(expr, reduction)
    if operands is None or reduction is None:
        return None
    best: MatrixRoles | None = None
    best_rank: tuple[bool, int] = (False, -1)
    first, second, dtype, scales = operands
    for a, b in ((first, second), (second, first)):
        for m, n, k in product(outputs, outputs, reduction.axes):
            if outputs.index(m) >= outputs.index(n):
                continue
            moving = [axis for axis in reduction.axes if axis != k]
            if not (_takes(a, b, m, moving) and _takes(b, a, n, moving)):
                continue
            batch = [axis for axis in outputs if axis not in (m, n)]
            if not (_meets(expr, a, b, k, batch) or _meets(expr, b, a, k, batch)):
                continue
            if a.indices[-1].axes[0] not in (m, k) or b.indices[-1].axes[0] not in (n, k):
                continue
            if any(index.coefficient(axis) for load in scales for index in load.indices for axis in (n, k)):
                continue
            rank = (n == outputs[-1], math.prod(expr.sizes[axis] for axis in (m, n, k)))
            if rank > best_rank:
                best_rank = rank
                a_layout = "row" if a.indices[-1].axes[0] == k else "col"
                b_layout = "row" if b.indices[-1].axes[0] == n else "col"
                best = MatrixRoles(
                    m=m, n=n, k=k, a=a, b=b, a_layout=a_layout, b_layout=b_layout, dtype=dtype, scales=scales,
                    blocks=_blocks(outputs[outputs.index(m) + 1 :], n, a, b) if scales else None,
                )  # fmt: skip
    return best


def _blocks(behind: Sequence[str], n: str, a: Load, b: Load) -> str | None:
    """The innermost axis ``behind`` the rows that B alone is indexed by besides n; None where there is none."""
    indexed = [{axis for index in load.indices for axis in index.axes} for load in (a, b)]
    return next((axis for axis in reversed(behind) if axis != n and axis in indexed[1] - indexed[0]), None)


def _operands(expr: TensorExpr, reduction: Reduction | None) -> tuple[Load, Load, str, tuple[Load, ...]] | None:
    """The two factors that the operator sums the product of, and their type, where a matrix instruction takes it; and
    the scales that the product is multiplied by."""
    if reduction is None or reduction.function != "sum":
        return None
    factors = product_factors(reduction.body) or []
    scales = _scales(expr, factors)
    operands = [load for load in factors if load not in scales]
    if len(operands) != 2 or operands[0].tensor == operands[1].tensor:
        return None
    first, second = operands
    dtypes = {expr.tensor_by_name[load.tensor].dtype for load in (first, second)}
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    if dtype == "float32" and expr.allow_tf32:
        dtype = "tfloat32"
    if dtype not in MATRIX_TYPES or MATRIX_TYPES[dtype].accumulate != expr.accumulate:
        return None
    for load in (first, second):
        # A pad value other than zero would be data of the product.
        if load.pad or not load.indices or not load.indices[-1].is_plain_axis:
            return None
        if not _is_at_rows_of_places(load, expr):
            return None
    return first, second, dtype, scales


def _scales(expr: TensorExpr, factors: Sequence[Load]) -> tuple[Load, ...]:
    """Factors of float32 next to two of eight-bit floats, whose numbers they say the size of."""
    dtypes = [expr.tensor_by_name[load.tensor].dtype for load in factors]
    if sum(dtype in FLOAT8_DTYPES for dtype in dtypes) != 2:
        return ()
    return tuple(
        load
        for load, dtype in zip(factors, dtypes, strict=True)
        if dtype == "float32" and load.pad is None and _is_at_rows_of_places(load, expr)
    )


def _is_at_rows_of_places(load: Load, expr: TensorExpr) -> bool:
    """True if every place that a load is at is one of rows (:func:`_is_row_of_places`)."""
    return all(_is_row_of_places(index, expr) for index in load.indices if isinstance(index, GatheredIndex))


def _is_row_of_places(index: GatheredIndex, expr: TensorExpr) -> bool:
    """True if a place is read at axes of the output as they are: the rows of a tile, or one place for all of it."""
    spatial = expr.statements[-1].axes
    plain = all(each.is_plain_axis and each.axes[0] in spatial for each in index.place.indices)
    return plain and index.place.pad is None


def _takes(load: Load, other: Load, axis: str, moving: Sequence[str]) -> bool:
    """``axis`` indexes ``other`` not at all and ``load`` plainly, but for axes ``moving`` that are steps of one."""
    return _indexes_plainly(load, axis, moving) and not any(index.coefficient(axis) for index in other.indices)


def _meets(expr: TensorExpr, load: Load, moved: Load, axis: str, moving: Sequence[str]) -> bool:
    """``axis`` indexes both operands plainly, ``moved`` but for axes ``moving``.

    Then ``load`` ends where ``axis`` does, so that what a tile has beyond is multiplied by zero.
    """
    if not _indexes_plainly(load, axis) or not _indexes_plainly(moved, axis, moving):
        return False
    (extent,) = (
        extent
        for index, extent in zip(load.indices, expr.tensor_by_name[load.tensor].shape, strict=True)
        if index.coefficient(axis)
    )
    return _indexes_plainly(moved, axis) or extent == expr.sizes[axis]


def _indexes_plainly(load: Load, axis: str, moving: Sequence[str] = ()) -> bool:
    """``axis`` is one whole index of ``load``, or the axes ``moving`` move it, and it has no part in any other."""
    indexed = [index for index in load.indices if index.coefficient(axis)]
    if len(indexed) != 1:
        return False
    (index,) = indexed
    if isinstance(index, GatheredIndex):
        return index.coefficient(axis) == 1 and index.axes[-1] == axis
    is_moved = load.pad is None and index.coefficient(axis) == 1 and set(index.axes) <= {axis, *moving}
    return index.is_plain_axis or is_moved
