"""Results as a file, a picture and tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cpu.__main__ import main
from bench.cpu.plots import draw_ratios
from bench.cpu.results import Check, Entry, read_results, write_results
from bench.cpu.tables import ratio_table, struck_out_lines, widest
from hal.support.errors import InputError
from tests.bench.cpu.samples import SUITE, entry, operator, results, whole

BAD = Check(relative_error=0.5, tolerance=1e-4, passed=False)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    made = whole(torch=1.3, openblas=1.1, metaschedule_64=1.2)
    write_results(tmp_path / "results.json", made)
    assert read_results(tmp_path / "results.json") == made


@pytest.mark.parametrize(("text", "problem"), [("{", "truncated"), ("{}", "missing required field")])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(InputError, match=problem):
        read_results(path)


def test_the_command_shows_a_file_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_results(tmp_path / "results.json", whole(torch=1.3, limit=0.2))
    result = CliRunner().invoke(main, ["--show", str(tmp_path / "results.json")])
    assert result.exit_code == 0
    shown = result.output + capfd.readouterr().out
    assert "geometric mean" in shown and "first choice" in shown


def test_a_rival_counts_with_the_faster_of_its_layouts() -> None:
    one = operator(SUITE[6], entry("ours", 1.0, 1.0), entry("torch", 2.0, 2.0), entry("torch-turned", 1.5, 1.5))
    ratio = one.ratio("torch", "torch-turned")
    assert ratio is not None and ratio.median == 1.5


def test_there_is_no_ratio_without_ours() -> None:
    one = operator(SUITE[0], Entry(who="ours", reason="no bundle"), entry("torch", 2.0))
    assert one.ratio("torch") is None


def test_struck_out_rivals_are_reported_once_a_reason() -> None:
    wrong = Entry(who="torch", check=BAD, reason="differs from the reference")
    absent = Entry(who="ours", reason="no bundle")
    made = results(operator(SUITE[0], absent, wrong), operator(SUITE[1], absent, entry("torch", 1.0)))
    assert list(struck_out_lines(made)) == [
        "ours struck out: no bundle (all 2)",
        "torch struck out: differs from the reference by 5.0e-01, allowed 1e-04 (gemm_512)",
    ]


def test_the_table_has_a_line_an_operator_and_the_means() -> None:
    table = ratio_table(whole(torch=1.5))
    assert table.row_count == 25
    assert list(table.columns[0].cells)[-1].startswith("geometric mean") and list(table.columns[3].cells)[-1] == "1.50"


def test_the_error_of_a_prediction_is_relative_to_what_was_measured() -> None:
    one = operator(SUITE[0], entry("ours", 1e-3, 1e-3, predicted_seconds=0.8e-3))
    assert one.prediction_error == pytest.approx(-0.2) and one.error_then is None
    assert operator(SUITE[0], entry("torch", 1.0)).prediction_error is None


def test_the_last_line_has_median_errors() -> None:
    first, second = (
        operator(spec, entry("ours", 1.0, predicted_seconds=p, predicted_then_seconds=1.5, first_choice=1.2))
        for spec, p in zip(SUITE[:2], (0.8, 1.4), strict=True)
    )
    cells = [list(column.cells)[-1] for column in ratio_table(results(first, second)).columns]
    assert cells[-4:] == ["", "30%", "50%", "1.20"]


def test_the_widest_spread_is_named() -> None:
    made = results(operator(SUITE[0], entry("ours", 1.0, 1.0, 1.0), entry("torch", 1.0, 2.0, 3.0)))
    assert widest(made) == ("gemm_512 by torch", 0.5)


@pytest.mark.slow
def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "ratios.png"
    assert draw_ratios(whole(torch=1.3, openblas=0.9, metaschedule_64=1.2, metaschedule_512=1.0, limit=0.1), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_there_is_no_picture_without_ours(tmp_path: Path) -> None:
    assert not draw_ratios(results(operator(SUITE[0], entry("torch", 1.0))), tmp_path / "ratios.png")
    assert list(tmp_path.iterdir()) == []
