"""Tables and pictures of a made-up harvest, whose figures can be checked by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.gpu.comparison import duels, standings
from bench.gpu.journal import Journal, archive
from bench.gpu.report import main, table, write_report
from bench.gpu.results import extract_trace, read_results
from bench.gpu.whatif import ask_daydream, what_ifs
from hal.support.errors import InputError

PNG = b"\x89PNG"


def spread(seconds: float) -> dict[str, Any]:
    return {"median": seconds, "low": seconds * 0.9, "high": seconds * 1.1, "count": 15}


CHECK = {"relative_error": 1e-6, "tolerance": 1e-4, "passed": True, "share": 1.0}


def contender(who: str, precision: str, microseconds: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": f"{who} {precision}", "who": who, "precision": precision}
    if microseconds is None:
        return {**found, "check": {**CHECK, "passed": False}, "reason": "differs from the reference"}
    times = spread(microseconds * 1e-6)
    return {**found, "check": CHECK, "reason": "", "cold": times, "warm": times, "graph": True}


def operator(name: str, op: str, dtype: str, **microseconds: float | None) -> dict[str, Any]:
    return {
        "suite": "x", "operator": name, "op": op, "dtype": dtype, "flop": 1e9, "bytes": 1e6, "bundle": None,
        "candidates": [contender(who, dtype, one) for who, one in microseconds.items()],
    }  # fmt: skip


def kernels(**microseconds: tuple[float, float]) -> list[dict[str, Any]]:
    """Entry name to (predicted, measured); rank in order of prediction."""
    ranked = sorted(microseconds.items(), key=lambda one: one[1][0])
    found = [
        {"entry": name, "rank": rank, "predicted_seconds": times[0] * 1e-6, "check": CHECK, "reason": "",
         "cold": spread(times[1] * 1e-6), "warm": spread(times[1] * 1e-6), "graph": True}
        for rank, (name, times) in enumerate(ranked, 1)
    ]  # fmt: skip
    return sorted(found, key=lambda one: one["cold"]["median"])


def step(model: str, variant: str, milliseconds: float, trace: str | None = None) -> dict[str, Any]:
    return {
        "model": model, "batch": 8, "variant": variant, "definition": "x", "parameters": 1, "setup_seconds": 1.0,
        "steps": spread(milliseconds * 1e-3), "wall_seconds": milliseconds * 1e-3, "peak_bytes": 1,
        "profiled": spread(milliseconds * 1.2e-3) if trace else None, "trace": trace, "loss": 0.1,
    }  # fmt: skip


@pytest.fixture
def harvest(tmp_path: Path) -> Path:
    journal = Journal(tmp_path)
    journal.note("environment", {"date": "2026-11-21", "properties": {"name": "NVIDIA Made-up"}})
    journal.note("sections", {"operators": {"done": 5, "failed": 1, "left_out": 2, "seconds": 60.0, "until": 1.0}})
    rows = [
        operator("faster", "matmul", "float32", roller=100, library=150, triton=120, compile=None),
        operator("equal", "matmul", "float32", roller=100, library=100, triton=50),
        operator("nearly", "conv2d", "float32", roller=107, library=100),
        operator("slower", "conv2d", "float32", roller=200, library=100),
        operator("wrong", "conv2d", "float32", roller=None, library=100),
        operator("half", "matmul", "float16", roller=104, library=100),
    ]
    for row in rows:
        journal.add("operators", f"x/{row['operator']}", row)
    profile = {
        "suite": "x",
        "operator": "p",
        "op": "matmul",
        "dtype": "float32",
        "flop": 1.0,
        "bytes": 1.0,
        "device": "v",
    }
    journal.add("profile", "x/p", {**profile, "kernels": kernels(a=(100, 200), b=(150, 100))})
    journal.add("profile", "x/q", {**profile, "op": "conv2d", "kernels": kernels(a=(90, 100))})
    archive(tmp_path / "traces_resnet50.tar", "base.json.gz", gzip.compress(b'{"traceEvents": []}', mtime=0))
    journal.add("training", "b", step("resnet50", "baseline", 100, "traces_resnet50.tar/base.json.gz"))
    journal.add("training", "a", step("resnet50", "amp", 40))
    journal.add("training", "f", step("resnet50", "fused-adam", 80))
    journal.add("training", "c", step("resnet50", "channels-last", 90))
    journal.add("training", "g", step("gpt2-medium", "amp", 90))
    journal.add("operators", "x/broken", {"error": "RuntimeError: lost"})
    journal.write_results()
    return tmp_path


def test_shares_of_operators_that_are_better_or_close(harvest: Path) -> None:
    library = {one.precision: one for one in standings(read_results(harvest)) if one.rival == "library"}
    single = library["float32"]
    assert (single.count, single.better) == (4, 2 / 4)
    assert single.within == (2 / 4, 3 / 4, 3 / 4), "107 of 100 is within 10%, 200 of 100 within nothing"
    assert single.mean_ratio == pytest.approx((1.5 * 1.0 * (100 / 107) * 0.5) ** 0.25)
    assert (library["float16"].count, library["float16"].better, library["float16"].within) == (1, 0, (1, 1, 1))


def test_the_best_rival_is_the_fastest_of_all_others(harvest: Path) -> None:
    found = {one.operator.operator: one.theirs for one in duels(read_results(harvest), "best", "float32")}
    assert found == pytest.approx({"faster": 120e-6, "equal": 50e-6, "nearly": 100e-6, "slower": 100e-6})


def test_a_wrong_kernel_fights_no_duel(harvest: Path) -> None:
    assert "wrong" not in [one.operator.operator for one in duels(read_results(harvest), "library", "float32")]


def answer(trace: Path, passes: Sequence[str]) -> dict[str, object] | str:
    assert gzip.decompress(trace.read_bytes()) == b'{"traceEvents": []}'
    return {"speedup": 2.0} if tuple(passes) == ("amp",) else "no optimizer in the trace"


def test_what_ifs_are_predicted_from_the_baselines_trace(harvest: Path) -> None:
    amp, fused = what_ifs(read_results(harvest), harvest, answer)
    assert (amp.variant, amp.measured_speedup, amp.predicted_speedup) == ("amp", pytest.approx(2.5), 2.0)
    assert amp.predicted == pytest.approx(0.05) and amp.error == pytest.approx(0.05 / 0.04 - 1)
    assert (fused.variant, fused.predicted, fused.error, fused.reason) == (
        "fused-adam", None, None, "no optimizer in the trace",
    )  # fmt: skip


def test_daydream_answers_or_says_why_not(tmp_path: Path) -> None:
    empty = tmp_path / "t.json"
    empty.write_text("{}")
    found = ask_daydream(empty, ("amp",))
    assert isinstance(found, str) and "t.json" in found


@pytest.mark.slow
def test_the_report_has_all_tables_and_pictures(harvest: Path, tmp_path: Path) -> None:
    text = write_report(harvest, tmp_path / "page", answer).read_text()
    assert text.startswith("# NVIDIA Made-up, 2026-11-21\n")
    assert "| library | float32 | 4 | 50% | 50% | 75% | 75% | 0.91 |" in text
    assert "| x/faster | float32 | 100 µs | 150 µs | - | - | - | 120 µs | 1.50 |" in text
    assert "| matmul | 1 | 2 | 50% | 1.00 | 0% |" in text
    assert "| unknown | 2 | 3 | 37% | 0.90 | 50% |" in text
    assert "| x/p | unknown | 100 µs | 200 µs | 0.50 |" in text and "| x/q | unknown | 90 µs |" not in text
    assert "| resnet50 | 8 | amp | 40 ms | 2.50 | - |" in text
    assert "| resnet50 | 8 | amp | 40 ms | 50 ms | 2.50 | 2.00 | +25.0% |" in text
    assert "| operators x/wrong | roller float32 | differs from the reference |" in text
    assert "| operators | x/broken | RuntimeError: lost |" in text
    pictures = {path.name: path.read_bytes()[:4] for path in (tmp_path / "page").glob("*.png")}
    assert pictures == {"operators.png": PNG, "predictions.png": PNG, "whatifs.png": PNG}


def test_a_harvest_without_anything_gives_a_short_page(tmp_path: Path) -> None:
    Journal(tmp_path).write_results()
    assert write_report(tmp_path, tmp_path, answer).read_text().splitlines()[0] == "# unknown board, "
    assert not list(tmp_path.glob("*.png"))


def test_a_table_without_rows_is_nothing() -> None:
    assert table(("a", "b"), []) == ""
    assert table(("a", "b"), [("1|2", "3")]) == "| a | b |\n|---|---|\n| 1/2 | 3 |"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "results.json: format: is 1, not 2; harvest again with this version"),
        ({"operators": [{"key": 3}]}, "Expected `str`, got `int` - at `$.operators[0].key`"),
    ],
)
def test_damaged_results_are_refused_in_one_line(harvest: Path, change: dict[str, Any], message: str) -> None:
    path = harvest / "results.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    done = CliRunner().invoke(main, [str(harvest)])
    assert done.exit_code == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_missing_results_and_traces_are_refused(harvest: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere/results.json: No such file"):
        read_results(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"traces_resnet50.tar: has no trace 'other.json.gz'"):
        extract_trace(harvest, "traces_resnet50.tar/other.json.gz", tmp_path)
