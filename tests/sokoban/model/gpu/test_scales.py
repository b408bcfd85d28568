"""Price of scales of blocks: multiply-adds, reads and bytes of a step, and groups that wait for their own products."""

from __future__ import annotations

import pytest

from hal.catalog import load_device
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from sokoban.model.gpu.breakdown import breakdown
from sokoban.model.gpu.issue import warp_instructions
from sokoban.model.gpu.scales import scale_bytes, scale_instructions, scale_passes
from sokoban.model.gpu.stages import compute_seconds
from sokoban.model.gpu.step import BlockStep
from sokoban.model.rational import estimate_schedules
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import group_schedule

H100 = load_device("h100-sxm-80gb")


def form_of(scales: str = "S[b,i]", m: int = 4096, c: int = 56, b: int = 16) -> KernelForm:
    data = {
        "expr": f"Y[i,c,n] = sum((b, k), A[i,b,k] * W[c,n,b,k] * {scales} * T[c,b])",
        "sizes": {"i": m, "c": c, "n": 128, "b": b, "k": 128}, "dtype": "float8_e4m3fn",
        "dtypes": {"S": "float32", "T": "float32", "Y": "bfloat16"},
    }  # fmt: skip
    return kernel_form(operator_from_data(data))


def schedule_of(form: KernelForm, rows: int, width: int = 128, stages: int = 4) -> TileSchedule:
    assert form.roles is not None
    return group_schedule(form, form.roles, rows, width, stages).with_(cluster=1)


def table_of(form: KernelForm, *rows: int) -> ScheduleTable:
    return ScheduleTable.of(form, [schedule_of(form, each) for each in rows])


def test_a_step_has_a_multiply_add_for_every_sum_of_a_thread() -> None:
    """64 of 128 columns, three reads of scales of four instructions, and a product for each of two rows."""
    table = table_of(form_of(), 64, 128)
    assert scale_instructions(table).tolist() == [64 + 3 * 4 + 2] * 2


@pytest.mark.parametrize(("scales", "passes"), [("S[b,i]", 3), ("S[i,b]", 2 * 4 + 1)])
def test_scales_of_rows_that_lie_apart_take_a_pass_a_line(scales: str, passes: float) -> None:
    """Rows of 16 blocks of four bytes: two to a line of 128 bytes."""
    assert scale_passes(table_of(form_of(scales), 64)) == passes


@pytest.mark.parametrize("scales", ["S[b,i]", "S[i,b]"])
def test_sectors_of_scales_come_once(scales: str) -> None:
    assert scale_bytes(table_of(form_of(scales), 64, 128), H100).tolist() == [64 * 4 + 4, 128 * 4 + 4]


def test_one_group_cannot_multiply_while_it_scales() -> None:
    """Two take turns at the matrix units; one leaves them idle for as long as its instructions take."""
    form = form_of()
    table = table_of(form, 64, 128)
    step = BlockStep(table, PlacedForm(form, H100))
    rates = step.placed.warp_group_rates
    assert rates is not None
    product = 2 * 64 * 128 * 128 / (rates.peak_flops / H100.unit_count)
    one, two = compute_seconds(step) / step.occupancy.running
    assert step.occupancy.running.tolist() == [1, 1]
    assert one == pytest.approx(product + warp_instructions(step)[0] / H100.clocks.boost_hz)
    assert two == pytest.approx(2 * product)


def test_threads_have_both_sets_of_sums() -> None:
    form = form_of()
    occupancy = breakdown(table_of(form, 64, 128, 192), PlacedForm(form, H100)).step.occupancy
    assert occupancy.registers.tolist() == [160, 168, 128]  # those of larger blocks get what the copying group gives up
    assert occupancy.spilled.tolist() == [0, 0, 0]


def test_scales_make_a_product_longer_but_not_much() -> None:
    scaled = form_of()
    data = {"op": "matmul", "m": 4096, "n": 7168, "k": 2048, "dtype": "float8_e4m3fn", "transpose_b": True}
    unscaled = kernel_form(operator_from_data({**data, "output_dtype": "bfloat16"}))
    least, scaling = (
        estimate_schedules(form, H100, [schedule_of(form, 128).with_(cluster=4)]).seconds[0]
        for form in (unscaled, scaled)
    )
    assert 1.01 < scaling / least < 1.05
