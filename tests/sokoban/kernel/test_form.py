"""The canonical form: same values, two kinds, and chains of contractions refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.expression import TensorExpr, statement_text
from sokoban.language.operators import operator_from_data
from sokoban.language.parser import parse_program
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from tests.sokoban.strategies import operators


def parse(text: str, shapes: Any = None, **sizes: int) -> TensorExpr:
    return parse_program(text, sizes, {}, shapes=shapes)


def statements(form: KernelForm) -> list[str]:
    return [statement_text(statement) for statement in (*form.reductions, form.final)]


def assert_same_value(source: TensorExpr, *, fuse: bool = True) -> None:
    form = kernel_form(source, fuse=fuse)
    inputs = random_inputs(source, 7)
    expected = evaluate(source, inputs)
    flat = {t.name: inputs[t.name].reshape(t.shape) for t in form.expr.inputs}
    actual = evaluate(form.expr, flat)
    assert actual.size == expected.size
    np.testing.assert_allclose(actual.ravel(), expected.ravel(), rtol=1e-12, atol=1e-12)


def is_one_kernel(data: dict[str, Any], *, fuse: bool = True) -> bool:
    try:
        kernel_form(operator_from_data(data), fuse=fuse)
    except InputError:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(operators(max_points=4000).filter(is_one_kernel))
@pytest.mark.slow
def test_any_operator_keeps_its_value(data: dict[str, Any]) -> None:
    assert_same_value(operator_from_data(data))


@settings(max_examples=40, deadline=None)
@given(operators(max_points=4000).filter(lambda data: is_one_kernel(data, fuse=False)))
def test_any_operator_keeps_its_value_over_its_own_axes(data: dict[str, Any]) -> None:
    assert_same_value(operator_from_data(data), fuse=False)


@pytest.mark.parametrize(
    ("data", "spatial", "reduced"),
    [
        ({"op": "elementwise", "function": "relu", "shape": [2, 1, 3]}, ("i0", "i1", "i2"), ()),
        (
            {"op": "conv2d", "n": 1, "c": 2, "h": 4, "w": 4, "f": 3, "kh": 1, "kw": 1},
            ("n", "f", "oh", "ow"),
            ("c", "kh", "kw"),
        ),
        ({"op": "matmul", "m": 4, "n": 1, "k": 1, "epilogue": ["relu"]}, ("m", "n"), ("k",)),
        ({"op": "softmax", "shape": [2, 1, 8]}, ("i0", "i1"), ("i2",)),
    ],
)
def test_without_fusion_an_operator_has_the_axes_it_was_given(
    data: dict[str, Any], spatial: tuple[str, ...], reduced: tuple[str, ...]
) -> None:
    form = kernel_form(operator_from_data(data), fuse=False)
    assert (form.spatial, form.reduced, form.fused) == (spatial, reduced, ())


@settings(max_examples=40, deadline=None)
@given(
    st.permutations(["i", "j", "k", "x", "y"]),
    st.sampled_from(["C[{0},{1}] + b[{1}]", "relu(C[{0},{1}]) * b[{1}]"]),
    st.booleans(),
)
def test_final_statements_may_call_and_order_axes_as_they_like(names: list[str], value: str, swapped: bool) -> None:
    """Names of the final statement come from any statement, those of the reduced axis included."""
    a, b = names[:2]
    left = f"{b},{a}" if swapped else f"{a},{b}"
    text = f"C[i,j] = sum(k, A[i,k] * B[k,j]); D[{left}] = {value.format(a, b)}"
    sizes = {axis: 5 for axis in {"i", "j", "k", a, b}}
    assert_same_value(parse(text, **sizes))


@settings(max_examples=30, deadline=None)
@given(st.permutations(["i", "j", "k", "x", "y"]), st.booleans(), st.booleans())
def test_rows_and_columns_may_be_called_anything(names: list[str], columns: bool, swapped: bool) -> None:
    row, column = names[:2]
    left = (f"{column},{row}" if swapped else f"{row},{column}") if columns else row
    more = f" + X[{row},{column}] * Z[{column},{row}]" if columns else ""
    text = f"M[i] = max(k, X[i,k]); S[j] = sum(i, exp(X[j,i] - M[j])); Y[{left}] = S[{row}] - M[{row}]{more}"
    sizes = {axis: 5 for axis in {"i", "j", "k", row, *([column] if columns else [])}}
    assert_same_value(parse(text, **sizes))


# Tiles


def test_a_contraction_gets_an_accumulator_of_its_own_dtype() -> None:
    form = kernel_form(operator_from_data({"op": "matmul", "m": 9, "n": 7, "k": 5, "dtype": "float16"}))
    assert form.kind == "tile"
    assert statements(form) == ["C_acc[m, n] = sum([k], (A[m, k] * B[k, n]))", "C[m, n] = C_acc[m, n]"]
    assert form.expr.tensor_by_name["C_acc"].dtype == "float32"
    assert form.expr.output.dtype == "float16"
    assert (form.spatial, form.reduced, form.columns) == (("m", "n"), ("k",), ())
    assert form.points == 9 * 7 * 5
    assert form.body_operations == 2
    assert form.flops == 2 * 9 * 7 * 5


def test_an_epilogue_reads_the_reduction_in_place() -> None:
    form = kernel_form(parse("C[i,j] = sum(k, A[i,k] * B[k,j]); D[i,j] = relu(C[i,j] + bias[j])", i=9, j=7, k=5))
    assert form.kind == "tile"
    assert statements(form) == [
        "C[i, j] = sum([k], (A[i, k] * B[k, j]))",
        "D[i, j] = relu((C[i, j] + bias[j]))",
    ]
    assert [load.tensor for load in form.final_loads] == ["bias"]
    assert form.flops == 2 * 9 * 7 * 5 + 2 * 9 * 7


def test_an_epilogue_s_loads_are_its_own_even_where_the_body_reads_the_same() -> None:
    form = kernel_form(parse("C[i,j] = max(k, A[i,j] * B[k]); D[i,j] = C[i,j] + A[i,j] + E[i,j]", i=9, j=7, k=5))
    assert [load.tensor for load in form.body_loads] == ["A", "B"]
    assert [load.tensor for load in form.final_loads] == ["A", "E"]
    assert kernel_form(parse("D[i,j] = A[i,j] + E[j]", i=9, j=7)).final_loads == ()


def test_a_permuted_output_names_the_axes_of_the_reduction() -> None:
    form = kernel_form(parse("C[i,j] = sum(k, A[i,k] * B[k,j]); D[x,y] = C[y,x] + bias[x]", i=9, j=7, k=5, x=7, y=9))
    assert statements(form) == ["C[y, x] = sum([k], (A[y, k] * B[k, x]))", "D[x, y] = (C[y, x] + bias[x])"]
    assert form.spatial == ("x", "y")
    assert dict(form.sizes) == {"x": 7, "y": 9, "k": 5}


def test_a_reduction_axis_steps_aside_for_an_output_axis_of_its_name() -> None:
    form = kernel_form(parse("C[i,j] = sum(k, A[i,k] * B[k,j]); D[k,j] = relu(C[k,j])", i=5, j=3, k=5))
    assert statements(form) == ["C[k, j] = sum([k_1], (A[k, k_1] * B[k_1, j]))", "D[k, j] = relu(C[k, j])"]
    assert dict(form.sizes) == {"k": 5, "j": 3, "k_1": 5}


def test_part_of_a_reduction_is_computed_where_part_is_read() -> None:
    form = kernel_form(parse("C[i] = sum(k, A[i,k]); D[x] = C[x] + 1", i=9, x=5, k=3))
    assert form.points == 5 * 3
    assert_same_value(form.source)


def test_pointwise_operators_have_no_reduction() -> None:
    form = kernel_form(operator_from_data({"op": "elementwise", "function": "gelu", "shape": [17, 11, 3]}))
    assert (form.kind, form.reductions, form.reduction, form.reduced) == ("tile", (), None, ())
    assert form.fused == (("i0.i1.i2", ("i0", "i1", "i2")),)
    assert dict(form.sizes) == {"i0.i1.i2": 17 * 11 * 3}
    assert form.body == form.final.value


def test_a_reduction_over_unit_axes_is_pointwise() -> None:
    form = kernel_form(parse("C[i,j] = sum(k, A[i,k] * B[k,j])", i=9, j=7, k=1))
    assert statements(form) == ["C[i, j] = (A[i] * B[j])"]


def test_adjacent_axes_fuse_and_keep_their_members_names() -> None:
    data = {"op": "conv2d", "n": 3, "c": 5, "h": 7, "w": 9, "f": 11, "kh": 1, "kw": 1}
    form = kernel_form(operator_from_data(data))
    assert dict(form.fused) == {"oh.ow": ("oh", "ow")}
    assert (form.spatial, form.reduced) == (("n", "f", "oh.ow"), ("c",))
    assert form.sizes["oh.ow"] == 7 * 9


def test_a_fused_axis_that_lost_its_name_is_not_listed() -> None:
    form = kernel_form(parse("M[i] = max([k,l], A[i,k,l]); Y[i,p] = X[i,p] - M[i]", i=5, k=7, l=3, p=21))
    assert dict(form.sizes) == {"i": 5, "p": 21}
    assert form.fused == ()
    assert_same_value(form.source)


# Rows


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax_keeps_rows_and_columns(axis: int) -> None:
    shape = [5, 7, 3]
    form = kernel_form(operator_from_data({"op": "softmax", "shape": shape, "axis": axis}))
    assert form.kind == "rows"
    assert [statement.tensor for statement in form.reductions] == ["Peak", "Total"]
    assert len(form.columns) == 1 and form.sizes[form.columns[0]] == shape[axis]
    assert form.reduced == form.columns
    assert form.points == 5 * 7 * 3
    assert {statement.axes for statement in form.reductions} == {form.spatial}
    assert_same_value(form.source)


def test_layer_norm_reads_its_row_in_every_pass() -> None:
    form = kernel_form(operator_from_data({"op": "layer_norm", "shape": [5, 33], "axis": 1}))
    assert form.kind == "rows"
    assert (form.spatial, form.columns) == (("i0",), ("i1",))
    assert all(statement.reduction and statement.reduction.axes == ("i1",) for statement in form.reductions)


def test_reductions_with_different_axis_names_share_the_output_s() -> None:
    form = kernel_form(
        parse("M[i] = max(k, X[i,k]); S[j] = sum(l, exp(X[j,l] - M[j])); Y[p,q] = X[p,q] / S[p]",
              i=5, j=5, k=7, l=7, p=5, q=7)
    )  # fmt: skip
    assert statements(form) == [
        "M[p] = max([q], X[p, q])",
        "S[p] = sum([q], exp((X[p, q] - M[p])))",
        "Y[p, q] = (X[p, q] / S[p])",
    ]


def test_rows_without_columns_are_one_value_each() -> None:
    form = kernel_form(parse("M[i] = max(k, X[i,k]); S[i] = sum(l, X[i,l]); Y[i] = S[i] - M[i]", i=5, k=7, l=7))
    assert (form.kind, form.spatial, form.columns, form.reduced) == ("rows", ("i",), (), ("k",))
    assert form.points == 5 * 7


# Refusals


@pytest.mark.parametrize(
    ("text", "sizes", "why"),
    [
        (
            "C[i,j] = sum(k, A[i,k] * B[k,j]); E[i,l] = sum(j, C[i,j] * D[j,l])",
            {"i": 5, "j": 3, "k": 7, "l": 2},
            "E_acc is not reduced over the same rows and columns as C",
        ),
        (
            "M[i] = max(k, X[i,k]); S[i] = sum(l, Z[i,l] - M[i]); Y[i] = S[i]",
            {"i": 5, "k": 7, "l": 6},
            "S is not reduced over the same rows and columns as M",
        ),
        (
            "C[i] = sum(k, A[i,k]); D[i] = sum(k, A[i,k] * C[i - 1 | pad=0]); E[i] = C[i] + D[i]",
            {"i": 5, "k": 7},
            "D reads C across rows",
        ),
        (
            "C[i] = sum(k, A[i,k]); D[i] = sum(k, A[i,k] * C[k]); E[i] = C[i] + D[i]",
            {"i": 7, "k": 7},
            "D reads C across rows",
        ),
        (
            "C[i] = sum(k, A[i,k]); D[i] = C[i] - C[i - 1 | pad=1]",
            {"i": 5, "k": 7},
            "D reads C at shifted or scaled indices",
        ),
        (
            "C[i] = sum(k, A[i,k]); D[x] = C[x | pad=7] + 1",
            {"i": 5, "k": 3, "x": 9},
            "D reads C beyond its end",
        ),
        (
            "C[i] = sum(k, A[i,k]); D[x] = C[2*x]",
            {"i": 9, "k": 3, "x": 5},
            "D reads C at shifted or scaled indices",
        ),
        (
            "C[i,j] = sum(k, A[i,k] * B[k,j]); E[i,j] = C[i,j] - C[j,i]",
            {"i": 5, "j": 5, "k": 7},
            "E reads C at other rows than its siblings",
        ),
        (
            "C[i,j] = sum(k, A[i,k] * B[k,j]); E[i,j,b] = C[i,j] + bias[b]",
            {"i": 512, "j": 512, "k": 64, "b": 4},
            "E has columns of another size than C reduces",
        ),
    ],
)  # fmt: skip
def test_what_needs_two_kernels_is_refused_with_its_reason(text: str, sizes: dict[str, int], why: str) -> None:
    with pytest.raises(InputError) as caught:
        kernel_form(parse(text, **sizes))
    assert str(caught.value) == f"expr: cannot be one kernel: {why}; write it as two operators"
