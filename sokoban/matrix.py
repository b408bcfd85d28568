"""Which axes of an operator form a matrix product, so that a matrix instruction can compute it.

A matrix instruction multiplies a 16x16 fragment of one operand by a 16x16 fragment of the other. An operator fits when
three of its axes are the rows (m), columns (n) and depth (k) of such a product; all other axes run in steps of one
around it, as the batch axis of a batched product does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from hal import DeviceSpec
from sokoban.expression import Call, Load
from sokoban.kernel_form import KernelForm

#: Element types of the operands of a matrix instruction.
MATRIX_DTYPES = ("float16", "bfloat16")


#: Matrix instructions that code is generated for, by what a warp multiplies at a time: fragments of ``nvcuda::wmma``,
#: whose layout is the hardware's secret, and ``mma.sync`` with operands by ``ldmatrix`` and asynchronous copies.
WMMA, MMA = "wmma_16x16x16", "mma_16x8x16"

#: Oldest NVIDIA devices with asynchronous copies and the full 16x8x16 product, as a compute capability.
MMA_CAPABILITY = (8, 0)

#: Edge of a fragment in elements; two 16x8 products side by side make one, too.
FRAGMENT = 16

#: Most elements of a warp's tile by ``mma.sync``, 64x64, half of all registers; and the registers of a thread that hold
#: neither sums nor fragments but addresses and counters (read off compiler reports for sm_80 and sm_90, warp tiles of
#: 32x32 to 64x64).
MMA_SUMS = 64 * 64
MMA_OTHER_REGISTERS = 36

#: Pipeline stages worth proposing for ``mma.sync``: more than four hide nothing that four do not.
MMA_STAGES = (2, 3, 4)

#: Results leave the fragments through a strip of shared memory, its float32 rows padded by this many elements.
STRIP_PADDING = 8

#: Largest statically declared shared memory of a block on any CUDA device; the strip is declared so.
STATIC_SHARED_BYTES = 48 * 1024


#: Pieces of 16 bytes that lie side by side in the banks of shared memory.
BANK_PIECES = 8


def swizzle_of(pieces: int) -> tuple[int, int]:
    """How rows of ``pieces`` pieces of 16 bytes are swizzled in shared memory: ``(divisor, count)``.

    Piece ``p`` of row ``r`` lies where ``p ^ (r // divisor % count)`` would: eight rows then have their piece ``p`` in
    different banks. Rows of an odd number of pieces have so by themselves (count 1): their starts already differ.
    """
    count = min(BANK_PIECES, pieces & -pieces)
    return BANK_PIECES // count, count


def instruction_for(device: DeviceSpec) -> str:
    """The matrix instruction that kernels for ``device`` are written with, if it has any."""
    capability = device.compute_capability
    return MMA if capability is not None and tuple(capability) >= MMA_CAPABILITY else WMMA


@dataclass(frozen=True, slots=True)
class MatrixRoles:
    """``output[… m … n …] = sum(k, a[m, k] * b[k, n])``: m comes before n in the output.

    Attributes:
        m, n, k: axis names.
        a: the operand that m indexes. b: the operand that n indexes.
        a_layout: ``"row"`` where k is the innermost dimension of ``a``, ``"col"`` where m is.
        b_layout: ``"row"`` where n is the innermost dimension of ``b``, ``"col"`` where k is.
    """

    m: str
    n: str
    k: str
    a: Load
    b: Load
    a_layout: str
    b_layout: str


def matrix_roles(form: KernelForm) -> MatrixRoles | None:
    """The roles of the axes of an operator, None where it is no product of matrices.

    The three axes index their operands plainly, and each operand's innermost dimension is one of them. Where several
    choices are left, the output's innermost axis is preferred for n, and large axes for all three.
    """
    operands = _operands(form)
    if operands is None:
        return None
    best: MatrixRoles | None = None
    best_rank: tuple[bool, int] = (False, -1)
    for a, b in (operands, operands[::-1]):
        for m, n, k in product(form.final.axes, form.final.axes, form.reduced):
            if form.final.axes.index(m) >= form.final.axes.index(n):
                continue
            if not (_takes(a, b, m) and _takes(b, a, n) and _indexes_plainly(a, k) and _indexes_plainly(b, k)):
                continue
            if a.indices[-1].axes[0] not in (m, k) or b.indices[-1].axes[0] not in (n, k):
                continue
            rank = (n == form.final.axes[-1], math.prod(form.sizes[axis] for axis in (m, n, k)))
            if rank > best_rank:
                best_rank = rank
                a_layout = "row" if a.indices[-1].axes[0] == k else "col"
                b_layout = "row" if b.indices[-1].axes[0] == n else "col"
                best = MatrixRoles(m, n, k, a, b, a_layout, b_layout)
    return best


def _operands(form: KernelForm) -> tuple[Load, Load] | None:
    """The two factors that the operator sums the product of, where a matrix instruction takes their types."""
    reduction = form.reduction
    if form.kind != "tile" or reduction is None or reduction.function != "sum" or form.expr.accumulate != "float32":
        return None
    body = reduction.body
    if not isinstance(body, Call) or body.function != "mul":
        return None
    first, second = body.arguments
    if not isinstance(first, Load) or not isinstance(second, Load) or first.tensor == second.tensor:
        return None
    dtypes = {form.expr.tensor_by_name[load.tensor].dtype for load in (first, second)}
    if len(dtypes) != 1 or not dtypes <= set(MATRIX_DTYPES):
        return None
    for load in (first, second):
        # A pad value other than zero would be data of the product.
        if load.pad or not load.indices or not load.indices[-1].is_plain_axis:
            return None
    return first, second


def _takes(load: Load, other: Load, axis: str) -> bool:
    """``axis`` indexes ``load`` plainly and ``other`` not at all."""
    return _indexes_plainly(load, axis) and not any(index.coefficient(axis) for index in other.indices)


def _indexes_plainly(load: Load, axis: str) -> bool:
    """``axis`` is one whole index of ``load`` and has no part in any other."""
    used = [index for index in load.indices if index.coefficient(axis)]
    return len(used) == 1 and used[0].is_plain_axis
