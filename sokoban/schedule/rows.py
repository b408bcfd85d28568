"""Walk of the threads that share a row over its columns: the width of their accesses, and what they keep of it.

Columns are dealt in vectors: thread ``t`` of ``T`` takes vectors ``t``, ``t + T``, ``t + 2 T``, ... of the row, so that
lanes of a warp stand side by side. A tensor that several statements of the kernel read (softmax reads its input three
times) is loaded once where a thread has registers for its part of the row. Of longer rows a schedule keeps
columns in shared memory (``kept_columns``), each where the thread that loaded it finds it again; besides, registers
hold what they can, and what is left is read again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import BFLOAT16_CAPABILITY, depends, value_instructions
from sokoban.language.expression import Call, Constant, Load, Reduction, Tensor, Value, loads, rewrite, walk
from sokoban.schedule.accesses import VECTOR_BYTES

#: Threads that exchange values by shuffles.
WARP = 32

#: Least vectors, and least columns, that a thread loads before it uses the first: so many loads under way hide the
#: latency of memory.
LEAST_LOADS = 4
LEAST_COLUMNS = 16

#: Threads beyond which a block leaves few registers besides the columns that a thread keeps of a row: operands then
#: share the loads under way. So many threads keep memory busy with fewer loads each.
ROOMY_THREADS = 512

#: Registers for the part of a row that a thread keeps: with all others, four blocks of 256 threads still fit a unit.
ROW_REGISTERS = 32

#: The same with columns in shared memory, whose way through registers takes some of them.
ROW_REGISTERS_WITH_SHARED = 24

#: Instructions from which on a value is worth the registers that remember it for a later statement.
REMEMBERED_INSTRUCTIONS = 8.0

#: Reads of the remembered value; no tensor can be called so.
REMEMBERED = Load("(remembered)", ())


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """A thread's way along a row.

    Attributes:
        values: what is computed: by the reductions in order, then by the final statement.
        reads: loads of input tensors along a row, by statement.
        vector: adjacent columns that a thread takes at a time.
        vectors: vectors of a row.
        turns: vectors of a thread; the last turn may leave some threads out.
        wide: loads that read a vector by one access.
        stores_wide: the results of a vector are stored by one access.
        kept: loads that are read from memory once in the turns below, and from there by later statements.
        register_turns: first turns of a thread, whose kept columns lie in registers.
        shared_turns: turns behind them, whose kept columns lie in shared memory; those that follow keep nothing.
        remembered: the body of a reduction whose values later statements find in registers, as :data:`REMEMBERED`;
            None where there is none. Softmax remembers its exponentials.
    """

    values: tuple[Value, ...]
    reads: tuple[tuple[Load, ...], ...]
    vector: int
    vectors: int
    turns: int
    wide: frozenset[Load]
    stores_wide: bool
    kept: tuple[Load, ...]
    register_turns: int
    shared_turns: int
    remembered: Value | None


def loads_together(plan: RowPlan, threads: int, operands: int) -> int:
    """Vectors of each of ``operands`` operands that a thread of a row of ``threads`` loads before it uses the first."""
    together = max(LEAST_LOADS, LEAST_COLUMNS // plan.vector)
    if threads <= ROOMY_THREADS and plan.register_turns in (0, plan.turns):
        return together
    # A row in registers, in shared memory and beyond both has a loop for each, with addresses of its own.
    in_three = plan.register_turns and plan.register_turns + plan.shared_turns < plan.turns
    return max(1, together // (max(1, operands) * (2 if in_three else 1)))


def row_columns(form: KernelForm) -> tuple[str, ...]:
    """The axes that the threads of a row share, in the order in which they are dealt."""
    return form.columns or form.reduced


def row_plan(form: KernelForm, threads: int, kept_columns: int = 0) -> RowPlan:
    """Walk of ``threads`` threads over a row of ``form``; shared memory has room for ``kept_columns`` of its columns.

    >>> from sokoban.kernel.form import kernel_form
    >>> from sokoban.language.parser import parse_program
    >>> text = "M[i] = max(j, X[i,j]); S[i] = sum(j, exp(X[i,j] - M[i])); Y[i,j] = exp(X[i,j] - M[i]) / S[i]"
    >>> plan = row_plan(kernel_form(parse_program(text, {"i": 64, "j": 1024}, {})), threads=128)
    >>> plan.vector, plan.vectors, plan.turns, len(plan.kept)
    (4, 256, 2, 1)
    """
    columns = row_columns(form)
    values = tuple(_reciprocals(statement.value, columns) for statement in (*form.reductions, form.final))
    reads = _reads(form, values)
    tensors = form.expr.tensor_by_name
    widths = {load: _width(form, load, tensors[load.tensor], columns) for group in reads for load in group}
    stored = _stored_width(form, columns)
    count = math.prod(form.sizes[axis] for axis in columns)
    vector = _vector([*widths.values(), stored], count, threads)
    vectors = count // vector
    turns = -(-vectors // threads)
    several = [load for load in widths if load in _read_again(reads)]
    shared_turns = min(turns, kept_columns // (threads * vector)) if several else 0
    remembered = _repeated(values, columns) if turns * vector <= ROW_REGISTERS and not shared_turns else None
    if remembered is not None:
        values = _remembering(values, remembered)
        reads = _reads(form, values)
        several = [load for load in widths if load in _read_again(reads)]
    # Registers take a row as a whole, or fill up what shared memory holds of it.
    room = (ROW_REGISTERS_WITH_SHARED if shared_turns else ROW_REGISTERS) // (vector * len(several)) if several else 0
    register_turns = min(room, turns - shared_turns) if shared_turns or room >= turns else 0
    return RowPlan(
        values=values,
        reads=reads,
        vector=vector,
        vectors=vectors,
        turns=turns,
        wide=frozenset(load for load, width in widths.items() if width > 1 and vector > 1),
        stores_wide=stored > 1 and vector > 1,
        kept=tuple(several) if register_turns or shared_turns else (),
        register_turns=register_turns,
        shared_turns=shared_turns,
        remembered=remembered,
    )


def _vector(widths: Sequence[int], columns: int, threads: int) -> int:
    """Adjacent columns that a thread takes at a time: as many as the narrowest wide access has.

    >>> _vector([4, 1, 8], columns=1024, threads=128), _vector([4, 8], columns=200, threads=128)
    (4, 2)
    """
    vector = min((width for width in widths if width > 1), default=1)
    # Lanes without a vector cost nothing as long as most have one.
    while vector > 1 and 2 * columns < vector * threads:
        vector //= 2
    return vector


def _read_again(reads: tuple[tuple[Load, ...], ...]) -> set[Load]:
    """Loads that several statements read, and that may be kept therefore."""
    return {load for group in reads for load in group if sum(load in each for each in reads) > 1 and load.pad is None}


def column_bytes_of(form: KernelForm) -> int:
    """Bytes that a column of a row takes which shared memory keeps: of every tensor that several statements read."""
    tensors = form.expr.tensor_by_name
    return sum(tensors[load.tensor].element_bytes for load in _repeated_loads(form))


def _repeated_loads(form: KernelForm) -> set[Load]:
    """Loads that the threads of a row keep, where there is room."""
    values = tuple(_reciprocals(statement.value, row_columns(form)) for statement in (*form.reductions, form.final))
    return _read_again(_reads(form, values))


def keeps_in_shared(form: KernelForm, device: DeviceSpec) -> bool:
    """True if a device has memory in which threads may keep columns of a row as they are stored: what compilers do not
    compute with, they keep wider."""
    tensors = form.expr.tensor_by_name
    capability = device.compute_capability
    is_native = capability is not None and tuple(capability) >= BFLOAT16_CAPABILITY
    dtypes = {tensors[load.tensor].dtype for load in _repeated_loads(form)}
    return bool(dtypes) and not device.shared.is_cache and (is_native or "bfloat16" not in dtypes)


def exchange_elements(form: KernelForm, row_threads: Any, column_threads: Any) -> Any:
    """Elements of shared memory through which the warps of a row exchange their results, numbers or columns of
    them."""
    if not form.reduces_contiguously:
        return row_threads * column_threads
    return row_threads * (column_threads // WARP + 1)


def _remembering(values: tuple[Value, ...], remembered: Value) -> tuple[Value, ...]:
    """``values`` with :data:`REMEMBERED` in place of ``remembered`` behind the reduction that computes it."""
    first = [isinstance(value, Reduction) and value.body == remembered for value in values].index(True)
    later = tuple(rewrite(value, {remembered: REMEMBERED}) for value in values[first + 1 :])
    return (*values[: first + 1], *later)


def _reads(form: KernelForm, values: tuple[Value, ...]) -> tuple[tuple[Load, ...], ...]:
    """Loads of input tensors along a row, by statement."""
    inputs, columns = {tensor.name for tensor in form.expr.inputs}, row_columns(form)

    def is_along(load: Load) -> bool:
        return load.tensor in inputs and any(index.coefficient(axis) for index in load.indices for axis in columns)

    return tuple(tuple(load for load in loads(value) if is_along(load)) for value in values)


def _reciprocals(value: Value, columns: tuple[str, ...]) -> Value:
    """``value`` with one division per row in place of one per column.

    ``x / s`` becomes ``x * (1 / s)`` where ``s`` is the same all along a row, which may round once more.
    """
    if isinstance(value, Reduction):
        return Reduction(value.function, value.axes, _reciprocals(value.body, columns))
    if not isinstance(value, Call):
        return value
    arguments = tuple(_reciprocals(argument, columns) for argument in value.arguments)
    if value.function != "div" or isinstance(arguments[1], Constant):
        return Call(value.function, arguments)
    if depends(arguments[1], columns) or not depends(arguments[0], columns):
        return Call(value.function, arguments)
    return Call("mul", (arguments[0], Call("div", (Constant(1.0), arguments[1]))))


def _repeated(values: tuple[Value, ...], columns: tuple[str, ...]) -> Value | None:
    """The body of a reduction that a later statement computes again, if it costs something."""
    for position, value in enumerate(values):
        if not isinstance(value, Reduction) or value_instructions(value.body, columns) < REMEMBERED_INSTRUCTIONS:
            continue
        if any(value.body in walk(later) for later in values[position + 1 :]):
            return value.body
    return None


def _width(form: KernelForm, load: Load, tensor: Tensor, columns: tuple[str, ...]) -> int:
    """Columns that one access of ``load`` may take: adjacent, aligned and inside the tensor."""
    innermost, last = load.indices[-1], columns[-1]
    if load.pad is not None or innermost.terms != ((last, 1),) or innermost.offset:
        return 1
    if any(index.coefficient(last) for index in load.indices[:-1]):
        return 1
    return _largest(tensor, form.sizes[last])


def _stored_width(form: KernelForm, columns: tuple[str, ...]) -> int:
    """Columns that one store may take; 1 where a row has a single result."""
    if not form.columns or form.final.axes[-1] != columns[-1]:
        return 1
    return _largest(form.expr.output, form.sizes[columns[-1]])


def _largest(tensor: Tensor, columns: int) -> int:
    """Elements of the widest access that divides a row of ``columns`` and the tensor's innermost dimension."""
    width = max(1, VECTOR_BYTES // tensor.element_bytes)
    while width > 1 and (columns % width or tensor.shape[-1] % width):
        width //= 2
    return width
