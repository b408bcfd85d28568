"""Sums over scattered rows: ``Y[i,c] = sum(t, select(I[t] == i, X[t,c], 0))`` adds row ``t`` of ``X`` to row ``I[t]``.

Walked by its definition such a sum looks at every ``t`` for every element of ``Y``. As a kernel of lines it has a line
of places for each row of ``Y``: they are looked through in order, those of several rows at once, and a row of ``X`` is
read where one of them is met.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sokoban.language.expression import AxisValue, Call, Constant, Load, Statement, Tensor, Value, used_axes


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Rows that are added to the rows of a result that an integer tensor names, in the order of that tensor.

    Attributes:
        place: the read of the integer tensor: to which row something is added.
        row: the axis of the result's rows.
        columns: the other axes of the result, in its order.
        value: the element that is added, over ``columns`` and the axis of places.
    """

    place: Load
    row: str
    columns: tuple[str, ...]
    value: Value


def scatter_of(statement: Statement, tensors: Mapping[str, Tensor]) -> Scatter | None:
    """The scattered rows that a statement sums; None where it is anything else."""
    reduction = statement.reduction
    if reduction is None or reduction.function != "sum" or len(reduction.axes) != 1:
        return None
    compared = _selected(reduction.body)
    if compared is None:
        return None
    place, row, value = compared
    columns = tuple(axis for axis in statement.axes if axis != row)
    is_line = len(place.indices) == 1 and place.indices[0].is_plain_axis and place.indices[0].axes == reduction.axes
    is_row = row in statement.axes and row not in used_axes([value])
    if not (is_line and is_row and columns and place.pad is None and tensors[place.tensor].dtype == "int32"):
        return None
    return Scatter(place=place, row=row, columns=columns, value=value)


def _selected(body: Value) -> tuple[Load, str, Value] | None:
    """The read, the axis that it is compared with, and the value where they are equal, 0 elsewhere."""
    if not (isinstance(body, Call) and body.function == "select" and body.arguments[2] == Constant(0.0)):
        return None
    condition = body.arguments[0]
    if not (isinstance(condition, Call) and condition.function == "eq"):
        return None
    for place, axis in (condition.arguments, condition.arguments[::-1]):
        if isinstance(place, Load) and isinstance(axis, AxisValue) and axis.index.is_plain_axis:
            return place, axis.index.axes[0], body.arguments[1]
    return None
