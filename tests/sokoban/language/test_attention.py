"""Attention against PyTorch's and against NumPy's, recognised again in its expression, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hal.support.errors import InputError
from sokoban.kernel.form import kernel_form
from sokoban.language.expression import TensorExpr
from sokoban.language.named.attention import Attention
from sokoban.language.operators import operator_from_data, operators_from_json
from sokoban.language.random_data import random_inputs
from sokoban.language.recognition import recognised
from sokoban.language.reference import evaluate

Data = dict[str, Any]
Arrays = dict[str, np.ndarray[Any, Any]]
BASE: Data = {"op": "attention", "b": 2, "heads": 6, "queries": 7, "head_dim": 5}

#: Every way to leave keys out, to share heads, and to differ in sizes.
CASES: dict[str, Data] = {
    "plain": {},
    "one-head": {"b": 1, "heads": 1},
    "cross": {"keys": 11, "value_dim": 3},
    "more-queries-than-keys": {"keys": 4},
    "causal": {"causal": True},
    "causal-after-a-cache": {"causal": True, "keys": 12},
    "decoding": {"causal": True, "queries": 1, "keys": 9, "kv_heads": 2},
    "grouped": {"kv_heads": 3, "keys": 5},
    "one-key-head": {"kv_heads": 1, "causal": True},
    "grouped-causal": {"kv_heads": 2, "causal": True, "keys": 10},
    "window": {"causal": True, "window": 3},
    "window-of-one": {"causal": True, "window": 1, "keys": 9},
    "window-as-long-as-the-offset": {"causal": True, "window": 5, "keys": 12},
    "window-beyond-the-keys": {"causal": True, "window": 100, "kv_heads": 3},
    "window-beyond-all-numbers": {"causal": True, "window": 2**31 - 1},
    "scale": {"scale": 0.25, "causal": True},
    "no-scale": {"scale": 1.0, "causal": True, "window": 2},
}


def run(data: Data) -> tuple[TensorExpr, Arrays, np.ndarray[Any, Any]]:
    """The operator, its inputs and its output on random data, all in the caller's shapes."""
    expr = operator_from_data(data)
    inputs = random_inputs(expr, seed=3)
    shaped = {name: array.reshape(expr.tensor_by_name[name].caller_shape) for name, array in inputs.items()}
    return expr, shaped, evaluate(expr, shaped).reshape(expr.output.caller_shape)


def seen(data: Data) -> np.ndarray[Any, Any]:
    """Which query sees which key, as FlashAttention says it: its ``window_size`` is ``(window - 1, 0)``."""
    queries: int = data["queries"]
    keys: int = data.get("keys", queries)
    mask = np.ones((queries, keys), np.bool_)
    if not data.get("causal"):
        return mask
    left = data["window"] - 1 if data.get("window") else keys
    for i in range(queries):
        own = i + keys - queries
        for j in range(keys):
            mask[i, j] = own - left <= j <= own
    return mask


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_values_are_those_of_pytorch(keys: Data, pytorch: Any) -> None:
    data = BASE | keys
    _, inputs, output = run(data | {"dtype": "float64"})
    q, k, v = (pytorch.from_numpy(inputs[name]) for name in "QKV")
    expected = pytorch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=pytorch.from_numpy(seen(data)), scale=data.get("scale"), enable_gqa="kv_heads" in data
    )
    np.testing.assert_allclose(output, expected.numpy(), rtol=1e-12, atol=1e-12)


def test_a_square_mask_is_pytorchs_causal(pytorch: Any) -> None:
    _, inputs, output = run(BASE | {"causal": True, "dtype": "float64"})
    q, k, v = (pytorch.from_numpy(inputs[name]) for name in "QKV")
    expected = pytorch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(output, expected.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_values_are_those_of_numpy(keys: Data) -> None:
    data = BASE | keys
    _, inputs, output = run(data)
    shared = data["heads"] // data.get("kv_heads", data["heads"])
    k, v = (np.repeat(inputs[name], shared, axis=1) for name in "KV")
    scores = inputs["Q"] @ k.transpose(0, 1, 3, 2) * data.get("scale", data["head_dim"] ** -0.5)
    weights = np.where(seen(data), np.exp(scores), 0.0)
    np.testing.assert_allclose(output, weights / weights.sum(-1, keepdims=True) @ v, rtol=1e-12, atol=1e-12)


def test_tensors_have_the_callers_shapes_and_the_results_type() -> None:
    expr = operator_from_data(BASE | {"kv_heads": 2, "keys": 9, "value_dim": 4, "dtype": "float8_e4m3fn"})
    shapes = {tensor.name: (tensor.caller_shape, tensor.dtype) for tensor in (*expr.inputs, expr.output)}
    assert shapes == {
        "Q": ((2, 6, 7, 5), "float8_e4m3fn"), "K": ((2, 2, 9, 5), "float8_e4m3fn"),
        "V": ((2, 2, 9, 4), "float8_e4m3fn"), "Y": ((2, 6, 7, 4), "bfloat16"),
    }  # fmt: skip
    assert expr.accumulate == "float32"


def test_an_epilogue_sees_all_heads() -> None:
    steps = [{"function": "bias_add", "axis": "h"}, {"function": "residual_add"}]
    expr, inputs, output = run(BASE | {"kv_heads": 2, "epilogue": steps})
    _, _, before = run(BASE | {"kv_heads": 2})
    assert (inputs["bias"].shape, inputs["residual"].shape) == ((6,), (2, 6, 7, 5))
    np.testing.assert_allclose(output, before + inputs["bias"][:, None, None] + inputs["residual"], rtol=1e-6)
    assert expr.name == "attention_2x6x7x7x5_kv2_bias_residual"


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_it_is_recognised_in_its_expression(keys: Data) -> None:
    data = BASE | keys
    found = recognised(operator_from_data(data | {"epilogue": ["relu"]}).rewritten()).operator_as(Attention)
    assert found is not None
    window = data.get("window", 0) if data.get("window", 0) < data.get("keys", 7) else 0
    asked = (data.get("causal", False), window, data.get("scale", data["head_dim"] ** -0.5))
    assert (found.causal, found.window_size, found.factor) == asked
    assert (found.b, found.heads, found.key_heads) == (data["b"], data["heads"], data.get("kv_heads", data["heads"]))
    assert (found.queries, found.key_count, found.head_dim) == (data["queries"], data.get("keys", 7), 5)
    assert found.value_size == data.get("value_dim", 5)


def test_other_expressions_are_no_attention() -> None:
    expr = operator_from_data(BASE | {"causal": True})
    assert recognised(expr.rewritten(statements=expr.statements[:-1])).origin is None
    text = (
        "Scores[i,j] = sum(d, Q[i,d] * K[j,d]); Logits[i,j] = Scores[i,j]; Peak[i] = max([j], Logits[i,j])\n"
        "E[i,j] = exp(Logits[i,j] - Peak[i]); Total[i] = sum([j], E[i,j]); P[i,j] = E[i,j] / Total[i]\n"
        "Y[i,e] = sum([j], P[i,j] * V[j,e])"
    )
    assert operator_from_data({"expr": text, "sizes": {"i": 3, "j": 4, "d": 5, "e": 6}}).origin is None
    assert recognised(operator_from_data({"op": "softmax", "shape": [4, 5]}).rewritten()).origin is None


def test_nothing_is_computed_behind_it_in_the_same_kernel() -> None:
    expr = operator_from_data(BASE | {"name": "core", "epilogue": ["relu"]})
    with pytest.raises(InputError, match=r"^core: ") as caught:
        kernel_form(expr)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kv_heads": 4}, "op.kv_heads: 6 heads are no multiple of 4; use a divisor of heads"),
        ({"kv_heads": 12}, "op.kv_heads: 6 heads are no multiple of 12; use a divisor of heads"),
        ({"window": 4}, "op.window: ends at a query's own key, which causal alone tells; add \"causal\": true"),
        ({"window": -1, "causal": True}, "op.window: expected int >= 0"),
        ({"causal": True, "keys": 6},
         "op.causal: 7 queries, but only 6 keys: the first would see none; use at least as many keys as queries"),
        ({"heads": 0}, "op.heads: expected int >= 1"),
        ({"algorithm": "flsh"}, "op.algorithm: unknown algorithm 'flsh'; use one of flash, eager"),
        ({"algorithm": "eager", "page": 64},
         'op.page: eager attention reads contiguous keys; remove it, or "algorithm"'),
        ({"algorithm": "eager", "dtype": "float8_e5m2"},
         "op.dtype: eager attention has no products of float8_e5m2; use bfloat16"),
        ({"dtype": "int8"},
         "op.dtype: unknown dtype 'int8'; use one of float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2"),
        ({"kv_head": 2}, "op: unknown key 'kv_head'; did you mean 'kv_heads'?"),
        ({"epilogue": [{"function": "bias_add", "axis": "j"}]},
         "op.epilogue[0].axis: no axis 'j'; use one of b, h, i, e"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(keys: Data, message: str) -> None:
    with pytest.raises(InputError) as caught:
        operators_from_json(json.dumps(BASE | keys).encode(), "op")
    assert str(caught.value) == message


def test_names_tell_operators_apart() -> None:
    keys: list[Data] = [
        {}, {"kv_heads": 2}, {"causal": True}, {"causal": True, "window": 3}, {"page": 16}, {"algorithm": "eager"},
        {"value_dim": 3}, {"scale": 0.5}, {"dtype": "bfloat16"}, {"keys": 8},
    ]  # fmt: skip
    names = [operator_from_data(BASE | more).name for more in keys]
    assert len(set(names)) == len(names)
    assert names[3] == "attention_2x6x7x7x5_causal_w3"
