"""Why a rank holds the others up: the cause that was planted, and slow links by groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from daydream.graph.graph import TaskKind
from daydream.ranks.causes import Cause, rank_causes, slow_groups
from daydream.ranks.equal import simulate_ranks
from daydream.ranks.merge import merge, read_ranks
from daydream.ranks.report import conclusions, findings
from daydream.ranks.skew import GroupTimes
from tests.daydream.ranks.synthetic import Job, write

STILL = Job(ranks=3, steps=2, layers=12, buckets=2, spread=0.0, jitter_us=0.0)


@pytest.mark.parametrize(
    ("planted", "cause"),
    [
        ({"load": (1.0, 1.2, 1.0)}, Cause.COMPUTE),
        ({"loading_us": (100.0, 2100.0, 100.0)}, Cause.DATA),
    ],
)
def test_the_planted_cause_is_reported(planted: dict[str, tuple[float, ...]], cause: Cause, tmp_path: Path) -> None:
    found = findings(merge(read_ranks(write(replace(STILL, **planted), tmp_path))))
    assert [rank.rank for rank in found.stragglers] == [1]
    second = found.causes[1]
    assert second.cause is cause
    (late,) = found.stragglers
    assert 0.5 * late.held_up_us < second.without_us <= late.held_up_us
    (sentence,) = [each for each in conclusions(found) if each.startswith("ranks that hold the others up: 1 (")]
    assert cause.text in sentence


def test_a_slow_host_differs_from_slow_kernels(tmp_path: Path) -> None:
    job = replace(STILL, kernel_us=2.0)
    whole = merge(read_ranks(write(job, tmp_path)))
    graph = whole.graph
    slow = graph.on_cpu & (graph.kind == TaskKind.CPU)
    slow &= np.array([thread.process == 2 for thread in graph.threads])[graph.thread]
    graph = graph.with_durations(np.flatnonzero(slow), 3 * graph.duration_us[slow])
    assert rank_causes(simulate_ranks(graph), (0, 1), [2])[2].cause is Cause.HOST
    assert rank_causes(simulate_ranks(graph), (0, 1), []) == {}


def group(name: str, moving_us: float, *, ranks: int = 8, size: float = 1e9) -> GroupTimes:
    return GroupTimes(
        name=name, ranks=ranks, count=4, bytes=size, moving_us=moving_us, waited_us=0, exposed_us=0, skew_us=0
    )  # fmt: skip


def test_a_link_is_slow_where_a_group_moves_less_than_those_that_do_the_same() -> None:
    groups = [group("a", 1000), group("b", 1020), group("c", 2000), group("wide", 9000, ranks=64)]
    (slow,) = slow_groups(groups)
    assert (slow.name, slow.rate, slow.usual) == ("c", pytest.approx(5e11), pytest.approx(1e9 / 1020e-6))
    assert [each.name for each in slow_groups([groups[0], groups[2]])] == ["c"], "of two the faster one is usual"
    assert slow_groups(groups[:2]) == []
    # Groups of a model's data between machines move other bytes than those of its tensors within one.
    assert slow_groups([group("tensors", 1000), group("data", 9000, size=2e9)]) == []
