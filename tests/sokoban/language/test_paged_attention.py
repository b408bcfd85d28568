"""Attention over pages of a pool: its values, its tensors, what it refuses, and how it is recognised."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hal.support.errors import InputError
from sokoban.language.named.attention import Attention
from sokoban.language.operators import operator_from_data, operators_from_json
from sokoban.language.random_data import random_inputs
from sokoban.language.recognition import recognised
from sokoban.language.reference import evaluate

Data = dict[str, Any]
BASE: Data = {"op": "attention", "b": 2, "heads": 4, "queries": 7, "keys": 37, "head_dim": 8, "dtype": "float64"}
PAGED: Data = BASE | {"page": 16, "pool": 9}
CASES: dict[str, Data] = {
    "the last page in part": {},
    "full pages": {"keys": 32},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 9},
    "grouped decoding": {"causal": True, "queries": 1, "kv_heads": 2, "value_dim": 5},
    "a token a page": {"page": 1, "pool": 50},
    "one page": {"keys": 11, "causal": True},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_values_are_those_of_the_keys_that_the_table_names(changes: Data) -> None:
    expr = operator_from_data(PAGED | changes)
    inputs = random_inputs(expr, seed=3)
    places = np.clip(inputs["Table"], 0, expr.tensor_by_name["K"].shape[0] - 1).astype(int)
    contiguous = operator_from_data(
        BASE | {key: value for key, value in changes.items() if key not in ("page", "pool")}
    )
    keys = contiguous.tensor_by_name["K"].caller_shape[2]
    gathered = {
        name: np.moveaxis(pool[places], 2, 1).reshape(2, pool.shape[1], -1, pool.shape[-1])[:, :, :keys]
        for name, pool in inputs.items()
        if name in "KV"
    }
    expected = evaluate(contiguous, {"Q": inputs["Q"], **gathered})
    np.testing.assert_allclose(evaluate(expr, inputs), expected, rtol=1e-12, atol=1e-12)


def test_tensors_are_those_of_the_pool() -> None:
    expr = operator_from_data(PAGED | {"kv_heads": 2, "value_dim": 4, "dtype": "float16"})
    shapes = {tensor.name: (tensor.caller_shape, tensor.dtype) for tensor in (*expr.inputs, expr.output)}
    assert shapes == {
        "Q": ((2, 4, 7, 8), "float16"), "K": ((9, 2, 16, 8), "float16"), "Table": ((2, 3), "int32"),
        "V": ((9, 2, 16, 4), "float16"), "Y": ((2, 4, 7, 4), "float16"),
    }  # fmt: skip
    assert expr.name == "attention_2x4x7x37x8_kv2_v4_page16_pool9_float16"


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_it_is_recognised_in_its_expression(changes: Data) -> None:
    asked = PAGED | changes
    operator = recognised(operator_from_data(asked | {"epilogue": ["relu"]}).rewritten()).operator_as(Attention)
    assert operator is not None
    assert (operator.page, operator.pool, operator.key_count) == (asked["page"], asked["pool"], asked["keys"])
    assert (operator.queries, operator.key_heads) == (asked["queries"], asked.get("kv_heads", 4))
    assert (operator.causal, operator.window) == (asked.get("causal", False), asked.get("window", 0))


#: Attention of pages by other names, the products turned round, the mask the other way.
WRITTEN = (
    "L[n,h,q,p,s] = select({slot} > q + 30, -inf, sum(c, Kc[Blocks[n,p],h,s,c] * A[n,h,q,c]) / 8)\n"
    "M[n,h,q] = max([s,p], L[n,h,q,p,s]); W[n,h,q,p,s] = exp(L[n,h,q,p,s] - M[n,h,q])\n"
    "T[n,h,q] = sum([p,s], W[n,h,q,p,s])\n"
    "R[n,h,q,c] = sum([s,p], W[n,h,q,p,s] * Vc[{values},h,s,c]) / T[n,h,q]"
)


def written(slot: str = "s + 16*p", values: str = "Blocks[n,p]") -> Attention | None:
    data = {
        "expr": WRITTEN.format(slot=slot, values=values), "sizes": {"n": 2, "h": 4, "q": 7, "p": 3, "s": 16, "c": 64},
        "shapes": {"Kc": [20, 4, 16, 64], "Vc": [20, 4, 16, 64]},
    }  # fmt: skip
    return operator_from_data(data).operator_as(Attention)


def test_other_spellings_are_recognised() -> None:
    operator = written()
    assert operator is not None
    assert (operator.page, operator.pool, operator.keys, operator.causal) == (16, 20, 37, True)


@pytest.mark.parametrize(
    "changes",
    [{"slot": "s + 17*p"}, {"slot": "p + 3*s"}, {"values": "Other[n,p]"}, {"values": "p"}],
    ids=["another step from page to page", "pages inside tokens", "another table", "values in order"],
)
def test_what_reads_pages_otherwise_is_no_attention(changes: dict[str, str]) -> None:
    assert written(**changes) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"page": None}, 'op.page: is missing: keys and values of a pool lie in pages; add "page": 16'),
        ({"page": 0}, 'op.page: is missing: keys and values of a pool lie in pages; add "page": 16'),
        ({"pool": 2}, "op.pool: 2 pages of 16 tokens have no room for 37 keys of a sequence; use at least 3"),
        ({"pool": -1}, "op.pool: expected int >= 0"),
        ({"algorithm": "eager"}, 'op.page: eager attention reads contiguous keys; remove it, or "algorithm"'),
        ({"pool": 2**30}, "op: tensor K: 1073741824x4x16x8 is more than 2147483647 elements (32-bit indexing); "
                          "split the work"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(keys: Data, message: str) -> None:
    with pytest.raises(InputError) as caught:
        operators_from_json(json.dumps(PAGED | keys).encode(), "op")
    assert str(caught.value) == message


def test_smaller_ones_keep_their_pages_and_a_pool_with_room() -> None:
    small = Attention(b=64, heads=32, queries=1, keys=8192, head_dim=128, page=16, pool=40000).smaller(
        b=2, key_heads=2, queries=1, keys=131
    )
    assert (small.page, small.pool, small.key_count) == (16, 2 * 9 + 1, 131)
