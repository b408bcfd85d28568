"""Attention by ``mma.sync``: compiled by NVRTC, executed by the CUDA emulator, held against float64."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.gpu.lower import lower
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.walks import attention_warps
from codegen.gpu.walks.staged_walk import StagedWalk
from codegen.target import Target
from codegen.tir.lowering import LoweringRequest
from sokoban.model.gpu.kinds.attention import registers_per_thread
from sokoban.schedule.attention import AttentionSchedule, shared_bytes
from tests.codegen.attention_kernels import by_matrices, checked, kernel_of


def text_of(schedule: AttentionSchedule, **changes: Any) -> str:
    request = LoweringRequest(kernel_of(**changes), schedule, "attention", Target("cuda", "sm_80", 32))
    return strip_prelude(lower(request).text)


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        (by_matrices(), {}),
        (by_matrices(stages=2), {"causal": True}),
        (by_matrices(held=True), {"causal": True, "window": 9}),
        (by_matrices(rows=64, keys=32, warps=2, stages=2, held=True), {"dtype": "bfloat16", "keys": 77}),
        (by_matrices(rows=16, warps=1, keys=64), {"heads": 6, "kv_heads": 2, "queries": 7, "causal": True}),
        (by_matrices(), {"head_dim": 24, "b": 2, "scale": -0.3}),
        (by_matrices(), {"scale": 0.0, "queries": 17}),
        (by_matrices(warps=1, rows=16, keys=32), {"queries": 1, "keys": 90, "heads": 4, "kv_heads": 1, "causal": True}),
    ],
    ids=["plain", "causal", "window", "bfloat16", "groups", "negative scale", "no scale", "decode"],
)
def test_results_are_those_of_float64(schedule: AttentionSchedule, changes: dict[str, Any]) -> None:
    result = checked(schedule, **changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("slices", [2, 5])
def test_slices_of_the_keys_come_together(slices: int) -> None:
    """With five slices of seven steps the last has a single one, and under the mask some have none."""
    result = checked(by_matrices(warps=1, rows=16), slices, queries=20, keys=110, causal=True, heads=2, kv_heads=1)
    assert result.passed, result.reason


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("sums[m][n][2 * i] *= shrink;", ""),
        ("totals[m][i] *= shrink;", ""),
        ("bases[m][i] += rise;", ""),
        ("logits[m][n][j] -= rise;", ""),
        ("|| largest > __float_as_int(8.0f)", ""),
        ("is_new ||", ""),
        ("is_first ? peak :", ""),
        ("is_first ? 1.0f :", ""),
        ("total += __shfl_xor_sync(0xffffffffu, total, apart);", ""),
    ],
    ids=["sums", "totals", "base", "logits", "vote", "first", "first base", "first sums", "total"],
)
def test_a_base_that_is_left_without_its_sums_is_noticed(
    monkeypatch: pytest.MonkeyPatch, line: str, instead: str
) -> None:
    written = attention_warps._products

    def changed(*arguments: Any) -> str:
        text = written(*arguments)
        assert line in text
        return text.replace(line, instead)

    monkeypatch.setattr(attention_warps, "_products", changed)
    assert not checked(by_matrices(), queries=70, keys=256, causal=True, window=40).passed


def test_the_base_of_a_row_stays_where_logits_grow_little() -> None:
    text = text_of(by_matrices())
    vote, shrinking = text.index("__ballot_sync"), text.index("sums[m][n][2 * i] *= shrink")
    assert "if (has_new_base)" in text[vote:shrinking] and "fmaxf" not in text[:vote]
    assert text.index("= power_of_two(logits") > shrinking


@pytest.mark.usefixtures("emulator")
def test_a_text_without_the_wait_for_copies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    written = StagedWalk.before_first
    monkeypatch.setattr(StagedWalk, "before_first", lambda walk: written(walk).replace("__syncthreads();", ""))
    result = checked(by_matrices(stages=2), queries=64)
    assert not result.passed


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_compile_without_spills(head_dim: int) -> None:
    schedule = by_matrices(rows=64, keys=64, warps=4)
    kernel = kernel_of(head_dim=head_dim, queries=4096, causal=True)
    compiled = compile_cuda(text_of(schedule, head_dim=head_dim, queries=4096, causal=True), "sm_80", name="attention")
    assert compiled.spill_bytes == 0
    assert registers_per_thread(kernel, schedule) - 24 < compiled.registers < registers_per_thread(kernel, schedule) + 8
    assert shared_bytes(kernel, schedule) == 64 * 3 * (2 * head_dim + 16)
