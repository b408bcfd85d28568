"""KernelBench's problems as captures: what reads what, halves, and the errors on the measured ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from bench.accuracy.data import default_directory
from bench.accuracy.steps.kernelbench import Score, capture_of, error_table, evaluate, read_problems, worst_table
from daydream.capture.fusion.inductor import fused

PATH = default_directory() / "kernelbench" / "problems.jsonl"

CONVOLUTION = [
    "aten::convolution",
    [[[8, 16, 32, 32], "float"], [[32, 16, 3, 3], "float"], [[32], "float"]],
    ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1"],
    [[8, 32, 30, 30]],
]
SIGMOID = ["aten::sigmoid", [[[8, 32, 30, 30], "float"]], [""], [[8, 32, 30, 30]]]
PRODUCT = ["aten::mul", [[[8, 32, 30, 30], "float"]] * 2, ["", ""], [[8, 32, 30, 30]]]


def row(name: str, count: int, ms: float) -> str:
    """A line of the data with so many sigmoids."""
    figures = {"eager_ms": ms, "eager_std_ms": 0.0, "compiled_ms": ms / 2}
    return json.dumps({"problem": name, "board": "h100-sxm-80gb", "operators": [SIGMOID] * count, **figures})


def test_operators_read_the_last_tensors_of_their_sizes() -> None:
    step = capture_of("gate", [CONVOLUTION, SIGMOID, PRODUCT])
    assert [each.read for each in step.operators] == [(0, 1, 2), (3,), (4, 3)]
    assert [each.freed for each in step.operators] == [(), (), (3, 4)]
    names = [each.name for each in fused(step).operators]
    assert names == ["aten::convolution", "inductor::triton_poi_fused_add_mul_sigmoid"]


def test_problems_of_many_operators_are_cut_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join([row("level1/24_Even.py", 2, 1.0), row("level3/7_Odd.py", 60, 1.0)]))
    (problem,) = read_problems(path)
    assert (problem.level, problem.chosen_on, problem.eager, problem.compiled) == ("level1", True, 1e-3, 5e-4)


def test_tables_tell_errors_by_half_and_the_worst(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join([row("level1/2_A.py", 1, 1.0), row("level1/3_B.py", 1, 1.0)]))
    scores = [
        Score(problem=problem, eager=seconds, compiled=5e-4)
        for problem, seconds in zip(read_problems(path), (1.1e-3, 3e-3), strict=True)
    ]
    columns = [list(column.cells) for column in error_table(scores).columns]
    assert columns[4][-3:] == ["10.0%", "200.0%", "105.0%"]
    assert columns[6][-3:] == ["0", "1", "1"]
    assert next(iter(worst_table(scores).columns[4].cells)) == "3.00"


@pytest.mark.slow
@pytest.mark.skipif(not PATH.is_file(), reason="the measured data is not here")
def test_measured_problems_are_met_on_the_half_that_nothing_was_chosen_on() -> None:
    scores = [score for score in evaluate(read_problems(PATH)) if not score.problem.chosen_on]
    errors = np.array([abs(score.eager / score.problem.eager - 1) for score in scores])
    compiled = np.array([abs(score.compiled / score.problem.compiled - 1) for score in scores])
    assert np.median(errors) < 0.08
    assert errors.mean() < 0.14
    assert np.median(compiled) < 0.18
