"""The thesis's operators against its measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.accuracy.data import default_directory
from bench.accuracy.kernels.thesis import (
    DEVICE,
    REFERENCES,
    evaluate,
    operator_table,
    reason,
    scatter,
    summary_table,
    verdict,
    worst_table,
)
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.programs import find_programs

measured_data = pytest.mark.skipif(
    not (default_directory() / "roller119").is_dir(), reason="the thesis's measurements are not next to this checkout"
)


def test_verdicts_leave_five_per_cent() -> None:
    assert [verdict(ratio) for ratio in (0.9, 0.95, 1.0, 1.05, 1.1)] == ["win", "tie", "tie", "tie", "lose"]


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ops\.csv: no such file"):
        evaluate(tmp_path, load_device(DEVICE))


@measured_data
@pytest.mark.slow
def test_operators_are_compared_with_their_own_measurements(tmp_path: Path) -> None:
    device = load_device(DEVICE)
    rows = evaluate(default_directory(), device, ["M2", "E19", "R3"])
    assert [row.name for row in rows] == ["M2", "E19", "R3"]
    for row in rows:
        assert row.seconds == find_programs(row.form, device, 1, "both").direct[0].estimate.seconds
        assert row.seconds <= row.constructed_seconds
        assert row.ratio("cudalib_ms") == row.seconds / row.measured["cudalib_ms"]
        assert "sets the pace" in reason(row, device, row.measured["roller_top10_ms"])
    assert operator_table(rows).row_count == 3
    assert summary_table(rows).row_count == len(REFERENCES) * 4
    assert worst_table(rows, device).row_count == 3
    pytest.importorskip("matplotlib")
    scatter(rows, tmp_path / "thesis.png")
    assert (tmp_path / "thesis.png").stat().st_size > 10_000
