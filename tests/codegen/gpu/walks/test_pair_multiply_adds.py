"""Two products in a row by multiply-adds: one text in CUDA and OpenCL C, held against float64."""

from __future__ import annotations

import pytest

from tests.codegen.attention_kernels import V100
from tests.codegen.pair_kernels import ASIDE, BATCHED, PLAIN, by_matrices, by_multiply_adds, checked, form_of


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("text", "dtype"), [(PLAIN, "float32"), (BATCHED, "float16"), (ASIDE, "float32")])
def test_results_are_those_of_float64(text: str, dtype: str) -> None:
    """Of 67 columns neither four nor a step is a part: turned factors are fetched element by element."""
    result = checked(by_multiply_adds(), form_of(text, dtype, n=67), target=V100)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize(("text", "dtype"), [(PLAIN, "bfloat16"), (BATCHED, "float16")])
def test_opencl_runs_the_twin_of_matrix_instructions(text: str, dtype: str) -> None:
    result = checked(by_matrices(), form_of(text, dtype), engine="opencl")
    assert result.passed, result.reason
    assert "scalar twin" in result.method


@pytest.mark.usefixtures("emulator")
def test_a_tensor_may_be_called_as_a_word_of_the_text() -> None:
    text = PLAIN.replace("X[", "BLOCK[").replace("b[n]", "THREAD[n]")
    assert checked(by_multiply_adds(), form_of(text, "float32"), target=V100).passed
