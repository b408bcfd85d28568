"""Clocks from what ranks did together, where that says little."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from daydream.ranks.clocks import Clocks, align, as_recorded
from daydream.ranks.collectives import Collectives, Group, Kind
from daydream.ranks.pairing import pair
from hal.support.errors import InputError
from tests.daydream.ranks.jobs import collectives

BEGINS = np.arange(20) * 1000.0


def aligned(own: list[Collectives], origin_us: list[float]) -> Clocks:
    """The clocks of ranks on a host each, whose recordings began at these times by their own clocks."""
    ranks = range(len(own))
    paths = [Path(f"rank{rank}.json") for rank in ranks]
    meetings = pair(list(ranks), own, [["step"]] * len(own), paths)
    return align(meetings, as_recorded(np.array(origin_us), [f"host {rank}" for rank in ranks]), paths)


def messages(first_sends: bool, lasts_us: float) -> list[Collectives]:
    """Messages between two ranks in turns, the sender's done at once, the receiver waiting from its begin."""
    even = np.arange(len(BEGINS)) % 2 == 0
    own = []
    for rank in (0, 1):
        sends = even == (first_sends == (rank == 0))
        kinds = [Kind.SEND if sending else Kind.RECV for sending in sends]
        ends = BEGINS + np.where(sends, 1.0, lasts_us)
        own.append(collectives(kinds, start_us=BEGINS, end_us=ends, peer=[1 - rank] * len(BEGINS)))
    return own


def test_messages_in_both_directions_bound_a_clock() -> None:
    clocks = aligned(messages(True, 6.0), [0.0, 500.0])
    # Received no earlier than sent: the clock is right within what a message takes.
    assert clocks.offset_us[0] == 0.0
    assert clocks.offset_us[1] == pytest.approx(-500.0, abs=6.0)


def test_a_host_that_meets_no_other_keeps_its_clock() -> None:
    talking = [collectives([Kind.ALL_REDUCE] * 20, start_us=BEGINS, end_us=BEGINS + 50.0) for _ in range(2)]
    silent = collectives([], [])
    clocks = aligned([*talking, silent], [0.0, 3e9, 77.0])
    assert clocks.offset_us.tolist() == pytest.approx([0.0, -3e9, 0.0], abs=1e-3)
    assert clocks.shift_us.tolist() == pytest.approx([0.0, 0.0, 77.0], abs=1e-3)
    assert np.isnan(clocks.jitter_us).tolist() == [False, False, True]


def test_pairs_of_hosts_that_never_meet_are_aligned_by_pairs() -> None:
    pairs = [
        collectives([Kind.ALL_REDUCE] * 20, start_us=BEGINS, end_us=BEGINS + 50.0, groups=(Group(f"pair {rank // 2}"),))
        for rank in range(4)
    ]
    clocks = aligned(pairs, [0.0, 100.0, 9e9, 9e9 + 40.0])
    assert clocks.offset_us.tolist() == pytest.approx([0.0, -100.0, 0.0, -40.0], abs=1e-3)


def test_a_clock_runs_no_faster_than_clocks_do() -> None:
    slow = BEGINS * 0.9
    own = [collectives([Kind.ALL_REDUCE] * 20, start_us=at, end_us=at + 50.0) for at in (BEGINS, slow)]
    with pytest.raises(InputError, match=r"rank1.json: its clock contradicts the others'"):
        aligned(own, [0.0, 0.0])
