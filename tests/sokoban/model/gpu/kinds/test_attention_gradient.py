"""RATIONAL for gradients of attention: walks of blocks, products, what decides what fits."""

from __future__ import annotations

import math

import pytest

from hal.catalog import load_device
from sokoban.model.gpu.kinds.attention import estimate_attention
from sokoban.model.gpu.kinds.attention_gradient import estimate_gradient, gradient_registers, gradient_walks
from sokoban.schedule.attention_gradient import gradient_shared_bytes
from tests.codegen import attention_kernels
from tests.codegen.gradient_kernels import by_groups, by_matrices, by_multiply_adds, kernel_of

A100, H100 = load_device("a100"), load_device("h100")
LONG = {"queries": 4096, "head_dim": 128, "heads": 32}


def test_blocks_walk_the_tiles_that_any_of_their_rows_sees() -> None:
    schedule = by_matrices(rows=64, step=32, warps=4)
    for of in ("queries", "keys"):
        causal = gradient_walks(kernel_of(of=of, queries=256, causal=True), schedule)
        assert (causal.mean, causal.longest, causal.edges) == (5, 8, 2)
        assert gradient_walks(kernel_of(of=of, queries=256), schedule).mean == 8
        windowed = gradient_walks(kernel_of(of=of, queries=256, causal=True, window=32), schedule)
        assert windowed.longest == 3
    # Keys that two heads share are walked by the queries of both.
    shared = gradient_walks(kernel_of(of="keys", queries=256, heads=2, kv_heads=1), schedule)
    assert shared.mean == 16


@pytest.mark.parametrize("of", ["queries", "keys"])
def test_gradients_take_as_much_longer_as_they_have_products(of: str) -> None:
    schedule = by_matrices(rows=64, step=64, warps=4)
    short, long = (estimate_gradient(kernel_of(of=of, **LONG | {"queries": n}), schedule, A100) for n in (2048, 8192))
    assert 12 < long.seconds / short.seconds < 17
    forward = estimate_attention(
        attention_kernels.kernel_of(**LONG), attention_kernels.by_matrices(rows=64, keys=64, warps=4), A100
    )
    gradient = estimate_gradient(kernel_of(of=of, **LONG), schedule, A100)
    assert gradient.stage_seconds["compute"] / forward.stage_seconds["compute"] == pytest.approx(
        {"queries": 1.5, "keys": 2.0}[of]
    )
    assert estimate_gradient(kernel_of(of=of, **LONG), schedule, A100, registers=256).seconds == math.inf


def test_shares_trade_products_for_registers() -> None:
    kernel = kernel_of(of="keys", queries=1024, head_dim=256, heads=8)
    whole, shared = (by_groups(2, 32, shares=shares) for shares in (1, 2))
    assert estimate_gradient(kernel, whole, H100).blocks_per_unit == 0
    assert estimate_gradient(kernel, shared, H100).blocks_per_unit > 0
    small = kernel_of(of="keys", queries=4096, head_dim=64, heads=32)
    assert estimate_gradient(small, whole, H100).seconds < estimate_gradient(small, shared, H100).seconds


def test_columns_trade_registers_for_a_barrier_and_what_passes_it() -> None:
    kernel = kernel_of(of="keys", queries=1024, head_dim=256, heads=8)
    alone, four = by_matrices(rows=64, step=64, warps=4), by_matrices(rows=64, step=64, warps=8, columns=4)
    assert estimate_gradient(kernel, alone, A100).blocks_per_unit == 0
    assert estimate_gradient(kernel, four, A100).blocks_per_unit == 1
    assert gradient_registers(kernel, alone) > 255 > gradient_registers(kernel, four)
    # Probabilities and gradients of logits of 64 rows by 64, a piece more than their rows apart.
    assert gradient_shared_bytes(kernel, four) == gradient_shared_bytes(kernel, alone) + 2 * 64 * (64 * 2 + 16)
    small = kernel_of(of="keys", queries=4096, head_dim=64, heads=32)
    whole, parted = (by_matrices(rows=64, step=32, warps=4 * columns, columns=columns) for columns in (1, 2))
    assert estimate_gradient(small, whole, A100).seconds < estimate_gradient(small, parted, A100).seconds


def test_multiply_adds_are_an_order_of_magnitude_slower() -> None:
    kernel = kernel_of(**LONG)
    matrices = estimate_gradient(kernel, by_matrices(rows=64, step=64, warps=4), A100)
    scalar = estimate_gradient(kernel, by_multiply_adds(rows=32, step=32, warps=4, lanes=8), A100)
    assert scalar.seconds > 5 * matrices.seconds
