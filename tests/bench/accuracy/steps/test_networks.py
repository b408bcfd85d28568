"""Vision networks: rows, scores and tables."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.accuracy.steps import networks
from bench.accuracy.steps.network_rows import NetworkRow, NetworkScore, read_rows

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
    """A network whose step is predicted a tenth too long."""
    each = row(f"n{number}", number * 1e-3, chosen_on=number % 2 == 0)
    return NetworkScore(row=each, predicted=1.1 * number * 1e-3, shares={})


def test_rows_belong_to_halves_by_their_place_among_the_names(tmp_path: Path) -> None:
    (tmp_path / "timm.csv").write_text(ROWS)
    first, second = read_rows(tmp_path / "timm.csv")
    assert (first.kind, first.chosen_on, first.measured) == ("inference NHWC", True, 0.01)
    assert (second.kind, second.chosen_on, second.parameters) == ("training NCHW", False, 1e6)


def test_tables_tell_halves_and_failures_apart(tmp_path: Path) -> None:
    scores = [score(number) for number in range(1, 13)]
    view = networks.score_table(scores)
    assert view.row_count == 3  # both halves of the one kind, and all of its mode
    assert networks.accuracy(scores) == ("10.0%", "10.0%", "1.000", "1.000")
    failed = NetworkScore(row=row("x", 1.0), shares={}, failure="no such network")
    failures = networks.failure_table([*scores, failed])
    assert failures.row_count == 1
    assert "92.3% of 13" in str(failures.title)
    assert list(networks.table(tmp_path, tmp_path)) == []


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
        seconds[channels_last] = result.predicted
    assert seconds[True] < seconds[False]
    other = networks.score_of(row("resnet18", 1.0, parameters=1e9))
    assert "was measured with 1000.0" in other.failure
