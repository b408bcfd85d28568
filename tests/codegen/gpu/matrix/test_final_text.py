"""Point-wise values as texts of kernels that are written by hand."""

from __future__ import annotations

import pytest

from codegen.gpu.matrix.final_text import NEAR_WRITTEN, WRITTEN, value_text
from sokoban.language.expression import Call, Constant, Value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Call("neg", (Constant(-0.25),)), "(- -0.25f)"),
        (Call("neg", (Call("neg", (Constant(2.0),)),)), "(- (- 2.0f))"),
        (Call("sub", (Constant(-1.0), Constant(-2.0))), "(-1.0f - -2.0f)"),
    ],
)
def test_signs_of_numbers_are_no_decrements(value: Value, text: str) -> None:
    assert value_text(value, {}, {}, {}) == text


@pytest.mark.parametrize("written", [WRITTEN, NEAR_WRITTEN])
def test_functions_of_negative_numbers_are_texts_of_c(written: dict[str, str]) -> None:
    for function in ("silu", "sigmoid", "gelu", "tanh"):
        assert "--" not in value_text(Call(function, (Constant(-0.25),)), {}, {}, {}, written)
