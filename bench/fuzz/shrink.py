"""A failing operator made smaller, one step at a time, as long as a kernel by the same lowerings still
fails."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.fuzz.kernels import Kernel, is_quick, kernels_of, outcome_of, traits
from bench.fuzz.operators import Data
from hal.support.errors import InputError
from sokoban.language.expression import (
    AffineIndex,
    AxisValue,
    Call,
    Constant,
    Load,
    Reduction,
    Scan,
    Statement,
    TensorExpr,
    Value,
    loads,
    rewrite,
    statement_text,
    used_axes,
    walk,
)
from sokoban.language.operators import operator_from_data

_TRUTHS = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"})

#: Kernels of the failing kind that are tried on every smaller operator.
_TRIED = 4


def shrunk(data: Data, fails: Callable[[Data], bool], seconds: float = 60.0) -> Data:
    """The smallest operator found in some seconds that still ``fails``."""
    end = time.monotonic() + seconds
    seen: set[str] = set()
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(data):
            if time.monotonic() > end:
                return data
            key = repr(smaller)
            if key in seen or _weight(smaller) >= _weight(data):
                continue
            seen.add(key)
            if _is_operator(smaller) and fails(smaller):
                data, progress = smaller, True
                break
    return data


def _is_operator(data: Data) -> bool:
    try:
        operator_from_data(data)
    except InputError:
        return False
    return True


def failure(device: str, kind: str, outcome: str, engine: str | None) -> Callable[[Data], bool]:
    """True if an operator has a kernel on a device that comes out so: of a kind, or of others with its lowerings."""
    parts = set(kind.split("+"))

    def fails(data: Data) -> bool:
        try:
            kernels = kernels_of(operator_from_data(data), device)
        except InputError:
            return False
        groups: dict[Any, Kernel] = {}
        for kernel in sorted(kernels, key=lambda each: each.kind != kind):
            if parts & set(kernel.kind.split("+")) and is_quick(kernel):
                groups.setdefault(traits(kernel), kernel)
        for kernel in list(groups.values())[:_TRIED]:
            result = kernel.verify(engine if device != "cpu" else None, (0, 1, 2))
            if outcome_of(kernel, result) == outcome:
                return True
        return False

    return fails


def _weight(data: Data) -> float:
    """Size of an operator: its text first, then its sizes."""
    text = data.get("expr", "")
    numbers = [*data.get("sizes", {}).values(), *(v for v in data.values() if isinstance(v, int))]
    other = len(data.get("dtypes", {})) + len(data.get("epilogue", ())) + ("layout" in data)
    return 4 * len(text) + sum(math.log2(number + 1) for number in numbers) + 3 * other


def _smaller(data: Data) -> Iterator[Data]:
    """Operators that are a step smaller, those that take most away first."""
    if "op" in data:
        yield from _smaller_named(data)
        return
    try:
        expr = operator_from_data(data)
    except InputError:
        return
    for statements in _smaller_statements(expr):
        smaller = _data(data, expr, statements, expr.sizes)
        if smaller is not None:
            yield smaller
    for axis, size in expr.sizes.items():
        for less in sorted({1, 2, size // 2, size - 1} - {0, size}):
            if less < size:
                smaller = _data(data, expr, expr.statements, {**expr.sizes, axis: less})
                if smaller is not None:
                    yield smaller
    for name in data.get("dtypes", {}):
        yield {**data, "dtypes": {key: dtype for key, dtype in data["dtypes"].items() if key != name}}
    for key in ("epilogue", "allow_tf32", "accumulate"):
        if key in data:
            yield {name: value for name, value in data.items() if name != key}


def _smaller_named(data: Data) -> Iterator[Data]:
    for key, value in data.items():
        if isinstance(value, bool):
            if value:
                yield {**data, key: False}
        elif isinstance(value, int):
            for less in sorted({1, value // 2, value - 1} - {0, value}):
                yield {**data, key: less}
    for key in ("epilogue", "layout", "window", "value_dim", "accumulate"):
        if key in data:
            yield {name: value for name, value in data.items() if name != key}


def _smaller_statements(expr: TensorExpr) -> Iterator[tuple[Statement, ...]]:
    statements = expr.statements
    if len(statements) > 1:
        yield statements[:-1]
    for position, statement in enumerate(statements):
        places = {place for load in loads(statement.value) for place in load.places}
        for node in walk(statement.value):
            for other in _simpler(node):
                if node in places and not isinstance(other, Load):
                    continue  # places are read, not computed
                value = rewrite(statement.value, {node: other})
                changed = Statement(statement.tensor, statement.axes, value)
                yield _used((*statements[:position], changed, *statements[position + 1 :]))


def _used(statements: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """The statements that the last one depends on."""
    needed = {statements[-1].tensor}
    result = []
    for statement in reversed(statements):
        if statement.tensor in needed:
            result.append(statement)
            needed.update(load.tensor for load in loads(statement.value))
    return tuple(reversed(result))


def _simpler(node: Value) -> Iterator[Value]:
    if isinstance(node, Reduction):
        for axis in node.axes if len(node.axes) > 1 else ():
            remaining = tuple(other for other in node.axes if other != axis)
            yield Reduction(node.function, remaining, rewrite(node.body, _without(node.body, axis)))
    elif isinstance(node, Scan):
        if node.is_reversed or node.is_exclusive:
            yield Scan(node.function, node.axis, node.body)
        yield node.body
    elif isinstance(node, Call):
        is_truth = node.function in _TRUTHS
        for argument in node.arguments:
            if _is_truth(argument) == is_truth:
                yield argument
        if not is_truth:
            yield Constant(1.0)
    elif isinstance(node, AxisValue):
        if not node.index.is_plain_axis:
            for axis in node.index.axes:
                yield AxisValue(AffineIndex.axis(axis))
        yield Constant(1.0)
    elif isinstance(node, Load):
        yield Constant(1.0)
        yield from _plainer(node)


def _plainer(load: Load) -> Iterator[Load]:
    """A load with one of its indices a single axis."""
    for position, index in enumerate(load.indices):
        if not index.is_plain_axis:
            for axis in index.axes:
                indices = (*load.indices[:position], AffineIndex.axis(axis), *load.indices[position + 1 :])
                yield Load(load.tensor, indices, load.pad)


def _without(body: Value, axis: str) -> dict[Value, Value]:
    """Replacement that takes an axis out of a value: the axis is 0."""
    zero = {axis: AffineIndex()}
    replaced: dict[Value, Value] = {}
    for node in walk(body):
        if isinstance(node, AxisValue) and axis in node.index.axes:
            replaced[node] = Constant(0.0)
        elif isinstance(node, Load):
            indices = tuple(index.substitute(zero) for index in node.indices)
            if indices != node.indices:
                replaced[node] = Load(node.tensor, indices, node.pad)
    return replaced


def _is_truth(value: Value) -> bool:
    return isinstance(value, Call) and value.function in _TRUTHS


def _data(data: Data, expr: TensorExpr, statements: tuple[Statement, ...], sizes: Any) -> Data | None:
    """Statements as JSON has them; shapes that are needed alone."""
    bodies = [s.value.body if isinstance(s.value, Reduction | Scan) else s.value for s in statements]
    axes = {axis for s in statements for axis in (*s.axes, *(s.reduction.axes if s.reduction else ()))}
    axes |= set(used_axes(bodies))
    every = [load for statement in statements for load in loads(statement.value)]
    written = {statement.tensor for statement in statements}
    padded = {load.tensor for load in every if load.pad is not None or load.places} - written
    read = {load.tensor for load in every} - written
    shapes = {}
    for tensor in expr.inputs:
        if tensor.name in padded:
            group = [load for load in every if load.tensor == tensor.name]
            if any(len(load.indices) != len(tensor.shape) for load in group):
                return None
            reach = [max(load.indices[d].bounds(sizes)[1] for load in group) + 1 for d in range(len(tensor.shape))]
            shapes[tensor.name] = [max(1, min(old, new)) for old, new in zip(tensor.shape, reach, strict=True)]
    output = statements[-1].tensor
    dtypes = {n: d for n, d in data.get("dtypes", {}).items() if n in read}
    result = data.get("dtypes", {}).get(expr.output.name)
    if result:
        dtypes[output] = result
    fields = {key: value for key, value in data.items() if key not in ("expr", "sizes", "dtypes", "shapes", "epilogue")}
    return fields | {
        "expr": "; ".join(statement_text(statement) for statement in statements),
        "sizes": {axis: sizes[axis] for axis in sizes if axis in axes},
        "dtypes": dtypes, "shapes": shapes,
    }  # fmt: skip
