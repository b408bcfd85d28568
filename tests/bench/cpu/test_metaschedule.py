"""Operators as TVM's workloads, and schedules that come back from their traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.cpu.metaschedule import _best, _trace_text, compiled, workload
from hal.microbench.cpu.native import host_architecture
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate

EMPTY = "[[],[]]"
WINDOW = {"n": 1, "c": 4, "h": 7, "w": 7, "kh": 3, "kw": 3, "stride": 2, "padding": 1}

SPECS: list[dict[str, Any]] = [
    {"op": "matmul", "m": 6, "n": 16, "k": 5, "epilogue": [{"function": "bias_add", "axis": "n"}, "gelu"]},
    {"op": "conv2d", "f": 3, **WINDOW},
    {"op": "max_pool2d", **WINDOW},
    {"op": "softmax", "shape": [3, 8]},
    {"op": "reduce", "function": "mean", "shape": [6, 8], "axes": [0]},
    {"op": "transpose", "shape": [4, 8], "perm": [1, 0]},
]


def error_of(spec: dict[str, Any], trace: str) -> float:
    import tvm

    expr = operator_from_data(spec)
    values = random_inputs(expr, 1)
    out = tvm.runtime.tensor(np.full(expr.output.shape, np.nan, np.float32))
    inputs = [tvm.runtime.tensor(values[tensor.name].astype(np.float32)) for tensor in expr.inputs]
    compiled(expr, trace, host_architecture(), 1)(*inputs, out)
    return float(np.abs(out.numpy() - evaluate(expr, values)).max())


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["op"])
def test_a_workload_computes_the_operator(spec: dict[str, Any]) -> None:
    assert error_of(spec, EMPTY) < 1e-5


@pytest.mark.usefixtures("device_compiler")
def test_padding_is_a_block_of_its_own() -> None:
    text = workload(operator_from_data(SPECS[1])).script()
    assert "X_padded" in text and text.count("T.sblock(") == 3  # with the one around all


@pytest.mark.usefixtures("device_compiler")
def test_a_schedule_comes_back_from_its_trace() -> None:
    from tvm.s_tir import Schedule

    spec = SPECS[0]
    schedule = Schedule(workload(operator_from_data(spec)))
    block = schedule.get_sblock("C")
    _, j, _ = schedule.get_loops(block)
    _, inner = schedule.split(j, [None, 8])
    schedule.reorder(schedule.get_loops(block)[-1], inner)
    schedule.vectorize(inner)
    trace = _trace_text(schedule.trace)
    assert '"Vectorize"' in trace and error_of(spec, trace) < 1e-5


class Record:
    """A candidate as TVM's database has it."""

    def __init__(self, *seconds: float) -> None:
        self.run_secs = seconds
        self.trace = self

    def as_json(self) -> list[Any]:
        return [[["Get", [], ["C", True], None]], [[0, self.run_secs[0]]]]


def test_the_best_candidate_is_kept_and_failures_are_counted() -> None:
    found = _best([Record(2e-3), Record(1e10), Record(1e-3, 1.2e-3)], 64, 12.3456)
    assert (found.tried, found.failed, found.best_seconds, found.seconds) == (3, 1, 1e-3, 12.346)
    assert found.trace == '[[["Get",[],["C",true],null]],[[0,0.001]]]'


def test_a_search_of_which_nothing_ran_has_no_schedule() -> None:
    found = _best([Record(1e10)], 64, 1.0)
    assert (found.tried, found.failed, found.best_seconds, found.trace) == (1, 1, None, None)
    assert _best([], 64, 1.0).trace is None
