"""Which axes of an operator form a matrix product, so that a matrix instruction can compute it.

A matrix instruction multiplies a fragment of 16 rows of one operand by a fragment of 16 columns of the other; how deep
they are depends on the element type. An operator fits when three of its axes are the rows (m), columns (n) and depth
(k) of such a product; all other axes run in steps of one around it, as the batch axis of a batched product does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES, MatrixInstruction
from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.language.expression import FLOAT8_DTYPES, Call, Load

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

#: Registers of a thread for the halves that eight-bit floats are widened to (:func:`is_widened`).
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
    """How rows of ``pieces`` pieces of 16 bytes are swizzled in shared memory: ``(divisor, count)``.

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


def device_product(form: KernelForm, device: DeviceSpec) -> tuple[MatrixRoles, Instruction] | None:
    """The roles of the axes of an operator, and the instruction that multiplies it on ``device``.

    None where the operator is no product of matrices, or the device has no instruction for it.
    """
    roles = matrix_roles(form)
    instruction = None if roles is None else instruction_for(device, roles.dtype)
    return None if roles is None or instruction is None else (roles, instruction)


def matrix_rates(form: KernelForm, device: DeviceSpec) -> MatrixInstruction | None:
    """How fast ``device`` multiplies the matrices of an operator by an instruction that code is generated for."""
    multiplied = device_product(form, device)
    return None if multiplied is None else device.matrix_instruction(multiplied[0].dtype)


def is_widened(form: KernelForm, device: DeviceSpec) -> bool:
    """Whether the eight-bit floats of a product become halves in registers before ``mma.sync`` multiplies them.

    They do where it is no faster for them: on sm_90, only the instructions of warp groups reach the units for them.
    """
    rates, halves = matrix_rates(form, device), device.matrix_instruction("float16")
    if rates is None or halves is None or rates.input_dtype not in FLOAT8_DTYPES:
        return False
    return rates.peak_flops <= halves.peak_flops


def mma_other_registers(form: KernelForm, device: DeviceSpec) -> int:
    """Registers of a thread by ``mma.sync`` that hold neither sums nor fragments as they are stored."""
    return MMA_OTHER_REGISTERS + (WIDENED_REGISTERS if is_widened(form, device) else 0)


def most_sums(form: KernelForm, device: DeviceSpec) -> int:
    """Elements of the largest tile of a warp by ``mma.sync``: half as many where widened operands need registers."""
    return MMA_SUMS // 2 if is_widened(form, device) else MMA_SUMS


def needs_matrix(form: KernelForm) -> bool:
    """Whether an operator reads eight-bit floats, which ordinary arithmetic takes none of."""
    return any(tensor.dtype in FLOAT8_DTYPES for tensor in form.expr.inputs)


def check_float8(form: KernelForm, device: DeviceSpec) -> None:
    """Raises InputError where an operator reads eight-bit floats that no matrix instruction of ``device`` multiplies.

    Ordinary arithmetic takes no eight-bit floats.
    """
    narrow = [tensor for tensor in form.expr.inputs if tensor.dtype in FLOAT8_DTYPES]
    if not narrow:
        return
    where = form.expr.name
    what = f"dtype {narrow[0].dtype} of {narrow[0].name} is multiplied by matrix instructions alone"
    roles = matrix_roles(form)
    if roles is None:
        raise InputError(where, f"{what}, and this is no product of two matrices of one dtype", "use float16")
    if device_product(form, device) is None:
        raise InputError(where, f"{what}, and {device.name} has none for it", "use float16, or a board like l4 or h200")
    for tensor in narrow:
        if tensor.name not in (roles.a.tensor, roles.b.tensor):
            problem = f"dtype {tensor.dtype} of {tensor.name} is for the operands of the product alone"
            raise InputError(where, problem, "use float16 or float32")


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
    """

    m: str
    n: str
    k: str
    a: Load
    b: Load
    a_layout: str
    b_layout: str
    dtype: str

    @property
    def depth(self) -> int:
        """Elements of the depth that an instruction multiplies."""
        return MATRIX_TYPES[self.dtype].depth

    def fragment(self, axis: str) -> int:
        """What every tile's size along ``axis`` is a multiple of; 1 for axes beside the product."""
        return self.depth if axis == self.k else FRAGMENT if axis in (self.m, self.n) else 1

    def is_turned(self, load: Load) -> bool:
        """Whether the depth of an operand is not its innermost dimension."""
        return (self.a_layout == "col") if load == self.a else (self.b_layout == "row")

    @property
    def is_interleaved(self) -> bool:
        """Whether two 16x8 products side by side have every other column each.

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


def matrix_roles(form: KernelForm) -> MatrixRoles | None:
    """The roles of the axes of an operator, None where it is no product of matrices.

    The three axes index their operands plainly, and each operand's innermost dimension is one of them. Where several
    choices are left, the output's innermost axis is preferred for n, and large axes for all three.

    >>> from sokoban.kernel.form import kernel_form
    >>> from sokoban.language.operators import operator_from_data
    >>> matmul = {"op": "matmul", "m": 64, "n": 32, "k": 16, "dtype": "float16", "transpose_b": True}
    >>> roles = matrix_roles(kernel_form(operator_from_data(matmul)))
    >>> (roles.m, roles.n, roles.k), roles.a_layout, roles.b_layout
    (('m', 'n', 'k'), 'row', 'col')
    """
    operands = _operands(form)
    if operands is None:
        return None
    best: MatrixRoles | None = None
    best_rank: tuple[bool, int] = (False, -1)
    first, second, dtype = operands
    for a, b in ((first, second), (second, first)):
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
                best = MatrixRoles(m=m, n=n, k=k, a=a, b=b, a_layout=a_layout, b_layout=b_layout, dtype=dtype)
    return best


def _operands(form: KernelForm) -> tuple[Load, Load, str] | None:
    """The two factors that the operator sums the product of, and their type, where a matrix instruction takes it."""
    reduction = form.reduction
    if form.kind != "tile" or reduction is None or reduction.function != "sum":
        return None
    body = reduction.body
    if not isinstance(body, Call) or body.function != "mul":
        return None
    first, second = body.arguments
    if not isinstance(first, Load) or not isinstance(second, Load) or first.tensor == second.tensor:
        return None
    dtypes = {form.expr.tensor_by_name[load.tensor].dtype for load in (first, second)}
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    if dtype == "float32" and form.expr.allow_tf32:
        dtype = "tfloat32"
    if dtype not in MATRIX_TYPES or MATRIX_TYPES[dtype].accumulate != form.expr.accumulate:
        return None
    for load in (first, second):
        # A pad value other than zero would be data of the product.
        if load.pad or not load.indices or not load.indices[-1].is_plain_axis:
            return None
    return first, second, dtype


def _takes(load: Load, other: Load, axis: str) -> bool:
    """``axis`` indexes ``load`` plainly and ``other`` not at all."""
    return _indexes_plainly(load, axis) and not any(index.coefficient(axis) for index in other.indices)


def _indexes_plainly(load: Load, axis: str) -> bool:
    """``axis`` is one whole index of ``load`` and has no part in any other."""
    indexed = [index for index in load.indices if index.coefficient(axis)]
    return len(indexed) == 1 and indexed[0].is_plain_axis
