"""Gradients of attention by ``wgmma``: compiled by NVRTC, executed by the CUDA emulator, held against float64."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.gpu.gradients import groups
from codegen.gpu.lower import lower
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import specific_architecture
from codegen.target import Target
from codegen.tir.lowering import LoweringRequest
from sokoban.model.gpu.kinds.attention_gradient import gradient_registers
from sokoban.schedule.attention import problem_band
from sokoban.schedule.attention_gradient import GradientSchedule, gradient_shared_bytes
from sokoban.schedule.warp_groups import MOVED_REGISTERS
from tests.codegen.gradient_kernels import by_groups, checked, kernel_of


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        (by_groups(), {}),
        (by_groups(step=32), {"queries": 70, "keys": 100, "causal": True, "value_dim": 40}),
        (by_groups(2), {"head_dim": 80, "dtype": "bfloat16", "queries": 150, "causal": True, "window": 20}),
        (by_groups(step=48, stages=3), {"queries": 30, "keys": 200, "heads": 4, "kv_heads": 2, "head_dim": 72}),
        (by_groups(), {"heads": 6, "kv_heads": 2, "b": 2, "queries": 33, "keys": 40, "causal": True, "scale": -0.3}),
    ],
    ids=["plain", "causal", "window", "groups", "causal groups"],
)
def test_results_are_those_of_float64(schedule: GradientSchedule, changes: dict[str, Any], of: str) -> None:
    result = checked(schedule, of=of, **changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        (by_groups(shares=2), {}),
        (by_groups(step=32, shares=2), {"queries": 72, "keys": 100, "causal": True, "head_dim": 24, "value_dim": 40}),
        (by_groups(2, shares=2), {"heads": 4, "kv_heads": 2, "b": 2, "queries": 152, "causal": True, "window": 20}),
    ],
    ids=["plain", "causal", "window of groups"],
)
def test_different_blocks_make_gradients_of_keys_and_of_values(
    schedule: GradientSchedule, changes: dict[str, Any], slopes: bool
) -> None:
    result = checked(schedule, of="keys", slopes=slopes, **changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize(("heads", "band"), [(3, 2), (4, 2)])
def test_blocks_of_several_problems_start_side_by_side(
    monkeypatch: pytest.MonkeyPatch, heads: int, band: int, of: str
) -> None:
    changes = {"heads": heads, "queries": 100, "causal": True}
    monkeypatch.setattr("sokoban.schedule.attention.BAND_BLOCKS", 2 * band)
    assert problem_band(kernel_of(of=of, **changes), 2) == band
    result = checked(by_groups(), of=of, **changes)
    assert result.passed, result.reason


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        (by_groups(), {}),
        (by_groups(step=32), {"queries": 72, "keys": 100, "causal": True, "value_dim": 40}),
        (by_groups(2), {"head_dim": 80, "dtype": "bfloat16", "queries": 152, "causal": True, "window": 20}),
        (by_groups(), {"heads": 6, "kv_heads": 2, "b": 2, "queries": 32, "keys": 40, "causal": True, "scale": -0.3}),
    ],
    ids=["plain", "causal", "window", "causal groups"],
)
def test_slopes_are_written_whether_queries_see_keys_or_not(
    schedule: GradientSchedule, changes: dict[str, Any]
) -> None:
    result = checked(schedule, of="keys", slopes=True, **changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("of", "line", "problem"),
    [
        ("keys", "__syncthreads();", "there is no barrier"),
        ("keys", "barrier_fence();", "no fence has followed its making"),
        ("keys", "async_proxy_fence();", "without a fence between the proxies"),
        ("keys", "barrier_arrive(shared, OWN_FULL);", "a wait without end"),
        ("keys", "barrier_wait(shared, OWN_FULL, 0);", "race"),
        ("keys", "barrier_wait(shared, STEP_FULL + 16 * (number % STAGES), number / STAGES % 2);", "race"),
        ("keys", "barrier_arrive(shared, STEP_FULL + 16 * stage);", "a wait without end"),
        ("keys", "barrier_wait(shared, STEP_EMPTY + 16 * stage, parity ^ 1);", "more arrivals"),
        ("keys", "barrier_expect(shared, STEP_FULL + 16 * stage, KEY_TILE + VALUE_TILE);", "a wait without end"),
        ("keys", "__syncwarp();", "race"),
        ("keys", "      products_done_but_1_16(logits[0][0]);", ""),
        ("keys", "      products_done_but_1_16(wanted[0][0]);", ""),
        ("queries", "barrier_wait(shared, STEP_FULL + 16 * (0 % STAGES), 0 / STAGES % 2);", "race"),
        ("queries", "barrier_wait(shared, STEP_FULL + 16 * (number % STAGES), number / STAGES % 2);", "race"),
        ("queries", "      products_done_but_2_16(logits[0][0]);", ""),
        ("queries", "      products_done_but_0_16(wanted[0][0]);", ""),
        (
            "queries",
            "if (lane == 0) barrier_arrive(shared, STEP_EMPTY + 16 * ((number - 1u) % STAGES));",
            "a wait without end",
        ),
    ],
)
def test_a_text_without_one_of_what_orders_copies_and_products_is_noticed(
    monkeypatch: pytest.MonkeyPatch, of: str, line: str, problem: str
) -> None:
    leave_out(monkeypatch, line)
    result = checked(by_groups(), of=of, queries=64)
    assert not result.passed and problem in result.reason


FULL = "barrier_wait(shared, STEP_FULL + 16 * (number % STAGES), number / STAGES % 2);"
EMPTY = "if (number > 0 && lane == 0) barrier_arrive(shared, STEP_EMPTY + 16 * ((number - 1u) % STAGES));"


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("line", "place", "problem"),
    [
        (FULL, 0, "race"),
        (FULL, 1, "race"),
        (EMPTY, 0, "a wait without end"),
        (EMPTY, 1, "a wait without end"),
        ("__syncwarp();", 0, "race"),
        ("__syncwarp();", 1, "race"),
        ("      products_done_but_1_16(logits[0][0]);", 0, ""),
        ("      products_done_but_0_16(wanted[0][0]);", 0, ""),
        ("      products_done_but_0_16(logits[0][0]);", 0, ""),
        ("    products_done_but_0_16(sums[0][0]);", 0, ""),
    ],
)
def test_either_share_without_one_of_these_is_noticed(
    monkeypatch: pytest.MonkeyPatch, line: str, place: int, problem: str
) -> None:
    leave_out(monkeypatch, line, place)
    result = checked(by_groups(shares=2), of="keys", queries=64)
    assert not result.passed and problem in result.reason


def leave_out(monkeypatch: pytest.MonkeyPatch, line: str, place: int = 0) -> None:
    """Kernels are without a line, at one of the places where it stands."""
    written = groups._text

    def without(*arguments: Any) -> str:
        parts = written(*arguments).split(line)
        assert len(parts) > place + 1
        return line.join(parts[: place + 1]) + line.join(["", *parts[place + 1 :]])[len(line) :]

    monkeypatch.setattr(groups, "_text", without)


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize(
    ("of", "head_dim", "schedule", "slopes"),
    [
        ("queries", 128, by_groups(2, 96), False), ("keys", 128, by_groups(2, 48), False),
        ("keys", 128, by_groups(2, 48), True), ("keys", 80, by_groups(1, 64), False),
        ("keys", 256, by_groups(2, 32, shares=2), True),
    ],
)  # fmt: skip
def test_kernels_compile_without_spills_and_without_serial_products(
    of: str, head_dim: int, schedule: GradientSchedule, slopes: bool
) -> None:
    count, step = schedule.warps // 4, schedule.step
    kernel = kernel_of(of=of, head_dim=head_dim, queries=4096, causal=True, slopes=slopes)
    architecture = specific_architecture(schedule, "sm_90")
    lowered = lower(LoweringRequest(kernel, schedule, "gradient", Target("cuda", architecture, 32)))
    compiled = compile_cuda(strip_prelude(lowered.text), architecture, name="gradient")
    assert compiled.spill_bytes == 0 and "serialized" not in compiled.log
    needed, moved = gradient_registers(kernel, schedule), MOVED_REGISTERS.get(count)
    assert needed <= moved[0] if moved else abs(compiled.registers - needed) < 24
    # Rows of 80 elements take two panels of 64; L and twice D of every query that is walked; two barriers of a buffer.
    row, numbers = 4 * max(head_dim, 128), 2 * 3 * 4 * step if of == "keys" else 0
    assert gradient_shared_bytes(kernel, schedule) == row * (64 * count + 2 * step) + numbers + 16 * 3
