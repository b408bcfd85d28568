"""Two products in a row as one kernel sees them: ``H = X A``, a function of every element of H, its product with B.

A block has rows of X and of the result for its own and walks the columns of H, a tile at a step, so that H never passes
through memory: attention without the softmax, where A's columns stand for keys and B's rows for values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hal.support.errors import InputError
from sokoban.kernel.kernel import ExpressionKernel
from sokoban.kernel.normalize import drop_unit_axes, fuse_axes, inline_pointwise
from sokoban.kernel.statements import (
    distinct_reduced_axes,
    reads_elementwise,
    reduction_of,
    rename_axes,
    renamed_to,
)
from sokoban.language.expression import (
    AffineIndex,
    Call,
    Load,
    Statement,
    TensorExpr,
    Value,
    loads,
)

#: Element types of the factors and of the result.
PAIR_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class ProductPair(ExpressionKernel):
    """``Y[.., m, p] = final(sum(n, inner(sum(k, X[.., m, k] * A[.., k, n])) * B[.., n, p]))``.

    Attributes:
        name: of the operator.
        expr: the operator over fused axes, its point-wise statements inlined.
        fused: pairs of a fused axis and the axes that it stands for.
        sizes_by_axis: elements of every axis that statements of the pair use.
        batch: axes of the output that products are repeated along.
        row, depth, middle, width: the axes m, k, n and p.
        own, first, second: what X, A and B are read by.
        inner: what H's elements become before the second product, over ``batch``, m and n.
        final: the statement that defines the output.
        summed, result: names of H, and of what the second product sums.
    """

    name: str
    expr: TensorExpr
    fused: tuple[tuple[str, tuple[str, ...]], ...]
    sizes_by_axis: Mapping[str, int]
    batch: tuple[str, ...]
    row: str
    depth: str
    middle: str
    width: str
    own: Load
    first: Load
    second: Load
    inner: Value
    final: Statement
    summed: str
    result: str

    @property
    def dtype(self) -> str:
        """Element type of the factors and of the result."""
        return self.output.dtype

    @property
    def problems(self) -> int:
        """Number of independent pairs of products."""
        return math.prod(self.sizes_by_axis[axis] for axis in self.batch)

    @property
    def rows(self) -> int:
        """Rows of one problem."""
        return self.sizes_by_axis[self.row]

    @property
    def depth_size(self) -> int:
        """Elements that the first product sums."""
        return self.sizes_by_axis[self.depth]

    @property
    def middle_size(self) -> int:
        """Columns of H, which the second product sums over."""
        return self.sizes_by_axis[self.middle]

    @property
    def width_size(self) -> int:
        """Columns of the result."""
        return self.sizes_by_axis[self.width]

    @property
    def sizes(self) -> Mapping[str, int]:
        """Elements along every axis."""
        return {
            "problem": self.problems, "row": self.rows, "middle": self.middle_size,
            "width": self.depth_size + self.width_size,
        }  # fmt: skip

    @property
    def flops(self) -> float:
        """Operations of both products."""
        return 2.0 * math.prod(self.sizes.values())

    @property
    def middle_bytes(self) -> int:
        """Bytes of what a sequence of kernels passes through memory."""
        return self.problems * self.rows * self.middle_size * self.output.element_bytes

    @property
    def is_first_turned(self) -> bool:
        """True if A lies as ``[k, n]``, its columns adjacent."""
        return self.first.indices[-1].axes[0] == self.middle

    @property
    def is_second_turned(self) -> bool:
        """True if B lies as ``[p, n]``, its columns one after the other."""
        return self.second.indices[-1].axes[0] == self.middle

    def stride(self, load: Load, axis: str) -> int:
        """Elements from one step along ``axis`` to the next in what ``load`` reads; 0 where that is the same."""
        shape = self.expr.tensor_by_name[load.tensor].shape
        return sum(
            math.prod(shape[dimension + 1 :]) for dimension, index in enumerate(load.indices) if axis in index.axes
        )

    @cached_property
    def inner_loads(self) -> tuple[Load, ...]:
        """Loads of the function between the products besides H."""
        return tuple(load for load in loads(self.inner) if load.tensor != self.summed)

    @cached_property
    def final_loads(self) -> tuple[Load, ...]:
        """Loads of the final statement besides sums."""
        return tuple(load for load in loads(self.final.value) if load.tensor != self.result)


def product_pair(source: TensorExpr) -> ProductPair:
    """An operator as two products in a row.

    >>> from sokoban.language.parser import parse_program
    >>> text = "H[m,n] = sum(k, X[m,k] * A[k,n]); G[m,n] = relu(H[m,n]); Y[m,k] = sum(n, G[m,n] * B[k,n])"
    >>> pair = product_pair(parse_program(text, {"m": 64, "n": 256, "k": 32}, {}))
    >>> pair.row, pair.width, pair.is_first_turned, pair.is_second_turned
    ('m', 'k', True, True)

    Raises:
        InputError: why it is none.
    """
    expr, fused = fuse_axes(inline_pointwise(drop_unit_axes(source)))
    reductions = [statement for statement in expr.statements if statement.reduction is not None]
    if len(reductions) != 2:
        raise _refused(source, f"it sums {len(reductions)} times, not twice")
    first, second = reductions
    final = expr.statements[-1]
    if final is second:
        indices = tuple(AffineIndex.axis(axis) for axis in second.axes)
        final = Statement(second.tensor, second.axes, Load(second.tensor, indices))
    if not reads_elementwise(final, second) or any(load.tensor == first.tensor for load in loads(final.value)):
        raise _refused(source, f"what follows {second.tensor} reads more than its own element of it")
    distinct, (second,) = distinct_reduced_axes(expr, (second,), final.axes)
    second = renamed_to(final, second)
    inner, factor = _factors(source, first, second)
    read = {load for load in loads(inner) if load.tensor == first.tensor}
    names = [index.axes[0] for load in read for index in load.indices if index.is_plain_axis and load.pad is None]
    if len(read) != 1 or len(set(names)) != len(first.axes):
        raise _refused(source, f"{second.tensor} reads {first.tensor} otherwise than element by element")
    distinct, (first,) = distinct_reduced_axes(distinct, (first,), tuple(names))
    first = rename_axes(first, dict(zip(first.axes, names, strict=True)))
    return _pair(source, expr, fused, distinct.sizes, (first, second, final), inner, factor)


def _refused(source: TensorExpr, why: str) -> InputError:
    return InputError(source.name, f"is no pair of products in one kernel: {why}", "it stays a sequence of kernels")


def _factors(source: TensorExpr, first: Statement, second: Statement) -> tuple[Value, Load]:
    """Expression of H's elements, and the load of B."""
    reduction = reduction_of(second)
    body = reduction.body
    if reduction.function == "sum" and isinstance(body, Call) and body.function == "mul":
        for inner, factor in (body.arguments, body.arguments[::-1]):
            if isinstance(factor, Load) and any(load.tensor == first.tensor for load in loads(inner)):
                return inner, factor
    raise _refused(source, f"{second.tensor} sums no products of {first.tensor} and of a tensor's elements")


def _pair(
    source: TensorExpr, expr: TensorExpr, fused: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int],
    statements: tuple[Statement, Statement, Statement], inner: Value, second: Load,
) -> ProductPair:  # fmt: skip
    """The roles of axes and loads; see :func:`product_pair`."""
    of_first, of_second, final = statements
    reduction = reduction_of(of_first)
    body = reduction.body
    is_product = reduction.function == "sum" and isinstance(body, Call) and body.function == "mul"
    factors = [each for each in body.arguments if isinstance(each, Load)] if isinstance(body, Call) else []
    if not is_product or len(factors) != 2 or len(reduction.axes) != 1 or len(reduction_of(of_second).axes) != 1:
        raise _refused(source, "both have to sum products of two factors along one axis")
    (depth,), (middle,) = reduction.axes, reduction_of(of_second).axes
    x_load, first = sorted(factors, key=lambda load: middle in _axes(load))
    rows = [axis for axis in of_second.axes if axis in _axes(x_load) and axis not in _axes(first) | _axes(second)]
    widths = [axis for axis in of_second.axes if axis not in of_first.axes]
    if not rows or len(widths) != 1:
        raise _refused(source, "no axis of rows is X's alone, or results have several axes that H has not")
    row = max(rows, key=lambda axis: sizes[axis])
    pair = ProductPair(
        name=source.name, expr=expr, fused=tuple((name, parts) for name, parts in fused.items() if len(parts) > 1),
        sizes_by_axis=dict(sizes), batch=tuple(axis for axis in of_second.axes if axis not in (row, widths[0])),
        row=row, depth=depth, middle=middle, width=widths[0], own=x_load, first=first, second=second, inner=inner,
        final=final, summed=of_first.tensor, result=of_second.tensor,
    )  # fmt: skip
    problem = _problem(pair, of_first)
    if problem:
        raise _refused(source, problem)
    return pair


def _axes(load: Load) -> set[str]:
    return {axis for index in load.indices for axis in index.axes}


def _problem(pair: ProductPair, of_first: Statement) -> str:
    """Why no kernel takes a pair of such layouts and types; empty where one does."""
    tensors, batch = pair.expr.tensor_by_name, set(pair.batch)
    if set(of_first.axes) != batch | {pair.row, pair.middle}:
        return "the first product has axes that the second has not"
    written = {pair.summed, pair.result}
    for load, inside, last in (
        (pair.own, {pair.row, pair.depth}, {pair.depth}),
        (pair.first, {pair.depth, pair.middle}, {pair.depth, pair.middle}),
        (pair.second, {pair.middle, pair.width}, {pair.middle, pair.width}),
    ):
        axes = [index.axes[0] for index in load.indices if index.is_plain_axis]
        if load.tensor in written or load.pad is not None or len(axes) != len(load.indices):
            return f"{load.tensor} is not read along plain axes"
        if not inside <= set(axes) <= inside | batch or len(set(axes)) != len(axes):
            return f"{load.tensor} has not the axes of a factor"
        if axes[-1] not in last:
            return f"rows of {load.tensor} do not lie along {' or '.join(sorted(last))}"
    if pair.final.axes[-1] != pair.width:
        return f"rows of {pair.output.name} do not lie along {pair.width}"
    others = (*pair.inner_loads, *pair.final_loads)
    if any(load.pad is not None or load.tensor in written for load in others):
        return "its point-wise functions read beyond a tensor, or H elsewhere"
    types = {tensors[load.tensor].dtype for load in (pair.own, pair.first, pair.second)} | {pair.dtype}
    if len(types) > 1 or pair.dtype not in PAIR_DTYPES or pair.expr.accumulate != "float32":
        return f"its factors and result have to be all of one of {', '.join(PAIR_DTYPES)}, summed in float32"
    if any(tensors[load.tensor].dtype not in PAIR_DTYPES for load in others):
        return "its point-wise functions read elements that are no floats"
    return ""
