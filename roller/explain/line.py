"""Explanation of kernels of lines."""

from __future__ import annotations

from collections.abc import Iterator

from hal.spec.device import DeviceSpec
from roller.explain.pace import stage_bars
from roller.text.quantities import count_text, time_text, wrapped
from sokoban.kernel.line import LineKernel
from sokoban.model.estimates import Estimate
from sokoban.schedule.patches import AHEAD, PLACES_AHEAD, LineSchedule, keeps_share, line_vector, turns


def line_origin(kernel: LineKernel, schedule: LineSchedule) -> Iterator[str]:
    """Reasons for a program of lines."""
    if kernel.scatter is not None:
        yield from wrapped(
            f"{count_text(kernel.length, 'row')} of {count_text(kernel.columns, 'element')} are added to "
            f"{count_text(kernel.lines, 'row')} in the order of {kernel.scatter.place.tensor}; the fastest by RATIONAL "
            f"of all numbers of rows whose sums a thread holds"
        )
        return
    shared = f"{schedule.threads} threads share a line" if schedule.threads > 1 else "a thread has a line of its own"
    ranks = f", of which {count_text(kernel.ranks, 'rank')} are looked for" if kernel.rank_axis is not None else ""
    yield from wrapped(
        f"{count_text(kernel.lines, 'line')} of {count_text(kernel.length, 'element')} along {kernel.axis}, each gone "
        f"along once{ranks}; {shared}: the fastest by RATIONAL of all numbers that have something to do"
    )


def line_lines(kernel: LineKernel, schedule: LineSchedule, estimate: Estimate, device: DeviceSpec) -> Iterator[str]:
    """The kernel of a scan, of places or ranks: its launch, what a turn is, its stages."""
    if device.teu.lane != "thread":
        yield f"  {count_text(schedule.blocks(kernel), 'block')} of {count_text(schedule.lines, 'line')}"
    else:
        each = "line" if kernel.scatter is None else "row"
        threads = schedule.threads * (schedule.lines if kernel.scatter is None else 1)
        yield (
            f"  {count_text(schedule.blocks(kernel), 'block')} of {count_text(threads, 'thread')}, "
            f"{count_text(schedule.lines, each)} each, {estimate.blocks_per_unit} at a time on a unit"
        )
        if kernel.scatter is not None:
            shared = threads > device.warp_lanes
            listed = "lists for the block which name its rows" if shared else "adds what names its rows"
            yield f"  a warp looks at 32 places at a time, {PLACES_AHEAD} times ahead, and {listed}"
        elif schedule.threads == 1:
            yield f"  a thread loads {AHEAD} elements before it uses the first"
        else:
            vector, count = line_vector(kernel, schedule), turns(kernel, schedule)
            carried = "carries on" if kernel.is_scan else "keeps the best of"
            yield from wrapped(
                f"a thread takes {count_text(vector, 'adjacent element')} of a line at each of "
                f"{count_text(count, 'turn')} and {carried} what the ones before came to"
            )
        if kernel.rank_axis is not None:
            source = "registers" if keeps_share(kernel, schedule) else "the caches"
            who = "a thread looks through its line again for every rank"
            if schedule.threads > 1:
                who = "who had the best of a rank goes on with the second of its share, then looks through it again"
            yield from wrapped(f"{who}, out of {source}")
    yield f"Predicted {time_text(estimate.seconds)}, {time_text(device.launch_overhead_seconds)} of it the launch"
    yield from stage_bars(estimate)
