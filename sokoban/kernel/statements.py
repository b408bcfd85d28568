"""Parts of what brings statements into canonical form: their axes read, and given other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hal.support.errors import InputError
from sokoban.language.expression import (
    FLOAT8_DTYPES,
    AffineIndex,
    Axis,
    AxisValue,
    Load,
    Reduction,
    Scan,
    Statement,
    Tensor,
    TensorExpr,
    Value,
    loads,
    rewrite,
    walk,
)


def reduction_of(statement: Statement) -> Reduction:
    """The reduction that a statement is; only for statements that are one."""
    assert statement.reduction is not None
    return statement.reduction


def widened_tensors(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors with floats narrower than float32 as such."""
    narrow = ("float16", "bfloat16", *FLOAT8_DTYPES)
    return tuple(replace(tensor, dtype="float32") if tensor.dtype in narrow else tensor for tensor in tensors)


def rename_axes(statement: Statement, names: Mapping[str, str]) -> Statement:
    """``statement`` with axes renamed everywhere.

    >>> from sokoban.language.expression import statement_text
    >>> from sokoban.language.parser import parse_program
    >>> (rows,) = parse_program("C[i] = sum(k, A[i,k])", {"i": 3, "k": 5}, {}).statements
    >>> statement_text(rename_axes(rows, {"i": "x"}))
    'C[x] = sum([k], A[x, k])'
    """
    indices = {axis: AffineIndex.axis(name) for axis, name in names.items()}
    value = statement.value
    changes: dict[Value, Value] = {}
    for node in walk(value):
        if isinstance(node, Load):
            changes[node] = Load(node.tensor, tuple(i.substitute(indices) for i in node.indices), node.pad)
        elif isinstance(node, AxisValue):
            changes[node] = AxisValue(node.index.substitute(indices))
    value = rewrite(value, changes)
    if isinstance(value, Reduction):
        rank = None if value.rank is None else names.get(value.rank, value.rank)
        value = Reduction(value.function, tuple(names.get(axis, axis) for axis in value.axes), value.body, rank)
    if isinstance(value, Scan):
        value = replace(value, axis=names.get(value.axis, value.axis))
    return Statement(statement.tensor, tuple(names.get(axis, axis) for axis in statement.axes), value)


def distinct_reduced_axes(
    expr: TensorExpr, reductions: tuple[Statement, ...], taken: tuple[str, ...]
) -> tuple[TensorExpr, tuple[Statement, ...]]:
    """The reductions with new names for reduced axes that share one with an axis of ``taken``.

    ``C[i] = sum(k, A[i,k])`` with ``k`` taken -> ``C[i] = sum(k_1, A[i,k_1])``: the next step may call ``i`` ``k``.
    """
    sizes = dict(expr.sizes)
    renamed = []
    for statement in reductions:
        renames: dict[str, str] = {}
        for axis in reduction_of(statement).axes:
            if axis in taken:
                number = 1
                while f"{axis}_{number}" in sizes:
                    number += 1
                renames[axis] = f"{axis}_{number}"
                sizes[renames[axis]] = sizes[axis]
        renamed.append(rename_axes(statement, renames) if renames else statement)
    axes = tuple(Axis(name, size) for name, size in sizes.items())
    return replace(expr, axes=axes), tuple(renamed)


def reads_elementwise(final: Statement, reduction: Statement) -> bool:
    """Every load of the reduction's result names each axis of ``final`` once, plainly."""
    reads = [load for load in loads(final.value) if load.tensor == reduction.tensor]
    return (
        len(set(reads)) == 1
        and all(index.is_plain_axis for index in reads[0].indices)
        and sorted(index.axes[0] for index in reads[0].indices) == sorted(final.axes)
    )


def renamed_to(final: Statement, reduction: Statement) -> Statement:
    """The reduction with its spatial axes called as the final statement calls them where it reads the result."""
    read = next(load for load in loads(final.value) if load.tensor == reduction.tensor)
    names = {axis: index.axes[0] for axis, index in zip(reduction.axes, read.indices, strict=True)}
    return rename_axes(reduction, names)


def axes_of(expr: TensorExpr, statements: tuple[Statement, ...]) -> tuple[Axis, ...]:
    """The axes that statements use, those of the last one's result first."""
    used: dict[str, None] = {}
    for statement in reversed(statements):
        used.update(dict.fromkeys(statement.axes))
    for statement in statements:
        if statement.reduction:
            used.update(dict.fromkeys(statement.reduction.axes))
    return tuple(Axis(name, expr.sizes[name]) for name in used)


def too_much(expr: TensorExpr, why: str) -> InputError:
    """Error of an operator that needs more than one kernel."""
    return InputError(expr.name, f"cannot be one kernel: {why}", "write it as two operators")
