"""Graphs of ranks joined in one and taken apart again."""

from __future__ import annotations

import numpy as np
import pytest

from daydream.graph.ranks import COLUMNS, by_rank, joined, meetings, parted
from daydream.graph.simulate import simulate
from tests.daydream.ranks.jobs import rank_graph

FAST, SLOW = (10.0, 10.0), (13.0, 9.0)


def test_ranks_meet_when_the_last_has_come() -> None:
    parts = [rank_graph(works, ("all", "all"), (5.0, 5.0)) for works in (FAST, SLOW)]
    whole = joined(parts, (0, 1))
    assert simulate(parts[0]).makespan_us == 10 + 5 + 10 + 5
    # Both come to the first meeting with the slow rank, to the second with the fast one.
    assert simulate(whole).makespan_us == 13 + 5 + 10 + 5
    assert int(meetings(whole).sum()) == 2


def test_groups_of_other_ranks_are_not_waited_for() -> None:
    parts = [rank_graph((work,), (group,), (1.0,)) for work, group in ((1.0, "a"), (2.0, "a"), (9.0, "b"))]
    timeline = simulate(joined(parts, (0, 1, 2)))
    ends = {timeline.graph.threads[t].process: e for t, e in zip(timeline.graph.thread, timeline.end_us, strict=True)}
    assert (ends[0], ends[1], ends[2]) == (3.0, 3.0, 10.0)


def test_parts_of_a_joined_graph_are_what_was_joined() -> None:
    parts = [rank_graph(works, ("all", "all"), (5.0, 6.0)) for works in (FAST, SLOW)]
    whole = joined(parts, (3, 7))
    assert [thread.process for thread in whole.threads if not thread.is_meeting] == [3, 7]
    again = joined(parted(whole), whole.ranks)
    for column in COLUMNS:
        assert np.array_equal(getattr(again, column), getattr(whole, column), equal_nan=True), column
    assert [simulate(part).makespan_us for part in parted(whole)] == [simulate(part).makespan_us for part in parts]


def test_a_change_by_rank_changes_every_rank() -> None:
    whole = joined([rank_graph(works, ("all", "all"), (5.0, 5.0)) for works in (FAST, SLOW)], (0, 1))
    halved = by_rank(whole, lambda part: part.scaled(part.select(gpu=True), 0.5))
    assert simulate(halved).makespan_us == simulate(whole).makespan_us / 2


def test_a_rank_is_joined_once() -> None:
    part = rank_graph((1.0,), ("all",), (1.0,))
    with pytest.raises(ValueError, match="one graph for every rank"):
        joined([part, part], (0, 0))
