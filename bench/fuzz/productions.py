"""Which productions of the grammar an operator has, by the place that they stand in.

What is inside a reduction is computed at every point of it, what is outside once for every output; lowerings write the
two differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sokoban.language.expression import (
    PLACE_REDUCTIONS,
    REDUCTION_IDENTITY,
    SCANS,
    AxisValue,
    Call,
    Constant,
    GatheredIndex,
    Load,
    Reduction,
    Statement,
    TensorExpr,
    Value,
    walk,
)
from sokoban.language.functions import FUNCTIONS
from sokoban.language.named.attention import AttentionSizes

INSIDE, OUTSIDE, READS = "inside", "outside", "reads"
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})

#: What indices of a load may be.
INDICES = ("plain", "strided", "offset", "reversed", "window", "constant", "diagonal", "broadcast", "transposed")
#: An index that is read from a tensor.
GATHERED = "gathered"
PADS = ("pad zero", "pad number", "pad infinity")
#: Values of axes: as numbers and compared, of an axis that is reduced and of one of the output.
POSITIONS = ("spatial axis as a number", "spatial axis compared", "reduced axis as a number", "reduced axis compared")

REDUCTIONS = tuple(f"{name} of a reduction" for name in REDUCTION_IDENTITY)

#: What goes along an axis in order.
SCANNED = tuple(f"{function} of a scan" for function in SCANS.values())
PLACED = tuple(f"{name} of a reduction" for name in PLACE_REDUCTIONS)
SCAN_OPTIONS = ("reversed scan", "exclusive scan")

#: The rows of the table of productions: what may stand inside of a reduction and outside.
_ANYWHERE = (*FUNCTIONS, *INDICES, *PADS)
ALL: tuple[str, ...] = (
    *REDUCTIONS,
    *(f"{INSIDE} {name}" for name in (*_ANYWHERE, *POSITIONS)),
    *(f"{OUTSIDE} {name}" for name in (*_ANYWHERE, *POSITIONS[:2])),
)


def productions(expr: TensorExpr) -> frozenset[str]:
    """The productions of a kernel's expression, and the dtypes of its tensors."""
    names: set[str] = set()
    for statement in expr.statements:
        names.update(_of_statement(statement, expr))
    names.update(f"{READS} {tensor.dtype}" for tensor in expr.inputs)
    names.add(f"writes {expr.output.dtype}")
    names.add(f"computes {expr.accumulate}")
    if len(expr.statements) > 2:
        names.add("several statements")
    if sum(statement.reduction is not None for statement in expr.statements) > 1:
        names.add("several reductions")
    if len(expr.inputs) < len({load for s in expr.statements for load in walk(s.value) if isinstance(load, Load)}):
        names.add("one tensor read in several ways")
    sizes = set(expr.sizes.values())
    names.update({"size 1"} if 1 in sizes else set())
    names.update({"prime size"} if any(_is_prime(size) for size in sizes) else set())
    return frozenset(names)


def attention_options(attention: AttentionSizes, dtype: str) -> frozenset[str]:
    """Options of an attention, or of a gradient of it."""
    options = {
        "every key seen": not attention.causal, "causal": attention.causal, "window": bool(attention.window_size),
        "heads share keys": attention.shares_keys, "a head for every key": not attention.shares_keys,
        "more keys than queries": attention.key_count != attention.queries,
        "values of another size": attention.value_size != attention.head_dim,
    }  # fmt: skip
    return frozenset({name for name, is_asked in options.items() if is_asked} | {f"{READS} {dtype}"})


#: All of :func:`attention_options` but dtypes.
OPTIONS = (
    "every key seen", "causal", "window", "heads share keys", "a head for every key", "more keys than queries",
    "values of another size",
)  # fmt: skip


def _of_statement(statement: Statement, expr: TensorExpr) -> Iterator[str]:
    scan, reduction = statement.scan, statement.reduction
    place, order = OUTSIDE, statement.axes
    body: Value = statement.value
    if reduction is not None:
        yield f"{reduction.function} of a reduction"
        place, order, body = INSIDE, (*statement.axes, *reduction.axes), reduction.body
    reduced = reduction.axes if reduction is not None else ()
    if scan is not None:
        yield f"{scan.function} of a scan"
        place, body, reduced = INSIDE, scan.body, (scan.axis,)
        if scan.is_reversed:
            yield "reversed scan"
        if scan.is_exclusive:
            yield "exclusive scan"
    for name in _of_value(body, order, reduced, expr):
        yield f"{place} {name}"


def _of_value(
    value: Value, order: Sequence[str], reduced: Sequence[str], expr: TensorExpr, compared: bool = False
) -> Iterator[str]:
    if isinstance(value, Call):
        yield value.function
        for argument in value.arguments:
            yield from _of_value(argument, order, reduced, expr, value.function in _COMPARISONS)
    elif isinstance(value, AxisValue):
        for axis in value.index.axes:
            yield f"{'reduced' if axis in reduced else 'spatial'} axis {'compared' if compared else 'as a number'}"
    elif isinstance(value, Load):
        for load in (value, *value.places):
            yield from _of_load(load, order)
    else:
        assert isinstance(value, Constant | Reduction)


def _of_load(load: Load, order: Sequence[str]) -> Iterator[str]:
    if load.pad is not None:
        yield "pad infinity" if math.isinf(load.pad) else "pad number" if load.pad else "pad zero"
    walked = [axis for index in load.indices for axis in index.axes]
    for index in load.indices:
        if isinstance(index, GatheredIndex):
            yield GATHERED
            continue
        if not index.terms:
            yield "constant"
        if index.is_plain_axis:
            yield "plain"
        if index.terms and index.offset:
            yield "offset"
        if any(coefficient > 1 for _, coefficient in index.terms):
            yield "strided"
        if any(coefficient < 0 for _, coefficient in index.terms):
            yield "reversed"
        if len(index.terms) > 1:
            yield "window"
    if len(set(walked)) < len(walked):
        yield "diagonal"
    if set(order) - set(walked):
        yield "broadcast"
    places = [order.index(axis) for axis in dict.fromkeys(walked) if axis in order]
    if places != sorted(places):
        yield "transposed"


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
