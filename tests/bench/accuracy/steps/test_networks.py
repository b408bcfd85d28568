"""Vision networks: rows, scores, tables and the baselines."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from bench.accuracy.steps import networks
from bench.accuracy.steps.network_rows import NetworkRow, NetworkScore, read_rows
from bench.accuracy.steps.networks_baseline import boosted, fitted_line

ROWS = """board,mode,layout,model,batch,image,parameters_millions,gmacs,step_ms,software
rtx3090,inference,NHWC,a,64,32,1.0,,10.0,torch
rtx3090,training,NCHW,b,64,32,1.0,,20.0,torch
"""


def row(model: str, measured: float, *, chosen_on: bool = True, parameters: float = 1e6) -> NetworkRow:
    return NetworkRow(
        model=model, training=False, channels_last=True, batch=8, image=32, parameters=parameters, measured=measured,
        chosen_on=chosen_on,
    )  # fmt: skip


def score(number: int) -> NetworkScore:
    """A network whose step takes as long as its FLOPs at a teraflop a second."""
    each = row(f"n{number}", number * 1e-3, chosen_on=number % 2 == 0)
    return NetworkScore(
        row=each, predicted=1.1 * number * 1e-3, flops=number * 1e9, parameters=1e6, layers=number,
        pairs={"relu convolution": number}, shares={},
    )  # fmt: skip


def test_rows_belong_to_halves_by_their_place_among_the_names(tmp_path: Path) -> None:
    (tmp_path / "timm.csv").write_text(ROWS)
    first, second = read_rows(tmp_path / "timm.csv")
    assert (first.kind, first.chosen_on, first.measured) == ("inference NHWC", True, 0.01)
    assert (second.kind, second.chosen_on, second.parameters) == ("training NCHW", False, 1e6)


def test_tables_tell_halves_and_failures_apart(tmp_path: Path) -> None:
    scores = [score(number) for number in range(1, 13)]
    ours = np.array([each.predicted for each in scores])
    view = networks.score_table(scores, {"ours": ours})
    assert view.row_count == 3  # both halves of the one kind, and all of its mode
    assert networks.accuracy(scores, ours, np.ones(12, dtype=bool)) == ("10.0%", "10.0%", "1.000", "1.000")
    failed = NetworkScore(row=row("x", 1.0), pairs={}, shares={}, failure="no such network")
    failures = networks.failure_table([*scores, failed])
    assert failures.row_count == 1
    assert "92.3% of 13" in str(failures.title)
    assert list(networks.table(tmp_path, tmp_path)) == []


def test_the_line_goes_through_what_is_one() -> None:
    scores = [score(number) for number in range(1, 13)]
    assert fitted_line(scores) == pytest.approx([each.row.measured for each in scores], rel=1e-6)


def test_boosting_learns_the_half_that_it_sees() -> None:
    pytest.importorskip("sklearn")
    scores = [score(number) for number in range(1, 41)]
    errors = boosted(scores) / [each.row.measured for each in scores] - 1
    chosen = np.array([each.row.chosen_on for each in scores])
    assert np.abs(errors[chosen]).max() < 0.01
    assert 0 < np.median(np.abs(errors[~chosen])) < 0.5


@pytest.mark.slow
def test_a_network_is_captured_in_both_layouts() -> None:
    if find_spec("torch") is None or find_spec("timm") is None:
        pytest.skip("builds a network of timm")
    seconds = {}
    for channels_last in (False, True):
        each = NetworkRow(
            model="resnet18", training=True, channels_last=channels_last, batch=64, image=64, parameters=11.69e6,
            measured=1.0, chosen_on=True,
        )  # fmt: skip
        result = networks.score_of(each)
        assert not result.failure
        assert result.pairs["native_batch_norm relu"] > 0
        # forward and twice as much backward, but for the gradient of the image
        assert result.flops == pytest.approx(64 * 3 * 2 * 1.82e9 * (64 / 224) ** 2, rel=0.1)
        seconds[channels_last] = result.predicted
    assert seconds[True] < seconds[False]
    other = networks.score_of(row("resnet18", 1.0, parameters=1e9))
    assert "was measured with 1000.0" in other.failure
