"""Whole models: which runs are captured, how, and the errors on measured steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.accuracy.data import default_directory
from bench.accuracy.library.library import boards
from bench.accuracy.steps import models
from bench.accuracy.steps.ported import ASKED, SOURCE, ported_steps

pytest.importorskip("pyarrow")
pytest.importorskip("torch")
pytest.importorskip("transformers")
DATA = default_directory()
measured_data = pytest.mark.skipif(
    not (DATA / "models" / "neusight_configs").is_dir(), reason="the measured models are not here"
)


def score(device: str, mode: str, predicted: float) -> models.Score:
    return models.Score(device=device, mode=mode, label="bert", measured=1.0, predicted=predicted)


def test_tables_count_boards_and_not_rows(tmp_path: Path) -> None:
    scores = [score("t4", "inference", 1.1), score("t4", "inference", 0.7), score("p4", "training", 1.5)]
    assert models.mean_errors(scores, "inference") == {"t4": pytest.approx(0.2)}
    # three runs, a mean per board and mode, and one per mode
    assert models.score_table(scores).row_count == 3 + 2 + 2
    models.chart(scores, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0
    assert list(models.table(tmp_path, tmp_path)) == []


@measured_data
def test_models_that_boards_share_and_patched_ones_are_left_out() -> None:
    runs = models.read_runs(DATA)
    assert {run.option for run in runs} <= set(models.OPTIONS)
    assert not any(run.model.startswith("switch") for run in runs)
    assert {run.label for run in runs if run.training} == {
        "bert_large training 2 x 512", "bert_large training 8 x 512", "gpt2_large training 1 x 1024",
        "gpt2_large training 4 x 1024 dp4",
    }  # fmt: skip


@measured_data
def test_a_captured_step_has_the_mask_of_its_day() -> None:
    run = models.Run(
        board="", model="bert_large", training=False, batch=2, sequence=128, option="", measured=1.0
    )  # fmt: skip
    step = models.captured_step(run, DATA / "models" / "neusight_configs")
    scores = (2, 16, 128, 128)
    added = [each for each in step.operators if each.name == "aten::add" and each.outputs[0].dims == scores]
    assert [each.inputs.tensors[1].dims for each in added] == [(2, 1, 1, 128)] * 24


@measured_data
@pytest.mark.slow
def test_models_are_as_right_as_was_asked() -> None:
    scores = models.evaluate(models.read_runs(DATA), DATA / "models" / "neusight_configs")
    for mode in ("inference", "training"):
        means = models.mean_errors(scores, mode)
        assert np.mean(list(means.values())) < models.BAR / 100
        assert max(means.values()) < models.BOARD_BAR / 100
    # Steps of one board that are ported to others, too.
    specs = boards({SOURCE, *ASKED})
    steps = ported_steps(scores, specs[SOURCE].name)
    asked = {specs[name].name for name in ASKED}
    errors = [abs(step.ported / step.measured - 1) for step in steps if step.board in asked]
    assert len(errors) > 10 and np.mean(errors) < 0.09
