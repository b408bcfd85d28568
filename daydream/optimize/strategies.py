"""Buckets and passes searched in turns (dPRO, algorithm 1): first what makes the step fit, then what makes it shorter.

A pass changes the graph, and so which buckets are best: every pass is judged by the step with its own best buckets.

A recording of several steps may hide one step's exchange behind the next one's loading and launches. There the pace of
all steps counts, from a simulation of the whole graph: the search finds the best list for one step, and takes it only
if the whole recording is faster with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import simulate
from daydream.optimize.coarse import CoarseStep, coarsened
from daydream.optimize.exchange import Ends, Exchange
from daydream.optimize.search import SAME_US, best_buckets, by_limits
from daydream.passes.basis.bytes import memory_of
from daydream.passes.basis.communication import MEBIBYTE
from daydream.passes.basis.gradients import Gradients
from daydream.trace.trace import NONE
from daydream.whatif import AppliedPass, PassRequest, apply_passes, parse_pass
from hal.support.errors import InputError

#: What makes a step fit: dPRO's two passes for memory (section 3), weakest first.
SAVING = (
    "recompute:every=4", "recompute:every=3", "recompute:every=2", "recompute",
    "accumulate:steps=2", "accumulate:steps=4", "accumulate:steps=8",
)  # fmt: skip

#: A pass is taken if it saves this share of the step.
WORTH = 1e-4

#: Most values of ``bucket_cap_mb`` that are tried one MiB apart; larger ones are tried eight to an octave.
LINEAR_MIB = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """A step after passes, with its best buckets.

    Attributes:
        requests: the passes.
        applied: what they say they did.
        exchange: the changed graph, and what it exchanges.
        step: its coarsened view.
        usual: DDP's own buckets, as recorded or by its default limits.
        limit_mb: the best ``bucket_cap_mb``, MiB.
        limited: the buckets that it makes.
        best: the best list of buckets.
        lengths_us: how long a step takes with each of these lists.
        peak_bytes: memory at the step's peak, None where sizes are unknown.
    """

    requests: tuple[PassRequest, ...]
    applied: tuple[AppliedPass, ...]
    exchange: Exchange
    step: CoarseStep
    usual: Ends
    limit_mb: float
    limited: Ends
    best: Ends
    lengths_us: Mapping[Ends, float]
    peak_bytes: float | None

    @property
    def title(self) -> str:
        """The passes in words."""
        return ", ".join(request.text for request in self.requests) or "buckets alone"

    @property
    def length_us(self) -> float:
        """The step with the best buckets."""
        return self.lengths_us[self.best]


@dataclass(frozen=True, kw_only=True, eq=False)
class Optimized:
    """Result of the search.

    Attributes:
        before: the step as it is; its usual buckets are what a user has today.
        best: the best variant.
        tried: every variant and why it was taken or left, in order.
    """

    before: Variant
    best: Variant
    tried: tuple[tuple[Variant, str], ...]


def optimized(
    exchange: Exchange,
    passes: Sequence[PassRequest] = (),
    memory_bytes: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Optimized:
    """The best buckets, with those of the passes that shorten the step, in as much memory as there is.

    Passes are taken one at a time, the one that saves most first, as long as one saves anything; each is tried again
    after every one that is taken, since they change each other's worth. A pass after which nothing happens later than
    before is no worse with any buckets (:func:`no_later`), and is taken without a comparison of the others.

    Args:
        exchange: the training.
        passes: to try.
        memory_bytes: what the step may hold at its peak.
        progress: called with the variant that is tried.

    Raises:
        InputError: nothing fits into the memory, or a pass refuses the graph.
    """
    before = _variant(exchange, ())
    tried: list[tuple[Variant, str]] = []
    best = before
    if memory_bytes is not None:
        best = _fitting(before, memory_bytes, tried, progress)
    remaining = list(passes)
    while remaining:
        offered = []
        for request in remaining:
            progress(f"trying {request.text}")
            offered.append(_variant(exchange, (*best.requests, request)))
            if _saves(offered[-1], best) and no_later(offered[-1].step, best.step):
                break
        shortest = min(offered, key=lambda each: each.length_us)
        if not _saves(shortest, best):
            tried += [(each, "saves nothing") for each in offered]
            break
        sure = no_later(shortest.step, best.step)
        tried.append((shortest, "taken: nothing happens later" if sure else "taken: saves most"))
        remaining.remove(shortest.requests[-1])
        best = shortest
    return Optimized(before=before, best=best, tried=tuple(tried))


def no_later(one: CoarseStep, other: CoarseStep) -> bool:
    """True if one step is no longer than another with any buckets: theorem 3's first half, for all operators at once.

    Every time and every path is no longer, so every replay is no later. Fusing operators delays the gradients of all
    but the last; where it delays none, and calls are hidden no worse, it cannot hurt.
    """
    if one.took_us.shape != other.took_us.shape or not np.array_equal(one.took_us, other.took_us):
        return False
    pairs = (
        (one.issued - one.begin, other.issued - other.begin),
        (one.ready - one.begin, other.ready - other.begin),
        (np.array(one.done - one.begin), np.array(other.done - other.begin)),
        (one.issued_after, other.issued_after),
        (one.ready_after, other.ready_after),
        (one.done_after, other.done_after),
        (np.array(one.tail), np.array(other.tail)),
    )
    return all(bool((mine <= theirs + SAME_US).all()) for mine, theirs in pairs)


def _saves(one: Variant, other: Variant) -> bool:
    return one.length_us <= other.length_us * (1 - WORTH)


def _fitting(
    before: Variant, memory_bytes: float, tried: list[tuple[Variant, str]], progress: Callable[[str], None]
) -> Variant:
    """Line 1 of algorithm 1: the shortest step that fits, by recomputation or by accumulation."""
    if before.peak_bytes is None:
        raise InputError("--memory-gb", "the trace does not tell what the step holds", "record with shapes")
    if before.peak_bytes <= memory_bytes:
        return before
    variants = []
    for text in SAVING:
        progress(f"trying {text}")
        try:
            variants.append(_variant(before.exchange, (parse_pass(text),)))
        except InputError:
            # Without modules nothing can be recomputed.
            continue
    fitting = [each for each in variants if each.peak_bytes is not None and each.peak_bytes <= memory_bytes]
    if not fitting:
        least = min((each.peak_bytes or np.inf for each in variants), default=before.peak_bytes)
        text = f"{memory_bytes / 1e9:.2f} GB are too few, {least / 1e9:.2f} GB are the least that was found"
        raise InputError("--memory-gb", text, "give more memory, or a smaller batch")
    best = min(fitting, key=lambda each: each.length_us)
    for each in variants:
        fits = each in fitting
        tried.append((each, "taken: fits, shortest" if each is best else "fits" if fits else "does not fit"))
    return best


def _variant(exchange: Exchange, requests: tuple[PassRequest, ...]) -> Variant:
    graph, applied = apply_passes(exchange.graph, requests)
    if requests:
        exchange = replace(exchange, graph=graph, gradients=carried(exchange.gradients, exchange.graph, graph))
    step = coarsened(exchange)
    usual, (limit_mb, limited) = exchange.usual(), best_limit(exchange, step)
    result = best_buckets(step, [usual, limited])
    lengths = {ends: step_length_us(exchange, step, ends) for ends in (usual, result.ends, limited)}
    # What saves next to nothing is no reason to change.
    best = min((result.ends, limited), key=lambda ends: lengths[ends])
    memory = memory_of(graph)
    return Variant(
        requests=requests,
        applied=tuple(applied),
        exchange=exchange,
        step=step,
        usual=usual,
        limit_mb=limit_mb,
        limited=limited,
        best=best if lengths[best] <= lengths[usual] * (1 - WORTH) else usual,
        lengths_us=lengths,
        peak_bytes=memory.peak_bytes if memory is not None else None,
    )


def step_length_us(exchange: Exchange, step: CoarseStep, ends: Ends) -> float:
    """A step with these buckets: at the pace of all steps where there are several full ones, else on its own."""
    graph = exchange.graph
    if sum(each.full for each in graph.steps) < 2 or not graph.on_gpu.any():
        return step.replay(ends)
    pace = simulate(exchange.with_buckets(ends)).sustained_us
    return pace if np.isfinite(pace) else step.replay(ends)


def best_limit(exchange: Exchange, step: CoarseStep) -> tuple[float, Ends]:
    """The ``bucket_cap_mb`` with which the step is shortest, of equal ones that of fewest buckets, and its buckets."""
    sizes = np.array([gradient.bytes for gradient in exchange.of_step])
    most = float(sizes.sum() / MEBIBYTE)
    octaves = np.ceil(LINEAR_MIB * 2.0 ** (np.arange(0, 160) / 8))
    limits = np.concatenate([np.arange(1, LINEAR_MIB), octaves])
    limits = limits[: int(np.searchsorted(limits, most)) + 1]
    lists = {by_limits(sizes, [limit * MEBIBYTE]): float(limit) for limit in limits[::-1].tolist()}
    lengths = {ends: step.replay(ends) for ends in lists}
    shortest = min(lengths.values())
    ends = min((ends for ends in lists if lengths[ends] <= shortest + SAME_US), key=len)
    return lists[ends], ends


def carried(gradients: Gradients, before: TaskGraph, after: TaskGraph) -> Gradients:
    """The gradients of a graph in what passes made of it.

    A task is found by the event that it was made from. Where it was fused into another, or left out, what completes
    the gradient is the task before it on its thread that is still there: a fused kernel stands where its first one was.
    """
    row_by_event = {event: row for row, event in enumerate(after.event.tolist()) if event != NONE}
    new_rows: dict[int, int] = {}
    last: dict[int, int] = {}
    for row in before.by_thread.tolist():
        thread, event = int(before.thread[row]), int(before.event[row])
        if event in row_by_event:
            last[thread] = row_by_event[event]
        new_rows[row] = last.get(thread, NONE)
    new_rows[NONE] = NONE
    steps = {
        step: tuple(replace(each, ready=new_rows[each.ready], hook=new_rows[each.hook]) for each in of_step)
        for step, of_step in gradients.steps.items()
    }
    return Gradients(gradients.source, steps)
