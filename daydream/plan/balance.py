"""Stages of equal cost: how many blocks each part of a pipeline gets, what lies around the blocks counted."""

from __future__ import annotations

from collections.abc import Sequence

from daydream.graph.graph import Phase
from daydream.plan.costs import Costs


def balanced_blocks(costs: Costs) -> tuple[int, ...]:
    """Blocks of every part of a pipeline such that the dearest part is as cheap as can be."""
    layout, units = costs.layout, costs.units
    seconds = [
        sum(costs.passing([unit], phase).device for phase in (Phase.FORWARD, Phase.BACKWARD))
        for unit in range(units.count)
    ]
    return least_dear(seconds, layout.pipeline * layout.chunks)


def least_dear(seconds: Sequence[float], parts: int) -> tuple[int, ...]:
    """Blocks of consecutive parts whose dearest is cheapest; the first and the last cost lie around the blocks.

    >>> least_dear([1.0, 4.0, 4.0, 4.0, 4.0, 5.0], 2)
    (2, 2)
    >>> least_dear([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0], 2)
    (4, 1)
    """
    blocks = list(seconds[1:-1])
    if parts == 1 or len(blocks) < parts:
        return ()
    sums = [0.0]
    for each in blocks:
        sums.append(sums[-1] + each)
    count = len(blocks)
    # Of so many parts that hold the first blocks: cost of the dearest, and where the last of them begins.
    best = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    begin = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        around = (seconds[0] if part == 1 else 0.0) + (seconds[-1] if part == parts else 0.0)
        for end in range(part, count - (parts - part) + 1):
            for start in range(part - 1, end):
                dearest = max(best[part - 1][start], sums[end] - sums[start] + around)
                if dearest < best[part][end]:
                    best[part][end], begin[part][end] = dearest, start
    sizes, end = [], count
    for part in range(parts, 0, -1):
        sizes.append(end - begin[part][end])
        end = begin[part][end]
    return tuple(reversed(sizes))
