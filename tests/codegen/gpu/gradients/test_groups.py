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
from sokoban.kernel.instructions import Instruction
from sokoban.model.gpu.kinds.attention_gradient import gradient_registers
from sokoban.schedule.attention import problem_band
from sokoban.schedule.attention_gradient import GradientSchedule, gradient_shared_bytes
from sokoban.schedule.warp_groups import MOVED_REGISTERS
from tests.codegen.gradient_kernels import checked, kernel_of


def by_groups(count: int = 1, step: int = 16, stages: int = 2) -> GradientSchedule:
    return GradientSchedule(rows=64 * count, step=step, warps=4 * count, stages=stages, instruction=Instruction.WGMMA)


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
    written = groups._text

    def without(*arguments: Any) -> str:
        text = written(*arguments)
        assert line in text
        return text.replace(line, "", 1)

    monkeypatch.setattr(groups, "_text", without)
    result = checked(by_groups(), of=of, queries=64)
    assert not result.passed and problem in result.reason


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize(
    ("of", "head_dim", "step", "count", "slopes"),
    [
        ("queries", 128, 96, 2, False), ("keys", 128, 48, 2, False), ("keys", 128, 48, 2, True),
        ("keys", 80, 64, 1, False),
    ],
)  # fmt: skip
def test_kernels_compile_without_spills_and_without_serial_products(
    of: str, head_dim: int, step: int, count: int, slopes: bool
) -> None:
    schedule = by_groups(count, step)
    kernel = kernel_of(of=of, head_dim=head_dim, queries=4096, causal=True, slopes=slopes)
    architecture = specific_architecture(schedule, "sm_90")
    lowered = lower(LoweringRequest(kernel, schedule, "gradient", Target("cuda", architecture, 32)))
    compiled = compile_cuda(strip_prelude(lowered.text), architecture, name="gradient")
    assert compiled.spill_bytes == 0 and "serialized" not in compiled.log
    needed, moved = gradient_registers(kernel, schedule), MOVED_REGISTERS.get(count)
    assert needed <= moved[0] if moved else abs(compiled.registers - needed) < 24
    # Rows of 80 elements take two panels of 64; L and twice D of every query that is walked; two barriers of a buffer.
    numbers = 2 * 3 * 4 * step if of == "keys" else 0
    assert gradient_shared_bytes(kernel, schedule) == 512 * (64 * count + 2 * step) + numbers + 16 * 3
