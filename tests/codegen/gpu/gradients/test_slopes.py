"""Products of slopes and keys: executed by the CUDA emulator against float64, compiled by NVRTC."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.gpu.gradients import slope_groups, slopes
from codegen.gpu.lower import lower
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import specific_architecture
from codegen.target import Target
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.attention_gradient import SlopeProduct
from sokoban.model.gpu.kinds.attention_gradient import slope_registers
from sokoban.schedule.attention_gradient import GradientSchedule
from sokoban.schedule.warp_groups import MOVED_REGISTERS
from tests.codegen.gradient_kernels import by_groups, by_matrices, by_multiply_adds, checked, kernel_of

PRODUCT: dict[str, Any] = {"of": "queries", "slopes": True}


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        (by_matrices(), {}),
        (by_matrices(stages=2), {"causal": True, "queries": 32, "keys": 50}),
        (by_matrices(rows=64, step=32, warps=2, stages=2), {"causal": True, "window": 9, "dtype": "bfloat16"}),
        (by_matrices(rows=16, warps=1), {"heads": 6, "kv_heads": 2, "queries": 8, "keys": 40, "causal": True}),
        (by_matrices(), {"head_dim": 24, "value_dim": 40, "b": 2, "scale": -0.3}),
        (by_matrices(step=32, stages=2), {"heads": 4, "kv_heads": 1, "window": 3, "keys": 90, "causal": True}),
        (by_groups(), {}),
        (by_groups(step=32), {"causal": True, "queries": 72, "keys": 100, "head_dim": 24, "value_dim": 40}),
        (by_groups(2, stages=3), {"causal": True, "window": 20, "dtype": "bfloat16", "queries": 152, "head_dim": 80}),
        (by_groups(step=48), {"heads": 6, "kv_heads": 2, "b": 2, "queries": 32, "keys": 200, "scale": -0.3}),
        (by_groups(), {"heads": 4, "kv_heads": 1, "window": 3, "queries": 40, "keys": 90, "causal": True}),
    ],
    ids=[
        "plain", "causal", "window", "groups", "other values", "window of groups", "warp groups", "causal warp groups",
        "window of warp groups", "heads of warp groups", "window of heads of warp groups",
    ],
)  # fmt: skip
def test_results_are_those_of_float64(schedule: GradientSchedule, changes: dict[str, Any]) -> None:
    result = checked(schedule, **PRODUCT, **changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("line", ["    copy_async_wait_0();\n", "    __syncthreads();\n"])
def test_a_tile_that_is_not_waited_for_is_noticed(monkeypatch: pytest.MonkeyPatch, stages: int, line: str) -> None:
    written = slopes._text

    def without(*arguments: Any) -> str:
        text = written(*arguments)
        assert line in text
        return text.replace(line, "", 1)

    monkeypatch.setattr(slopes, "_text", without)
    assert not checked(by_matrices(stages=stages), **PRODUCT, queries=64).passed


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("__syncthreads();", "there is no barrier"),
        ("barrier_fence();", "no fence has followed its making"),
        ("barrier_wait(shared, STEP_FULL + 16 * stage, number / STAGES % 2);", "race"),
        ("barrier_wait(shared, STEP_EMPTY + 16 * stage, number / STAGES % 2 ^ 1);", "more arrivals"),
        ("barrier_expect(shared, STEP_FULL + 16 * stage, SLOPE_TILE + KEY_TILE);", "a wait without end"),
        ("if (lane == 0) barrier_arrive(shared, STEP_EMPTY + 16 * stage);", "a wait without end"),
        ("      products_done_but_0_16(sums[0][0]);", ""),
        ("warp_group_commit();", ""),
        ("__syncwarp();", "race"),
    ],
)
def test_warp_groups_without_one_of_what_orders_copies_and_products_are_noticed(
    monkeypatch: pytest.MonkeyPatch, line: str, problem: str
) -> None:
    written = slope_groups._text

    def without(*arguments: Any) -> str:
        text = written(*arguments)
        assert line in text
        return text.replace(line, "", 1)

    monkeypatch.setattr(slope_groups, "_text", without)
    result = checked(by_groups(), **PRODUCT, queries=64, keys=128)
    assert not result.passed and problem in result.reason


@pytest.mark.parametrize(
    ("changes", "schedule", "problem"),
    [
        (PRODUCT | {"queries": 36}, by_matrices(), "slopes of 36 queries are no multiple of 8"),
        ({"of": "keys", "slopes": True}, by_multiply_adds(), "slopes need matrix instructions"),
        (PRODUCT, by_groups(shares=2), "2 shares of a product of slopes"),
        (PRODUCT | {"head_dim": 32}, by_matrices(step=32, columns=2), "2 warps to a row of a product of slopes"),
        ({"head_dim": 80}, by_matrices(step=32, columns=2), "2 warps do not divide 80 columns into fragments of 16"),
    ],
)
def test_a_schedule_that_no_kernel_has_is_refused(
    changes: dict[str, Any], schedule: GradientSchedule, problem: str
) -> None:
    with pytest.raises(LoweringError, match=problem):
        lower(LoweringRequest(kernel_of(**changes), schedule, "product", Target("cuda", "sm_80", 32)))


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize(
    ("head_dim", "schedule"),
    [
        (64, by_matrices(rows=128, step=64, warps=4, stages=2)),
        (128, by_matrices(rows=128, step=32, warps=4, stages=2)),
        (128, by_matrices(rows=64, step=64, warps=4)),
        (64, by_groups(1, 128)),
        (256, by_groups(2, 64)),
        (128, by_groups(3, 64)),
    ],
)
def test_kernels_compile_without_spills(head_dim: int, schedule: GradientSchedule) -> None:
    kernel = kernel_of(**PRODUCT, head_dim=head_dim, queries=4096, causal=True)
    assert isinstance(kernel, SlopeProduct)
    architecture = specific_architecture(schedule, "sm_90") or "sm_80"
    lowered = lower(LoweringRequest(kernel, schedule, "product", Target("cuda", architecture, 32)))
    compiled = compile_cuda(strip_prelude(lowered.text), architecture, name="product")
    assert compiled.spill_bytes == 0 and "serialized" not in compiled.log
    needed, moved = slope_registers(kernel, schedule), MOVED_REGISTERS.get(schedule.warps // 4)
    is_moved = schedule.instruction.is_by_groups and moved is not None
    assert needed <= moved[0] if is_moved else abs(compiled.registers - needed) < 24
