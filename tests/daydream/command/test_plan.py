"""``daydream plan`` as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daydream.cli import main
from tests.daydream.plan.conftest import MODEL

pytestmark = pytest.mark.usefixtures("pytorch")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return f"{path}:six"


def called(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def test_a_plan_is_reported_by_stage_and_memory(model: str, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    options = ["--tensor", "2", "--pipeline", "2", "--nodes", "1", "--global-batch", "32", "--batch", "4"]
    said = called(model, "--device", "h100", *options, "--plot", str(picture))
    assert said.exit_code == 0, said.output
    assert "data 2, tensor 2, pipeline 2" in said.output and "optimizer states" in said.output
    assert "What a rank of each stage does" in said.output and picture.stat().st_size > 10_000


def test_a_plan_is_a_json_object(model: str) -> None:
    said = called(model, "--device", "a100-sxm-80gb", "--data", "16", "--shard", "fsdp", "--batch", "2", "--json")
    record = json.loads(said.output)
    assert (record["ranks"], record["node"], record["shard"]) == (16, "dgx-a100", "fsdp")
    assert record["samples_per_second"] == pytest.approx(32 / record["step_seconds"])
    assert record["reserved_bytes"] >= record["allocated_bytes"] > 0


def test_a_search_prints_the_best_first(model: str) -> None:
    options = ["--tensor", "2", "--data", "2", "--global-batch", "8", "--search", "--checkpoint", "full", "--rows", "4"]
    said = called(model, "--device", "h100", *options, "--json")
    records = [json.loads(line) for line in said.stdout.splitlines()]
    seconds = [record["step_seconds"] for record in records]
    assert len(records) == 4 and seconds == sorted(seconds)
    assert all((record["ranks"], record["tensor"]) == (4, 2) for record in records)


def test_a_search_tells_why(model: str) -> None:
    options = ["--tensor", "2", "--data", "2", "--global-batch", "4", "--search", "--checkpoint", "none", "--rows", "3"]
    # A title breaks where the table ends.
    said = " ".join(called(model, "--device", "h100", *options, "--shard", "fsdp").stdout.split())
    assert "best of" in said and "less of" in said and "more of" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "12"], "do not fill nodes"),
        (["--nodes", "2", "--data", "3"], "are not 3 x 1 ranks"),
        (["--nodes", "1", "--pipeline", "3"], "no multiple of 3"),
        (["--global-batch", "7", "--batch", "2"], "no multiple of 1 x 2"),
        (["--global-batch", "8", "--micro-batches", "2"], "say the same"),
        (["--pipeline", "16"], "repeats 6 blocks"),
        (["--schedule", "interleaved"], "several stages"),
        (["--search"], "add --global-batch"),
        (["--node", "dgx-a100"], "not h100"),
        (["--tensor", "3", "--data", "8"], "do not divide"),
        (["--plot", "picture.txt"], "picture.txt"),
    ],
)
def test_what_cannot_be_is_one_line(model: str, arguments: list[str], said: str) -> None:
    outcome = called(model, "--device", "h100", *arguments)
    assert outcome.exit_code == 2 and outcome.stdout == ""
    assert said in outcome.stderr and outcome.stderr.count("\n") == 1


def test_a_model_that_no_board_holds_is_said(tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text(MODEL.replace("width=256", "width=16384"))
    said = called(f"{path}:six", "--device", "h100", "--global-batch", "1", "--search")
    assert said.exit_code == 2 and "no plan fits" in said.stderr
