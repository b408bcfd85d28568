"""The command line as a person meets it: answers, whole messages, exit codes, and what is left on the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daydream.cli import main
from daydream.record.record import Recorded
from daydream.trace.files import read_trace
from tests.daydream.recorded import recorded_trace
from tests.daydream.traces import Builder

ROOT = Path(__file__).resolve().parents[2]

OWN = """\
def nothing(graph):
    return graph

def faster(graph, *, factor: float = 2.0):
    return graph.scaled(graph.select(gpu=True), 1 / factor)
"""


def daydream(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="daydream")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with trace.json, two whole steps of 100 µs, and own.py, two passes."""
    monkeypatch.chdir(tmp_path)
    builder = Builder()
    for number, start in ((4, 0), (5, 100)):
        builder.step(number, start, 100)
        builder.operator("aten::mm", start + 5, 15, external=number, dims=[[8, 8], [8, 8]], types=["float"] * 2)
        builder.launch(start + 10, 5, correlation=number, external=number)
        builder.kernel("sgemm", start + 15, 70, correlation=number, external=number)
        builder.launch(start + 30, 60, name="cudaDeviceSynchronize", correlation=number + 50)
    builder.write(tmp_path / "trace.json")
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


# Answers


def test_simulate_gives_measured_and_simulated_times(here: Path) -> None:
    result = daydream("simulate", "trace.json", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert [step["name"] for step in answer["steps"]] == ["ProfilerStep#4", "ProfilerStep#5"]
    for step in answer["steps"]:
        assert step["measured_seconds"] == 1e-4
        assert step["simulated_seconds"] == pytest.approx(1e-4, rel=0.05)
    assert answer["partial_steps"] == [] and answer["warnings"] == []
    assert answer["tasks"] > 6
    assert 0 <= answer["mean_error"] <= answer["worst_error"] < 0.05


def test_a_trace_without_steps_is_one(here: Path) -> None:
    Builder().operator("aten::mm", 0, 10).operator("aten::mm", 10, 30).write(here / "plain.json")
    (step,) = json.loads(daydream("simulate", "plain.json", "--json").stdout)["steps"]
    assert step["measured_seconds"] == 4e-5
    assert step["simulated_seconds"] == pytest.approx(4e-5)


def test_a_step_can_be_chosen_by_number_or_index(here: Path) -> None:
    for number in ("5", "1"):
        answer = json.loads(daydream("simulate", "trace.json", "--json", "--step", number).stdout)
        assert [step["name"] for step in answer["steps"]] == ["ProfilerStep#5"]
    assert "ProfilerStep#4" not in daydream("report", "trace.json", "--step", "5").stdout


def test_whatif_tells_what_changes(here: Path) -> None:
    result = daydream("whatif", "trace.json", "--pass", "own.py:nothing", "--pass", "own.py:faster:factor=7", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    # The kernel takes 10 instead of 70 and ends while the CPU is still busy with the next 15.
    assert answer["measured_seconds"] == 1e-4
    saved = answer["baseline_seconds"] - answer["predicted_seconds"]
    assert 40e-6 < saved <= 60e-6
    assert answer["speedup"] == pytest.approx(answer["baseline_seconds"] / answer["predicted_seconds"], rel=1e-5)
    assert (answer["baseline_bottleneck"], answer["bottleneck"]) == ("GPU compute", "CPU")
    assert [one["name"] for one in answer["passes"]] == ["nothing", "faster"]
    assert answer["passes"][1]["parameters"] == {"factor": 7.0}
    assert [set(step) for step in answer["steps"]] == [
        {"name", "measured_seconds", "baseline_seconds", "predicted_seconds", "speedup", "bottleneck",
         "baseline_bottleneck", "critical_path_seconds"}
    ] * 2  # fmt: skip


def test_report_has_every_table(here: Path) -> None:
    result = daydream("report", "trace.json")
    assert (result.exit_code, result.stderr) == (0, "")
    for text in ("Steps, ms", "Who works", "Critical path", "Phases", "GPU tasks", "sgemm", "GPU idle", "recorded"):
        assert text in result.stdout
    answer = json.loads(daydream("report", "trace.json", "--json").stdout)
    assert answer["kernels"] == [{"name": "sgemm", "count": 1.0, "seconds": 7e-5, "share": 1.0}]
    assert answer["bottleneck"] == "GPU compute"
    assert sum(answer["critical_path_seconds"].values()) == pytest.approx(answer["simulated_seconds"], rel=0.01)
    busy = answer["recorded_breakdown_seconds"]
    assert busy["gpu_only"] + busy["both"] == pytest.approx(7e-5)


def test_report_tells_utilisation(here: Path) -> None:
    # Each kernel runs for 70 of 100 µs and does 2 x 8^3 FLOPs; the trace names no board.
    answer = json.loads(daydream("report", "trace.json", "--batch", "5", "--device", "v100", "--json").stdout)
    utilisation = answer["utilisation"]
    assert utilisation["device"] == "NVIDIA Tesla V100 SXM2 16 GB"
    assert utilisation["samples_per_second"] == pytest.approx(5 / 1e-4, rel=0.01)
    assert utilisation["gpu_utilisation"] == pytest.approx(0.7, rel=0.01)
    assert (utilisation["flops"], utilisation["model_flops"]) == (1024, 1024)
    assert [step["name"] for step in utilisation["steps"]] == ["ProfilerStep#4", "ProfilerStep#5"]
    # Less than a thousandth of what the peak allows in 70 µs.
    assert utilisation["kernels"][0]["flops_utilisation"] == pytest.approx(1024 / (15.667e12 * 70e-6), abs=1e-6)
    result = daydream("report", "trace.json")
    assert (result.exit_code, result.stderr) == (0, "")
    for text in ("Utilisation", "No FLOPs: the trace does not say which board", "give --batch"):
        assert text in result.stdout
    assert daydream("simulate", "trace.json").stdout.find("Utilisation") == -1


@pytest.mark.parametrize("command", [("simulate",), ("report",), ("whatif", "--pass", "own.py:nothing")])
def test_timeline_and_report_are_written(here: Path, command: tuple[str, ...]) -> None:
    before = set(os.listdir(here))
    result = daydream(*command, "trace.json", "--out", "out.json.gz", "--html", "report.html", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["trace"] == "trace.json"
    assert set(os.listdir(here)) - before == {"out.json.gz", "report.html"}
    assert sum(name == "sgemm" for name in map(read_trace(Path("out.json.gz")).text, range(6))) >= 1
    assert Path("report.html").read_text().startswith("<!doctype html>")


def test_passes_are_listed_and_explained() -> None:
    listing = daydream("passes")
    assert listing.exit_code == 0
    records = [json.loads(line) for line in daydream("passes", "--json").stdout.splitlines()]
    for record in records:
        assert set(record) == {"name", "summary", "parameters"}
        assert record["name"] in listing.stdout
        page = daydream("passes", record["name"])
        assert page.exit_code == 0
        assert page.stdout.startswith(f"{record['name']}: ")
        assert "Raises:" not in page.stdout


def test_a_damaged_trace_warns(here: Path) -> None:
    text = Path("trace.json").read_text()
    Path("cut.json").write_text(text[: text.rindex("cudaDeviceSynchronize")])
    result = daydream("simulate", "cut.json")
    assert result.exit_code == 0
    assert result.stderr.startswith("daydream: warning: ")
    assert len(json.loads(daydream("simulate", "cut.json", "--json").stdout)["warnings"]) >= 1


def test_record_hands_over_what_follows_the_script(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def record_script(*given: Any, **options: Any) -> Recorded:
        calls.append((given, options))
        return Recorded(Path("t.json"), 1, 7, "the script failed")

    monkeypatch.setattr("daydream.record.record.record_script", record_script)
    result = daydream("record", "--out", "t.json", "--steps", 2, "--stack", "own.py", "--out", "x", "-v", "a b")
    assert result.exit_code == 7
    assert result.stderr == "daydream: the script failed\n1 step recorded in t.json\n"
    options = {
        "steps": 2, "warmup": 3, "timed": 0, "batch": None, "with_stack": True, "with_modules": True,
        "memory": False, "stop": True,
    }  # fmt: skip
    assert calls == [((Path("t.json"), Path("own.py"), ("--out", "x", "-v", "a b")), options)]


# Bad input: one line, exit code 2, nothing left


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "gone.json"), "gone.json: no such file"),
        (("report", "."), "trace.json: is the only trace; give those of two ranks or more"),
        (("simulate", "own.py"), "own.py: "),
        (("simulate",), "Missing argument 'TRACE'; see daydream simulate --help"),
        (("simulate", "trace.json", "--step", "9"),
         "--step: there is no step 9; the trace has ProfilerStep#4 and ProfilerStep#5"),
        (("simulate", "trace.json", "--step", "x"), "Invalid value for '--step': 'x' is not a valid int"),
        (("simulate", "trace.json", "--out", "out.txt"),
         "--out: out.txt has no ending that is known; use .json or .json.gz"),
        (("simulate", "trace.json", "--out", "no/out.json"), "--out: there is no directory no; make it first"),
        (("report", "trace.json", "--html", "report.pdf"),
         "--html: report.pdf has no ending that is known; use .html or .htm"),
        (("report", "trace.json", "--device", "h999"), "device: no device is called 'h999'"),
        (("report", "trace.json", "--batch", "0"), "Invalid value for '--batch': 0 is not in the range x>=1"),
        (("whatif", "trace.json"), "Missing option '--pass'; see daydream whatif --help"),
        (("whatif", "trace.json", "--pass", "zzzz"),
         "--pass: no pass is called 'zzzz'; `daydream passes` lists all"),
        (("whatif", "trace.json", "--pass", "gone.py"), "gone.py: No such file or directory; give a Python file"),
        (("whatif", "trace.json", "--pass", "own.py"),
         "own.py: has several passes: nothing and faster; write own.py:NAME"),
        (("whatif", "trace.json", "--pass", "own.py:faster:factor=fast"),
         "--pass own.py:faster: factor: 'fast' is not a number; write factor=2"),
        (("whatif", "trace.json", "--pass", "own.py:faster:factor=0"),
         "own.py:5: ZeroDivisionError: float division by zero"),
        (("passes", "zzzz"), "NAME: no pass is called 'zzzz'; `daydream passes` lists all"),
        (("record", "own.py"), "Missing option '--out'; see daydream record --help"),
        (("explain",), "No such command 'explain'"),
        (("simulate", "trace.json", "--bogus"), "No such option '--bogus'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(here: Path, arguments: tuple[str, ...], message: str) -> None:
    assert _refusal(here, arguments).startswith(f"daydream: {message}")


@pytest.mark.usefixtures("pytorch")
def test_a_script_that_is_not_there_is_one_line(here: Path) -> None:
    refusal = _refusal(here, ("record", "--out", "t.json", "gone.py"))
    assert refusal.startswith("daydream: gone.py: no such file; give a Python script")


def _refusal(here: Path, arguments: tuple[str, ...]) -> str:
    """The one line on stderr of a command that is refused, with exit code 2 and no file written."""
    before = sorted(os.listdir(here))
    result = daydream(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert sorted(name for name in os.listdir(here) if name != "__pycache__") == before
    return result.stderr


def test_a_pass_that_ties_a_knot_is_one_line(here: Path) -> None:
    knot = "from daydream.graph.edit import Edit\nfrom daydream.graph.graph import Dependency\ndef knot(graph):\n"
    knot += "    edit = Edit(graph)\n    edit.depend(len(graph) - 1, 0, Dependency.SYNC)\n    return edit.apply()\n"
    Path("knot.py").write_text(knot)
    result = daydream("whatif", "trace.json", "--pass", "knot.py")
    assert result.exit_code == 2
    assert result.stderr.startswith("daydream: --pass: ")
    assert "wait for each other in a circle" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_full_disk_leaves_nothing_half_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr("hal.support.atomic.os.replace", full)
    before = sorted(os.listdir(here))
    result = daydream("simulate", "trace.json", "--out", "out.json")
    assert result.exit_code == 1
    assert result.stderr == "daydream: out.json: No space left on device\n"
    assert sorted(os.listdir(here)) == before


def test_no_command_shows_the_help() -> None:
    result = daydream()
    assert result.exit_code == 2
    assert result.stdout.startswith("Usage: ")
    for command in ("record", "report", "simulate", "whatif", "passes"):
        assert f"  {command} " in result.stdout


# Start


@pytest.mark.parametrize("arguments", [["--help"], ["passes"], ["simulate", "trace.json"], ["report", "trace.json"]])
def test_nothing_slow_is_loaded_before_it_is_needed(here: Path, arguments: list[str]) -> None:
    script = (
        "import sys\nfrom daydream.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "slow = {'numba', 'torch', 'sympy', 'tvm', 'matplotlib', 'roller'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(slow)) or 0)\n"
    )
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# Recorded traces


@pytest.mark.parametrize(
    "name", ["resnet50_v100_nw0", "trace_diff_control_a100", "ns_resolution_v100", "alexnet_a100", "simple_add"]
)
@pytest.mark.slow
def test_recorded_traces_are_replayed(name: str) -> None:
    path = recorded_trace(name)
    answer = json.loads(daydream("simulate", path, "--json").stdout)
    assert answer["worst_error"] < 0.05
    assert answer["tasks"] > 500


@pytest.mark.slow
def test_a_recorded_trace_has_an_answer_to_every_question(tmp_path: Path) -> None:
    path = recorded_trace("resnet50_v100_nw0")
    (tmp_path / "own.py").write_text(OWN)
    own = f"{tmp_path / 'own.py'}:faster:factor=1000"
    result = daydream("whatif", path, "--pass", own, "--html", tmp_path / "r.html", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    # What remains is the CPU's own work.
    assert 1 < answer["speedup"] < 2
    assert answer["bottleneck"] == "CPU"
    assert (tmp_path / "r.html").stat().st_size < 500_000
