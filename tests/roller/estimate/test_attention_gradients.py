"""Attention's backward pass in its ways: two kernels, or slopes between them, in slices that fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.catalog import load_device
from roller.estimate.attention_gradients import SLOPE_BYTES
from roller.estimate.gradients import backward_ways, gradients
from roller.estimate.operators import estimate_items, load_items
from sokoban.language.operators import operator_from_data
from sokoban.language.reference import evaluate

ATTENTION = {"op": "attention", "b": 4, "heads": 8, "queries": 1024, "head_dim": 64, "causal": True, "dtype": "float16"}


def ways(**changes: Any) -> list[list[str]]:
    found = backward_ways(operator_from_data(ATTENTION | changes))
    return [[each.label for each in way] for way in found]


def test_slopes_are_a_second_way() -> None:
    plain, sloped = ways()
    sums = "gradient of P, summed over keys"
    assert plain == [sums, "gradient of Q", "gradient of K and V"]
    assert sloped == [sums, "gradient of K and V", "gradient of Q"]
    assert [each.label for each in gradients(operator_from_data(ATTENTION))] == plain


@pytest.mark.parametrize(
    ("changes", "slices", "heads"),
    [
        ({"b": 12, "heads": 64, "queries": 4096}, 12, "1x64"),
        ({"b": 6, "heads": 32, "queries": 4096}, 3, "2x32"),
        ({"b": 2, "heads": 32, "kv_heads": 8, "queries": 8192}, 4, "1x16"),
        ({"b": 1, "heads": 5, "queries": 16384}, 5, "1x1"),
    ],
)
def test_slices_of_sequences_or_heads_fit(changes: dict[str, Any], slices: int, heads: str) -> None:
    way = backward_ways(operator_from_data(ATTENTION | changes))[1]
    assert len(way) == 1 + 2 * slices
    assert way[1].label == f"gradient of K and V, slice 1 of {slices}"
    assert way[-1].label == f"gradient of Q, slice {slices} of {slices}"
    assert all(f"_{heads}x" in each.expr.name for each in way[1:])
    slopes = way[2].expr.inputs[0]
    assert slopes.name == "dKVS" and slopes.size_bytes < 1.1 * SLOPE_BYTES


@pytest.mark.parametrize("changes", [{"queries": 1020}, {"dtype": "float32"}, {"heads": 1, "queries": 65536}])
def test_there_is_one_way_where_slopes_have_no_kernel_or_no_room(changes: dict[str, Any]) -> None:
    assert len(ways(**changes)) == 1


def test_either_way_gives_the_same_gradients() -> None:
    expr = operator_from_data(
        ATTENTION | {"b": 2, "heads": 4, "kv_heads": 2, "queries": 8, "head_dim": 4, "dtype": "float16"}
    )
    chance = np.random.default_rng(2)
    found = []
    known: dict[str, Any] = {}
    for way in backward_ways(expr):
        values = {}
        for each in way[1:]:
            for tensor in each.expr.inputs:
                known.setdefault(tensor.name, chance.normal(size=tensor.caller_shape))
            name = each.expr.output.name
            values[name] = known[name] = evaluate(each.expr, known)
        found.append(values)
    plain, sloped = found
    np.testing.assert_allclose(sloped["dKVS"][..., :8], plain["dKV"])
    np.testing.assert_allclose(sloped["dQ"], plain["dQ"], atol=1e-12)


def test_the_faster_way_is_estimated(tmp_path: Any) -> None:
    path = tmp_path / "ops.json"
    path.write_text(
        '[{"op": "attention", "b": 8, "heads": 16, "queries": 2048, "head_dim": 128, "causal": true,'
        ' "dtype": "bfloat16"}, {"op": "attention", "b": 1, "heads": 1, "queries": 200, "head_dim": 64,'
        ' "dtype": "float32"}]'
    )
    large, small = estimate_items(load_items(path, "backward"), load_device("a100"))
    assert [part.label for part in large.parts][1:] == ["gradient of K and V", "gradient of Q"]
    assert [part.label for part in small.parts][1:] == ["gradient of Q", "gradient of K and V"]
