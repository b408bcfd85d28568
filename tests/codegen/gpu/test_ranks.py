"""Kernels of values and places by rank: what compilers make of them, and in which order equal values and NaN come."""

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
from sokoban.language.reference import evaluate
from sokoban.schedule.patches import LineSchedule

SCHEDULES = [
    LineSchedule(threads=threads, lines=lines) for threads, lines in ((1, 64), (32, 4), (128, 2), (512, 1), (8, 12))
]
TARGET = Target("cuda", "sm_80", 32)


def form(text: str, length: int = 1000, **options: object) -> KernelForm:
    data = {"expr": text, "sizes": {"i": 12, "j": length, "r": 8}, **options}
    return operator_form(operator_from_data(data))


def text_of(problem: KernelForm, schedule: LineSchedule) -> str:
    _, built = cuda_kernel(LoweringRequest(problem.line_kernel, schedule, "k", TARGET))
    return built.source[built.source.rindex('extern "C"') :]


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: f"{each.threads} threads")
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_texts_compile_without_spills(schedule: LineSchedule, dtype: str) -> None:
    for text, length in (("Y[i,r] = max(j, X[i,j], r)", 1000), ("Y[i,r] = argmin(j, X[i,j], r)", 24)):
        request = BuildRequest(
            form=form(text, length, dtype=dtype).line_kernel, schedule=schedule, entry="ranks", target=TARGET,
            worthwhile_blocks=(),
        )  # fmt: skip
        built = build_kernel(request)
        assert built.error == "" and built.spill_bytes == 0


def test_shares_that_fit_registers_are_read_once() -> None:
    short, long = (text_of(form("Y[i,r] = max(j, X[i,j], r)", length), SCHEDULES[1]) for length in (256, 2048))
    assert (short.count("(float4*)(X_ptr"), long.count("(float4*)(X_ptr")) == (1, 2)
    assert text_of(form("Y[i,r] = max(j, X[i,j], r)"), SCHEDULES[2]).count("__syncthreads();") == 1


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: f"{each.threads} threads")
@pytest.mark.parametrize("text", ["argmax(j, X[i,j], r)", "min(j, X[i,j], r)"])
def test_equal_values_and_nan_come_in_the_order_of_the_reference(text: str, schedule: LineSchedule) -> None:
    problem = form(f"Y[i,r] = {text}")
    values = np.random.default_rng(0).integers(-3, 4, (12, 1000)).astype(np.float64)
    values[0], values[1], values[2] = 5.0, np.inf, -np.inf
    values[3, [700, 130]] = np.nan
    values[4, [40, 41]] = (np.inf, -np.inf)
    values[5] = np.nan
    # All that come first are neighbours, or in the share of one thread.
    values[6], values[7] = np.arange(1000) - 500, 500 - np.arange(1000)
    values[8], values[9] = (sign * np.where(np.arange(1000) % 128, 0, np.arange(1000) + 1) for sign in (1, -1))
    trial = cuda_trial(problem, [(problem.line_kernel, schedule)])
    (launch,) = trial.launches
    flat = emulated_kernel(trial, launch, {"X": values}).run((0, 1)).flat[:96]
    assert np.array_equal(flat, evaluate(problem.expr, {"X": values}).ravel(), equal_nan=True)
