"""Rows of a tile in pages: how many follow each other, how often threads look, what copies in bulk take."""

from __future__ import annotations

import pytest

from sokoban.kernel.pages import bulk_misfit, rows_in_a_page, rows_of_a_lookup
from tests.codegen.attention_kernels import kernel_of


@pytest.mark.parametrize(("step", "page"), [(64, 16), (16, 64), (48, 64), (32, 5), (96, 36)])
def test_rows_of_a_lookup_never_cross_a_page(step: int, page: int) -> None:
    rows = rows_in_a_page(step, page)
    assert step % rows == 0
    starts = range(0, 5 * step, rows)
    assert all(start // page == (start + rows - 1) // page for start in starts)


def test_threads_look_once_for_a_page_or_once_for_the_rows_that_they_copy_at_once() -> None:
    # 128 threads copy eight rows of 16 pieces at once.
    assert [rows_of_a_lookup(128, 64, page, 128) for page in (64, 16, 8, 4, 5)] == [64, 16, 8, 8, 8]


@pytest.mark.parametrize(
    ("page", "keys", "problem"),
    [
        (16, 64, None),
        (64, 128, None),
        (4, 64, "copies in bulk take 8 rows of a page together, and a step has 4"),
        (16, 60, "copies in bulk take 16 rows of a page together, and 60 keys end between"),
        (0, 60, None),
    ],
)
def test_copies_in_bulk_take_whole_panels_of_keys_alone(page: int, keys: int, problem: str | None) -> None:
    pages = {"page": page, "pool": 20} if page else {}
    assert bulk_misfit(kernel_of(keys=keys, **pages), 32) == problem
