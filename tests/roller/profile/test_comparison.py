"""Predicted against measured: harvests and profiled bundles made up so that every figure can be checked by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hal.catalog import load_device
from hal.microbench import toml_text
from hal.support.errors import InputError
from roller.cli import main
from roller.profile.comparison import far_off, group_errors, read_comparison, remedies
from roller.profile.harvested import HARVEST, HARVEST_FORMAT

BOARD = "v100-sxm2-16gb"


def kernel(rank: int, predicted: float, measured: float | None, bound: str = "dram") -> dict[str, Any]:
    cold = None if measured is None else {"median": measured, "low": 0, "high": 0, "count": 5}
    return {"rank": rank, "predicted_seconds": predicted, "kind": "fma", "bound": bound, "cold": cold}


def harvested(folder: Path, *operators: list[dict[str, Any]], microbench: str | None = None) -> Path:
    profile = [
        {"key": f"suite/{number}", "op": "matmul", "device": BOARD, "kernels": kernels}
        for number, kernels in enumerate(operators)
    ]
    figures = [] if microbench is None else [{"figures": {"device": microbench}}]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HARVEST).write_text(json.dumps({"format": HARVEST_FORMAT, "profile": profile, "microbench": figures}))
    return folder


def test_errors_are_over_what_was_timed(tmp_path: Path) -> None:
    kernels = [kernel(1, 1e-3, 2e-3), kernel(2, 1.5e-3, 1e-3, "l2"), kernel(3, 1.0, None)]
    comparison = read_comparison(harvested(tmp_path, kernels, [kernel(1, 9e-4, 1e-3)]))
    dram, l2, together = group_errors(comparison.kernels, lambda each: each.bound)
    assert (dram.name, dram.operators, dram.kernels, dram.first_is_best) == ("dram", 2, 2, 1.0)
    assert dram.mean_error == pytest.approx(0.3) and dram.median_ratio == pytest.approx(0.7)
    assert (l2.kernels, l2.first_is_best) == (1, None)
    assert (together.kernels, together.first_is_best) == (3, 0.5)
    assert [(each.operator, each.rank) for each in far_off(comparison.kernels)] == [("suite/0", 1)]


def test_a_number_of_the_board_and_a_stage_stand_out(tmp_path: Path) -> None:
    board = load_device(BOARD)
    slower = replace_layer(toml_text(board), "dram", 0.8)
    slow = [[kernel(1, 8e-4, 1e-3)] for _ in range(3)]
    lines = list(remedies(read_comparison(harvested(tmp_path, *slow, microbench=slower))))
    assert lines[0].startswith("layers.dram.bandwidth_bytes_per_second: measured ")
    assert lines[1:] == [
        "3 kernels bound by dram are predicted too fast, 0.80 of measured: look at "
        "layers.dram.bandwidth_bytes_per_second of its device file"
    ]


def replace_layer(text: str, layer: str, factor: float) -> str:
    head, _, rest = text.partition(f'name = "{layer}"')
    before, _, after = rest.partition("bandwidth_bytes_per_second = ")
    number, newline, end = after.partition("\n")
    return f'{head}name = "{layer}"{before}bandwidth_bytes_per_second = {float(number) * factor}{newline}{end}'


def test_the_command_prints_what_it_found(tmp_path: Path) -> None:
    folder = harvested(tmp_path, [kernel(1, 1e-3, 2e-3), kernel(2, 2e-3, 2e-3)])
    result = CliRunner().invoke(main, ["compare", str(folder), "--wide"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"2 kernels predicted for {BOARD} and timed\n")
    assert "suite/0       fma   dram        1 ms      2 ms   0.50\n" in result.stdout
    assert "Nothing stands out" in result.stdout
    record = json.loads(CliRunner().invoke(main, ["compare", str(folder), "--json"]).stdout)
    assert record["kinds"][0]["mean_error"] == pytest.approx(0.25) and record["remedies"] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "malformed"),
        ('{"format": 7, "profile": []}', "format: is 7, not 2"),
        ('{"format": 2, "profile": []}', "holds no kernel that was timed"),
    ],
)
def test_damaged_results_are_one_line(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / HARVEST).write_text(text)
    result = CliRunner().invoke(main, ["compare", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert problem in result.stderr or "truncated" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_folder_of_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="roller compile"):
        read_comparison(tmp_path)
