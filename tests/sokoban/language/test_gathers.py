"""Indices that are read from tensors: what they mean, what stands for them, what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from hal.support.errors import InputError
from sokoban.kernel.form import kernel_form
from sokoban.language.expression import GatheredIndex, TensorExpr, loads, statement_text
from sokoban.language.gathers import gathers
from sokoban.language.operators import operator_from_data
from sokoban.language.parser import parse_program
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate

TABLE = np.arange(12.0).reshape(4, 3)
SIZES = {"t": 3, "d": 3, "k": 2}
SHAPES = {"E": [4, 3]}


def program(text: str, shapes: dict[str, list[int]] | None = None, **options: Any) -> TensorExpr:
    used = {axis: SIZES[axis] for axis in re.findall(r"\b[tdk]\b", text)}
    return parse_program(text, used, options.pop("dtypes", {}), shapes=SHAPES if shapes is None else shapes, **options)


@pytest.mark.parametrize(
    ("text", "places", "expected"),
    [
        ("Y[t,d] = E[I[t], d]", [2, 0, 2], [[6, 7, 8], [0, 1, 2], [6, 7, 8]]),
        ("Y[t] = E[I[t], 1] + E[I[t], 2]", [3, 1, 0], [21, 9, 3]),
        ("Y[t] = E[t, I[t]]", [2, 1, 0], [2, 4, 6]),
        ("Y[t] = sum(d, E[I[t], d])", [3, 0, 1], [30, 3, 12]),
        ("Y[t,d] = E[I[2 - t], d] * 0 + I[t]", [5, 6, 7], [[5, 5, 5], [6, 6, 6], [7, 7, 7]]),
        ("Y[t] = cumsum(t, E[I[t], 0])", [1, 1, 3], [3, 6, 15]),
        # Outside of the table: the nearest row, or the pad.
        ("Y[t] = E[I[t], 0]", [-7, 4, 2**31 - 1], [0, 9, 9]),
        ("Y[t] = E[I[t], 0 | pad=-1]", [-7, 4, 3], [-1, -1, 9]),
        ("Y[t] = E[I[t + 1 | pad=2], 0]", [3, 0, 1], [0, 3, 6]),
    ],
)
def test_values(text: str, places: list[int], expected: list[Any]) -> None:
    shapes = SHAPES | ({"I": [3]} if "pad=2" in text else {})
    assert evaluate(program(text, shapes), {"E": TABLE, "I": np.array(places)}).tolist() == expected


def test_places_of_several_axes_and_of_two_tables() -> None:
    expr = program("Y[t,d] = sum(k, E[I[t,k], d] * W[t, J[k]])", SHAPES | {"W": [3, 4]})
    assert [(tensor.name, tensor.dtype) for tensor in expr.inputs] == [
        ("E", "float32"), ("I", "int32"), ("W", "float32"), ("J", "int32"),
    ]  # fmt: skip
    rows, columns = np.array([[0, 1], [2, 3], [1, 1]]), np.array([3, 0])
    weights = np.arange(12.0).reshape(3, 4)
    expected = np.einsum("tkd,tk->td", TABLE[rows], weights[:, columns])
    assert np.array_equal(evaluate(expr, {"E": TABLE, "I": rows, "W": weights, "J": columns}), expected)


def test_text_reads_back() -> None:
    expr = program("Y[t,d] = sum(k, E[I[t,k], d | pad=0] * 2)")
    text = statement_text(expr.statements[0])
    assert text == "Y[t, d] = sum([k], (E[I[t, k], d | pad=0] * 2))"
    assert program(text).statements == expr.statements


def test_rows_are_counted_in_order_and_elements_by_sectors() -> None:
    (rows,) = gathers(program("Y[t,d] = sum(k, E[I[t,k], d])"))
    # Rows of twelve bytes lie in sectors of 32.
    assert rows.indices[0].terms == (("k", 2), ("t", 4)) and rows.indices[0].bounds({}) == (0, 3)
    (wide,) = gathers(parse_program("Y[t,d] = E[I[t], d]", {"t": 3, "d": 8}, {}, shapes={"E": [4, 8]}))
    assert wide.indices[0].terms == (("t", 1),)
    (elements,) = gathers(program("Y[t] = E[t, I[t] | pad=0]"))
    assert elements.indices[1].terms == (("t", 8),) and elements.indices[1].bounds({}) == (-1, 3)


def test_axes_merge_below_places_and_axes_of_one_go() -> None:
    form = kernel_form(program("Y[t,k,d] = E[I[t,k], d]"))
    assert statement_text(form.final) == "Y[t.k, d] = E[I[t.k], d]"
    (load,) = [load for load in loads(form.final.value) if load.places]
    assert load.indices[0].terms == (("t.k", 2),)
    single = parse_program("Y[t,d] = E[I[t], d]", {"t": 1, "d": 3}, {}, shapes={"E": [4, 3]})
    assert statement_text(kernel_form(single).final) == "Y[d] = E[I[0], d]"
    # A table of one row is still read where it is said to be.
    one = kernel_form(parse_program("Y[t] = E[I[t]]", {"t": 3}, {}, shapes={"E": [1]}))
    assert [tensor.name for tensor in one.expr.inputs] == ["E", "I"]
    # Of two rows apart in a table no walk is one.
    assert kernel_form(program("Y[t,d] = E[I[t], d] + I[t]")).spatial == ("t", "d")


@pytest.mark.parametrize(
    ("text", "shapes", "is_product"),
    [
        ("C[m,n] = sum(k, A[I[m],k] * B[k,n])", {"A": [64, 64]}, True),
        ("C[b,m,n] = sum(k, A[b,m,k] * B[G[b],k,n])", {"B": [5, 64, 64]}, True),
        ("C[b,m,n] = sum(k, A[I[b,m],k | pad=0] * B[G[b],k,n])", {"A": [64, 64], "B": [5, 64, 64]}, True),
        # Of the depth, of elements, at places in between, or of what is no place.
        ("C[m,n] = sum(k, A[m,k] * B[I[k],n])", {"B": [64, 64]}, False),
        ("C[m,n] = sum(k, A[m,I[k]] * B[k,n])", {"A": [64, 64]}, False),
        ("C[b,m,n] = sum(k, A[I[m,b],k] * B[b,k,n])", {"A": [64, 64]}, False),
        ("C[m,n] = sum(k, A[I[m + 1],k] * B[k,n])", {"A": [64, 64], "I": [65]}, False),
        ("C[m,n] = sum(k, A[I[m],k | pad=1] * B[k,n])", {"A": [64, 64]}, False),
    ],
)
def test_rows_and_matrices_of_a_product_may_lie_at_places(
    text: str, shapes: dict[str, list[int]], is_product: bool
) -> None:
    sizes = {axis: 64 for axis in re.findall(r"\b[bmnk]\b", text)}
    form = kernel_form(parse_program(text, sizes, {}, shapes=shapes, default_dtype="float16"))
    assert (form.roles is not None) == is_product and form.source.origin is None
    # Tiles hold operands alone, and multiply-adds none of those at places.
    names = [load.tensor for load in form.body_loads]
    assert (names == ["A", "B"]) == is_product and form.scattered_loads


def test_places_are_drawn_inside_and_a_few_outside() -> None:
    expr = parse_program("Y[t,d] = E[I[t], d]", {"t": 4000, "d": 2}, {}, shapes={"E": [50, 2]})
    places = random_inputs(expr, 0)["I"]
    outside = (places < 0) | (places >= 50)
    assert 0.03 < outside.mean() < 0.1 and {-1, 50} <= set(places[outside])
    assert set(range(50)) <= set(places)


def test_integers_are_read_as_integers() -> None:
    expr = program("Y[t,d] = E[I[t], d]", default_dtype="int8")
    assert (expr.output.dtype, expr.accumulate, expr.tensor_by_name["I"].dtype) == ("int32", "int32", "int32")


def test_a_shape_is_inferred_from_other_reads() -> None:
    text = "M[t] = max(d, X[t,d]); Y[t] = X[t, I[t]] - M[t]"
    assert program(text, {}).tensor_by_name["X"].shape == (3, 3)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("Y[t,d] = E[I[t] + 1, d]", {}, "'I[t]' of E is not affine; an index is a sum of integer*axis terms plus an"),
        ("Y[t,d] = E[I[J[t]], d]", {}, "is read at an index that is read itself; read one of them alone"),
        ("Y[t,d] = E[I[t], d]", {"shapes": {}}, "shapes.E: the shape of a gathered input cannot be inferred; give it"),
        ("Y[t,d] = E[I[t], d]", {"dtypes": {"I": "int8"}}, "E is read at places of I, which is int8; use int32"),
        ("F[t] = 2 * t; Y[t,d] = E[F[t], d]", {}, "places of F, and a statement defines F; read places from an input"),
        ("F[t,d] = E[t,d]; Y[t,d] = F[I[t], d]", {}, "a statement defines F; gather from an input"),
        ("Y[t,d] = E[I[t, k], d]", {}, "axis 'k' is neither on the left-hand side nor reduced"),
        ("Y[t,d] = E[I[t + 1], d]", {"shapes": SHAPES | {"I": [3]}}, "reads I dimension 0 at 1 to 3, outside 0 to 2"),
        ("Y[t,d] = E[I[t], d + 1]", {}, "reads E dimension 1 at 1 to 3, outside 0 to 2"),
    ],
)  # fmt: skip
def test_errors_are_one_line(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        program(text, **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_json() -> None:
    data = {"expr": "Y[t,d] = E[I[t], d]", "sizes": {"t": 3, "d": 3}, "shapes": SHAPES, "pad": {"E": 1}}
    (load,) = gathers(operator_from_data(data))
    assert load.pad == 1.0 and isinstance(load.indices[0], GatheredIndex)
