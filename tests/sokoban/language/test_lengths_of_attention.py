"""Attention of sequences with lengths of their own: its values, its tensors, its data, and how it is recognised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sokoban.language.named.attention import Attention
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.recognition import recognised
from sokoban.language.reference import evaluate

Data = dict[str, Any]
BASE: Data = {
    "op": "attention", "b": 3, "heads": 4, "queries": 7, "keys": 37, "head_dim": 8, "dtype": "float64",
}  # fmt: skip
CASES: dict[str, Data] = {
    "all keys": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 9},
    "grouped decoding": {"causal": True, "queries": 1, "kv_heads": 2, "value_dim": 5},
    "pages": {"page": 16, "pool": 12},
    "full pages": {"page": 16, "pool": 12, "keys": 32, "causal": True},
    "a window of pages": {"page": 16, "pool": 12, "causal": True, "window": 9, "kv_heads": 2},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_values_are_those_of_each_sequence_alone(changes: Data) -> None:
    asked = BASE | changes
    expr = operator_from_data(asked | {"lengths": True})
    inputs = random_inputs(expr, seed=3)
    least = asked["queries"] if asked.get("causal") else 1
    inputs["Lengths"] = np.array([12, least - 1, asked["keys"] + 2], float)
    result = evaluate(expr, inputs)
    for sequence, length in enumerate((12, least, asked["keys"])):
        alone = operator_from_data(asked | {"b": 1, "keys": length})
        own = {name: array[sequence : sequence + 1] for name, array in inputs.items() if name != "Lengths"}
        if "Table" in own:
            own |= {name: inputs[name] for name in "KV"}
            own["Table"] = own["Table"][:, : -(-length // asked["page"])]
        else:
            own |= {name: own[name][:, :, :length] for name in "KV"}
        np.testing.assert_allclose(evaluate(alone, own)[0], result[sequence], rtol=1e-12, atol=1e-12)


def test_lengths_are_an_input_in_front_of_values() -> None:
    expr = operator_from_data(BASE | {"lengths": True, "page": 16, "pool": 12, "dtype": "float16"})
    assert [(tensor.name, tensor.dtype) for tensor in expr.inputs] == [
        ("Q", "float16"), ("K", "float16"), ("Table", "int32"), ("Lengths", "int32"), ("V", "float16"),
    ]  # fmt: skip
    assert expr.tensor_by_name["Lengths"].shape == (3,)
    assert expr.name == "attention_3x4x7x37x8_page16_pool12_lengths_float16"


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_it_is_recognised_in_its_expression(changes: Data) -> None:
    asked = BASE | changes
    expr = operator_from_data(asked | {"lengths": True, "epilogue": ["relu"]})
    operator = recognised(expr.rewritten()).operator_as(Attention)
    assert operator is not None
    assert operator.lengths
    assert (operator.key_count, operator.queries) == (asked["keys"], asked["queries"])
    assert (operator.causal, operator.window) == (asked.get("causal", False), asked.get("window", 0))
    assert operator.pool == asked.get("pool", 0)


def test_another_cut_is_no_attention_of_lengths() -> None:
    text = (
        "L[n,h,q,k] = select(k < min(max(Count[n], 2), 37), sum(c, B[n,h,k,c] * A[n,h,q,c]) / 8, -inf)\n"
        "M[n,h,q] = max(k, L[n,h,q,k]); W[n,h,q,k] = exp(L[n,h,q,k] - M[n,h,q]); T[n,h,q] = sum(k, W[n,h,q,k])\n"
        "R[n,h,q,c] = sum(k, W[n,h,q,k] * C[n,h,k,c]) / T[n,h,q]"
    )
    data = {"expr": text, "sizes": {"n": 2, "h": 4, "q": 7, "k": 37, "c": 64}, "dtypes": {"Count": "int32"}}
    assert operator_from_data(data).operator_as(Attention) is None
    data["expr"] = text.replace("Count[n], 2", "Count[n], 1")
    operator = operator_from_data(data).operator_as(Attention)
    assert operator is not None and operator.lengths


def test_counts_of_proofs_lie_on_both_sides_of_their_ends() -> None:
    expr = operator_from_data(BASE | {"b": 64, "lengths": True})
    lengths = np.concatenate([random_inputs(expr, seed)["Lengths"] for seed in range(4)])
    assert (lengths < 1).any() and (lengths >= 37).any()
    assert len(set(lengths[(lengths >= 1) & (lengths < 37)])) > 25
