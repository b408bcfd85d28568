"""Published servings: their sources, their settings, and how near the predictions of some of them are."""

from __future__ import annotations

import pytest

from bench.accuracy.steps.served import BAR, ENGINES, parts, read_rows


def test_rows_have_a_source_each_and_engines_that_are_described() -> None:
    rows = read_rows()
    assert len(rows) >= 60
    assert len({row.text["source"] for row in rows}) >= 5
    assert all(row.text["source"].startswith("https://") for row in rows)
    assert all(any(row.text["engine"].startswith(name) for name in ENGINES) for row in rows)
    assert all(float(row.text["throughput"]) > 0 for row in rows)


@pytest.mark.usefixtures("pytorch")
def test_servings_of_one_model_are_near() -> None:
    rows = [row for row in read_rows() if row.text["model"] == "llama-8b" and row.text["device"] == "h100"][::3]
    errors = [row.predicted().tokens_per_second / float(row.text["throughput"]) - 1 for row in rows]
    assert parts("llama-8b").title.startswith("hf:")
    assert sum(map(abs, errors)) / len(errors) < BAR
