"""Long lines in parts: what their kernels compute, what they take, and where lines stay whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from codegen.target import Target
from codegen.verify.cpu import verify_cpu_chain
from codegen.verify.gpu import verify_chain
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from roller.algorithms import ALGORITHMS, DIRECT, SPLIT_LINE
from roller.algorithms.chain import ChainProgram
from roller.algorithms.line_parts import can_cut
from roller.algorithms.slices import Slices
from roller.algorithms.split_line import SlicedLine
from roller.explain.page import explain
from roller.programs import find_programs, form_on
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.schedule.patches import LineSchedule

V100, H100, CPU = (load_device(name) for name in ("v100", "h100", "epyc-7763"))

CASES: dict[str, dict[str, Any]] = {
    "one line": {"op": "scan", "function": "sum", "shape": [1 << 20]},
    "reversed": {"op": "scan", "function": "sum", "shape": [3, 1 << 18], "reverse": True},
    "exclusive columns": {"op": "scan", "function": "sum", "shape": [1 << 18, 2], "axis": 0, "exclusive": True},
    "reversed, exclusive, scaled": {
        "expr": "Y[i,j] = cumsum(j, X[i,j] * j / 9, reverse, exclusive) * B[j] + i", "sizes": {"i": 2, "j": 1 << 18},
    },
    "largest of halves": {"op": "scan", "function": "max", "shape": [2, 1 << 19], "dtype": "float16"},
    "smallest, masked": {
        "expr": "Y[i,j] = cummin(j, select(j < 77777, X[i,j] * M[j], X[i,j]))", "sizes": {"i": 2, "j": 1 << 19},
    },
    "in the middle": {"op": "scan", "function": "sum", "shape": [2, 1 << 17, 3], "axis": 1, "epilogue": ["relu"]},
    "place": {"op": "reduce", "function": "argmax", "shape": [1 << 20], "axes": [0]},
    "places": {"op": "reduce", "function": "argmin", "shape": [3, 1 << 19], "axes": [1], "dtype": "bfloat16"},
    "a prime": {"op": "scan", "function": "sum", "shape": [1_000_003]},
    "an odd reversed line, masked": {
        "expr": "Y[j,i] = cummax(j, select(j < 77777, X[i,j] * M[j], X[i,j]), reverse) + B[j]",
        "sizes": {"i": 2, "j": 300_007},
    },
    "values by rank": {"op": "topk", "shape": [2, 1 << 17], "k": 8},
    "places by rank": {"op": "topk", "shape": [1 << 17], "k": 5, "result": "indices", "dtype": "float16"},
    "smallest columns by rank": {
        "op": "topk", "shape": [1 << 17, 2], "k": 3, "axis": 0, "largest": False, "result": "indices"
    },
    "places of an odd line": {"expr": "Y[i] = argmin(j, X[i,j] + B[j]) * 2", "sizes": {"i": 2, "j": 300_007}},
    "ranks of an odd line": {"expr": "Y[i,r] = argmax(j, -X[i,j], r) + r", "sizes": {"i": 2, "j": 100_003, "r": 4}},
    "odd values by rank": {"op": "topk", "shape": [3, 100_003], "k": 6, "dtype": "bfloat16"},
    "places of columns, in floats": {
        "expr": "Y[i] = argmax(j, X[j,i]) / 2 + B[i]", "sizes": {"i": 3, "j": 1 << 18}
    },
}  # fmt: skip


def form_of(data: dict[str, Any]) -> KernelForm:
    return kernel_form(operator_from_data({**data, "name": "lines"}))


def split(data: dict[str, Any], device: DeviceSpec = H100) -> list[ChainProgram]:
    form = form_on(operator_from_data({**data, "name": "lines"}), device)
    chains = find_programs(form, device, 60, "roller").chains
    return [program for program in chains if program.algorithm == SPLIT_LINE]


def computed(form: KernelForm, length: int, values: dict[str, Any]) -> Any:
    """The output by all kernels of a chain of parts of a ``length``, as their expressions say."""
    axis = form.line_kernel.axis
    values = dict(values)
    for problem in SlicedLine(Slices(axis, -(-form.sizes[axis] // length), length)).problems(form):
        given = {tensor.name: values[tensor.name].reshape(tensor.shape) for tensor in problem.expr.inputs}
        values[problem.expr.output.name] = evaluate(problem.expr, given)
    return values[form.expr.output.name]


SMALL: dict[str, dict[str, Any]] = {
    f"{function}{', reversed' * reverse}{', exclusive' * exclusive}": {
        "op": "scan", "function": function, "shape": [3, 24], "axis": axis, "reverse": reverse, "exclusive": exclusive
    }
    for function in ("sum", "prod", "max", "min")
    for reverse in (False, True)
    for exclusive in ((False, True) if function in ("sum", "prod") else (False,))
    for axis in (1,)
}  # fmt: skip


@pytest.mark.parametrize("data", SMALL.values(), ids=list(SMALL))
def test_parts_make_the_whole_line(data: dict[str, Any]) -> None:
    form = form_of(data)
    values = random_inputs(form.expr, 1)
    for length in (12, 4, 2, 7, 23):
        np.testing.assert_allclose(
            computed(form, length, values).reshape(3, 24), evaluate(form.source, values), rtol=1e-12
        )


@pytest.mark.parametrize(
    "data",
    [
        {"op": "reduce", "function": "argmax", "shape": [4, 12], "axes": [1]},
        {"op": "reduce", "function": "argmin", "shape": [4, 12], "axes": [1]},
        {"op": "topk", "shape": [4, 12], "k": 2, "result": "indices"},
        {"op": "topk", "shape": [4, 12], "k": 2, "result": "indices", "largest": False},
        {"op": "topk", "shape": [4, 12], "k": 2},
    ],
    ids=["largest", "smallest", "largest by rank", "smallest by rank", "values by rank"],
)
def test_places_are_the_first_of_equals_and_of_what_is_no_number(data: dict[str, Any]) -> None:
    form = form_of(data)
    values = np.array([
        [1, 1, 5, 1, 5, 5, -2, 5, -2, -2, 0, 5],
        [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3],
        [1, 2, 3, np.nan, 9, np.nan, -9, np.nan, 9, 9, -9, 0],
        [-np.inf, -np.inf, np.inf, 0, 0, 0, np.inf, 0, -np.inf, 0, np.inf, 0],
    ])  # fmt: skip
    (name,) = (tensor.name for tensor in form.expr.inputs)
    expected = evaluate(form.source, {name: values})
    for length in (6, 4, 3, 2, 5, 7, 11):
        np.testing.assert_array_equal(computed(form, length, {name: values}).reshape(expected.shape), expected)


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("data", CASES.values(), ids=list(CASES))
def test_kernels_of_boards_are_right_and_wait_for_nothing_in_vain(data: dict[str, Any]) -> None:
    program, *_ = split(data)
    result = verify_chain(program.check(), engine="emulator", target=Target.of(H100), order_seeds=(0, 1))
    assert result.passed, (program.policy, result.reason)
    lines = [number for number, part in enumerate(program.parts, 1) if isinstance(part.schedule, LineSchedule)]
    assert not [each for each in result.needless if int(each.split()[1].rstrip(",")) in lines], program.policy


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize("data", CASES.values(), ids=list(CASES))
def test_twins_in_opencl_are_right(data: dict[str, Any]) -> None:
    *_, program = split(data)
    result = verify_chain(program.check(), engine="opencl", target=Target.of(V100))
    assert result.passed, (program.policy, result.reason)


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("name", ["one line", "in the middle", "a prime", "values by rank"])
def test_kernels_of_processors_are_right(name: str) -> None:
    program, *_ = split(CASES[name], CPU)
    result = verify_cpu_chain(program.check(), Target.of(CPU))
    assert result.passed, (program.policy, result.reason)


def test_processors_read_no_places() -> None:
    assert not split(CASES["places"], CPU)


def test_one_long_line_takes_what_its_elements_take_from_memory_and_not_one_block() -> None:
    """Three times: the line is read twice and written once."""
    data = {"op": "scan", "function": "sum", "shape": [1 << 24]}
    form = form_on(operator_from_data(data), H100)
    split_up, whole = (
        find_programs(form, H100, 1, "roller", algorithms).ranked(1)[0].estimate
        for algorithms in (ALGORITHMS, (DIRECT,))
    )
    roofline = 3 * 4 * 2**24 / H100.dram.bandwidth_bytes_per_second
    assert roofline < split_up.seconds < 1.3 * roofline and whole.seconds > 50 * split_up.seconds


@pytest.mark.parametrize(
    "data",
    [
        {"op": "scan", "function": "sum", "shape": [4096, 4096]},
        {"op": "reduce", "function": "argmax", "shape": [(1 << 24) + 2], "axes": [0]},
        {"expr": "Y[j] = cumsum(j, X[j + 1 | pad=0])", "sizes": {"j": 1 << 20}, "shapes": {"X": [1 << 20]}},
        {"expr": "Y[j] = cumsum(j, X[j] * X[1048575 - j])", "sizes": {"j": 1 << 20}},
        {"expr": "Y[j] = cumsum(j, X[j]) * X[5]", "sizes": {"j": 1 << 20}},
        {"expr": "Y[i] = argmax(j, X[i,j] * j)", "sizes": {"i": 2, "j": 1 << 20}},
    ],
    ids=["many lines", "no numbers in float32", "moved", "two ways", "across", "positions of places"],
)  # fmt: skip
def test_other_lines_stay_whole(data: dict[str, Any]) -> None:
    assert not split(data)
    assert can_cut(form_of(data)) == (data.get("shape") == [4096, 4096])


def test_a_page_shows_every_kernel() -> None:
    form = form_on(operator_from_data(CASES["one line"]), H100)
    programs = find_programs(form, H100, 3, "roller")
    page = " ".join(explain(programs, 1, programs.ranked(3)).split())
    assert "other blocks have other parts of a line" in page
    assert "adds up what parts come to" in page and "scans parts behind what comes before them" in page


def test_sequences_have_whole_lines() -> None:
    data = {"expr": "C[i,j] = cumsum(j, X[i,j]); Y[i] = max(j, C[i,j])", "sizes": {"i": 2, "j": 1 << 18}}
    form = form_on(operator_from_data({**data, "name": "steps"}), H100)
    first, *_ = find_programs(form, H100, 2, "roller").chains
    assert [isinstance(part.schedule, LineSchedule) for part in first.parts] == [True, False]
    assert first.check().steps


def test_places_of_a_single_row_are_computed_with() -> None:
    form = form_of({"expr": "Y[i] = argmax(j, X[i,j]) * 2 + B[i]", "sizes": {"i": 1, "j": 1000}})
    values = random_inputs(form.source, 3)
    fused = {tensor.name: values[tensor.name].reshape(tensor.shape) for tensor in form.expr.inputs}
    assert form.is_line and evaluate(form.expr, fused).tolist() == evaluate(form.source, values).tolist()
