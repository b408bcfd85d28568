"""Arguments of an operator as the profiler writes them: tensors with sizes, types and strides, and plain values.

A profiler that was told to (``record_shapes=True``) writes "Input Dims" and "Input type" beside every CPU operator,
newer ones also "Input Strides" and, with the values of what is no tensor, "Concrete Inputs".
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from daydream.trace.dtypes import element_bytes, is_tensor_type
from daydream.trace.trace import Trace, argument

Dims = tuple[int, ...]

#: Element types that Roller prices, by the profiler's spelling.
DTYPES = {
    "double": "float64", "float": "float32", "c10::Half": "float16", "half": "float16", "c10::BFloat16": "bfloat16",
    "bfloat16": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class RecordedTensor:
    """A recorded input; ``dtype`` as the profiler spells it, ``strides`` in elements, empty where not recorded."""

    dims: Dims
    dtype: str
    strides: Dims = ()

    @property
    def elements(self) -> int:
        """Number of elements.

        >>> RecordedTensor((2, 3), "float").elements
        6
        """
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in bytes; elements of types that are not known count four.

        >>> RecordedTensor((2, 3), "c10::Half").bytes
        12
        """
        return self.elements * element_bytes(self.dtype)


@dataclass(frozen=True)
class Inputs:
    """An operator's arguments in order.

    Attributes:
        tensors: None where an argument is no tensor.
        values: of what is no tensor, as Python text; "" where not recorded.
        lists: the tensors of arguments that are lists of them, empty elsewhere; () without any.
    """

    tensors: tuple[RecordedTensor | None, ...]
    values: tuple[str, ...] = ()
    lists: tuple[tuple[RecordedTensor, ...], ...] = ()

    def tensor(self, position: int) -> RecordedTensor | None:
        """The argument at this position as a tensor, None where it is none."""
        return self.tensors[position] if position < len(self.tensors) else None

    def value(self, position: int) -> Any:
        """The recorded value of an argument that is no tensor, or None."""
        text = self.values[position] if position < len(self.values) else ""
        try:
            return ast.literal_eval(text) if text else None
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None


# What is recorded


def inputs_of(trace: Trace, row: int) -> Inputs | None:
    """The recorded arguments of an operator; None without "Input Dims"."""
    arguments = trace.arguments[row]
    dims = argument(arguments, "Input Dims", "Input dims", "input_dims")
    types = argument(arguments, "Input type", "Input types", "input_types")
    if not isinstance(dims, list):
        return None
    strides = argument(arguments, "Input Strides", "Input strides")
    values = argument(arguments, "Concrete Inputs", "Concrete inputs")
    return _inputs(
        repr(dims), repr(types if isinstance(types, list) else []), repr(strides if isinstance(strides, list) else []),
        tuple(str(value) for value in values) if isinstance(values, list) else (),
    )  # fmt: skip


@lru_cache(maxsize=65536)
def _inputs(dims: str, types: str, strides: str, values: tuple[str, ...]) -> Inputs:
    """The arguments from their JSON as Python text, in which equal ones are found again at once."""
    try:
        parts = [ast.literal_eval(text) for text in (dims, types, strides)]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return Inputs(())  # NaN, or nested without end
    lists = tuple(_lists(*parts))
    return Inputs(tuple(_tensors(*parts)), values, lists if any(lists) else ())


def _lists(dims: Sequence[Any], types: Sequence[Any], strides: Sequence[Any]) -> Iterator[tuple[RecordedTensor, ...]]:
    """The tensors of every argument that is a list of them; types of their elements stand in predicted steps alone."""
    for position, members in enumerate(dims):
        if _is_sizes(members) or not isinstance(members, list) or not all(_is_sizes(sizes) for sizes in members):
            yield ()
            continue
        kinds = types[position] if position < len(types) and isinstance(types[position], list) else []
        steps = strides[position] if position < len(strides) and isinstance(strides[position], list) else []
        # An unknown type counts four bytes.
        padded: Any = zip_longest(members, kinds[: len(members)], steps[: len(members)], fillvalue="")
        yield tuple(
            RecordedTensor(tuple(sizes), str(kind), tuple(step) if _is_sizes(step) and len(step) == len(sizes) else ())
            for sizes, kind, step in padded
        )


def _tensors(dims: Sequence[Any], types: Sequence[Any], strides: Sequence[Any]) -> list[RecordedTensor | None]:
    tensors: list[RecordedTensor | None] = []
    for position, sizes in enumerate(dims):
        kind = types[position] if position < len(types) else ""
        recorded = strides[position] if position < len(strides) else ()
        # Scalars have the dims [] too; of them only zero-dimensional tensors have a tensor's type.
        has_type = isinstance(kind, str) and is_tensor_type(kind)
        is_tensor = _is_sizes(sizes) and (has_type or (bool(sizes) and not types))
        if not is_tensor:
            tensors.append(None)
            continue
        element_steps = tuple(recorded) if _is_sizes(recorded) and len(recorded) == len(sizes) else ()
        tensors.append(RecordedTensor(tuple(sizes), str(kind), element_steps))
    return tensors


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(size) is int and 0 <= size < 2**48 for size in value)


def outputs_of(trace: Trace, row: int) -> tuple[RecordedTensor, ...]:
    """The results of an operator, which stand in predicted steps alone; () in recordings."""
    arguments = trace.arguments[row]
    dims, types = arguments.get("Output Dims"), arguments.get("Output type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return ()
    strides = arguments.get("Output Strides")
    written = _inputs(repr(dims), repr(types), repr(strides if isinstance(strides, list) else []), ())
    return tuple(tensor for tensor in written.tensors if tensor is not None)


def pair(value: Any) -> tuple[int, int] | None:
    """A number for each of two directions, from a list of both, a list of one, or one; None for anything else.

    >>> pair([3, 1]), pair([2]), pair(2), pair("same")
    ((3, 1), (2, 2), (2, 2), None)
    """
    numbers = value if isinstance(value, list | tuple) else [value]
    if not numbers or len(numbers) > 2 or not all(type(number) is int and number >= 0 for number in numbers):
        return None
    return int(numbers[0]), int(numbers[-1])
