"""Gradients are operators: their values against differences of the forward operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.support.errors import InputError
from roller.estimate.gradients import gradients
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operator_from_data
from sokoban.language.reference import evaluate

Arrays = dict[str, Any]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("matmul", {"op": "matmul", "m": 4, "n": 3, "k": 5, "transpose_a": True}),
    ("bmm", {"op": "batch_matmul", "b": 2, "m": 4, "n": 3, "k": 5}),
    ("linear", {"op": "matmul", "m": 4, "n": 3, "k": 5, "epilogue": [{"function": "bias_add", "axis": "n"}]}),
    ("conv", {"op": "conv2d", "n": 2, "c": 3, "h": 6, "w": 5, "f": 2, "kh": 3, "kw": 3, "padding": 1}),
    ("dilated", {"op": "conv2d", "n": 1, "c": 2, "h": 9, "w": 8, "f": 2, "kh": 3, "kw": 2, "dilation": 2}),
    ("strided", {"op": "conv2d", "n": 1, "c": 2, "h": 7, "w": 8, "f": 3, "kh": 3, "kw": 3, "stride": 2, "padding": 1}),
    ("strided_1x1", {"op": "conv2d", "n": 1, "c": 2, "h": 7, "w": 8, "f": 3, "kh": 1, "kw": 1, "stride": 2}),
    ("grouped", {"op": "conv2d", "n": 1, "c": 4, "h": 5, "w": 5, "f": 6, "kh": 3, "kw": 3, "groups": 2, "stride": 3}),
    ("nhwc", {"op": "conv2d", "n": 1, "c": 2, "h": 5, "w": 5, "f": 3, "kh": 2, "kw": 2, "layout": "NHWC"}),
    ("depthwise", {"op": "depthwise_conv2d", "n": 1, "c": 3, "h": 6, "w": 6, "kh": 3, "kw": 3, "padding": "SAME"}),
    ("avg_pool", {"op": "avg_pool2d", "n": 1, "c": 2, "h": 7, "w": 7, "kh": 3, "kw": 3, "stride": 2, "padding": 1}),
    ("mean", {"op": "reduce", "function": "mean", "shape": [4, 5], "axes": [0]}),
    ("transpose", {"op": "transpose", "shape": [4, 5], "perm": [1, 0]}),
    ("broadcast", {"op": "elementwise", "function": "mul", "shapes": [[4, 5], [5]]}),
    ("div", {"op": "elementwise", "function": "div", "shape": [4, 5]}),
    ("pow", {"op": "elementwise", "function": "pow", "shape": [4, 5]}),
    ("max", {"op": "elementwise", "function": "max", "shape": [4, 5]}),
    *(
        (name, {"op": "elementwise", "function": name, "shape": [4, 5]})
        for name in ("abs", "relu", "gelu", "tanh", "sigmoid", "silu", "exp", "log", "sqrt", "rsqrt", "erf", "sin",
                     "cos", "neg")
    ),
    ("epilogue", {"op": "matmul", "m": 4, "n": 3, "k": 5, "epilogue": [{"function": "bias_add", "axis": "n"}, "gelu"]}),
    ("select", {"expr": "Y[i] = select(X[i] > 0.8, X[i] * Z[i], 3 * X[i])", "sizes": {"i": 9}}),
]  # fmt: skip


def differences(expr: TensorExpr, inputs: Arrays, upstream: Any, name: str) -> Any:
    """The gradient of one input by central differences."""
    step = 1e-6
    out = np.zeros(inputs[name].shape)
    for index in np.ndindex(out.shape):
        sides = []
        for sign in (1, -1):
            moved = inputs[name].copy()
            moved[index] += sign * step
            sides.append((evaluate(expr, inputs | {name: moved}) * upstream).sum())
        out[index] = (sides[0] - sides[1]) / (2 * step)
    return out


def forward(data: dict[str, Any]) -> tuple[TensorExpr, Arrays, Any]:
    expr = operator_from_data(data)
    chance = np.random.default_rng(1)
    inputs = {tensor.name: chance.uniform(0.5, 1.5, tensor.shape) for tensor in expr.inputs}
    return expr, inputs, chance.uniform(0.5, 1.5, expr.output.shape)


def backward(data: dict[str, Any]) -> dict[str, list[Any]]:
    """The values of every gradient, its phases in order; the results of one are inputs of the next."""
    expr, inputs, upstream = forward(data)
    known = inputs | {"grad": upstream}
    first = expr.statements[0]
    if first.reduction is not None and len(expr.statements) > 1:
        later = {statement.tensor for statement in expr.statements[1:]}
        tensors = tuple(tensor for tensor in expr.tensors if tensor.name not in later)
        known[first.tensor] = evaluate(
            TensorExpr(name="sum", axes=expr.axes, tensors=tensors, statements=(first,), accumulate=expr.accumulate),
            inputs,
        )
    out: dict[str, list[Any]] = {}
    for gradient in gradients(expr):
        name = gradient.label.removeprefix("gradient of ").partition(",")[0]
        values = evaluate(gradient.expr, known)
        if name == "the sum":
            known["grad"] = values
        out.setdefault(name, []).append(values)
    return out


@pytest.mark.parametrize("data", [data for _, data in CASES], ids=[name for name, _ in CASES])
def test_gradients_are_those_of_differences(data: dict[str, Any]) -> None:
    expr, inputs, upstream = forward(data)
    found = backward(data)
    for name in inputs:
        wanted = differences(expr, inputs, upstream, name)
        assert name in found
        # The phases of a strided window hold disjoint elements and leave out what no window reads.
        values = np.sort(np.concatenate([np.ravel(part) for part in found[name]]))
        nonzero = np.sort(wanted[np.abs(wanted) > 1e-9])
        np.testing.assert_allclose(values[np.abs(values) > 1e-9], nonzero, rtol=1e-5)
        if len(found[name]) == 1 and found[name][0].shape == wanted.shape:
            np.testing.assert_allclose(found[name][0], wanted, rtol=1e-5, atol=1e-8)


def test_a_strided_window_falls_into_phases() -> None:
    data = {"op": "conv2d", "n": 1, "c": 2, "h": 8, "w": 8, "f": 3, "kh": 3, "kw": 3, "stride": 2, "padding": 1}
    labels = [gradient.label for gradient in gradients(operator_from_data(data))]
    assert labels == [*(f"gradient of X, phase {i} of 4" for i in range(1, 5)), "gradient of W"]


@pytest.mark.parametrize("shape", [[6, 7], [7]])
def test_softmax_from_its_result(shape: list[int]) -> None:
    expr, inputs, upstream = forward({"op": "softmax", "shape": shape})
    (gradient,) = gradients(expr)
    shaped = gradient.expr.inputs[0].shape
    known = {"Y": evaluate(expr, inputs).reshape(shaped), "grad": upstream.reshape(shaped)}
    wanted = differences(expr, inputs, upstream, "X").reshape(shaped)
    np.testing.assert_allclose(evaluate(gradient.expr, known), wanted, atol=1e-8)


def test_layer_norm_from_its_moments() -> None:
    expr, inputs, upstream = forward({"op": "layer_norm", "shape": [6, 7]})
    x = inputs["X"]
    known = {"X": x, "grad": upstream, "gamma": inputs["gamma"], "Mean": x.mean(1), "Rstd": (x.var(1) + 1e-5) ** -0.5}
    found = {gradient.label: evaluate(gradient.expr, known) for gradient in gradients(expr)}
    for name in ("X", "gamma", "beta"):
        wanted = differences(expr, inputs, upstream, name)
        np.testing.assert_allclose(found[f"gradient of {name}"], wanted, rtol=1e-5, atol=1e-7)


NUMBERED: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("rows read", {"expr": "E[i,d] = T[I[i],d]", "sizes": {"i": 5, "d": 3}, "shapes": {"T": [4, 3]}}, [2, 0, 2, 3, 2]),
    (
        "rows read and scaled",
        {"expr": "E[d,i] = T[I[i],d] * W[i] + P[i,d]", "sizes": {"i": 5, "d": 3}, "shapes": {"T": [4, 3]}},
        [1, 1, 0, 3, 1],
    ),
    (
        "rows read by two axes",
        {"expr": "E[b,s,d] = T[I[b,s],d]", "sizes": {"b": 2, "s": 3, "d": 2}, "shapes": {"T": [4, 2]}},
        [[3, 3, 0], [1, 3, 0]],
    ),
    ("scattered rows", {"op": "scatter_add", "rows": 4, "columns": 3, "count": 6}, [1, -1, 3, 1, 4, 0]),
    (
        "scattered and scaled",
        {"expr": "Y[h,i,c] = sum(t, select(i == I[t], W[t] * X[t,h,c], 0))", "sizes": {"i": 3, "t": 5, "h": 2, "c": 2}},
        [2, 2, 0, 7, -3],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("data", "numbers"), [each[1:] for each in NUMBERED], ids=[each[0] for each in NUMBERED])
def test_gradients_of_rows_by_number_are_those_of_differences(data: dict[str, Any], numbers: list[Any]) -> None:
    typed = {**data, "dtypes": {"I": "int32"}} if "expr" in data else data
    expr, inputs, upstream = forward(typed)
    inputs["I"] = np.array(numbers, np.float64)
    found = {gradient.label.removeprefix("gradient of "): gradient.expr for gradient in gradients(expr)}
    for name, gradient in found.items():
        shapes = {tensor.name: tensor.shape for tensor in gradient.inputs}
        known = {each: values.reshape(shapes.get(each, values.shape)) for each, values in inputs.items()}
        known["grad"] = upstream.reshape(shapes.get("grad", upstream.shape))
        values = evaluate(gradient, known)
        np.testing.assert_allclose(values, differences(expr, inputs, upstream, name), rtol=1e-5, atol=1e-8)
    assert {"I", *found} == set(inputs)


@pytest.mark.parametrize("axis", [0, 1])
def test_values_by_rank_from_their_places(axis: int) -> None:
    expr, inputs, upstream = forward({"op": "topk", "shape": [7, 6], "k": 3, "axis": axis, "largest": axis == 0})
    (gradient,) = gradients(expr)
    places = np.argsort(-inputs["X"] if axis == 0 else inputs["X"], axis=axis).take(range(3), axis=axis)
    values = evaluate(gradient.expr, {"Places": places.astype(np.float64), "grad": upstream})
    np.testing.assert_allclose(values, differences(expr, inputs, upstream, "X"), rtol=1e-5, atol=1e-8)


def test_passed_on_gradients_need_no_kernel() -> None:
    assert gradients(operator_from_data({"op": "elementwise", "function": "add", "shape": [4, 5]})) == []


@pytest.mark.parametrize(
    "data",
    [
        {"op": "max_pool2d", "n": 1, "c": 2, "h": 8, "w": 8, "kh": 2, "kw": 2, "stride": 2},
        {"op": "conv2d", "n": 1, "c": 2, "h": 9, "w": 9, "f": 2, "kh": 3, "kw": 3, "stride": 2, "dilation": 2},
        {"expr": "Y[i] = X[2*i] * X[2*i + 1]", "sizes": {"i": 4}},
        {"expr": "Y[i] = sum(k, X[i,k] * X[k,i])", "sizes": {"i": 4, "k": 4}},
        {"op": "topk", "shape": [4, 9], "k": 2, "result": "indices"},
        {"expr": "Y[i] = argmax(j, X[i,j]) / 2", "sizes": {"i": 4, "j": 5}},
        {
            "expr": "Y[b,s,d] = T[I[b,s],d] * W[s]",
            "sizes": {"b": 2, "s": 3, "d": 2},
            "shapes": {"T": [9, 2]},
            "dtypes": {"I": "int32"},
        },
        {"expr": "P[i] = max(j, X[i,j]); Y[i] = log(sum(j, exp(X[i,j] - P[i])))", "sizes": {"i": 4, "j": 5}},
    ],
)
def test_what_has_none_of_ours_is_refused_in_one_line(data: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        gradients(operator_from_data(data))
    assert "has no backward pass of ours" in str(error.value) and "--implementation library" in str(error.value)
