"""``daydream place`` from the outside: jobs with given and predicted figures, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daydream.cli import main
from daydream.command.place import board_counts
from hal.support.errors import InputError

pytestmark = pytest.mark.usefixtures("pytorch")

#: Three jobs of known length. The V100 has 16 GB: it cannot run the second.
GIVEN: list[dict[str, Any]] = [
    {"name": "short", "seconds": {"h100": 10, "v100": 30}, "memory_gb": 4},
    {"name": "wide", "seconds": {"h100": 50, "v100": 60}, "memory_gb": 40},
    {"name": "long", "seconds": {"h100": 45, "v100": 80}},
]


def run(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["place", str(path), *arguments], catch_exceptions=False)


def written(folder: Path, jobs: object) -> Path:
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    return path


def test_jobs_go_where_they_fit_and_end_first(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    path = written(tmp_path, GIVEN)
    done = run(path, "--boards", "h100,v100", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    # wide is the H100's. With long beside it the V100 ends at 30 and the H100 at 95; with long on the V100 it ends at
    # 80, and the H100 at 60.
    assert record["makespan_seconds"] == record["lower_bound_seconds"] == 80 and record["gap"] == 0
    first, second = record["boards"]
    assert (first["board"], second["board"]) == ("h100-sxm-80gb", "v100-sxm2-16gb")
    assert [(job["name"], job["start_seconds"]) for job in first["jobs"]] == [("short", 0), ("wide", 10)]
    assert [(job["name"], job["seconds"], job["job"]) for job in second["jobs"]] == [("long", 80, 2)]
    assert (first["finish_seconds"], second["finish_seconds"]) == (60, 80)
    assert first["jobs"][1]["device_bytes"] == 40_000_000_000
    assert record["greedy_seconds"] == 80 and 80 < record["random_seconds"] < 110


def test_tables_tell_jobs_boards_and_what_chance_gives(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    done = run(written(tmp_path, GIVEN), "--boards", "h100,v100=2")
    assert done.exit_code == 0, done.output
    for text in ("40.0 GB", "v100-sxm2-16gb #2", "wide 50.0", "long 80.0", "makespan 80.0 s: no schedule takes less"):
        assert text in done.stdout
    assert "longest job first: 80.0 s, 0.0 % more" in done.stdout and "at random: " in done.stdout


def test_models_are_predicted_once(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(
        "import torch\n\ndef network(batch=4):\n    return torch.nn.Linear(64, 64), torch.empty(batch, 64)\n"
    )
    model = f"{tmp_path / 'net.py'}:network"
    jobs = [
        {"model": model, "batch": 8, "steps": 100},
        {"name": "again", "model": model, "batch": 8, "steps": 300},
        {"name": "given", "model": model, "batch": 8, "steps": 1, "seconds": {"t4": 7}, "memory_gb": 15},
        {"name": "too wide", "model": model, "batch": 8, "steps": 1, "memory_gb": 30},
    ]
    done = run(written(tmp_path, jobs), "--boards", "t4,a100", "--json")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("predicting") == 1
    record = json.loads(done.stdout)
    of_board = {board["board"]: {job["name"]: job for job in board["jobs"]} for board in record["boards"]}
    everything = {**of_board["t4"], **of_board["a100-pcie-40gb"]}
    assert sorted(everything) == sorted([model, "again", "given", "too wide"])
    assert "too wide" in of_board["a100-pcie-40gb"] and "given" in of_board["a100-pcie-40gb"]
    assert 0 < everything[model]["device_bytes"] < 1e9 and everything["given"]["device_bytes"] == 15e9


def test_boards_are_counted_by_kind() -> None:
    assert {spec.name: count for spec, count in board_counts("v100 = 2, t4,v100").items()} == {
        "v100-sxm2-16gb": 3,
        "t4": 1,
    }
    for text in ("", "v100=", "v100=0", "v100=-1", "v100=two", "=2", "all", "v100,,t4", "v100=101", "mi50"):
        with pytest.raises(InputError):
            board_counts(text)


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ([], "holds 0 jobs"),
        ({"jobs": []}, "expected array, got object"),
        ([{"model": "timm:resnet18"}], "[0].steps: is missing"),
        ([{"name": "idle"}], "[0]: has neither a model nor seconds"),
        ([{"seconds": {"t4": 1}}], "[0]: has no name"),
        ([{"name": "a", "seconds": {"t4": 0}}], "[0].seconds"),
        ([{"name": "a", "seconds": {"t4": 1e999}}], "jobs.json"),
        ([{"name": "a", "seconds": {"nowhere": 1}}], "nowhere"),
        ([{"name": "a", "seconds": {"h100": 1}}], "a has no seconds for t4"),
        ([{"name": "a", "seconds": {"t4": 1}, "memory_gb": 20}], "a fits on no board: needs 20.0 of 17.2 GB on t4"),
        ([{"name": "a", "seconds": {"t4": 1}, "colour": "red"}], "colour"),
        ([{"model": "timm:resnet18", "steps": 0}], "[0].steps"),
        ([{"model": "timm:resnet18", "steps": 1, "dtype": "int8"}], "[0].dtype"),
        ([{"model": "nothing:resnet18", "steps": 1}], "[0]: nothing:resnet18: names no model"),
    ],
)
def test_bad_jobs_are_one_line_and_exit_code_2(tmp_path: Path, jobs: object, said: str) -> None:
    if "nothing:" in str(jobs):
        pytest.importorskip("torch")
    done = run(written(tmp_path, jobs), "--boards", "t4")
    assert done.exit_code == 2 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if "predicting" not in line]
    assert len(lines) == 1 and said in lines[0], done.stderr


@pytest.mark.parametrize("text", ["", "[", "[1]", '"jobs"', "[" * 5000, '[{"name": "a", "seconds": {"t4": NaN}}]'])
def test_what_is_no_list_of_jobs_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(text)
    for each in (path, tmp_path / "missing.json", tmp_path):
        done = run(each, "--boards", "t4")
        assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
