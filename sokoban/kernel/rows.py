"""Kernels over rows: several reductions and a last statement brought to the same rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sokoban.kernel.statements import axes_of, distinct_reduced_axes, reduction_of, rename_axes, too_much
from sokoban.language.expression import Statement, TensorExpr, loads


def as_rows(expr: TensorExpr, reductions: tuple[Statement, ...], final: Statement) -> TensorExpr:
    """Check that all reductions share rows and columns, and give rows and columns the final statement's names.

    Raises:
        InputError: they do not, or the final statement reads results across rows.
    """
    _check_same_rows(expr, reductions)
    rows = _row_names(expr, reductions, final)
    columns = tuple(axis for axis in final.axes if axis not in rows)
    if columns:
        reduced = reduction_of(reductions[0]).axes
        if sorted(expr.sizes[axis] for axis in columns) != sorted(expr.sizes[axis] for axis in reduced):
            problem = f"{final.tensor} has columns of another size than {reductions[0].tensor} reduces"
            raise too_much(expr, problem)
        renamed = [_over_columns(expr, statement, rows, columns) for statement in reductions]
    else:
        expr, reductions = distinct_reduced_axes(expr, reductions, final.axes)
        common = reduction_of(reductions[0]).axes
        renamed = [_renamed(statement, rows, common) for statement in reductions]
    statements = (*renamed, final)
    return replace(expr, axes=axes_of(expr, statements), statements=statements)


def _check_same_rows(expr: TensorExpr, reductions: tuple[Statement, ...]) -> None:
    """Refuse reductions over rows or columns of other sizes than the first one's, and reads across rows."""
    first = reductions[0]
    produced = {statement.tensor for statement in reductions}
    row_sizes, column_sizes = _row_and_column_sizes(expr, first)
    for statement in reductions:
        if _row_and_column_sizes(expr, statement) != (row_sizes, column_sizes):
            raise too_much(expr, f"{statement.tensor} is not reduced over the same rows and columns as {first.tensor}")
        in_its_row = tuple((axis,) for axis in statement.axes)
        for load in loads(statement.value):
            walked = tuple(index.axes for index in load.indices if index.is_plain_axis)
            if load.tensor in produced and walked != in_its_row:
                raise too_much(expr, f"{statement.tensor} reads {load.tensor} across rows")


def _row_and_column_sizes(expr: TensorExpr, statement: Statement) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows, columns = statement.axes, reduction_of(statement).axes
    return tuple(expr.sizes[axis] for axis in rows), tuple(expr.sizes[axis] for axis in columns)


def _over_columns(expr: TensorExpr, statement: Statement, rows: tuple[str, ...], columns: tuple[str, ...]) -> Statement:
    """A reduction with the names of an output's rows and columns: each axis takes the first free column of its size."""
    free = list(columns)
    names = []
    for axis in reduction_of(statement).axes:
        column = next((c for c in free if expr.sizes[c] == expr.sizes[axis]), None)
        if column is not None:
            free.remove(column)
        names.append(axis if column is None else column)
    return _renamed(statement, rows, names)


def _renamed(statement: Statement, rows: Sequence[str], columns: Sequence[str]) -> Statement:
    """A reduction whose own axes are called ``rows``, and those that it reduces ``columns``."""
    axes, reduced = statement.axes, reduction_of(statement).axes
    return rename_axes(statement, dict(zip((*axes, *reduced), (*rows, *columns), strict=True)))


def _row_names(expr: TensorExpr, reductions: tuple[Statement, ...], final: Statement) -> tuple[str, ...]:
    """The final statement's names for the axes of a row, read off its loads of the reductions' results."""
    results = {statement.tensor for statement in reductions}
    names: tuple[str, ...] | None = None
    for load in loads(final.value):
        if load.tensor not in results:
            continue
        if not all(index.is_plain_axis for index in load.indices):
            raise too_much(expr, f"{final.tensor} reads {load.tensor} at shifted or scaled indices")
        read_at = tuple(index.axes[0] for index in load.indices)
        if len(set(read_at)) != len(read_at) or (names is not None and read_at != names):
            raise too_much(expr, f"{final.tensor} reads {load.tensor} at other rows than its siblings")
        names = read_at
    if names is None:
        raise too_much(expr, f"{final.tensor} reads none of the reductions before it")
    return names
