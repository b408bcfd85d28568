"""Architectures of transformers: two layers of two kinds, counts, and reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.daydream import architectures
from bench.daydream.architectures import ASSUMED, Answer, _shortened, answer, tables


def test_two_layers_are_of_two_kinds_where_there_are_several() -> None:
    layers = ["linear", "linear", "full", "linear"]
    parts = {"num_hidden_layers": 4, "layer_types": layers, "widths": [8, 9, 10, 11], "part": {"depth": 7, "width": 7}}
    assert _shortened(parts, 2) == {
        "num_hidden_layers": 2,
        "layer_types": ["linear", "full"],
        "widths": [8, 9],
        "part": {"depth": 2, "width": 7},
    }
    six = {"num_hidden_layers": 6, "layer_types": ["linear", "full"] * 3, "image_token_id": None}
    assert _shortened(six, 4) == {
        "num_hidden_layers": 4,
        "layer_types": ["linear", "linear", "full", "full"],
        "image_token_id": 1,
    }


def test_counts_are_by_mode_and_reasons_are_named() -> None:
    answers = [
        Answer(kind="a", class_name="A", mode="inference", seconds=1.0, milliseconds=2.0),
        Answer(kind="b", class_name="B", mode="inference", seconds=3.0, reason="wants a state"),
    ]
    counts, reasons = tables(answers)
    assert [next(iter(column.cells)) for column in counts.columns][:4] == ["inference", "2", "1", "50.0%"]
    assert list(reasons.columns[2].cells) == ["wants a state"]


def test_what_is_supposed_changes_until_a_model_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = []

    def milliseconds(path: Path, mode: str, assume: tuple[str, ...], limit: int) -> tuple[float, str]:
        tried.append(assume)
        return (3.0, "") if assume == ASSUMED[1] else (0.0, "reads values")

    monkeypatch.setattr(architectures, "_milliseconds", milliseconds)
    answered = answer("a", {"architectures": ["A"]}, "training", tmp_path, 1)
    assert tried == list(ASSUMED[:2])
    assert (answered.milliseconds, answered.reason, answered.assumed) == (3.0, "", True)
