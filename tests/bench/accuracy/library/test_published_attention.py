"""Published rates of attention: their file, and how the errors of its rows come about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.accuracy.library.published_attention import errors, published_rates, table


def test_every_row_has_a_source_and_a_rate_per_length() -> None:
    rows = published_rates()
    assert len(rows) == len({(row.label, row.device.name) for row in rows})
    for row in rows:
        assert row.source and row.measured.shape == row.lengths.shape
        assert row.tokens % row.lengths.max() == 0 and row.width % row.head_dim == 0


def test_a_rate_that_is_predicted_has_no_error() -> None:
    row = published_rates()[0]
    assert errors(replace(row, measured=row.predicted)) == pytest.approx(np.zeros(row.lengths.shape))
    # Twice the predicted rate is half of its time.
    assert errors(replace(row, measured=2 * row.predicted)) == pytest.approx(np.ones(row.lengths.shape))


def test_backward_passes_of_flash_attention_3_are_as_published() -> None:
    rows = [row for row in published_rates() if row.kernels == "FlashAttention 3" and row.direction == "backward"]
    assert len(rows) == 2
    for row in rows:
        assert np.abs(errors(row)).mean() < 0.02


def test_the_table_has_a_row_per_kernel_and_a_picture(tmp_path: Path) -> None:
    (view,) = table(tmp_path, tmp_path)
    assert view.row_count == len(published_rates())
    assert (tmp_path / "published_attention.png").stat().st_size > 1000
