"""Attention and its gradients recognised however they are written, and nothing else taken for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sokoban.kernel.form import kernel_form
from sokoban.language.expression import TensorExpr
from sokoban.language.named import NAMED_OPERATORS
from sokoban.language.named.attention import Attention, AttentionSizes
from sokoban.language.named.attention_gradient import AttentionGradient
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from tests.sokoban.attention_spellings import Spelling, attention_spellings, gradient_spellings

SIZES = {"b": 2, "h": 3, "i": 5, "j": 5, "d": 4, "e": 6}


def facts(operator: AttentionSizes) -> tuple[Any, ...]:
    """What decides kernels of attention."""
    return (
        operator.b, operator.heads, operator.key_heads, operator.queries, operator.key_count, operator.head_dim,
        operator.value_size, operator.causal, operator.window_size, operator.dtype, pytest.approx(operator.factor),
    )  # fmt: skip


def recognised_as(spelling: Spelling, kind: type[AttentionSizes]) -> tuple[TensorExpr, TensorExpr]:
    """The named operator and the expression, which has to be known as the same with the tensors that it has."""
    named, written = operator_from_data(spelling.named), operator_from_data(spelling.written)
    operator, meant = written.operator_as(kind), named.operator_as(kind)
    assert operator is not None and meant is not None, spelling.written["expr"]
    assert facts(operator) == facts(meant)
    assert written.origin is not None and not written.epilogue
    assert {own: written.origin.name(own) for own in spelling.names} == dict(spelling.names)
    return named, written


def agree(spelling: Spelling, named: TensorExpr, written: TensorExpr) -> None:
    """Both have the same values."""
    inputs = random_inputs(named, seed=1)
    given = {spelling.names[name]: array for name, array in inputs.items()}
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(evaluate(written, given), evaluate(named, inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(attention_spellings())
def test_attention_is_recognised_however_it_is_written(spelling: Spelling) -> None:
    named, written = recognised_as(spelling, Attention)
    agree(spelling, named, written)
    form = kernel_form(written)
    assert form.kind == "attention" and form.flops == kernel_form(named).flops
    assert [tensor.name for tensor in form.expr.operands("QKV")] == [spelling.names[name] for name in "QKV"]
    assert form.expr.output == written.output


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(gradient_spellings())
def test_gradients_are_recognised_however_they_are_written(spelling: Spelling) -> None:
    named, written = recognised_as(spelling, AttentionGradient)
    agree(spelling, named, written)
    assert kernel_form(written).kind == "attention_gradient"


def text_of(**changes: str) -> str:
    """Attention with statements exchanged."""
    statements = {
        "S": "S[b,h,i,j] = sum(d, Q[b,h,i,d] * K[b,h,j,d])",
        "L": "L[b,h,i,j] = select(j <= i, S[b,h,i,j] * 0.5, -inf)",
        "M": "M[b,h,i] = max(j, L[b,h,i,j])",
        "E": "E[b,h,i,j] = exp(L[b,h,i,j] - M[b,h,i])",
        "T": "T[b,h,i] = sum(j, E[b,h,i,j])",
        "P": "P[b,h,i,j] = E[b,h,i,j] / T[b,h,i]",
        "Y": "Y[b,h,i,e] = sum(j, P[b,h,i,j] * V[b,h,j,e])",
    }
    return "; ".join(filter(None, (statements | changes).values()))


OTHERS = {
    "no maximum is subtracted": {"M": "", "E": "E[b,h,i,j] = exp(L[b,h,i,j])"},
    "the maximum of other rows": {"M": "M[b,h,j] = max(i, L[b,h,i,j])", "E": "E[b,h,i,j] = exp(L[b,h,i,j] - M[b,h,j])"},
    "a minimum": {"M": "M[b,h,i] = min(j, L[b,h,i,j])"},
    "a sum along queries": {"T": "T[b,h,j] = sum(i, E[b,h,i,j])", "P": "P[b,h,i,j] = E[b,h,i,j] / T[b,h,j]"},
    "keys with their last dimensions exchanged": {"S": "S[b,h,i,j] = sum(d, Q[b,h,i,d] * K[b,h,d,j])"},
    "values along queries": {"Y": "Y[b,h,i,e] = sum(j, P[b,h,i,j] * V[b,h,i,e] * V[b,h,j,e])"},
    "a scale behind the maximum": {"E": "E[b,h,i,j] = exp((L[b,h,i,j] - M[b,h,i]) * 0.5 + M[b,h,i])"},
    "a scale before exponentials alone": {"E": "E[b,h,i,j] = exp(L[b,h,i,j] * 0.5 - M[b,h,i])"},
    "a scale of the weights": {"P": "P[b,h,i,j] = 0.5 * E[b,h,i,j] / T[b,h,i]"},
    "a mask that hides the last key seen": {"L": "L[b,h,i,j] = select(j < i, S[b,h,i,j] * 0.5, -inf)"},
    "a mask the other way round": {"L": "L[b,h,i,j] = select(i <= j, S[b,h,i,j] * 0.5, -inf)"},
    "a mask of zeros": {"L": "L[b,h,i,j] = select(j <= i, S[b,h,i,j] * 0.5, 0)"},
    "a mask of a large number": {"L": "L[b,h,i,j] = select(j <= i, S[b,h,i,j] * 0.5, -10000)"},
    "a mask at the wrong sign": {"L": "L[b,h,i,j] = S[b,h,i,j] * 0.5 - select(j <= i, 0, -inf)"},
    "a window that begins before nothing": {"L": "L[b,h,i,j] = select(j > i - 2, S[b,h,i,j] * 0.5, -inf)"},
    "a power other than a quotient": {"P": "P[b,h,i,j] = E[b,h,i,j] / T[b,h,i] / T[b,h,i]"},
    "a result of other axes": {"Y": "Y[b,h,e,i] = sum(j, P[b,h,i,j] * V[b,h,j,e])"},
    "another function": {"E": "E[b,h,i,j] = sigmoid(L[b,h,i,j] - M[b,h,i])"},
    "a bias": {"S": "S[b,h,i,j] = sum(d, Q[b,h,i,d] * K[b,h,j,d]) + B[i,j]"},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_what_computes_something_else_is_no_attention(changes: dict[str, str]) -> None:
    assert operator_from_data({"expr": text_of(), "sizes": SIZES}).operator_as(Attention) is not None
    assert operator_from_data({"expr": text_of(**changes), "sizes": SIZES}).origin is None


def test_sizes_of_the_pattern_are_sizes_like_others() -> None:
    """Offsets of masks are then those of the pattern, too."""
    mask = {"L": "L[b,h,i,j] = select(j <= i + 12 and j > i + 8, S[b,h,i,j] * 0.37, -inf)"}
    attention = operator_from_data({"expr": text_of(**mask), "sizes": SIZES | {"j": 17}}).operator_as(Attention)
    assert attention is not None and (attention.window, attention.scale) == (4, 0.37)


def test_sums_over_fewer_keys_are_no_attention() -> None:
    changes = {"T": "T[b,h,i] = sum(k, E[b,h,i,k])"}
    assert operator_from_data({"expr": text_of(**changes), "sizes": SIZES | {"k": 5}}).origin is not None
    assert operator_from_data({"expr": text_of(**changes), "sizes": SIZES | {"k": 4}}).origin is None


@pytest.mark.parametrize(
    ("keys", "is_attention"),
    [
        ({"dtype": "float16"}, True),
        ({"dtype": "float16", "dtypes": {"Y": "float32"}}, False),
        ({"dtype": "float16", "dtypes": {"K": "float32"}}, False),
        ({"dtype": "float64"}, True),
        ({"shapes": {"K": [2, 3, 9, 4]}}, False),
        ({"accumulate": "float64"}, True),
    ],
)
def test_types_and_shapes_have_to_be_those_of_attention(keys: dict[str, Any], is_attention: bool) -> None:
    expr = operator_from_data({"expr": text_of(), "sizes": SIZES} | keys)
    assert (expr.origin is not None) == is_attention
    if is_attention:
        attention = expr.operator_as(Attention)
        assert attention is not None and attention.accumulate == keys.get("accumulate")


def test_an_epilogue_may_follow() -> None:
    text = text_of() + "; Z[b,h,i,e] = relu(Y[b,h,i,e]) + R[b,h,i,e]"
    expr = operator_from_data({"expr": text, "sizes": SIZES, "dtype": "float16"})
    assert expr.operator_as(Attention) is not None and [each.tensor for each in expr.epilogue] == ["Z"]
    assert expr.origin is not None and expr.origin.result == "Y"
    # What follows reads the result alone.
    inside = text_of() + "; Z[b,h,i,e] = Y[b,h,i,e] + T[b,h,i]"
    assert operator_from_data({"expr": inside, "sizes": SIZES}).origin is None


@pytest.mark.slow
def test_a_long_expression_is_left_alone() -> None:
    """Written into each other, statements that read the one before twice would have a million parts."""
    doubled = [f"X{n}[i,j] = exp(X{n - 1}[i,j]) * X{n - 1}[i,j]" for n in range(1, 20)]
    text = "; ".join(
        ["X0[i,j] = A[i,j] + B[i,j] * C[i,j]", *doubled, "S[i] = sum(j, X19[i,j]); Y[j] = sum(i, S[i] * A[i,j])"]
    )
    assert operator_from_data({"expr": text, "sizes": {"i": 3, "j": 4}}).origin is None
    chained = [f"X{n}[i,j] = exp(X{n - 1}[i,j] + 1)" for n in range(1, 250)]
    text = "; ".join(
        ["X0[i,j] = A[i,j] + B[i,j] * C[i,j]", *chained, "S[i] = sum(j, X249[i,j]); Y[j] = sum(i, S[i] * A[i,j])"]
    )
    assert operator_from_data({"expr": text, "sizes": {"i": 3, "j": 4}}).origin is None


@pytest.mark.parametrize(
    "power", ["pow(1e200 * A[i,j], 3)", "pow(0 * A[i,j], -2)", "A[i,j] / (0 * A[i,j])", "exp(1e9)"]
)
def test_numbers_without_a_power_are_no_reason_to_fail(power: str) -> None:
    text = f"S[i] = sum(j, exp({power}) * A[i,j]); Y[j] = sum(i, S[i] * B[i,j] * C[i,j])"
    data = {"expr": text, "sizes": {"i": 3, "j": 4}, "dtype": "float64"}
    assert operator_from_data(data).origin is None


EXAMPLES: dict[str, dict[str, Any]] = {
    "matmul": {"m": 4, "n": 5, "k": 6}, "batch_matmul": {"b": 2, "m": 4, "n": 5, "k": 6},
    "softmax": {"shape": [4, 5]}, "layer_norm": {"shape": [4, 5]},
    "attention": {"b": 1, "heads": 2, "queries": 3, "head_dim": 4, "page": 16},
    "attention_gradient": {"b": 1, "heads": 2, "queries": 3, "head_dim": 4, "of": "keys"},
}  # fmt: skip


@pytest.mark.parametrize("op", EXAMPLES)
def test_an_expression_carries_the_operator_that_wrote_it(op: str) -> None:
    data = {"op": op, **EXAMPLES[op]}
    expr, again = operator_from_data(data), operator_from_data(data)
    assert expr == again and hash(expr) == hash(again) and repr(expr) == repr(again)
    assert isinstance(expr.origin.operator if expr.origin else None, NAMED_OPERATORS[op])
    assert expr.rewritten().origin is None and expr.rewritten() != expr
    assert kernel_form(expr).source is expr


def test_pages_tell_expressions_apart() -> None:
    """They change the time of a call, by which a cache must not confuse two."""
    data = {"op": "attention", "name": "a", **EXAMPLES["attention"]}
    assert operator_from_data(data) != operator_from_data(data | {"page": 0})


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["Q", "K", "V", "E", "Parts", "b", "i", "e"]))
def test_names_of_the_program_give_way_to_those_of_the_user(name: str) -> None:
    axes = {"b": "n", "h": "m", "i": "s", "j": "t", "d": "u", "e": "v"}
    text = text_of().replace("V[", f"{name}_[").replace("Q[", "Queries[").replace("K[", "Keys[").replace("E[", "Ex[")
    for own, axis in axes.items():
        for before, after in (("[", ","), (",", ","), (",", "]"), ("(", ","), ("(", " "), (" ", ","), ("<= ", ",")):
            text = text.replace(f"{before}{own}{after}", f"{before}{axis}{after}").replace(
                f"{before}{own}{after}", f"{before}{axis}{after}"
            )
    text = text.replace(f"{name}_[", f"{name}[").replace("Y[", "Z[")
    expr = operator_from_data({"expr": text, "sizes": {axes[own]: size for own, size in SIZES.items()}})
    form = kernel_form(expr)
    assert form.kind == "attention"
    names = [*form.expr.sizes, *(tensor.name for tensor in form.expr.tensors)]
    assert len(set(names)) == len(names)
    assert [tensor.name for tensor in form.expr.operands("QKV")] == ["Queries", "Keys", name]
