"""Predictions against times that others published."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.accuracy.kernels import published


@pytest.mark.parametrize("kind", ["kernels", "library"])
def test_every_entry_is_a_product_of_a_shipped_board_with_its_source(kind: str) -> None:
    rows = published.products(kind)
    assert rows
    for row in rows:
        assert row.source and row.who
        assert 0.05 < row.flops / row.device.peak_flops("float32") < (1.0 if row.dtype == "float32" else 20.0)
        assert (row.schedule is None) == (kind == "library")


def test_seconds_follow_from_the_published_rate() -> None:
    first = published.products("kernels")[0]
    assert first.measured_seconds == pytest.approx(2 * 4096**3 / 2.811e12)


def test_kernels_are_priced_by_their_own_tiles() -> None:
    ladder = [row.predicted_seconds for row in published.products("kernels") if row.device.name == "v100-sxm2-16gb"]
    assert ladder == sorted(ladder, reverse=True), "every rung of the ladder was faster than the one before it"


@pytest.mark.slow
def test_the_table_names_errors_and_ratios(tmp_path: Path) -> None:
    first, second = published.table(tmp_path, tmp_path)
    assert [str(column.header) for column in first.columns][-1] == "error"
    assert [str(column.header) for column in second.columns][-1] == "ours/theirs"
    assert first.row_count == len(published.products("kernels"))
