"""The table of large products: rows per board and size, neighbours where a size was not measured, a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.accuracy.kernels.own_products import BAR, BOARDS, SIDES, compare, table

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
    (view,) = table(DATA, tmp_path)
    assert view.row_count == len(found)
    assert (tmp_path / "own_products.png").read_bytes().startswith(b"\x89PNG")
