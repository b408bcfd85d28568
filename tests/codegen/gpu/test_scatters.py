"""Kernels that add scattered rows: the order of sums, places that name no row, and what is read."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.compile.build import build_kernel
from codegen.compile.request import BuildRequest
from codegen.gpu.sources import cuda_kernel
from codegen.target import Target
from codegen.tir.lowering import LoweringRequest
from codegen.verify.gpu import cuda_trial, emulated_kernel
from sokoban.kernel.form import KernelForm
from sokoban.kernel.stages import operator_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.patches import LineSchedule

SCHEDULES = [
    LineSchedule(threads=threads, lines=lines) for threads, lines in ((32, 1), (32, 16), (128, 4), (256, 16), (512, 8))
]
TARGET = Target("cuda", "sm_80", 32)


def form(rows: int = 20, columns: int = 48, count: int = 600, **options: object) -> KernelForm:
    data = {"op": "scatter_add", "rows": rows, "columns": columns, "count": count, **options}
    return operator_form(operator_from_data(data))


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: f"{each.threads} threads, {each.lines} rows")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_texts_compile_without_spills(schedule: LineSchedule, dtype: str) -> None:
    request = BuildRequest(
        form=form(dtype=dtype).line_kernel, schedule=schedule, entry="rows", target=TARGET, worthwhile_blocks=()
    )
    built = build_kernel(request)
    assert built.error == "" and built.spill_bytes == 0


def test_rows_are_read_where_they_are_named_and_nothing_waits() -> None:
    _, built = cuda_kernel(LoweringRequest(form().line_kernel, SCHEDULES[1], "k", TARGET))
    text = built.source[built.source.rindex('extern "C"') :]
    assert "__syncthreads" not in text and "atomic" not in text
    before, inside = text.split("while (1)")
    assert "X_ptr +" not in before and inside.count("*(float4*)(X_ptr") == 1


def test_every_place_is_looked_at_by_one_warp_of_a_block() -> None:
    _, built = cuda_kernel(LoweringRequest(form(count=4096).line_kernel, SCHEDULES[3], "k", TARGET))
    text = built.source[built.source.rindex('extern "C"') :]
    assert text.count("__syncthreads") == 1 and "atomic" not in text
    assert "turn < 4" in text  # of 256 threads with four places each


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: f"{each.threads} threads, {each.lines} rows")
def test_sums_are_in_the_order_of_the_places(schedule: LineSchedule) -> None:
    problem, generator = form(), np.random.default_rng(0)
    places = generator.integers(-2, 22, 600)
    values = (generator.uniform(-1, 1, (600, 48)) * 10.0 ** generator.integers(0, 6, (600, 1))).astype(np.float32)
    values[(places < 0) | (places >= 20)] = np.nan
    expected = np.zeros((20, 48), np.float32)
    for place, row in zip(places, values, strict=True):
        if 0 <= place < 20:
            expected[place] += row
    trial = cuda_trial(problem, [(problem.line_kernel, schedule)])
    (launch,) = trial.launches
    inputs = {"I": places.astype(np.float64), "X": values.astype(np.float64)}
    for orders in ((0,), (1,), (2,)):
        flat = emulated_kernel(trial, launch, inputs).run(orders).flat[: expected.size]
        assert np.array_equal(flat.astype(np.float32), expected.ravel())
