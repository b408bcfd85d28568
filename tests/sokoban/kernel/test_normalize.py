"""Rewrites: statements before and after, and the same elements for random operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from hal.support.errors import InputError
from sokoban.kernel.normalize import can_fuse, drop_unit_axes, fuse_axes, inline_pointwise
from sokoban.language.expression import Statement, TensorExpr
from sokoban.language.operators import operator_from_data
from sokoban.language.parser import parse_program
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from tests.sokoban.strategies import operators


def parse(text: str, shapes: Any = None, **sizes: int) -> TensorExpr:
    return parse_program(text, sizes, {}, shapes=shapes)


def summary(expr: TensorExpr) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Tensor, spatial axes and reduced axes of every statement."""
    return [(s.tensor, s.axes, s.reduction.axes if s.reduction else ()) for s in expr.statements]


def value_of(text: str, **sizes: int) -> Any:
    return parse(text, **sizes).statements[0].value


# inline_pointwise


def test_pointwise_chain_becomes_one_statement() -> None:
    expr = inline_pointwise(parse("C[i] = sum(k, A[i,k]); D[i] = C[i] + bias[i]; E[i] = relu(D[i])", i=3, k=5))
    assert summary(expr) == [("C", ("i",), ("k",)), ("E", ("i",), ())]
    assert expr.statements[1].value == value_of("E[i] = relu(C[i] + bias[i])", i=3)
    assert [t.name for t in expr.tensors] == ["A", "bias", "C", "E"]


def test_value_between_reductions_goes_into_its_readers() -> None:
    expr = inline_pointwise(operator_from_data({"op": "softmax", "shape": [3, 5]}))
    assert summary(expr) == [("Peak", ("i0",), ("i1",)), ("Total", ("i0",), ("i1",)), ("Y", ("i0", "i1"), ())]
    total = expr.statements[1].reduction
    assert total is not None and total.body == value_of("T[i0,i1] = exp(X[i0,i1] - Peak[i0])", i0=3, i1=5)


def test_indices_are_substituted() -> None:
    expr = inline_pointwise(parse("D[i,j] = X[2*i, j] * (i + 1); Y[j] = D[j + 1, 2]", shapes={"X": [9, 5]}, i=5, j=4))
    expected = parse("Y[j] = X[2*j + 2, 2] * (j + 2)", shapes={"X": [9, 5]}, j=4)
    assert expr.statements == expected.statements
    assert expr.axes == expected.axes


def test_padded_read_of_a_value_becomes_a_select() -> None:
    expr = inline_pointwise(parse("D[i] = exp(X[i]); Y[i] = sum(k, D[i + k - 1 | pad=0])", i=5, k=3))
    expected = parse(
        "Y[i] = sum(k, select(i + k - 1 >= 0 and i + k - 1 < 5, exp(X[i + k - 1 | pad=0]), 0))",
        shapes={"X": [5]}, i=5, k=3,
    )  # fmt: skip
    assert expr.statements == expected.statements


def test_statements_that_multiply_are_refused_before_there_are_so_many() -> None:
    text = "T0[i] = X[i]; " + "; ".join(f"T{n + 1}[i] = T{n}[i] * T{n}[i]" for n in range(60))
    with pytest.raises(InputError) as caught:
        inline_pointwise(parse(text, i=3))
    assert str(caught.value) == (
        "expr: with its point-wise statements inlined, a statement of expr has more than 20000 terms or 150 levels; "
        "split the operator into several"
    )


def test_long_chains_are_refused() -> None:
    text = "T0[i] = X[i]; " + "; ".join(f"T{n + 1}[i] = exp(T{n}[i])" for n in range(200))
    with pytest.raises(InputError) as caught:
        inline_pointwise(parse(text, i=3))
    assert str(caught.value) == (
        "expr: with its point-wise statements inlined, statement T150 of expr has more than 20000 terms or 150 levels; "
        "split the operator into several"
    )


# drop_unit_axes


def test_unit_axes_vanish() -> None:
    data = {"op": "conv2d", "n": 1, "c": 6, "h": 9, "w": 11, "f": 4, "kh": 1, "kw": 3, "padding": [0, 1, 0, 1]}
    expr = drop_unit_axes(operator_from_data(data))
    assert summary(expr) == [("Y", ("f", "oh", "ow"), ("c", "kw"))]
    assert [(t.name, t.shape, t.caller_shape) for t in expr.tensors] == [
        ("X", (6, 9, 11), (1, 6, 9, 11)),
        ("W", (4, 6, 3), (4, 6, 1, 3)),
        ("Y", (4, 9, 11), (1, 4, 9, 11)),
    ]


def test_one_axis_stays_where_all_are_one() -> None:
    expr = drop_unit_axes(parse("Y[i,j] = sum(k, X[i,j,k] * W[i,j])", i=1, j=1, k=5))
    assert summary(expr) == [("Y", ("i",), ("k",))]
    assert [t.shape for t in expr.tensors] == [(5,), (1,), (1,)]


def test_reduction_over_unit_axes_is_pointwise() -> None:
    expr = drop_unit_axes(operator_from_data({"op": "matmul", "m": 3, "n": 5, "k": 1}))
    assert expr.statements == parse("C[m,n] = A[m] * B[n]", m=3, n=5).statements


def test_padded_dimension_of_one_element_stays() -> None:
    expr = drop_unit_axes(parse("Y[i,j] = sum(k, X[i, j, k - 1 | pad=0])", shapes={"X": [1, 5, 1]}, i=1, j=5, k=3))
    assert [t.shape for t in expr.tensors] == [(5, 1), (5,)]


# fuse_axes


def test_elementwise_becomes_one_axis() -> None:
    expr, fused = fuse_axes(operator_from_data({"op": "elementwise", "function": "add", "shape": [3, 5, 7]}))
    assert fused == {"i0.i1.i2": ("i0", "i1", "i2")}
    assert summary(expr) == [("Y", ("i0.i1.i2",), ())]
    assert [(t.shape, t.caller_shape) for t in expr.tensors] == [((3 * 5 * 7,), (3, 5, 7))] * 3
    assert expr.sizes == {"i0.i1.i2": 3 * 5 * 7}


def test_broadcast_axis_stays_apart() -> None:
    _, fused = fuse_axes(parse("Y[n,c,h,w] = relu(X[n,c,h,w] + b[c])", n=2, c=3, h=5, w=7))
    assert fused == {"h.w": ("h", "w")}


def test_axes_reduced_together_fuse() -> None:
    expr, fused = fuse_axes(parse("Y[i] = sum([j,k], X[i,j,k] * W[j,k])", i=3, j=5, k=7))
    assert summary(expr) == [("Y", ("i",), ("j.k",))] and fused == {"j.k": ("j", "k")}


def test_pointwise_convolution_fuses_rows_and_columns() -> None:
    data = {"op": "conv2d", "n": 2, "c": 6, "h": 9, "w": 11, "f": 4, "kh": 1, "kw": 1}
    expr, fused = fuse_axes(drop_unit_axes(operator_from_data(data)))
    assert fused == {"oh.ow": ("oh", "ow")}
    assert [t.shape for t in expr.tensors] == [(2, 6, 99), (4, 6), (2, 4, 99)]


@pytest.mark.parametrize(
    "text",
    [
        "Y[i,j] = X[j,i]",  # other order
        "Y[i,j] = X[i,j] + Z[i]",  # one without the other
        "Y[i,j] = X[i,j] * j",  # used as a number
        "Y[i,j] = X[i,j] + X[j,i]",  # two accesses that disagree
        "Y[i,j] = X[i, j + 1]",  # not plain
        "Y[i,j] = X[i,j] + Z[i,j,i]",  # used once more
        "Y[i] = sum(j, X[i,j])",  # one kept, one reduced
        "C[i,j] = X[i,j] * 2; Y[i] = sum(j, C[i,j])",  # treated differently by two statements
        "Y[i,j] = X[i,j] + X[0,0]",  # another access of the same tensor
    ],
)
def test_axes_that_must_not_fuse(text: str) -> None:
    expr = parse(text, i=3, j=3)
    assert not can_fuse(expr, "i", "j") and not can_fuse(expr, "j", "i")
    assert fuse_axes(expr) == (expr, {})


def test_part_of_a_dimension_must_not_fuse() -> None:
    expr = parse("Y[i,j] = X[i,j]", shapes={"X": [3, 8]}, i=3, j=5)
    assert not can_fuse(expr, "i", "j")
    assert can_fuse(parse("Y[i,j] = X[i,j]", shapes={"X": [8, 5]}, i=3, j=5), "i", "j")


# All of them


def is_canonical(statements: tuple[Statement, ...]) -> bool:
    return all(statement.reduction for statement in statements[:-1])


@settings(max_examples=80, deadline=None)
@given(operators(max_points=3000))
@pytest.mark.slow
def test_rewrites_keep_every_element(data: dict[str, Any]) -> None:
    expr = operator_from_data(data)
    inputs = random_inputs(expr, seed=11)
    expected = evaluate(expr, inputs)
    dropped = drop_unit_axes(expr)
    inlined = inline_pointwise(dropped)
    fused, _ = fuse_axes(inlined)
    assert is_canonical(inlined.statements)
    for rewritten in (dropped, inlined, fused, inline_pointwise(expr), fuse_axes(expr)[0], drop_unit_axes(fused)):
        assert [t.name for t in rewritten.inputs] == [t.name for t in expr.inputs]
        assert [t.caller_shape for t in rewritten.inputs] == [t.caller_shape for t in expr.inputs]
        assert rewritten.output.caller_shape == expr.output.caller_shape
        shaped = {t.name: inputs[t.name].reshape(t.shape) for t in rewritten.inputs}
        result = evaluate(rewritten, shaped)
        assert result.shape == rewritten.output.shape
        np.testing.assert_allclose(result.ravel(), expected.ravel(), rtol=1e-10, atol=1e-12)
