"""Named operators against independent NumPy, and everything an operator file can get wrong."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from hal.support.errors import InputError
from sokoban.language.expression import TensorExpr
from sokoban.language.named import NAMED_OPERATORS
from sokoban.language.operators import (
    MAX_FILE_BYTES,
    load_operators,
    operator_from_data,
    operator_schema,
    operators_from_json,
)
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from tests.sokoban.strategies import operators

Data = dict[str, Any]


def run(data: Data) -> tuple[dict[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """The operator's inputs and output on random data, all in the caller's shapes."""
    expr = operator_from_data(data)
    inputs = random_inputs(expr, seed=7)
    shaped = {name: array.reshape(expr.tensor_by_name[name].caller_shape) for name, array in inputs.items()}
    return shaped, evaluate(expr, shaped).reshape(expr.output.caller_shape)


def axes_of(expr: TensorExpr) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Output axes and reduction axes of a one-reduction operator, as schedules and tiles name them."""
    statement = next(s for s in expr.statements if s.reduction)
    assert statement.reduction is not None
    return statement.axes, statement.reduction.axes


@pytest.mark.parametrize(("transpose_a", "transpose_b"), list(itertools.product([False, True], repeat=2)))
def test_matmul(transpose_a: bool, transpose_b: bool) -> None:
    data = {"op": "matmul", "m": 5, "n": 7, "k": 11, "transpose_a": transpose_a, "transpose_b": transpose_b}
    inputs, output = run(data)
    a = inputs["A"].T if transpose_a else inputs["A"]
    b = inputs["B"].T if transpose_b else inputs["B"]
    np.testing.assert_allclose(output, np.matmul(a, b))
    assert axes_of(operator_from_data(data)) == (("m", "n"), ("k",))


def test_batch_matmul() -> None:
    data = {"op": "batch_matmul", "b": 3, "m": 5, "n": 7, "k": 11, "transpose_b": True}
    inputs, output = run(data)
    np.testing.assert_allclose(output, np.einsum("bmk,bnk->bmn", inputs["A"], inputs["B"]))
    assert axes_of(operator_from_data(data)) == (("b", "m", "n"), ("k",))


def convolve(
    x: np.ndarray[Any, Any], w: np.ndarray[Any, Any], stride: tuple[int, int], dilation: tuple[int, int],
    padding: tuple[int, int, int, int], groups: int,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Convolution by loops over the output, NCHW."""
    top, left, bottom, right = padding
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    (n, _, h, width), (f, per_group, kh, kw) = x.shape, w.shape
    rows = (h - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    columns = (width - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    y = np.zeros((n, f, rows, columns))
    for out_f, row, column in itertools.product(range(f), range(rows), range(columns)):
        first = out_f // (f // groups) * per_group
        taps_y = [row * stride[0] + dilation[0] * tap for tap in range(kh)]
        taps_x = [column * stride[1] + dilation[1] * tap for tap in range(kw)]
        patch = x[:, first : first + per_group][:, :, taps_y][:, :, :, taps_x]
        y[:, out_f, row, column] = (patch * w[out_f]).sum(axis=(1, 2, 3))
    return y


CONVOLUTIONS: list[tuple[Data, tuple[int, int], tuple[int, int], tuple[int, int, int, int]]] = [
    ({}, (1, 1), (1, 1), (0, 0, 0, 0)),
    ({"padding": 2, "stride": 2}, (2, 2), (1, 1), (2, 2, 2, 2)),
    ({"padding": [1, 2, 3, 0], "stride": [2, 3], "dilation": [1, 2]}, (2, 3), (1, 2), (1, 2, 3, 0)),
    # SAME, 9 rows: ceil(9/2) = 5 outputs reach (5-1)*2 + 3 = 11 rows, so 2 more: 1 above, 1 below.
    # 12 columns: 6 outputs reach 5*2 + 4 = 14 columns, so 2 more: 1 left, 1 right.
    ({"padding": "SAME", "stride": 2}, (2, 2), (1, 1), (1, 1, 1, 1)),
    # 9 rows, stride 1: 3 - 1 = 2 more; 12 columns: 4 - 1 = 3 more, the odd one at the right.
    ({"padding": "SAME"}, (1, 1), (1, 1), (1, 1, 1, 2)),
]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("keys", "stride", "dilation", "padding"), CONVOLUTIONS)
def test_conv2d(
    keys: Data, stride: tuple[int, int], dilation: tuple[int, int], padding: tuple[int, int, int, int],
    groups: int, layout: str,
) -> None:  # fmt: skip
    data = {"op": "conv2d", "n": 2, "c": 6, "h": 9, "w": 12, "f": 3 * 5, "kh": 3, "kw": 4}
    inputs, output = run({**data, **keys, "groups": groups, "layout": layout})
    x, w = inputs["X"], inputs["W"]
    if layout == "NHWC":
        x, w, output = x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), output.transpose(0, 3, 1, 2)
    assert w.shape == (15, 6 // groups, 3, 4)
    np.testing.assert_allclose(output, convolve(x, w, stride, dilation, padding, groups), atol=1e-12)


def test_conv2d_axes() -> None:
    data: Data = {"op": "conv2d", "n": 2, "c": 6, "h": 9, "w": 12, "f": 15, "kh": 3, "kw": 4}
    assert axes_of(operator_from_data(data)) == (("n", "f", "oh", "ow"), ("c", "kh", "kw"))
    grouped = operator_from_data({**data, "groups": 3})
    assert axes_of(grouped) == (("n", "g", "f", "oh", "ow"), ("c", "kh", "kw"))
    assert grouped.sizes == {"n": 2, "g": 3, "f": 5, "oh": 7, "ow": 9, "c": 2, "kh": 3, "kw": 4}
    assert [(t.name, t.shape, t.caller_shape) for t in grouped.tensors] == [
        ("X", (2, 3, 2, 9, 12), (2, 6, 9, 12)),
        ("W", (3, 5, 2, 3, 4), (15, 2, 3, 4)),
        ("Y", (2, 3, 5, 7, 9), (2, 15, 7, 9)),
    ]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_depthwise_conv2d(layout: str) -> None:
    data = {"op": "depthwise_conv2d", "n": 2, "c": 5, "h": 9, "w": 12, "kh": 3, "kw": 4, "stride": 2, "padding": 1}
    inputs, output = run({**data, "layout": layout})
    x, w = inputs["X"], inputs["W"]
    if layout == "NHWC":
        x, w, output = x.transpose(0, 3, 1, 2), w.transpose(2, 3, 0, 1), output.transpose(0, 3, 1, 2)
    assert w.shape == (5, 1, 3, 4)
    np.testing.assert_allclose(output, convolve(x, w, (2, 2), (1, 1), (1, 1, 1, 1), groups=5), atol=1e-12)
    assert axes_of(operator_from_data(data)) == (("n", "c", "oh", "ow"), ("kh", "kw"))


def pool(x: np.ndarray[Any, Any], keys: Data, outside: float, value: Any) -> np.ndarray[Any, Any]:
    """``value`` of every window, NCHW; the window's elements come flattened, the padding as ``outside``."""
    (top, left, bottom, right), (sy, sx) = keys["padding"], keys["stride"]
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=outside)
    rows, columns = (x.shape[2] - keys["kh"]) // sy + 1, (x.shape[3] - keys["kw"]) // sx + 1
    y = np.zeros((*x.shape[:2], rows, columns))
    for row, column in itertools.product(range(rows), range(columns)):
        window = x[:, :, row * sy : row * sy + keys["kh"], column * sx : column * sx + keys["kw"]]
        y[:, :, row, column] = value(window.reshape(*x.shape[:2], -1))
    return y


POOL = {"n": 2, "c": 3, "h": 7, "w": 10, "kh": 3, "kw": 2, "stride": [2, 3], "padding": [1, 0, 2, 1]}


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_max_pool2d_ignores_the_padding(layout: str) -> None:
    inputs, output = run({"op": "max_pool2d", **POOL, "layout": layout})
    x = inputs["X"]
    if layout == "NHWC":
        x, output = x.transpose(0, 3, 1, 2), output.transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(output, pool(x - 5, POOL, -math.inf, lambda w: w.max(axis=-1)) + 5)


def test_avg_pool2d_counts_what_is_inside() -> None:
    inputs, output = run({"op": "avg_pool2d", **POOL})
    expected = pool(inputs["X"], POOL, math.nan, lambda window: np.nanmean(window, axis=-1))
    np.testing.assert_allclose(output, expected)
    _, with_padding = run({"op": "avg_pool2d", **POOL, "count_include_pad": True})
    np.testing.assert_allclose(with_padding, pool(inputs["X"], POOL, 0.0, lambda window: window.mean(axis=-1)))


def test_pool_axes() -> None:
    for op in ("avg_pool2d", "max_pool2d"):
        assert axes_of(operator_from_data({"op": op, **POOL})) == (("n", "c", "oh", "ow"), ("kh", "kw"))


@pytest.mark.parametrize("function", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("axes", [[0], [-1], [2, 0], [0, 1, 2]])
def test_reduce(function: str, axes: list[int]) -> None:
    inputs, output = run({"op": "reduce", "function": function, "shape": [3, 5, 7], "axes": axes})
    expected = getattr(np, function)(inputs["X"], axis=tuple(axes))
    np.testing.assert_allclose(output, expected.reshape(expected.shape or (1,)))


UNARY: dict[str, Any] = {
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "gelu": lambda x: np.vectorize(lambda v: v * 0.5 * math.erfc(-v / math.sqrt(2)))(x),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "rsqrt": lambda x: x**-0.5,
    "erf": lambda x: np.vectorize(math.erf)(x),
}


@pytest.mark.parametrize("function", list(UNARY))
def test_unary_elementwise(function: str) -> None:
    inputs, output = run({"op": "elementwise", "function": function, "shape": [5, 7]})
    np.testing.assert_allclose(output, UNARY[function](inputs["X"]), rtol=1e-12)


BINARY: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power,
    "min": np.minimum, "max": np.maximum,
}  # fmt: skip


@pytest.mark.parametrize("function", list(BINARY))
def test_binary_elementwise(function: str) -> None:
    data: Data = {"op": "elementwise", "function": function}
    inputs, output = run({**data, "shape": [5, 7]})
    np.testing.assert_allclose(output, BINARY[function](inputs["X"], inputs["X2"]))
    inputs, output = run({**data, "shapes": [[3, 1, 7], [5, 1]]})
    assert output.shape == (3, 5, 7)
    np.testing.assert_allclose(output, BINARY[function](inputs["X"], inputs["X2"]))
    inputs, output = run({**data, "shape": [5, 7], "scalar": True})
    np.testing.assert_allclose(output, BINARY[function](inputs["X"], 2.0))
    inputs, output = run({**data, "shape": [5, 7], "scalar": True, "value": -0.5})
    np.testing.assert_allclose(output, BINARY[function](inputs["X"], -0.5))


@pytest.mark.parametrize(("shape", "axis"), [([5, 7], -1), ([3, 5, 7], 1), ([3, 5], 0), ([9], 0)])
def test_softmax_and_layer_norm(shape: list[int], axis: int) -> None:
    inputs, output = run({"op": "softmax", "shape": shape, "axis": axis})
    powers = np.exp(inputs["X"])
    np.testing.assert_allclose(output, powers / powers.sum(axis=axis, keepdims=True))
    inputs, output = run({"op": "layer_norm", "shape": shape, "axis": axis, "eps": 0.25})
    x = inputs["X"]
    along = [1] * len(shape)
    along[axis] = shape[axis]
    scaled = (x - x.mean(axis=axis, keepdims=True)) / np.sqrt(x.var(axis=axis, keepdims=True) + 0.25)
    expected = scaled * inputs["gamma"].reshape(along) + inputs["beta"].reshape(along)
    np.testing.assert_allclose(output, expected, atol=1e-12)


def test_transpose() -> None:
    inputs, output = run({"op": "transpose", "shape": [3, 5, 7], "perm": [2, 0, 1]})
    np.testing.assert_array_equal(output, inputs["X"].transpose(2, 0, 1))


def test_epilogue_steps_apply_in_order() -> None:
    epilogue = [{"function": "bias_add", "axis": "m"}, "tanh", {"function": "residual_add"},
                {"function": "scale", "value": -0.5}, {"function": "bias_add", "axis": "n"}]  # fmt: skip
    data: Data = {"op": "matmul", "m": 5, "n": 7, "k": 11, "epilogue": epilogue, "dtype": "float16"}
    inputs, output = run(data)
    activated = np.tanh(inputs["A"] @ inputs["B"] + inputs["bias"][:, None])
    np.testing.assert_allclose(output, (activated + inputs["residual"]) * -0.5 + inputs["bias_2"])
    expr = operator_from_data(data)
    assert [(t.name, t.dtype) for t in expr.tensors] == [
        ("A", "float16"), ("B", "float16"), ("bias", "float16"), ("residual", "float16"), ("bias_2", "float16"),
        ("C", "float32"), ("Out", "float16"),
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_bias_of_a_grouped_convolution_is_one_vector(layout: str) -> None:
    data = {"op": "conv2d", "n": 2, "c": 6, "h": 5, "w": 4, "f": 15, "kh": 3, "kw": 2, "groups": 3, "layout": layout}
    inputs, plain = run(data)
    more, output = run({**data, "epilogue": [{"function": "bias_add", "axis": "f"}, {"function": "residual_add"}]})
    np.testing.assert_array_equal(inputs["X"], more["X"])
    bias = more["bias"] if layout == "NHWC" else more["bias"][:, None, None]
    np.testing.assert_allclose(output, plain + bias + more["residual"])


def test_expression_with_epilogue() -> None:
    data = {
        "expr": "Out[i] = X[i - 1]", "sizes": {"i": 5}, "shapes": {"X": [5]}, "pad": {"X": "-inf"},
        "dtypes": {"X": "float16", "Out": "float16"}, "epilogue": ["tanh"],
    }  # fmt: skip
    inputs, output = run(data)
    np.testing.assert_allclose(output, np.tanh([-math.inf, *inputs["X"][:4]]))
    expr = operator_from_data(data)
    assert (expr.output.name, expr.output.dtype, expr.name) == ("Out_2", "float16", "expr_Out_5_tanh")


def test_names_are_derived_and_made_distinct() -> None:
    matmul = {"op": "matmul", "m": 65536, "n": 1024, "k": 2}
    conv = {"op": "conv2d", "n": 1, "c": 6, "h": 9, "w": 11, "f": 4, "kh": 3, "kw": 5, "padding": "SAME", "stride": 2}
    suite = [
        matmul,
        {**matmul, "name": "matmul_65536x1024x2_2"},
        matmul,
        conv,
        {**conv, "groups": 2, "dtype": "float16"},
    ]
    suite += [{"op": "elementwise", "function": "relu", "shape": [3, 5]}, {"op": "softmax", "shape": [3, 5], "axis": 0}]
    names = [expr.name for expr in operators_from_json(json.dumps(suite).encode(), "ops.json")]
    assert names == [
        "matmul_65536x1024x2",
        "matmul_65536x1024x2_2",
        "matmul_65536x1024x2_3",
        "conv2d_1x6x9x11_4x3x5_s2_same",
        "conv2d_1x6x9x11_4x3x5_s2_same_g2_float16",
        "elementwise_relu_3x5",
        "softmax_3x5_axis0",
    ]


def test_long_derived_names_stay_short_and_distinct() -> None:
    data: Data = {
        "op": "elementwise",
        "function": "add",
        "shapes": [[1000000007, 1], [1, 1]],
        "epilogue": ["sigmoid"] * 20,
    }
    first, second = operator_from_data(data).name, operator_from_data({**data, "epilogue": ["sigmoid"] * 21}).name
    assert len(first) == len(second) == 96 and first != second


def test_file_with_one_operator(tmp_path: Path) -> None:
    path = tmp_path / "op.json"
    path.write_text('{"op": "matmul", "m": 3, "n": 5, "k": 7, "name": "mine"}')
    assert [expr.name for expr in load_operators(path)] == ["mine"]


MATMUL = {"op": "matmul", "m": 3, "n": 5, "k": 7}
CONV: Data = {"op": "conv2d", "n": 2, "c": 6, "h": 9, "w": 11, "f": 4, "kh": 3, "kw": 5}
KNOWN = (
    "known: matmul, batch_matmul, conv2d, depthwise_conv2d, avg_pool2d, max_pool2d, reduce, scan, topk, "
    "scatter_add, elementwise, softmax, layer_norm, transpose, attention, attention_gradient"
)
SAFE = "use 1 to 100 of A-Z a-z 0-9 . _ -, not starting with a dot"
PAD_LESS = "pad less; a window wholly outside the input has no value"
AFFINE = "an index is a sum of integer*axis terms plus an integer, or one element of an integer tensor"
FIT = "pad more, or use a smaller kh or dilation, or a larger h"
STEPS = "tanh, relu, sigmoid, silu, gelu, bias_add, residual_add, scale"
DTYPES = "use one of float16, bfloat16, float32, float64"
OPERAND_DTYPES = f"{DTYPES}, int8, float8_e4m3fn, float8_e5m2"
ALL_DTYPES = f"{DTYPES}, int8, int32, float8_e4m3fn, float8_e5m2"
ERRORS: list[tuple[Any, str]] = [
    ({"op": "matmul", "m": 3, "n": 5}, 'ops.json.k: is missing; add "k"'),
    ({**MATMUL, "k": -1}, "ops.json.k: expected int >= 1"),
    ({**MATMUL, "k": 0}, "ops.json.k: expected int >= 1"),
    ({**MATMUL, "k": 2**31}, "ops.json.k: expected int <= 2147483647"),
    ({**MATMUL, "k": True}, "ops.json.k: expected int, got bool"),
    ({**MATMUL, "k": 7.0}, "ops.json.k: expected int, got float"),
    ({**MATMUL, "k": "7"}, "ops.json.k: expected int, got str"),
    ({**MATMUL, "transpose": True}, "ops.json: unknown key 'transpose'; did you mean 'transpose_b'?"),
    ({**MATMUL, "zzz": 1},
     "ops.json: unknown key 'zzz'; known: name, dtype, accumulate, allow_tf32, epilogue, output_dtype, transpose_a, "
     "transpose_b, m, n, k, op"),
    ({**MATMUL, "dtype": "int4"}, f"ops.json.dtype: unknown dtype 'int4'; {OPERAND_DTYPES}"),
    ({"op": "softmax", "shape": [4, 5], "dtype": "int8"}, f"ops.json.dtype: unknown dtype 'int8'; {DTYPES}"),
    ({**MATMUL, "dtype": "int8", "output_dtype": "int8"},
     "ops.json.output_dtype: unknown output_dtype 'int8'; use one of float16, bfloat16, float32, float64, int32"),
    ({**MATMUL, "dtype": "int8", "epilogue": ["gelu"]},
     "ops.json.output_dtype: int32 keeps none but whole numbers; use float32"),
    ({**MATMUL, "accumulate": "int32"},
     "ops.json.accumulate: int32 takes one reduction of integers by functions of integers; use float32"),
    ({**MATMUL, "dtype": "float16", "allow_tf32": True},
     "ops.json.allow_tf32: is about products of float32 tensors, and there are none; remove it"),
    ({**MATMUL, "accumulate": "float16"},
     "ops.json.accumulate: unknown accumulate 'float16'; use one of float32, float64, int32"),
    ({**MATMUL, "dtype": "float64", "accumulate": "float32"},
     "ops.json.accumulate: float32 is narrower than the float64 tensors; use float64"),
    ({**MATMUL, "m": 65536, "n": 65536},
     "ops.json: tensor C: 65536x65536 is more than 2147483647 elements (32-bit indexing); split the work"),
    ({**MATMUL, "name": "../../etc/passwd"},
     f"ops.json.name: '../../etc/passwd' cannot name a folder; {SAFE}"),
    ({**MATMUL, "name": ".hidden"},
     f"ops.json.name: '.hidden' cannot name a folder; {SAFE}"),
    ({**MATMUL, "name": ""},
     f"ops.json.name: '' cannot name a folder; {SAFE}"),
    ({**MATMUL, "epilogue": ["relu", "softplus"]},
     f"ops.json.epilogue[1]: unknown epilogue 'softplus'; use one of {STEPS}"),
    ({**MATMUL, "epilogue": ["bias_add"]},
     "ops.json.epilogue[0]: 'bias_add' is no word by itself; write {\"function\": \"bias_add\", \"axis\": ...}"),
    ({**MATMUL, "epilogue": [{"function": "relu"}]},
     "ops.json.epilogue[0]: 'relu' has no keys; write \"relu\" by itself"),
    ({**MATMUL, "epilogue": [{"function": "bias_add"}]}, 'ops.json.epilogue[0].axis: is missing; add "axis"'),
    ({**MATMUL, "epilogue": [{"function": "bias_add", "axis": "k"}]},
     "ops.json.epilogue[0].axis: no axis 'k'; use one of m, n"),
    ({**CONV, "groups": 2, "epilogue": [{"function": "bias_add", "axis": "g"}]},
     "ops.json.epilogue[0].axis: no axis 'g'; use one of n, f, oh, ow"),
    ({"op": "matmull"}, f"ops.json.op: unknown operator 'matmull'; did you mean 'matmul'? {KNOWN}"),
    ({"op": 3}, f"ops.json.op: unknown operator a number; {KNOWN}"),
    ({}, 'ops.json: has neither op nor expr; write {"op": ...} or {"expr": ...}'),
    ({"op": "matmul", "expr": ""}, 'ops.json: has both op and expr; write {"op": ...} or {"expr": ...}'),
    ("matmul", 'ops.json: expected an object, got a string; write {"op": ...} or {"expr": ...}'),
    ([], "ops.json: an empty list; write at least one operator"),
    ([MATMUL, [MATMUL]], 'ops.json[1]: expected an object, got an array; write {"op": ...} or {"expr": ...}'),
    ([MATMUL, {**CONV, "stride": "2"}], "ops.json[1].stride: expected int | array, got str"),
    ([{**MATMUL, "name": "a"}, {**MATMUL, "name": "a"}],
     "ops.json[1].name: 'a' is already used by ops.json[0]; rename one of them"),
    ({**CONV, "stride": [2, 0]}, "ops.json.stride[1]: expected int >= 1"),
    ({**CONV, "padding": "same"},
     "ops.json.padding: unknown padding 'same'; use one of SAME, VALID, a number, [top, left, bottom, right]"),
    ({**CONV, "padding": -1}, "ops.json.padding: expected int >= 0"),
    ({**CONV, "padding": [1, 1]}, "ops.json.padding: expected array of length >= 4"),
    ({**CONV, "h": 2**31 - 1, "n": 1, "c": 1, "w": 1, "kw": 1, "f": 1, "padding": [9, 0, 0, 0], "stride": 2**20},
     "ops.json: statement Y: an index of X goes beyond 32-bit integers; use smaller strides and offsets"),
    ({**CONV, "layout": "CHWN"}, "ops.json.layout: unknown layout 'CHWN'; use one of NCHW, NHWC"),
    ({**CONV, "groups": 4}, "ops.json.groups: 4 groups do not divide c = 6; change groups or c"),
    ({**CONV, "kh": 5, "dilation": 3, "padding": 1},
     f"ops.json.kh: the window covers 13 elements, the padded input 11; {FIT}"),
    ({"op": "max_pool2d", **POOL, "padding": [3, 0, 0, 0]},
     f"ops.json.padding: 3 is not smaller than the window of 3 (kh); {PAD_LESS}"),
    ({"op": "reduce", "function": "sum", "shape": [3, 5], "axes": [2]},
     "ops.json.axes[0]: dimension 2 of a tensor with 2; use 0 to 1"),
    ({"op": "reduce", "function": "sum", "shape": [3, 5], "axes": [1, -1]},
     "ops.json.axes: [1, -1] names a dimension twice; name every dimension once"),
    ({"op": "reduce", "function": "median", "shape": [3], "axes": [0]},
     "ops.json.function: unknown function 'median'; use one of sum, mean, max, min, argmax, argmin"),
    ({"op": "elementwise", "function": "add", "shapes": [[3], [4]]},
     "ops.json.shapes: [3] and [4] do not broadcast; from the right, extents must be equal or one of them 1"),
    ({"op": "elementwise", "function": "add", "shapes": [[3]]},
     "ops.json.shapes: add reads 2 tensor(s), got 1 shape(s)"),
    ({"op": "elementwise", "function": "relu"},
     "ops.json.shape: exactly one of shape and shapes is needed; write shape for operands of one shape"),
    ({"op": "elementwise", "function": "relu", "shape": [3], "scalar": True},
     "ops.json.scalar: relu takes one operand; remove scalar"),
    ({"op": "elementwise", "function": "add", "shape": [3], "value": 2},
     'ops.json.value: is only used with a scalar operand; add "scalar": true or remove value'),
    ({"op": "softmax", "shape": [3, 5], "axis": 2}, "ops.json.axis: dimension 2 of a tensor with 2; use 0 to 1"),
    ({"op": "softmax", "shape": []}, "ops.json.shape: expected array of length >= 1"),
    ({"op": "transpose", "shape": [3, 5], "perm": [0, 0]},
     "ops.json.perm: [0, 0] does not order the 2 dimensions; use each of 0 to 1 once"),
    ({"expr": "__import__('os').system('id')"},
     "ops.json.expr: syntax error at column 11: unexpected '('; expected '['"),
    ({"expr": "Y[i] = X[i]"}, 'ops.json.sizes: is missing; add "sizes"'),
    ({"expr": 3, "sizes": {}}, "ops.json.expr: expected str, got int"),
    ({"expr": "Y[i] = X[i]", "sizes": {"i": -3}}, "ops.json.sizes.i: -3 is not between 1 and 2147483647"),
    ({"expr": "Y[i] = X[i]", "sizes": [3]}, "ops.json.sizes: expected an object, got an array"),
    ({"expr": "Y[i] = X[i]", "sizes": {"i": 3}, "dtypes": {"X": "int4"}},
     f"ops.json.dtypes.X: unknown dtype 'int4'; {ALL_DTYPES}"),
    ({"expr": "Y[i] = X[i]", "sizes": {"i": 3}, "shapes": {"X": 3}},
     "ops.json.shapes.X: expected a list of extents, got a number"),
    ({"expr": "Y[i] = X[i]", "sizes": {"i": 3}, "pad": {"X": "0"}},
     'ops.json.pad.X: expected a number, got \'0\'; write a number, "inf" or "-inf"'),
    ({"expr": "Y[i] = X[i*i]", "sizes": {"i": 3}},
     f"ops.json.expr: statement Y: index 'i*i' of X is not affine; {AFFINE}"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), ERRORS, ids=[message[:70] for _, message in ERRORS])
def test_error(data: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        operators_from_json(json.dumps(data).encode(), "ops.json")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "ops.json: broken JSON at line 1, column 1: it ends too early"),
        (b'{"op": "matmul",\n "m": 3,\n', "ops.json: broken JSON at line 3, column 1: it ends too early"),
        (b'[\n{"op": oops}]', "ops.json: broken JSON at line 2, column 8: invalid character"),
        (b'{"op": 1e999}', "ops.json: broken JSON: number out of range"),
        (b"[1,]", "ops.json: broken JSON at line 1, column 4: trailing comma in array"),
        (b'"\xff"', "ops.json: not UTF-8 text: invalid start byte; save the file as UTF-8"),
        (b"[" * 10_000_000,
         "ops.json: brackets nested too deep; an operator is an object, a suite a list of them"),
        (b'{"op":' * 2_000_000,
         "ops.json: brackets nested too deep; an operator is an object, a suite a list of them"),
        (b" " * (MAX_FILE_BYTES + 1), "ops.json: larger than 32 MiB; split the list into several files"),
    ],
    ids=["empty", "truncated", "word", "number", "comma", "encoding", "arrays", "objects", "large"],
)  # fmt: skip
def test_broken_json(text: bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        operators_from_json(text, "ops.json")
    assert str(caught.value) == message


@pytest.mark.parametrize("depth", [100, 900, 940, 960, 980, 1000])
@pytest.mark.parametrize(
    "text",
    [
        '{"op": "matmul", "m": 3, "n": 5, "k": 7, "epilogue": @}',
        '{"op": "matmul", "m": @, "n": 5, "k": 7}',
        '{"op": @}',
        '{"expr": @, "sizes": {"i": 3}}',
        '{"expr": "Y[i] = X[i]", "sizes": {"i": @}}',
        '{"expr": "Y[i] = X[i]", "sizes": {"i": 3}, "dtypes": {"X": @}}',
        '{"expr": "Y[i] = X[i]", "sizes": {"i": 3}, "shapes": {"X": [@]}}',
        '{"expr": "Y[i] = X[i]", "sizes": {"i": 3}, "pad": {"X": @}}',
    ],
)
def test_nested_values_are_input_errors_at_any_depth(text: str, depth: int) -> None:
    with pytest.raises(InputError):
        operators_from_json(text.replace("@", "[" * depth + "]" * depth).encode(), "ops.json")


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "op.json"
    with pytest.raises(InputError) as caught:
        load_operators(path)
    assert str(caught.value) == f"{path}: cannot be read: No such file or directory"
    with pytest.raises(InputError) as caught:
        load_operators(tmp_path)
    assert str(caught.value) == f"{tmp_path}: cannot be read: Is a directory"


def test_examples_of_the_documentation_are_operators() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operators.md").read_text()
    examples = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    seen = set()
    for example in examples:
        operators_from_json(example.encode(), "docs/operators.md")
        data = json.loads(example)
        seen |= {item.get("op", "expr") for item in (data if isinstance(data, list) else [data])}
    assert seen == {*NAMED_OPERATORS, "expr"}


def test_schema_has_every_operator() -> None:
    schema = operator_schema()
    json.dumps(schema)
    tags = {d["properties"]["op"]["enum"][0] for d in schema["$defs"].values() if "op" in d.get("properties", {})}
    assert tags == {*NAMED_OPERATORS, "grouped_matmul", "scaled_matmul"}


@settings(max_examples=30, deadline=None)
@given(operators(dtypes=("float16", "bfloat16", "float32", "float64")))
def test_random_operators_survive_json(data: Data) -> None:
    (expr,) = operators_from_json(json.dumps(data).encode(), "ops.json")
    assert expr == operator_from_data(data)
    assert len(expr.name) <= 100
