"""Instructions that values cost."""

from __future__ import annotations

import json
import pickle

import msgspec
import pytest

from sokoban.kernel.form import kernel_form
from sokoban.kernel.instructions import FUNCTION_INSTRUCTIONS, Instruction, depends, value_instructions
from sokoban.kernel.matrix import MATRIX_TYPES
from sokoban.language.operators import operator_from_data


def final(text: str) -> object:
    return kernel_form(operator_from_data({"expr": f"Y[i,j] = {text}", "sizes": {"i": 8, "j": 8}})).final.value


@pytest.mark.parametrize(
    ("text", "instructions"),
    [
        ("X[i,j]", 0.0),
        ("X[i,j] + Z[j]", 1.0),
        ("X[i,j] * Z[j] + W[i]", 1.0),
        ("X[i,j] / 4", 1.0),
        ("X[i,j] / Z[j]", FUNCTION_INSTRUCTIONS["div"]),
        ("exp(X[i,j] - Z[j])", FUNCTION_INSTRUCTIONS["exp"] + 1),
        ("relu(X[i,j])", 1.0),
    ],
)
def test_multiplications_and_additions_fuse_and_functions_are_many(text: str, instructions: float) -> None:
    assert value_instructions(final(text)) == instructions  # type: ignore[arg-type]


def test_what_does_not_vary_counts_once() -> None:
    value = final("X[i,j] * exp(Z[i])")
    assert value_instructions(value, ("j",)) == 1.0  # type: ignore[arg-type]
    assert value_instructions(value, ("i",)) == 1.0 + FUNCTION_INSTRUCTIONS["exp"]  # type: ignore[arg-type]
    assert depends(value, ("j",)) and not depends(value, ("k",))  # type: ignore[arg-type]


def test_a_sum_of_products_is_a_multiply_add() -> None:
    form = kernel_form(operator_from_data({"op": "matmul", "m": 4, "n": 4, "k": 4}))
    assert value_instructions(form.reductions[0].value) == 1.0
    form = kernel_form(operator_from_data({"op": "reduce", "function": "max", "shape": [4, 8], "axes": [1]}))
    assert value_instructions(form.reductions[0].value) == 1.0


def test_instructions_are_the_texts_of_files() -> None:
    assert [instruction.value for instruction in Instruction] == [
        "fma", "wmma_16x16x16", "mma_16x8x16", "mma_16x8x32", "mma_16x8x8", "wgmma_64xNx16",
    ]  # fmt: skip
    assert json.dumps(Instruction.WMMA) == '"wmma_16x16x16"' and msgspec.json.encode(Instruction.FMA) == b'"fma"'
    assert f"{Instruction.FMA}" == "fma" and hash(Instruction.FMA) == hash("fma")
    assert pickle.loads(pickle.dumps(Instruction.WGMMA)) is Instruction.WGMMA


def test_matrix_instructions_are_distinguished_by_how_operands_arrive() -> None:
    assert [instruction.is_matrix for instruction in Instruction] == [False, True, True, True, True, True]
    assert [instruction.is_mma for instruction in Instruction] == [False, False, True, True, True, False]
    assert [instruction.is_swizzled for instruction in Instruction] == [False, False, True, True, True, True]
    assert {kind.mma for kind in MATRIX_TYPES.values()} == {each for each in Instruction if each.is_mma}
