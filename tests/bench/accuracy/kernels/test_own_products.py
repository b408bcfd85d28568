"""Tables of large products: rows per board and size, neighbours where a size was not measured, halves, a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.accuracy.kernels.own_products import BAR, BOARDS, SIDES, compare, halves, table

DATA = Path(__file__).parents[4].parent / "shared" / "data"

pytestmark = pytest.mark.skipif(not (DATA / "tensor_core").exists(), reason="the measured products are not here")


@pytest.mark.slow
def test_the_library_is_met_and_ours_is_reported_next_to_it(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("matplotlib")
    found = compare(DATA)
    assert [(each.board, each.side) for each in found] == [(board, side) for board in BOARDS for side in SIDES]
    assert all(abs(each.measured / each.library - 1) <= BAR / 100 for each in found)
    assert all(0.5 * each.library < each.ours < 1.2 * each.library for each in found)
    view, of_halves = table(DATA, tmp_path)
    assert (view.row_count, of_halves.row_count) == (len(found), 2)
    assert (tmp_path / "own_products.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_steps_and_ends_of_tiles_are_those_of_the_library_on_either_half() -> None:
    pytest.importorskip("pyarrow")
    chosen, judged = halves(DATA)
    assert sum(chosen.products + judged.products) > 500
    # A step of the model, 1.481 + 0.028 us over 1.452, and what it has between two tiles, stores and filling among it.
    for half in (chosen, judged):
        assert half.slope == pytest.approx(1.039, abs=0.01)
        assert half.tile_seconds == pytest.approx(5.4e-6, rel=0.2)
        assert half.median_error < 0.07
