"""Continuous batching with chunked prefill: iterations one after another, as vLLM's scheduler forms them.

Every iteration has a budget of tokens. Running sequences come first, in the order in which they were admitted: a token
for each that decodes, a chunk for each whose prompt is not computed yet. What is left admits those that wait, as long
as there are pages for what they compute; where pages run out, the sequence admitted last gives its own back, and is
computed again later (``vllm/v1/core/sched/scheduler.py``; Kwon et al. 2023, section 4.5; Agrawal et al. 2024, section
4). With ``reserves`` a sequence is admitted only if the pages of all that it will ever need are free, as TensorRT-LLM's
``GUARANTEED_NO_EVICT`` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daydream.serving.costs import PAGE

if TYPE_CHECKING:
    from daydream.serving.costs import IterationCosts
    from daydream.serving.requests import Requests
    from daydream.trace.trace import Floats, Ints


class Host(NamedTuple):
    """Seconds of the host for an iteration.

    Attributes:
        iteration: of its own.
        sequence: for each running sequence besides.
        overlaps: whether it prepares an iteration while the boards compute the one before.
        graphs: whether iterations of decoding sequences alone are launched as a graph.
    """

    iteration: float
    sequence: float
    overlaps: bool = True
    graphs: bool = True


class Schedule(NamedTuple):
    """Simulated requests.

    Attributes:
        arrived: seconds at which each was sent.
        first: at which each had its first token.
        finished: at which each had its last one.
        iterations: how many there were.
        preemptions: how often pages were given back.
        busy: seconds in which the boards computed.
        running: sequences of an iteration, in the mean.
        pages: most pages at a time.
        gaps: tokens of decoding sequences by the time since the one before, in bins of :func:`bin_seconds`.
    """

    arrived: Floats
    first: Floats
    finished: Floats
    iterations: int
    preemptions: int
    busy: float
    running: float
    pages: int
    gaps: Floats


#: Shortest gap that is told apart, seconds, and how much longer each bin is than the one before.
SHORTEST, STEP, BINS = 1e-6, 0.01, 2100


def bin_seconds() -> Floats:
    """Seconds of a bin of :attr:`Schedule.gaps`."""
    return np.asarray(SHORTEST * np.exp(STEP * (np.arange(BINS) + 0.5)))


def schedule(requests: Requests, costs: IterationCosts, host: Host, *, reserves: bool = False) -> Schedule:
    """Requests served by one replica.

    The requests must fit: :func:`daydream.serving.requests.check_lengths` says which do not.
    """
    engine = costs.engine
    results = tuple(np.zeros(len(requests.arrival)) for _ in range(3))
    counts, gaps = np.zeros(5), np.zeros(BINS)
    launch = 0.0 if host.graphs else costs.launch
    _compiled_run()(
        requests.arrival, requests.prompt, requests.output, requests.concurrency or len(requests.arrival),
        (engine.tokens, engine.sequences, costs.blocks, requests.shared // PAGE * PAGE), reserves,
        costs.body, costs.head, *costs.decode, *costs.prefill,
        (host.iteration, host.sequence, launch, float(host.overlaps)), *results, counts, gaps,
    )  # fmt: skip
    iterations, preemptions, busy, running, pages = counts.tolist()
    return Schedule(*results, int(iterations), int(preemptions), busy, running / max(iterations, 1), int(pages), gaps)


def interpolated(rows: Floats, keys: Floats, seconds: Any, row: float, key: float) -> float:
    """Seconds of so many rows and keys between the points of a grid; rows times keys is exact."""
    i = min(max(np.searchsorted(rows, row) - 1, 0), max(len(rows) - 2, 0))
    j = min(max(np.searchsorted(keys, key) - 1, 0), len(keys) - 2)
    down = (key - keys[j]) / (keys[j + 1] - keys[j])
    near = seconds[i, j] + down * (seconds[i, j + 1] - seconds[i, j])
    if len(rows) < 2 or row <= rows[i]:
        return near
    far = seconds[i + 1, j] + down * (seconds[i + 1, j + 1] - seconds[i + 1, j])
    return near + (row - rows[i]) / (rows[i + 1] - rows[i]) * (far - near)


def _run(
    arrival: Floats, prompt: Ints, output: Ints, concurrency: int, limits: Any, reserves: bool,
    body: Floats, head: Floats, decode_rows: Floats, decode_keys: Floats, decode: Any,
    prefill_rows: Floats, prefill_keys: Floats, prefill: Any, host: Any,
    arrived: Floats, first: Floats, finished: Floats, counts: Floats, gaps: Floats,
) -> None:  # fmt: skip
    """Iterations until every request has its last token; results are written into the last five arrays."""
    most_tokens, most_sequences, free, shared = limits
    pages = free
    count = len(arrival)
    computed, generated = np.zeros(count, np.int64), np.zeros(count, np.int64)
    held = np.zeros(count, np.int64)
    chunk = np.zeros(count, np.int64)
    running = np.zeros(most_sequences + 1, np.int64)
    returned = np.zeros(count + 1, np.int64)
    active = back = done = entered = 0
    now = 0.0
    while done < count:
        budget, sampled, decoding, context, tokens, seen = most_tokens, 0, 0, 0, 0, 0.0
        place, evicted = 0, False
        while place < active and budget > 0:
            each = running[place]
            size = min(prompt[each] + generated[each] - computed[each], budget)
            needed = _pages(computed[each] + size, shared) - held[each]
            while needed > free and active > place:
                active -= 1
                last = running[active]
                free += held[last]
                held[last], computed[last] = 0, 0
                returned[back] = last
                back += 1
                counts[1] += 1
                evicted = True
            if active <= place:
                break
            free -= max(needed, 0)
            held[each] += max(needed, 0)
            chunk[each] = size
            budget -= size
            place += 1
        scheduled = place
        while budget > 0 and active < most_sequences and not evicted and scheduled == active:
            if back:
                each = returned[back - 1]
            elif entered < count and entered < done + concurrency and arrival[entered] <= now:
                each = entered
            else:
                break
            start = min(shared, prompt[each] - 1) if shared else 0
            size = min(prompt[each] + generated[each] - start, budget)
            ends = prompt[each] + output[each] if reserves else start + size
            needed = _pages(ends, shared)
            if needed > free:
                break
            if back:
                back -= 1
            else:
                arrived[each] = arrival[each] if concurrency >= count else max(arrival[each], arrived[each])
                entered += 1
            free -= needed
            held[each], computed[each], chunk[each] = needed, start, size
            budget -= size
            running[active] = each
            active += 1
            scheduled += 1
        if not scheduled:
            # Nothing runs: the next request starts the clock again.
            now = max(now, arrival[entered])
            continue
        for place in range(scheduled):
            each = running[place]
            size = chunk[each]
            if size == 1 and generated[each] > 0:
                decoding += 1
                context += computed[each] + 1
            else:
                tokens += size
                seen += size * (computed[each] + (size + 1) / 2)
            if computed[each] + size == prompt[each] + generated[each]:
                sampled += 1
        seconds = body[decoding + tokens] + head[sampled]
        if decoding:
            seconds += interpolated(decode_rows, decode_keys, decode, decoding, context / decoding)
        if tokens:
            seconds += interpolated(prefill_rows, prefill_keys, prefill, tokens, seen / tokens)
        counts[2] += seconds
        prepared = host[0] + host[1] * scheduled
        seconds = max(seconds, host[2])
        seconds = max(seconds, prepared) if host[3] else seconds + prepared
        now += seconds
        gaps[min(max(int(np.log(seconds / SHORTEST) / STEP), 0), BINS - 1)] += decoding
        counts[0] += 1
        counts[3] += scheduled
        counts[4] = max(counts[4], pages - free)
        left = 0
        for place in range(active):
            each = running[place]
            if place < scheduled:
                computed[each] += chunk[each]
                if computed[each] == prompt[each] + generated[each]:
                    generated[each] += 1
                    if generated[each] == 1:
                        first[each] = now
                    if generated[each] == output[each]:
                        finished[each] = now
                        free += held[each]
                        if done + concurrency < count:
                            # Whoever got an answer asks again.
                            arrived[done + concurrency] = now
                        done += 1
                        continue
            running[left] = each
            left += 1
        active = left


def _pages(tokens: int, shared: int) -> int:
    """Pages of a sequence's own: those of a shared prefix are kept once for all."""
    return (max(tokens - shared, 0) + PAGE - 1) // PAGE


@cache
def _compiled_run() -> Callable[..., None]:
    """:func:`_run` as machine code, kept on disk between processes."""
    import numba
    from numba.extending import register_jitable

    for part in (interpolated, _pages):
        register_jitable(part)
    compiled: Callable[..., None] = numba.njit(cache=True)(_run)
    return compiled
