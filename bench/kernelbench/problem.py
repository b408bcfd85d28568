"""Problems of KernelBench as calls of PyTorch's operators: shapes, values, and which reads what another wrote."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.accuracy.steps.kernelbench import capture_of

#: Element types of tensors as profilers write them, and as the language does.
DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16", "bool": "int8",
    "long int": "int32", "int": "int32",
}  # fmt: skip

Shape = tuple[int, ...]
#: A call as rows have it.
Listed = Sequence[Any]


@dataclass(frozen=True)
class Layout:
    """A tensor that does not lie in order: its strides and offset in memory of so many elements."""

    strides: Shape
    offset: int
    elements: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call.

    Attributes:
        stem: the operator's name without its library: ``convolution``.
        shapes: of the tensors among its arguments.
        dtypes: of the same.
        values: of all arguments as text, empty for tensors and for what was not given.
        outputs: shapes of the results.
        read: numbers of the tensors that it reads, equal ones for one tensor.
        written: the number of its first result.
        layouts: of the tensors; None of those that lie in order.
    """

    stem: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    values: tuple[str, ...]
    outputs: tuple[Shape, ...]
    read: tuple[int, ...]
    written: int
    layouts: tuple[Layout | None, ...] = ()

    def value(self, place: int, default: Any = None) -> Any:
        """The argument at a place: a number, a truth value or a list of numbers, ``default`` where there is none."""
        text = self.values[place] if place < len(self.values) else ""
        if text in ("", "None"):
            return default
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem.

    Attributes:
        name: ``level1/3_....py``.
        listed: its calls as rows have them.
        board, eager_ms: milliseconds by PyTorch on a board where it was measured.
        recorded: its calls where these are known to the tensor; rows tell sizes alone.
    """

    name: str
    listed: tuple[Listed, ...]
    board: str = ""
    eager_ms: float | None = None
    recorded: tuple[Call, ...] = ()

    def calls(self) -> list[Call]:
        """The calls that compute something, in order. Of rows each reads the last tensors of its sizes."""
        if self.recorded:
            return list(self.recorded)
        calls = []
        for captured, (_, given, values, made) in zip(
            capture_of(self.name, self.listed).operators, self.listed, strict=True
        ):
            if not captured.launches:
                continue
            calls.append(
                Call(
                    stem=captured.name.removeprefix("aten::"),
                    shapes=tuple(tuple(dims) for dims, _ in given),
                    dtypes=tuple(DTYPES.get(kind, kind) for _, kind in given),
                    values=tuple(values),
                    outputs=tuple(map(tuple, made)),
                    read=captured.read,
                    written=captured.written[0] if captured.written else -1,
                )
            )
        return calls
