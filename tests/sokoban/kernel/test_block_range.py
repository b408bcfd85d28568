"""What a block walks, against every pair of a query and a key that a mask leaves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sokoban.kernel.block_range import BlockRange


@st.composite
def ranges(draw: st.DrawFn) -> BlockRange:
    queries = draw(st.integers(1, 40))
    is_causal = draw(st.booleans())
    keys = draw(st.integers(queries if is_causal else 1, 60))
    return BlockRange(
        is_of_keys=draw(st.booleans()), queries=queries, keys=keys, group=draw(st.integers(1, 4)), is_causal=is_causal,
        window=draw(st.integers(0, keys)) if is_causal else 0,
    )  # fmt: skip


def met(walked: BlockRange, own: int, other: int) -> bool:
    """Whether a row of the block's own meets one of the other side."""
    query, key = (other // walked.group, own) if walked.is_of_keys else (own // walked.group, other)
    place = query + walked.keys - walked.queries
    return not walked.is_causal or (key <= place and (not walked.window or key > place - walked.window))


@given(ranges(), st.sampled_from((1, 3, 4, 8)), st.sampled_from((1, 4, 5, 16)))
def test_blocks_walk_from_the_first_to_the_last_step_that_a_row_of_theirs_meets(
    walked: BlockRange, rows: int, step: int
) -> None:
    counts = walked.steps(rows, step)
    assert len(counts) == -(-walked.rows // rows)
    for block, count in enumerate(counts):
        own = range(block * rows, min((block + 1) * rows, walked.rows))
        others = [other for other in range(walked.walked_rows) if any(met(walked, row, other) for row in own)]
        assert count == (others[-1] // step - others[0] // step + 1 if others else 0)


def test_ends_have_the_sizes_of_their_kernel() -> None:
    windowed = BlockRange(is_of_keys=True, queries=64, keys=80, group=2, is_causal=True, window=24)
    begin, end = windowed.bounds
    assert begin.offset(windowed.sizes) == -16
    assert end.offset(windowed.sizes) == 8
    assert windowed.walked_rows == 128 and windowed.rows == 80
