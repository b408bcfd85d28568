"""The judge of KernelBench: rows of measured problems, a copy's folder, and what is wrong with either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from click.testing import CliRunner, Result

from bench.accuracy.data import default_directory
from bench.kernelbench.__main__ import main
from bench.kernelbench.calls import read_rows
from bench.kernelbench.twins.chains import CHAINS
from bench.kernelbench.twins.operators import OPERATORS

ROWS = default_directory() / "kernelbench" / "problems.jsonl"
BOARD = "h100-sxm-80gb"

#: A problem as files of a copy have it.
FILE = """
import torch

class Model(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.layer = torch.nn.Linear(64, features)

    def forward(self, x):
        return torch.cumsum(torch.relu(self.layer(x)), dim=1)

def get_inputs():
    return [torch.rand(256, 64)]

def get_init_inputs():
    return [128]
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def row(name: str, *operators: object, **more: object) -> str:
    return json.dumps({"problem": name, "board": "h100-sxm-80gb", "eager_ms": 1.0, "operators": operators, **more})


@pytest.mark.usefixtures("emulator")
def test_rows_are_said_priced_and_proved(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    sums = ["aten::cumsum", [[[64, 4096], "float"]], ["", "1", ""], [[64, 4096]]]
    places = ["aten::argmax", [[[64, 4096], "float"]], ["", "1", "False"], [[64]]]
    drawn = ["aten::native_dropout", [[[64, 64], "float"]], ["", "0.5", "True"], [[64, 64], [64, 64]]]
    path.write_text("\n".join(row(f"level1/{n}_x.py", each) for n, each in enumerate((sums, places, drawn), 1)))
    invoked = run(path, "--prove")
    assert invoked.exit_code == 0, invoked.output
    lines = invoked.output.splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["proved", "proved"] and "random numbers" in lines[3]
    assert "level1: 2 of 3 said, 2 proved" in lines[-1]


def test_a_copys_files_are_called_without_data(tmp_path: Path) -> None:
    folder = tmp_path / "KernelBench" / "level1"
    folder.mkdir(parents=True)
    (folder / "1_sum.py").write_text(FILE)
    (folder / "2_broken.py").write_text(FILE.replace("torch.relu", "torch.no_such_function"))
    invoked = run(folder.parent, "--level", "level1")
    assert invoked.exit_code == 0, invoked.output
    assert "level1: 1 of 2 said, 0 proved" in invoked.output
    assert "cannot be called without data: AttributeError" in invoked.output


@pytest.mark.usefixtures("emulator")
def test_twins_stand_in_for_titles_without_rows() -> None:
    invoked = run("--problem", "_sums_of_all", "--prove")
    assert invoked.exit_code == 0, invoked.output
    lines = invoked.output.splitlines()[1:-1]
    assert len(lines) == 4 and all(line.endswith("proved") for line in lines), invoked.output


@pytest.mark.slow
def test_twins_are_said_but_for_what_is_drawn() -> None:
    invoked = run()
    assert "level1: 56 of 56 said" in invoked.output and "level2: 41 of 42 said" in invoked.output
    assert "random numbers" in invoked.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"problem": "level1/1.py"}', "rows.jsonl:1: no row with problem and operators; give problems.jsonl"),
        (row("level1/1.py", board="h20"), "no problems of level1, level2 on h100-sxm-80gb"),
    ],
)
def test_what_is_no_problem_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    refused = run(path)
    assert refused.exit_code == 2 and message in refused.output
    assert run(tmp_path).exit_code == 2


@pytest.mark.skipif(not ROWS.is_file(), reason="the measured problems are not at hand")
@pytest.mark.parametrize(("level", "twins"), [("level1", OPERATORS), ("level2", CHAINS)])
def test_twins_have_the_numbers_that_rows_have_not(level: str, twins: dict[str, object]) -> None:
    measured = {problem.name.partition("/")[2].partition("_")[0] for problem in read_rows(ROWS, BOARD, [level])}
    others = [title.partition("_")[0] for title in twins]
    assert sorted([*measured, *others], key=int) == [str(number) for number in range(1, 101)]


@pytest.mark.slow
@pytest.mark.skipif(not ROWS.is_file(), reason="the measured problems are not at hand")
def test_measured_problems_are_said() -> None:
    invoked = run(ROWS)
    assert "level1: 44 of 44 said" in invoked.output and "level2: 57 of 58 said" in invoked.output
