"""A line for every trace of a folder: steps, error, share of unknown GPU time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daydream.cli import main
from daydream.command.survey import survey
from tests.daydream.recorder_files import nsys_steps
from tests.daydream.traces import Builder

CASES = Path(__file__).resolve().parents[4] / "shared" / "cases" / "traces"


def daydream(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="daydream")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two traces, one of them in a folder below and of nsys, and a file that is none."""
    builder = Builder(head={"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]})
    for step in range(3):
        builder.step(step, 100 * step, 100)
        for place, kernel in enumerate(("sgemm", "my_kernel")):
            number = 10 * step + place + 1
            builder.launch(100 * step + 5 + 20 * place, 5, correlation=number)
            builder.kernel(kernel, 100 * step + 12 + 30 * place, 30 - 20 * place, correlation=number)
    builder.write(tmp_path / "a.json")
    (tmp_path / "below").mkdir()
    nsys_steps(tmp_path / "below" / "b.sqlite")
    (tmp_path / "c.json").write_text("no trace")
    return tmp_path


def test_every_trace_has_a_line_with_its_error_and_unknown_share(folder: Path) -> None:
    rows = {row.trace: row for row in survey(folder)}
    assert list(rows) == ["a.json", "below/b.sqlite", "c.json"]
    first = rows["a.json"]
    assert (first.device, first.steps, first.step) == ("NVIDIA H100 80GB HBM3", 3, pytest.approx(1e-4))
    assert first.unknown == pytest.approx(10 / 40)
    assert first.gpu == pytest.approx(40e-6)
    assert first.worst_error < 0.02
    assert rows["below/b.sqlite"].steps == 3 and rows["below/b.sqlite"].unknown == 0
    assert rows["c.json"].problem.startswith("is not a trace")


def test_the_table_and_json_say_the_same(folder: Path) -> None:
    result = daydream("report", "--dir", folder)
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("a.json")]
    assert line.split()[5:7] == ["3", "0.10"]
    assert "25.0 %" in line
    assert result.stderr.startswith("daydream: c.json: is not a trace")
    records = [json.loads(line) for line in daydream("report", "--dir", folder, "--json").stdout.splitlines()]
    assert [record["trace"] for record in records] == ["a.json", "below/b.sqlite", "c.json"]
    assert records[0]["unknown_share_of_gpu_time"] == pytest.approx(0.25)
    assert records[2]["step_seconds"] is None and records[2]["problem"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "daydream: TRACE: is missing; name a trace, or a folder of them with --dir"),
        (("--dir", "nowhere"), "daydream: --dir: nowhere is no directory; name a folder of traces"),
        (("--dir", "empty"), "daydream: --dir: empty has no trace"),
        (("a.json", "--dir", "empty"), "daydream: --dir: does not go with TRACE; leave one of them out"),
        (("--dir", "bad"), "daydream: --dir: none of the 1 files in bad can be read"),
    ],
)
def test_bad_input_is_one_line_more(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "c.json").write_text("no trace")
    result = daydream("report", *arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(said)


@pytest.mark.skipif(not CASES.is_dir(), reason="needs ../shared/cases/traces")
def test_two_percent_of_gpu_time_at_most_is_of_no_known_kind_on_h100_and_mi300x() -> None:
    rows = [row for row in survey(CASES) if "H100" in row.device or "MI300X" in row.device]
    assert len(rows) >= 15
    assert {row.trace for row in rows if not row.unknown <= 0.02} == set()
