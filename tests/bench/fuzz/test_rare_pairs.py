"""Productions that meet a lowering seldom when operators are drawn."""

from __future__ import annotations

from typing import Any

import pytest

from bench.fuzz.kernels import kernels_of
from sokoban.language.operators import operator_from_data

SIZES = {"i": 20, "j": 77}
PLACES = {"sizes": SIZES, "shapes": {"E": [9, 20]}}

PAIRS: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    (
        {"expr": "Y[i,j] = sum(k, A[i,k] - B[k,j])", "sizes": {"i": 16, "j": 24, "k": 30000}},
        "v100", "split-k", "inside sub",
    ),
    ({"expr": "Y[i,j] = cumsum(j, sqrt(abs(X[i,j])))", "sizes": SIZES}, "cpu", "cpu.walks", "inside sqrt"),
    ({"expr": "Y[i,j] = cumsum(j, exp(X[i,j]))", "sizes": SIZES}, "cpu", "cpu.walks", "inside exp"),
    (
        {"expr": "S[i,j] = cumsum(j, X[i,j]); Y[i,j] = gelu(S[i,j])", "sizes": SIZES},
        "cpu", "cpu.walks", "outside gelu",
    ),
    (
        {"expr": "S[i,j] = cumsum(j, abs(X[i,j])); Y[i,j] = log(S[i,j] + 1)", "sizes": SIZES},
        "cpu", "cpu.walks", "outside log",
    ),
    (
        {"expr": "M[i] = max(j, X[i,j]); Y[i,j] = exp(X[i,j] - M[i]) * E[I[j], i]", **PLACES},
        "cpu", "cpu.rows", "outside gathered",
    ),
    (
        {"expr": "S[i,j] = cumsum(j, X[i,j]); Y[i,j] = S[i,j] * E[I[j], i]", **PLACES},
        "cpu", "cpu.walks", "outside gathered",
    ),
    *(
        (
            {"op": "scatter_add", "rows": 33, "columns": 7, "count": 128, "dtype": dtype, "epilogue": ["relu"]},
            "cpu", "cpu.scatters", f"reads {dtype}",
        )
        for dtype in ("float16", "float32", "float64")
    ),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("emulator", "c_compiler")
@pytest.mark.parametrize(("data", "device", "lowering", "production"), PAIRS)
def test_they_agree(data: dict[str, Any], device: str, lowering: str, production: str) -> None:
    kernel = kernels_of(operator_from_data(data), device, count=1)[0]
    assert production in kernel.productions()[lowering]
    result = kernel.verify("native" if device == "cpu" else "emulator", (0,))
    assert result.passed, result.reason
