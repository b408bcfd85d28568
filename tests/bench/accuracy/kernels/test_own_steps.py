"""Our kernels against the library's measured rates: the bar, and that every step of the way is one forward."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.accuracy.kernels.own_steps import STEPS, shares, table

DATA = Path(__file__).parents[4].parent / "shared" / "data"

pytestmark = pytest.mark.skipif(not (DATA / "tensor_core").exists(), reason="the measured products are not here")


def test_bulk_copies_and_clusters_bring_products_to_the_librarys_rate() -> None:
    pytest.importorskip("pyarrow")
    found = {(each.board, each.kernels): each for each in shares(DATA, every=100)}
    steps = [found["h100_sxm", step].mean for step in STEPS]
    assert steps == sorted(steps)
    assert steps[0] < 0.75
    assert found["h100_sxm", "all that construction proposes"].mean >= 0.9
    assert all(abs(sum(share for _, share in each.bounds) - 1) < 1e-9 for each in found.values())


@pytest.mark.slow
def test_the_table_has_a_row_per_step(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (view,) = table(DATA, tmp_path)
    assert view.row_count == len(STEPS) + 2
