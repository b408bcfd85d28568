"""Gradients of attention by multiply-adds: the same statements in CUDA and in OpenCL C, held against float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.codegen.gradient_kernels import by_multiply_adds, checked

CASES: list[dict[str, Any]] = [
    {},
    {"causal": True, "queries": 33, "keys": 50},
    {"causal": True, "window": 9, "dtype": "bfloat16"},
    {"heads": 6, "kv_heads": 2, "queries": 7, "keys": 40, "causal": True},
    {"head_dim": 20, "value_dim": 36, "b": 2, "scale": -0.3},
    {"heads": 4, "kv_heads": 1, "window": 3, "keys": 90, "causal": True},
]


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize("changes", CASES)
def test_results_are_those_of_float64(changes: dict[str, Any], of: str) -> None:
    result = checked(by_multiply_adds(rows=32, step=32, warps=4, lanes=16), of=of, **{"dtype": "float32", **changes})
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize("changes", CASES[2:])
def test_opencl_has_the_same_results(changes: dict[str, Any], of: str) -> None:
    result = checked(by_multiply_adds(), engine="opencl", of=of, **{"dtype": "float32", **changes})
    assert result.passed, result.reason
