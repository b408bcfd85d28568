"""Scans and places in one kernel: proposals, prices, and results on boards, by OpenCL and on this processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from codegen.target import Target
from codegen.verify.cpu import verify_cpu_chain
from codegen.verify.gpu import verify_chain
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.algorithms import DIRECT
from roller.algorithms.chain import ChainProgram
from roller.cli import main
from roller.estimate.gradients import gradients
from roller.explain.page import explain
from roller.library.recognise import recognise
from roller.programs import find_programs, form_on
from sokoban.language.expression import statement_text
from sokoban.language.operators import operator_from_data
from sokoban.schedule.patches import LineSchedule

V100, H100, CPU = (load_device(name) for name in ("v100", "h100", "epyc-7763"))

CASES: dict[str, dict[str, Any]] = {
    "rows": {"op": "scan", "function": "sum", "shape": [37, 1000]},
    "columns, exclusive": {"op": "scan", "function": "sum", "shape": [300, 70], "axis": 0, "exclusive": True},
    "reversed halves": {"op": "scan", "function": "max", "shape": [9, 2048], "reverse": True, "dtype": "float16"},
    "odd products of doubles": {
        "expr": "Y[j,i] = cumprod(j, 1 + X[i,j] / 99, reverse, exclusive) * B[j]", "sizes": {"i": 17, "j": 401},
        "dtype": "float64",
    },
    "masked, with a border": {
        "expr": "Y[i,j] = cumsum(j, X[i, j - 2 | pad=1] * select(M[i,j] > 0, 1, 0))", "sizes": {"i": 20, "j": 520},
        "shapes": {"X": [20, 515]},
    },
    "a long line": {"op": "scan", "function": "sum", "shape": [100003]},
    "places": {"op": "reduce", "function": "argmax", "shape": [40, 1000], "axes": [1]},
    "places of columns": {"op": "reduce", "function": "argmin", "shape": [5, 300, 33], "axes": [1], "dtype": "float16"},
    "places in floats": {"expr": "Y[i] = argmax(j, X[i,j]) / 2 + B[i]", "sizes": {"i": 33, "j": 999}},
    "values by rank": {"op": "topk", "shape": [40, 1000], "k": 8},
    "short lines by rank": {"op": "topk", "shape": [70, 8], "k": 2, "result": "indices", "dtype": "float64"},
    "columns by rank": {"op": "topk", "shape": [3, 200, 70], "k": 24, "axis": 1, "largest": False, "result": "indices"},
    "a softmax of ranks": {
        "expr": "V[i,r] = max(j, X[i,j] + B[j], r); S[i] = sum(r, exp(V[i,r])); Y[i,r] = exp(V[i,r]) / S[i]",
        "sizes": {"i": 50, "j": 128, "r": 6},
    },
    "scattered rows": {"op": "scatter_add", "rows": 70, "columns": 96, "count": 1000},
    "odd scattered doubles": {
        "op": "scatter_add", "rows": 37, "columns": 7, "count": 30, "dtype": "float64", "epilogue": ["relu"],
    },
    "scattered heads": {
        "expr": "Y[h,i,c] = sum(t, select(i == I[t], W[t] * X[t,h,c], 0)) + R[i,c]",
        "sizes": {"i": 50, "t": 128, "h": 3, "c": 20}, "dtypes": {"I": "int32"},
    },
    "a sequence": {"expr": "S[i] = sum(j, X[i,j]); Y[i,j] = cumsum(j, X[i,j] / S[i])", "sizes": {"i": 20, "j": 333}},
}  # fmt: skip
BOARD_CASES = CASES | {
    "integers": {"op": "scan", "function": "sum", "shape": [64, 96], "axis": 0, "dtype": "float32"},
    "bytes": {"expr": "Y[i] = argmin(j, X[i,j])", "sizes": {"i": 33, "j": 256}, "dtypes": {"X": "int8"}},
    "bytes by rank": {
        "expr": "Y[i,r] = argmin(j, X[i,j], r)",
        "sizes": {"i": 33, "j": 256, "r": 5},
        "dtypes": {"X": "int8"},
    },
    "scattered brain floats": {"op": "scatter_add", "rows": 32000, "columns": 100, "count": 4096, "dtype": "bfloat16"},
    "whole numbers": {"expr": "Y[i,j] = cumsum(i, X[i,j])", "sizes": {"i": 70, "j": 33}, "dtype": "int8"},
    "brain floats": {"op": "scan", "function": "prod", "shape": [12, 520], "dtype": "bfloat16", "epilogue": ["tanh"]},
}


def ranked(data: dict[str, Any], device: DeviceSpec, count: int = 60) -> list[ChainProgram]:
    form = form_on(operator_from_data(data), device)
    programs = find_programs(form, device, count, "roller", (DIRECT,)).ranked(count)
    assert all(isinstance(program, ChainProgram) for program in programs)
    return programs  # type: ignore[return-value]


def kinds(data: dict[str, Any], device: DeviceSpec) -> list[ChainProgram]:
    """A program of each way: warps of one line, blocks of one, a thread each."""
    chosen: dict[tuple[bool, bool, int], ChainProgram] = {}
    for program in ranked(data, device):
        schedules = [part.schedule for part in program.parts if isinstance(part.schedule, LineSchedule)]
        for schedule in schedules:
            key = (schedule.threads == 1, schedule.threads == 32, min(2, schedule.lines))
            chosen.setdefault(key, program)
    return list(chosen.values())


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("data", BOARD_CASES.values(), ids=list(BOARD_CASES))
def test_kernels_of_boards_are_right_and_wait_for_nothing_in_vain(data: dict[str, Any]) -> None:
    for program in kinds(data, H100):
        check = program.check()
        assert check is not None
        result = verify_chain(check, engine="emulator", target=Target.of(H100), order_seeds=(0, 1))
        assert result.passed, (program.policy, result.reason)
        assert not result.needless, (program.policy, result.needless)


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize("data", CASES.values(), ids=list(CASES))
def test_twins_in_opencl_are_right(data: dict[str, Any]) -> None:
    for program in kinds(data, V100):
        check = program.check()
        assert check is not None
        result = verify_chain(check, engine="opencl", target=Target.of(V100))
        assert result.passed, (program.policy, result.reason)


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("data", CASES.values(), ids=list(CASES))
def test_kernels_of_processors_are_right(data: dict[str, Any]) -> None:
    for program in ranked(data, CPU, 2):
        check = program.check()
        assert check is not None
        result = verify_cpu_chain(check, Target.of(CPU))
        assert result.passed, (program.policy, result.reason)


def test_many_long_lines_take_the_time_of_memory() -> None:
    """Of PyTorch's shape of a cumulative sum, 32768 lines of 32768 numbers, each number is read and written once."""
    scan = {"op": "scan", "function": "sum", "shape": [32768, 32768]}
    for name in ("v100", "a100", "h100", "b200"):
        device = load_device(name)
        best = ranked(scan, device, 1)[0].estimate
        roofline = 2 * 4 * 2**30 / device.dram.bandwidth_bytes_per_second
        assert best.bound == "dram" and roofline < best.seconds < 1.2 * roofline


def test_few_lines_are_shared_and_many_short_ones_are_not() -> None:
    few = ranked({"op": "scan", "function": "sum", "shape": [8, 65536]}, H100, 1)[0].parts[0].schedule
    many = ranked({"op": "scan", "function": "sum", "shape": [64, 1 << 22], "axis": 0}, H100, 1)[0].parts[0].schedule
    assert isinstance(few, LineSchedule) and few.threads == 1024
    assert isinstance(many, LineSchedule) and many.threads == 1


def test_a_page_tells_how_lines_are_gone_along() -> None:
    data = CASES["rows"]
    programs = find_programs(form_on(operator_from_data(data), H100), H100, 3, "roller")
    page = " ".join(explain(programs, 1, programs.ranked(3)).split())
    assert "37 lines of 1000 elements along i1" in page and "carries on what the ones before came to" in page


def test_gradients_of_cumulative_sums_go_the_other_way() -> None:
    (gradient,) = gradients(operator_from_data({"op": "scan", "function": "sum", "shape": [4, 5], "exclusive": True}))
    assert statement_text(gradient.expr.statements[0]) == "dX[i0, i1] = cumsum(i1, grad[i0, i1], reverse, exclusive)"
    for data in (CASES["reversed halves"], CASES["places"]):
        with pytest.raises(InputError, match="known for cumulative sums and values by rank"):
            gradients(operator_from_data(data))


def test_libraries_reduce_places_and_scan_rows() -> None:
    place, scan = (
        recognise(operator_from_data({**CASES[name], "name": "op"})) for name in ("places in floats", "rows")
    )
    assert [call.label for call in place] == ["reduce argmax", "div (number)", "add"]
    assert [call.kind for call in scan] == ["scan"]


def test_commands(tmp_path: Path) -> None:
    file = tmp_path / "ops.json"
    file.write_text('[{"op": "scan", "function": "sum", "shape": [64, 4096]}]')
    invoked = CliRunner().invoke(main, ["estimate", "--device", "h100", str(file)])
    assert invoked.exit_code == 0 and "threads a line" in invoked.output
    schedules = tmp_path / "schedules.json"
    schedules.write_text('{"block": {"i0": 4}, "thread": {"i0": 1}}')
    refused = CliRunner().invoke(main, ["score", "--device", "h100", "--schedules", str(schedules), str(file)])
    assert refused.exit_code == 2 and "its kernels take no schedules of tiles" in refused.output
