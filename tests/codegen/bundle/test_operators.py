"""Operators read back from manifests: shapes as the statements read them, whatever shapes callers give."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.bundle.operators import operator_of
from codegen.bundle.records import FORMAT, Argument, Manifest
from sokoban.kernel.form import kernel_form
from sokoban.language.expression import TensorExpr, statement_text
from sokoban.language.operators import operator_from_data
from tests.sokoban.attention_spellings import Spelling, attention_spellings, gradient_spellings

MATMUL = {"op": "matmul", "m": 65, "n": 33, "k": 17, "epilogue": ["relu"]}
DEPTHWISE = {"op": "depthwise_conv2d", "n": 1, "c": 8, "h": 9, "w": 7, "kh": 3, "kw": 3, "padding": 1}
PADDED = {
    "expr": "Y[i] = sum(k, A[2*i + k - 1|pad=0] * B[1, k])", "sizes": {"i": 5, "k": 3},
    "shapes": {"A": [9], "B": [2, 3]}, "name": "padded",
}  # fmt: skip

GATHERED = {
    "expr": "Y[t,d] = E[I[t], d | pad=1] * V[I[t]]", "sizes": {"t": 5, "d": 3}, "shapes": {"E": [9, 3], "V": [9]},
    "name": "gathered",
}  # fmt: skip

ATTENTION = {"op": "attention", "b": 2, "heads": 4, "kv_heads": 2, "queries": 5, "head_dim": 8, "causal": True}
PAGED = ATTENTION | {"keys": 21, "page": 8, "pool": 7}


def manifest_of(expr: TensorExpr) -> Manifest:
    """The manifest of an operator, without kernels."""
    tensors = (*expr.inputs, expr.output)
    return Manifest(
        format=FORMAT, name=expr.name, device="a device", architecture="sm_70",
        statements=tuple(statement_text(statement) for statement in expr.statements), axes=dict(expr.sizes),
        fused_axes={}, accumulate=expr.accumulate, notes=(), kernels=(),
        arguments=tuple(
            Argument(name=tensor.name, role="output" if tensor is expr.output else "input", dtype=tensor.dtype,
                     shape=tensor.caller_shape)
            for tensor in tensors
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [MATMUL, DEPTHWISE, PADDED, GATHERED, ATTENTION, PAGED],
    ids=["matmul", "depthwise", "padded", "gathered", "shared heads", "pages"],
)
def test_an_operator_reads_back_as_it_was_written(data: dict[str, Any]) -> None:
    expr = operator_from_data(data)
    again = operator_of(manifest_of(expr))
    assert again.statements == expr.statements and again.sizes == expr.sizes
    assert [tensor.shape for tensor in again.tensors] == [tensor.shape for tensor in expr.tensors]
    assert [tensor.caller_shape for tensor in again.inputs] == [tensor.caller_shape for tensor in expr.inputs]


@settings(max_examples=8, deadline=None)
@given(st.one_of(attention_spellings(), gradient_spellings()))
def test_attention_reads_back_as_the_operator_that_it_is(spelling: Spelling) -> None:
    for data in (spelling.named, spelling.written):
        expr = operator_from_data(data)
        again = operator_of(manifest_of(expr))
        assert again.origin is not None and kernel_form(again).kind == kernel_form(expr).kind
        assert kernel_form(again).flops == kernel_form(expr).flops
        assert {own: again.origin.name(own) for own in spelling.names} == {
            own: expr.origin.name(own) if expr.origin else own for own in spelling.names
        }


def test_filters_lose_the_dimension_that_only_callers_know() -> None:
    record = manifest_of(operator_from_data(DEPTHWISE))
    assert next(argument.shape for argument in record.arguments if argument.name == "W") == (8, 1, 3, 3)
    assert next(tensor.shape for tensor in operator_of(record).inputs if tensor.name == "W") == (8, 3, 3)
