"""Gradients of attention by ``mma.sync``: executed by the CUDA emulator against float64, compiled by NVRTC."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.gpu.lower import lower
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.target import Target
from codegen.tir.lowering import LoweringRequest
from sokoban.model.gpu.kinds.attention_gradient import gradient_registers
from sokoban.schedule.attention_gradient import GradientSchedule
from tests.codegen.gradient_kernels import by_matrices, checked, kernel_of

#: Values of another width than keys, of heads in groups.
PARTED = {"head_dim": 64, "value_dim": 128, "heads": 4, "kv_heads": 2, "causal": True, "keys": 90}


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        (by_matrices(), {}),
        (by_matrices(stages=2), {"causal": True, "queries": 33, "keys": 50}),
        (by_matrices(rows=64, step=32, warps=2, stages=2), {"causal": True, "window": 9, "dtype": "bfloat16"}),
        (by_matrices(rows=16, warps=1), {"heads": 6, "kv_heads": 2, "queries": 7, "keys": 40, "causal": True}),
        (by_matrices(), {"head_dim": 24, "value_dim": 40, "b": 2, "scale": -0.3}),
        (by_matrices(), {"scale": 0.0, "queries": 17, "keys": 5}),
        (by_matrices(step=32, stages=2), {"heads": 4, "kv_heads": 1, "window": 3, "keys": 90, "causal": True}),
        (by_matrices(step=32, columns=2), {"head_dim": 32}),
        (by_matrices(rows=64, step=32, warps=4, stages=2, columns=2), {"head_dim": 64, "causal": True, "queries": 70}),
        (by_matrices(rows=16, step=64, warps=4, columns=4), PARTED | {"window": 9, "dtype": "bfloat16"}),
    ],
    ids=[
        "plain",
        "causal",
        "window",
        "groups",
        "negative scale",
        "no scale",
        "window of groups",
        "columns",
        "columns of a mask",
        "four columns",
    ],
)
def test_results_are_those_of_float64(schedule: GradientSchedule, changes: dict[str, Any], of: str) -> None:
    result = checked(schedule, of=of, **changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        (by_matrices(), {}),
        (by_matrices(stages=2), {"causal": True, "queries": 32, "keys": 50}),
        (by_matrices(rows=64, step=32, warps=2, stages=2), {"causal": True, "window": 9, "dtype": "bfloat16"}),
        (by_matrices(rows=16, warps=1), {"heads": 6, "kv_heads": 2, "queries": 8, "keys": 40, "causal": True}),
        (by_matrices(step=32, stages=2), {"heads": 4, "kv_heads": 1, "window": 3, "keys": 90, "causal": True}),
        (by_matrices(step=32, columns=2), {"head_dim": 32, "b": 2, "heads": 2, "kv_heads": 1, "causal": True}),
        (by_matrices(rows=16, step=64, warps=4, columns=4), PARTED | {"window": 9, "dtype": "bfloat16"}),
    ],
    ids=["plain", "causal", "window", "groups", "window of groups", "columns", "four columns"],
)
def test_slopes_are_written_whether_queries_see_keys_or_not(
    schedule: GradientSchedule, changes: dict[str, Any]
) -> None:
    result = checked(schedule, of="keys", slopes=True, **changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("emulator")
def test_numbers_that_are_not_waited_for_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from codegen.gpu.gradients import warps

    written = warps._walk
    monkeypatch.setattr(warps, "_walk", lambda *a: written(*a).replace("    __syncthreads();\n", "", 1))
    assert not checked(by_matrices(stages=2), of="keys", queries=64).passed


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("of", ["queries", "keys"])
def test_factors_that_other_warps_have_not_written_are_noticed(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from codegen.gpu.gradients import warps

    written = warps._sums
    monkeypatch.setattr(warps, "_sums", lambda *a, **b: written(*a, **b).replace("    __syncthreads();\n", "", 1))
    assert not checked(by_matrices(step=32, columns=2), of=of, queries=64, head_dim=32).passed


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize(
    ("of", "head_dim", "schedule", "slopes"),
    [
        ("queries", 128, by_matrices(rows=64, step=64, warps=4), False),
        ("keys", 64, by_matrices(rows=64, step=64, warps=4), False),
        ("keys", 64, by_matrices(rows=64, step=64, warps=4), True),
        ("keys", 128, by_matrices(rows=64, step=64, warps=4), False),
        ("keys", 128, by_matrices(rows=64, step=32, warps=4), True),
        ("keys", 256, by_matrices(rows=64, step=64, warps=8, columns=4), False),
        ("keys", 256, by_matrices(rows=64, step=64, warps=8, columns=4), True),
        ("queries", 256, by_matrices(rows=32, step=32, warps=2, columns=2), False),
    ],
)
def test_kernels_compile_without_spills(of: str, head_dim: int, schedule: GradientSchedule, slopes: bool) -> None:
    kernel = kernel_of(of=of, head_dim=head_dim, queries=4096, causal=True, slopes=slopes)
    request = LoweringRequest(kernel, schedule, "gradient", Target("cuda", "sm_80", 32))
    compiled = compile_cuda(strip_prelude(lower(request).text), "sm_80", name="gradient")
    counted = gradient_registers(kernel, schedule)
    assert compiled.spill_bytes == 0
    assert abs(compiled.registers - counted) < 24
