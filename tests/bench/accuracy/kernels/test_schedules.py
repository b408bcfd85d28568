"""The figures that compare predictions with measurements are what their names say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.accuracy.__main__ import TABLES, main
from bench.accuracy.data import VARIABLE, data_directory, default_directory
from bench.accuracy.kernels.ansor import FLAT, TILED
from bench.accuracy.kernels.schedules import evaluate, flat_table, scatter, score, tiled_table
from hal.support.errors import InputError

measured_data = pytest.mark.skipif(
    not (default_directory() / "v100_schedules").is_dir(), reason="the measured schedules are not next to this checkout"
)


def test_choices_are_ranked_by_prediction_and_judged_by_measurement() -> None:
    measured = np.array([4.0, 1.0, 2.0, 5.0])
    found = score("conv", "C0", np.array([2.0, 3.0, 1.0, np.inf]), measured)
    assert (found.first, found.best_of_ten) == (2.0, 1.0)
    assert found.median_error == pytest.approx(np.median([0.5, 2.0, 0.5, np.inf]))
    assert found.rank_correlation == pytest.approx(np.corrcoef([2, 3, 1, 4], [3, 1, 2, 4])[0, 1])


def test_only_the_first_ten_choices_count() -> None:
    predicted = np.arange(1.0, 21.0)
    measured = np.where(predicted == 11.0, 1.0, 2.0)
    assert score("conv", "C0", predicted, measured).best_of_ten == 2.0


def test_equal_predictions_share_a_rank() -> None:
    found = score("conv", "C0", np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0]))
    assert found.rank_correlation == pytest.approx(np.corrcoef([1.5, 1.5, 3], [1, 2, 3])[0, 1])
    assert np.isnan(score("conv", "C0", np.ones(3), np.arange(1.0, 4.0)).rank_correlation)


def test_tables_have_operators_kinds_and_a_mean_of_all() -> None:
    scores = [
        score(kind, kind[0].upper(), np.array([1.0, 2.0]), np.array([1.0, 3.0])) for kind in ("conv", "conv", "matmul")
    ]
    tiled = tiled_table(scores)
    assert list(tiled.columns[1].cells) == ["conv", "conv", "conv", "matmul", "matmul", "all"]
    assert list(tiled.columns[2].cells) == ["2", "2", "4", "2", "2", "6"]
    assert list(flat_table(scores).columns[0].cells) == ["conv", "matmul"]


@pytest.mark.slow
def test_a_picture_has_a_panel_per_kind(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scores = [score(kind, "", np.array([1.0, 2.0]), np.array([1.0, 3.0])) for kind in ("conv", "matmul")]
    scatter(scores, tmp_path / "below" / "picture.png", "Two kinds")
    assert (tmp_path / "below" / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_data_is_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert data_directory() == tmp_path
    assert data_directory(tmp_path / "..") == tmp_path / ".."
    with pytest.raises(InputError, match="no such directory; name the measured data with --data or ROLLER_DATA"):
        data_directory(tmp_path / "none")


def test_a_missing_directory_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--data", str(tmp_path / "none")])
    assert result.exit_code == 2 and result.output.count("\n") == 1
    assert TABLES[0] == "schedules"


@measured_data
def test_every_program_gets_a_figure() -> None:
    scores = evaluate(kinds=("matmul", "elementwise"))
    assert {s.kind for s in scores} == {"matmul", "elementwise"}
    assert all(len(s.predicted) == len(s.measured) and (s.predicted > 0).all() for s in scores)
    assert all(1 <= s.best_of_ten <= s.first for s in scores)
    assert {*TILED, *FLAT} >= {"matmul", "elementwise"}
