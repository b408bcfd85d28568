"""Kernels of lines as text: what compilers make of it, where threads meet, and what NaN and equal values come to."""

from __future__ import annotations

import re

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

SCHEDULES = [LineSchedule(threads=threads, lines=lines) for threads, lines in ((1, 64), (32, 4), (128, 2), (512, 1))]


def form(text: str, **options: object) -> KernelForm:
    return operator_form(operator_from_data({"expr": text, "sizes": {"i": 12, "j": 1024}, **options}))


def text_of(problem: KernelForm, schedule: LineSchedule) -> str:
    target = Target("cuda", "sm_80", 32)
    _, built = cuda_kernel(LoweringRequest(problem.line_kernel, schedule, "k", target))
    return built.source[built.source.rindex('extern "C"') :]


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: f"{each.threads} threads")
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_texts_compile_without_spills(schedule: LineSchedule, dtype: str) -> None:
    for value in ("Y[i,j] = cumsum(j, X[i,j], reverse)", "Y[i] = argmax(j, X[i,j])"):
        problem = form(value, dtype=dtype).line_kernel
        request = BuildRequest(
            form=problem, schedule=schedule, entry="lines", target=Target("cuda", "sm_80", 32), worthwhile_blocks=()
        )
        built = build_kernel(request)
        assert built.error == "" and built.spill_bytes == 0
        assert built.grid == (schedule.blocks(problem), 1, 1)


def test_a_piece_has_one_barrier_and_vectors_one_access() -> None:
    text = text_of(form("Y[i,j] = cumsum(j, X[i,j])"), LineSchedule(threads=128, lines=2))
    assert text.count("__syncthreads();") == 1 and text.count("(float4*)(X_ptr") == 1
    assert len(re.findall(r"__shfl_up_sync", text)) == 6
    assert "__syncthreads" not in text_of(form("Y[i,j] = cumsum(j, X[i,j])"), LineSchedule(threads=32, lines=4))
    alone = text_of(form("Y[i,j] = cumsum(j, X[i,j])"), LineSchedule(threads=1, lines=64))
    assert "__shfl" not in alone and "__shared__" not in alone


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: f"{each.threads} threads")
@pytest.mark.parametrize("function", ["argmax", "argmin"])
def test_of_equal_values_the_first_is_taken_and_nan_before_all(function: str, schedule: LineSchedule) -> None:
    problem = form(f"Y[i] = {function}(j, X[i,j])")
    values = np.random.default_rng(0).integers(-3, 4, (12, 1024)).astype(np.float64)
    values[0], values[1], values[2] = 5.0, np.inf, -np.inf
    values[3, [700, 130]] = np.nan
    values[4, 1023] = np.nan
    values[5, [40, 41]] = (np.inf, -np.inf)
    values[6] = np.nan
    trial = cuda_trial(problem, [(problem.line_kernel, schedule)])
    (launch,) = trial.launches
    flat = emulated_kernel(trial, launch, {"X": values}).run((0, 1)).flat[:12]
    assert flat.tolist() == evaluate(problem.expr, {"X": values}).tolist()
    assert flat[[0, 1, 2, 3, 4, 6]].tolist() == [0, 0, 0, 130, 1023, 0]
