"""Statements that several lowerings write: buffers, vector reads and writes, totals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from codegen.tir.values import Expr


def wide(value: Expr) -> Expr:
    """An index as 64 bits. The device compiler then takes constants out of the sums of an unrolled loop and into the
    instructions' offsets; with 32 bits, whose sums might wrap around, it adds anew for every access."""
    return value.astype("int64")


def vector_read(buffer: Any, first: Expr, lanes: int) -> Expr:
    """``lanes`` adjacent elements."""
    return buffer[first] if lanes == 1 else tirx.BufferLoad(buffer, [tirx.Ramp(first, 1, lanes)])


def vector_write(buffer: Any, first: Expr, lanes: int, value: Expr) -> None:
    """Store ``lanes`` adjacent elements."""
    T.buffer_store(buffer, value, [first if lanes == 1 else tirx.Ramp(first, 1, lanes)])


def local_buffer(name: str, elements: int, dtype: str) -> Any:
    """Registers of a thread."""
    return allocate(name, elements, dtype, "local")


def allocate(name: str, elements: int, dtype: str, scope: str, *, align_bytes: int = -1) -> Any:
    """A one-dimensional buffer with a name in the source; its start is a multiple of ``align_bytes``, where given."""
    buffer = T.alloc_buffer((elements,), dtype, scope=scope, align=align_bytes)
    IRBuilder.name(name, buffer)
    return buffer


#: A function that texts of kernels call nowhere: :func:`without_mentions` takes its calls out.
_MENTION = "roller_mention"


def mention(buffer: Any) -> None:
    """Make a buffer live from here on for TVM, by a call that the text of the kernel does without."""
    T.evaluate(tirx.call_extern("int32", _MENTION, buffer.access_ptr("w")))


def without_mentions(source: str) -> str:
    """The text of a kernel without the calls of :func:`mention`.

    >>> without_mentions("  a = 1;\\n  roller_mention(&(strip_ptr[0]));\\n  b = 2;\\n")
    '  a = 1;\\n  b = 2;\\n'
    """
    return "".join(line for line in source.splitlines(keepends=True) if not line.lstrip().startswith(f"{_MENTION}("))


def barrier() -> None:
    """All threads of the block have come here."""
    T.evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


class named:
    """A loop whose variable has a name of its own in the source."""

    def __init__(self, loop: Callable[[int], Any], extent: int, name: str) -> None:
        self._loop, self._name = loop(extent), name

    def __enter__(self) -> Expr:
        variable = self._loop.__enter__()
        IRBuilder.name(self._name, variable)
        return variable

    def __exit__(self, *error: Any) -> None:
        self._loop.__exit__(*error)


def total_of(terms: Sequence[Expr], offset: int = 0) -> Expr:
    """The sum of some terms and a constant."""
    total: Expr = tirx.const(offset, "int32")
    for term in terms:
        total = total + term
    return total
