"""Other ways to predict steps: what they count, at which rates, and how they are told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.accuracy.data import default_directory
from bench.accuracy.steps import models, rivals

CONFIGURATIONS = default_directory() / "models" / "neusight_configs"


def test_an_operator_takes_the_longer_of_computing_and_moving() -> None:
    counted = rivals.Counted(flops=np.array([600.0, 0.0]), bytes=np.array([10.0, 80.0]))
    # 600 / 100 beside 10 / 20, and nothing beside 80 / 20
    assert counted.seconds(100.0, 20.0) == pytest.approx(6.0 + 4.0)


def test_a_way_has_a_row_with_its_mean_errors() -> None:
    rows = [
        models.Score(device="t4", mode=mode, label="bert", measured=2.0, predicted=predicted)
        for mode, predicted in (("inference", 1.0), ("training", 3.0))
    ]
    view = rivals.rival_table({"a way": rows})
    cells = [list(column.cells) for column in view.columns]
    assert cells[1:5] == [["2"], ["50.0%"], ["50.0%"], ["-50%"]]


def test_nothing_is_told_without_measurements(tmp_path: Path) -> None:
    assert list(rivals.table(tmp_path, tmp_path)) == []


@pytest.mark.skipif(not CONFIGURATIONS.is_dir(), reason="the measured models are not here")
@pytest.mark.usefixtures("pytorch")
@pytest.mark.slow
def test_matrix_products_of_a_model_are_counted_as_pytorch_counts_them() -> None:
    pytest.importorskip("transformers")
    run = models.Run(
        board="NVIDIA_T4", model="bert_large", training=False, batch=2, sequence=512, option="", measured=1.0
    )
    counted = rivals.counted_step(run, CONFIGURATIONS)
    # 24 layers of 1024 columns: 12 x 1024^2 weights a token, and scores and sums of 512 tokens
    layers = 24 * 2 * 2 * 512 * (12 * 1024**2 + 2 * 512 * 1024)
    assert layers <= counted.flops.sum() <= layers * 1.1
    assert counted.bytes.min() >= 0.0
