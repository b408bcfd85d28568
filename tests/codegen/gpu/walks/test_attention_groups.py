"""Attention by ``wgmma``: compiled by NVRTC, executed by the CUDA emulator, held against float64."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.gpu.lower import lower
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import specific_architecture
from codegen.gpu.walks import attention_groups
from codegen.target import Target
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.attention import AttentionSchedule, one_columns, problem_band, shared_bytes
from tests.codegen.attention_kernels import checked, kernel_of


def by_groups(count: int = 1, keys: int = 16, stages: int = 2) -> AttentionSchedule:
    return AttentionSchedule(
        rows=64 * count, keys=keys, warps=4 * count, stages=stages, held=False, instruction=Instruction.WGMMA
    )


def change(monkeypatch: pytest.MonkeyPatch, part: str, line: str, instead: str, count: int = -1) -> None:
    """Texts of kernels have something else in place of a line, in what function ``part`` of the lowering writes."""
    written = getattr(attention_groups, part)

    def changed(*arguments: Any) -> str:
        text: str = written(*arguments)
        assert line in text
        return text.replace(line, instead, count)

    monkeypatch.setattr(attention_groups, part, changed)


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("schedule", "slices", "changes"),
    [
        (by_groups(), 1, {}),
        (by_groups(keys=32), 1, {"queries": 70, "keys": 100, "causal": True, "value_dim": 40}),
        (by_groups(2), 1, {"head_dim": 80, "dtype": "bfloat16", "queries": 150, "causal": True, "window": 20}),
        (by_groups(keys=48, stages=3), 3, {"queries": 30, "keys": 200, "heads": 4, "kv_heads": 2, "head_dim": 72}),
        (by_groups(), 1, {"scale": -0.3, "queries": 9}),
        (by_groups(2, 32), 1, {"head_dim": 64, "queries": 70, "keys": 200, "dtype": "bfloat16"}),
        (by_groups(keys=32), 2, {"head_dim": 64, "queries": 90, "keys": 150, "causal": True, "window": 40}),
    ],
    ids=["plain", "causal", "window", "slices", "negative scale", "ones", "ones, window and slices"],
)
def test_results_are_those_of_float64(schedule: AttentionSchedule, slices: int, changes: dict[str, Any]) -> None:
    result = checked(schedule, slices, **changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("__syncthreads();", "there is no barrier"),
        ("barrier_fence();", "no fence has followed its making"),
        ("async_proxy_fence();", "without a fence between the proxies"),
        ("barrier_arrive(shared, QUERIES_FULL);", "a wait without end"),
        ("barrier_wait(shared, QUERIES_FULL, 0);", "race"),
        ("barrier_wait(shared, KEYS_FULL + 32 * (number % STAGES), number / STAGES % 2);", "race"),
        ("barrier_wait(shared, VALUES_FULL + 32 * ((number - 1) % STAGES), (number - 1) / STAGES % 2);", "race"),
        ("if (lane == 0) barrier_arrive(shared, KEYS_EMPTY + 32 * (number % STAGES));", "a wait without end"),
        ("if (lane == 0) barrier_arrive(shared, VALUES_EMPTY + 32 * ((number - 1) % STAGES));", "a wait without end"),
        ("barrier_wait(shared, VALUES_EMPTY + 32 * stage, parity ^ 1);", "race"),
        ("barrier_expect(shared, KEYS_FULL + 32 * stage, KEY_TILE);", "a wait without end"),
    ],
)
def test_a_text_without_one_of_what_orders_copies_and_products_is_noticed(
    monkeypatch: pytest.MonkeyPatch, line: str, problem: str
) -> None:
    change(monkeypatch, "_text", line, "", 1)
    result = checked(by_groups(), queries=64)
    assert not result.passed and problem in result.reason


@pytest.mark.usefixtures("emulator")
def test_exponentials_of_a_product_that_is_under_way_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for values: without it new exponentials, and sums that shrink, meet products of the step before."""
    from codegen.gpu.walks import group_functions

    written = group_functions._done
    late = "#define products_done_but_0_16(d) (void)0\n"
    monkeypatch.setattr(
        group_functions,
        "_done",
        lambda pending, width: late if (pending, width) == (0, 16) else written(pending, width),
    )
    assert not checked(by_groups(keys=32), queries=96).passed


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("line", ["sums[m][n][2 * i] *= shrink;", "totals[m][i] *= shrink;", "shrinks[i] = shrink;"])
def test_sums_that_do_not_shrink_with_their_base_are_noticed(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    change(monkeypatch, "_products", line, "shrinks[i] = 1.0f;" if "shrinks" in line else "")
    assert not checked(by_groups(keys=32), keys=256).passed


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("has_base[m][i] |= peak != nothing;", ""), ("sums[m][n][2 * i] *= shrink;", ""),
        ("= 0x3c003c00u;", "= 0u;"), ("(128 - (128LL << 16))", "128"),
    ],
)  # fmt: skip
def test_sums_by_columns_of_ones_are_noticed_where_they_are_none(
    monkeypatch: pytest.MonkeyPatch, line: str, instead: str
) -> None:
    """A base that is forgotten shrinks nothing; the second panel of a product is 16 rows that stay where they are."""
    change(monkeypatch, "_products", line, instead)
    assert not checked(by_groups(keys=32), keys=256, head_dim=64).passed


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("line", "instead"), [("i < 512; i +=", "i < 513; i +="), ("VALUE_BUFFERS + stage", "VALUE_BUFFERS + 2176 + stage")]
)
def test_what_is_written_over_a_barrier_is_noticed(monkeypatch: pytest.MonkeyPatch, line: str, instead: str) -> None:
    """By a thread, one word behind the ones, or by a bulk copy to the last buffer."""
    change(monkeypatch, "_text", line, instead)
    result = checked(by_groups(keys=32, stages=4), keys=256, head_dim=64)
    assert not result.passed and "is written as memory" in result.reason


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("heads", "band"), [(3, 2), (4, 2), (5, 3), (4, 4)])
def test_blocks_of_several_problems_start_side_by_side(monkeypatch: pytest.MonkeyPatch, heads: int, band: int) -> None:
    """Bands alike, whose length is a constant of the text, and a shorter one at the end."""
    changes = {"heads": heads, "queries": 150, "causal": True}
    schedule = by_groups()
    monkeypatch.setattr("sokoban.schedule.attention.BAND_BLOCKS", 3 * band)
    kernel = kernel_of(**changes)
    assert problem_band(kernel, schedule.row_blocks(kernel)) == band
    result = checked(schedule, **changes)
    assert result.passed, result.reason


def test_rows_of_a_panel_have_ones_behind_them() -> None:
    schedules = (
        by_groups(keys=32),
        AttentionSchedule(rows=32, keys=32, warps=2, stages=1, held=False, instruction=Instruction.MMA_16X8X16),
    )
    columns = [[one_columns(kernel_of(head_dim=width), each) for each in schedules] for width in (48, 64, 80, 128)]
    assert columns == [[0, 0], [8, 0], [0, 0], [0, 0]]
    bare = 128 * (64 + 4 * 32) + 32 * 3
    assert shared_bytes(kernel_of(head_dim=64), by_groups(keys=32)) == bare + 16 * 128


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize(
    ("head_dim", "keys", "count", "registers"), [(128, 128, 2, 168), (80, 64, 1, 115), (64, 128, 3, 128)]
)
def test_kernels_compile_without_spills_and_without_serial_products(
    head_dim: int, keys: int, count: int, registers: int
) -> None:
    """Two groups start with a third of the registers for each of three; the third gives some of its own up to them."""
    schedule, changes = by_groups(count, keys), {"head_dim": head_dim, "queries": 4096, "causal": True}
    kernel, architecture = kernel_of(**changes), specific_architecture(schedule, "sm_90")
    assert architecture == "sm_90a"
    lowered = lower(LoweringRequest(kernel, schedule, "attention", Target("cuda", architecture, 32)))
    compiled = compile_cuda(strip_prelude(lowered.text), architecture, name="attention")
    assert compiled.spill_bytes == 0 and "serialized" not in compiled.log
    assert compiled.registers == registers
    # Rows of 80 elements take two panels of 64. Four barriers belong to each buffer, one to the queries; ones to rows
    # of a panel.
    ones, row = (2048, 128) if head_dim == 64 else (0, 256)
    assert shared_bytes(kernel, schedule) == row * (64 * count + 4 * keys) + ones + 32 * 3
