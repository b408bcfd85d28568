"""Estimates of library calls, many at once, from operators as JSON holds them to seconds."""

from __future__ import annotations

from typing import Any

import pytest

from hal.catalog import load_device
from roller.library import library_times

#: The promises for ten thousand attentions and for ten thousand products.
LIMIT_SECONDS, PRODUCTS_LIMIT_SECONDS = 2.0, 1.0

OPERATORS = 10_000


def attentions(count: int) -> list[dict[str, Any]]:
    """Different attentions: prefill and decoding, all the heads' own keys or shared ones, windows, pages."""
    made = []
    for number in range(count):
        decoding, causal = number % 3 == 0, number % 5 > 0
        made.append(
            {
                "op": "attention", "b": 1 + number % 64, "heads": 32, "kv_heads": (1, 4, 8, 32)[number % 4],
                "queries": 1 if decoding else 1 + number, "keys": 1 + number, "head_dim": (64, 128)[number % 2],
                "causal": causal, "window": 1024 if causal and number % 7 == 0 else 0, "page": 64 * (number % 2),
                "dtype": "bfloat16",
            }
        )  # fmt: skip
    return made


def test_estimate_10000_attentions(benchmark: Any, limits: bool) -> None:
    """FlashAttention on H100, each operator read, checked and priced."""
    h100, operators = load_device("h100"), attentions(OPERATORS)
    estimates = benchmark.pedantic(lambda: library_times(operators, h100), rounds=5, warmup_rounds=1)
    assert len(estimates) == OPERATORS
    if limits:
        assert benchmark.stats.stats.median <= LIMIT_SECONDS


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_estimate_10000_products(benchmark: Any, limits: bool, dtype: str) -> None:
    """cuBLAS on H100, by Tensor Cores and without, no two products alike."""
    h100 = load_device("h100")
    operators = [
        {"op": "matmul", "m": 1 + number, "n": 64 * (1 + number % 97), "k": 64 * (1 + number % 61), "dtype": dtype}
        for number in range(OPERATORS)
    ]
    estimates = benchmark.pedantic(lambda: library_times(operators, h100), rounds=5, warmup_rounds=1)
    assert len(estimates) == OPERATORS
    if limits:
        assert benchmark.stats.stats.median <= PRODUCTS_LIMIT_SECONDS
