"""Operators that no single kernel computes, taken apart into those that do."""

from __future__ import annotations

from typing import Any

from sokoban.kernel.form import kernel_form
from sokoban.kernel.stages import operator_form
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operator_from_data

LAYERS = "H[m,n] = sum(k, X[m,k] * A[k,n]); G[m,n] = relu(H[m,n] + b[n]); Y[m,p] = sum(n, G[m,n] * B[n,p])"
SIZES = {"m": 6, "n": 7, "k": 8, "p": 9}


def written(text: str, sizes: dict[str, int], **more: Any) -> TensorExpr:
    return operator_from_data({"expr": text, "sizes": sizes, **more})


def test_one_kernel_stays_one() -> None:
    expr = written("C[m,n] = sum(k, A[m,k] * B[k,n])", {"m": 3, "n": 4, "k": 5})
    assert operator_form(expr) == kernel_form(expr)


def test_epilogues_and_softmax_stay_with_their_kernel() -> None:
    text = (
        "S[i,j] = sum(d, Q[i,d] * K[j,d]); T[i,j] = S[i,j] + bias[i,j]; M[i] = max(j, T[i,j]); "
        "E[i,j] = exp(T[i,j] - M[i]); N[i] = sum(j, E[i,j]); P[i,j] = E[i,j] / N[i]; Y[i,e] = sum(j, P[i,j] * V[j,e])"
    )
    form = operator_form(written(text, {"i": 6, "j": 7, "d": 8, "e": 9}))
    assert [(stage.expr.output.name, stage.kind) for stage in form.stages] == [
        ("T", "tile"), ("P", "rows"), ("Y", "tile"),
    ]  # fmt: skip
    assert form.flops == sum(stage.flops for stage in form.stages)
    assert form.is_composed and form.kind == "sequence"


GATED = "G[m,n] = sum(k, X[m,k] * A[k,n]); U[m,n] = sum(k, X[m,k] * B[k,n]); Y[m,n] = silu(G[m,n]) * U[m,n]"


def test_products_side_by_side_are_a_kernel_each() -> None:
    form = operator_form(written(GATED, {"m": 6, "n": 7, "k": 8}, dtype="float16"))
    assert [(stage.expr.output.name, stage.kind) for stage in form.stages] == [("G", "tile"), ("Y", "tile")]
    assert [stage.roles is not None for stage in form.stages] == [True, True]
    assert kernel_form(form.source).is_rows_of_products


def test_products_of_one_row_and_reductions_that_share_nothing_stay_together() -> None:
    assert operator_form(written(GATED, {"m": 1, "n": 7, "k": 8})).kind == "rows"
    masked = (
        "M[b,i] = max(j, X[b,i,j] + B[b,j]); N[b,i] = sum(j, exp(X[b,i,j] + B[b,j] - M[b,i])); "
        "Y[b,i,j] = exp(X[b,i,j] + B[b,j] - M[b,i]) / N[b,i]"
    )
    assert operator_form(written(masked, {"b": 2, "i": 6, "j": 7})).kind == "rows"


def test_what_is_read_twice_is_stored() -> None:
    form = operator_form(written(f"{LAYERS}; R[m] = max(p, Y[m,p]); Z[m,n] = G[m,n] * R[m]", SIZES))
    assert [stage.expr.output.name for stage in form.stages] == ["G", "Y", "Z"]
    assert {tensor.name for tensor in form.stages[2].expr.inputs} == {"G", "Y"}


def test_what_lies_between_has_the_type_of_the_result() -> None:
    narrow, wide = (operator_form(written(LAYERS, SIZES, dtype=dtype)) for dtype in ("float16", "float64"))
    assert narrow.stages[0].expr.output.dtype == narrow.stages[1].expr.inputs[0].dtype == "float16"
    assert wide.stages[0].expr.output.dtype == "float64"


def test_factors_of_a_least_product_keep_the_type_of_sums() -> None:
    form = operator_form(written(LAYERS.replace("sum(n,", "min(n,"), SIZES, dtype="float16"))
    assert form.stages[0].expr.output.dtype == "float32"


def test_logits_keep_the_type_of_sums_and_probabilities_do_not() -> None:
    attention = {"op": "attention", "b": 1, "heads": 2, "queries": 5, "head_dim": 8, "causal": True, "dtype": "float16"}
    form = operator_form(operator_from_data(attention), with_attention=False)
    stored = [(stage.expr.output.name, stage.expr.output.dtype) for stage in form.stages]
    assert stored == [("Logits", "float32"), ("P", "float16"), ("Y", "float16")]
    assert operator_form(operator_from_data(attention)).kind == "attention"


def test_attention_with_an_epilogue_is_written_out() -> None:
    attention = {"op": "attention", "b": 1, "heads": 2, "queries": 5, "head_dim": 8, "epilogue": ["relu"]}
    form = operator_form(operator_from_data(attention))
    assert [stage.expr.output.name for stage in form.stages] == ["Logits", "P", "Out"]
