"""Gradients of attention in the language: their values, the inputs they take, and that they are known again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.support.errors import InputError
from sokoban.kernel.attention_gradient import gradient_flops
from sokoban.kernel.form import kernel_form
from sokoban.language.named.attention import AttentionSizes
from sokoban.language.named.attention_gradient import AttentionGradient
from sokoban.language.operators import operator_from_data
from sokoban.language.recognition import recognised
from sokoban.language.reference import evaluate

SIZES = {"b": 2, "heads": 4, "queries": 3, "keys": 5, "head_dim": 4, "value_dim": 6}
CASES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": 2, "kv_heads": 2},
    {"kv_heads": 1, "scale": -0.7},
    {"scale": 0.0},
]


def written(sizes: dict[str, Any], of: str, **options: Any) -> Any:
    return operator_from_data({"op": "attention_gradient", "of": of, **sizes, **options})


def saved(sizes: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """What the forward pass saves, by its definition: L, and D for a gradient of the results."""
    group = 4 // sizes.get("kv_heads", 4)
    q = inputs["Q"]
    k, v = (np.repeat(inputs[name], group, axis=1) for name in "KV")
    scale = sizes.get("scale", 4**-0.5)
    logits = q @ k.swapaxes(2, 3) * scale
    i, j = np.ogrid[:3, :5]
    if sizes.get("causal"):
        seen = (j <= i + 2) & (j > i + 2 - (sizes.get("window") or 9))
        logits = np.where(seen, logits, -np.inf)
    total = np.log(np.exp(logits).sum(axis=-1))
    results = np.exp(logits - total[..., None]) @ v
    return {"L": total, "D": (inputs["dY"] * results).sum(axis=-1)}


@pytest.mark.slow
@pytest.mark.parametrize("changes", CASES, ids=["plain", "causal", "window", "one key head", "no scale"])
def test_values_are_differences_of_the_forward_pass(changes: dict[str, Any]) -> None:
    sizes, random = SIZES | changes, np.random.default_rng(3)
    forward = operator_from_data({"op": "attention", **sizes})
    inputs = {tensor.name: random.normal(size=tensor.caller_shape) for tensor in forward.inputs}
    inputs["dY"] = random.normal(size=forward.output.caller_shape)
    inputs |= saved(sizes, inputs)

    def loss(moved: dict[str, Any]) -> float:
        return float((evaluate(forward, moved).reshape(inputs["dY"].shape) * inputs["dY"]).sum())

    def difference(name: str) -> Any:
        result = np.zeros_like(inputs[name])
        for place in np.ndindex(result.shape):
            step = np.zeros_like(result)
            step[place] = 1e-5
            result[place] = loss(inputs | {name: inputs[name] + step}) - loss(inputs | {name: inputs[name] - step})
        return result / 2e-5

    queries, keys = written(sizes, "queries"), written(sizes, "keys")
    assert np.allclose(evaluate(queries, inputs).reshape(inputs["Q"].shape), difference("Q"), atol=1e-8)
    both = evaluate(keys, inputs).reshape(2, sizes.get("kv_heads", 4), 5, 10)
    assert np.allclose(both, np.concatenate([difference("K"), difference("V")], axis=3), atol=1e-8)


@pytest.mark.parametrize("changes", CASES, ids=["plain", "causal", "window", "one key head", "no scale"])
def test_slopes_lie_behind_both_gradients_and_give_that_of_queries(changes: dict[str, Any]) -> None:
    sizes = SIZES | changes
    plain = written(sizes, "keys")
    random = np.random.default_rng(5)
    inputs = {tensor.name: random.normal(size=tensor.caller_shape) for tensor in plain.inputs}
    both, all_three = (evaluate(each, inputs) for each in (plain, written(sizes, "keys", slopes=True)))
    assert np.array_equal(all_three[..., :10], both)
    group = 4 // sizes.get("kv_heads", 4)
    slopes = all_three[..., 10:].reshape(2, 4 // group, 5, group, 3)  # b, g, j, h, i
    i, j = np.arange(3), np.arange(5)[:, None, None]
    hidden = (
        (j > i + 2) | (j <= i + 2 - (sizes.get("window") or 9)) if sizes.get("causal") else np.zeros((5, 1, 3), bool)
    )
    assert not slopes[:, :, np.broadcast_to(hidden, (5, group, 3))].any()
    assert slopes[:, :, ~np.broadcast_to(hidden, (5, group, 3))].all()
    product = written(sizes, "queries", slopes=True)
    assert [tensor.name for tensor in product.inputs] == ["dKVS", "K"]
    # What stands in place of slopes that are zero is not read.
    slopes[:, :, np.broadcast_to(hidden, (5, group, 3))] = np.nan
    known = {"K": inputs["K"], "dKVS": np.concatenate([both, slopes.reshape(*both.shape[:3], -1)], axis=-1)}
    assert np.allclose(evaluate(product, known), evaluate(written(sizes, "queries"), inputs))


@pytest.mark.parametrize(("of", "slopes"), [("queries", False), ("keys", False), ("keys", True)])
@pytest.mark.parametrize("changes", CASES)
def test_an_expression_is_known_again(changes: dict[str, Any], of: str, slopes: bool) -> None:
    expr = written(SIZES | changes | {"dtype": "bfloat16"}, of, slopes=slopes)
    found = recognised(expr.rewritten()).operator_as(AttentionGradient)
    assert found is not None and isinstance(found, AttentionSizes) and found.slopes == slopes
    assert (found.of, found.heads, found.key_heads, found.dtype) == (of, 4, changes.get("kv_heads", 4), "bfloat16")
    assert found.factor == pytest.approx(changes.get("scale", 0.5))
    assert (found.causal, found.window) == (changes.get("causal", False), changes.get("window", 0))
    assert {tensor.name: tensor.dtype for tensor in expr.inputs if tensor.dtype == "float32"} == dict.fromkeys(
        "LD", "float32"
    )


def test_forms_count_the_products_of_both_kernels() -> None:
    forms = [kernel_form(written(SIZES, of)) for of in ("queries", "keys")]
    assert all(form.is_composed and form.kind == "attention_gradient" for form in forms)
    pairs = 2 * 4 * 3 * 5
    assert [form.flops for form in forms] == [2 * pairs * (4 + 6 + 4), 2 * pairs * 2 * (4 + 6)]
    assert gradient_flops(forms[0].attention_gradient) == forms[0].flops
    sloped = [kernel_form(written(SIZES, of, slopes=True)) for of in ("queries", "keys")]
    assert [form.flops for form in sloped] == [2 * pairs * 4, 2 * pairs * 2 * (4 + 6)]
    # A product of slopes reads keys and slopes and writes dQ, in float32.
    assert sloped[0].compulsory_bytes == 4 * (2 * 4 * 5 * 4 + pairs + 2 * 4 * 3 * 4)


def test_what_follows_a_gradient_and_what_contradicts_itself_is_refused() -> None:
    expr = written(SIZES | {"epilogue": [{"function": "scale", "value": 2.0}]}, "queries")
    with pytest.raises(InputError, match="no epilogue"):
        kernel_form(expr)
    with pytest.raises(InputError, match="take no schedules of tiles"):
        kernel_form(written(SIZES, "keys"), fuse=False)
    with pytest.raises(InputError, match="of: unknown of 'values'; use one of queries, keys"):
        written(SIZES, "values")
    with pytest.raises(InputError, match="kv_heads: 4 heads are no multiple of 3"):
        written(SIZES | {"kv_heads": 3}, "keys")
