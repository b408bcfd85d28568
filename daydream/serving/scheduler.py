"""Continuous batching with chunked prefill: iterations one after another, as vLLM's scheduler forms them.

Every iteration has a budget of tokens. Running sequences come first, in the order in which they were admitted: a token
for each that decodes, a chunk for each whose prompt is not computed yet. What is left admits those that wait, as long
as there are pages for what they compute; where pages run out, the sequence admitted last gives its own back, and is
computed again later (``vllm/v1/core/sched/scheduler.py``; Kwon et al. 2023, section 4.5; Agrawal et al. 2024, section
4). Where sequences reserve, one is admitted only if the pages of all that it will ever need are free, as TensorRT-LLM's
``GUARANTEED_NO_EVICT`` has it.

With speculative tokens a decoding sequence computes its last token and drafted ones; those before the first that is
refused, and one more, are new (Leviathan et al. 2023, section 2.1). How many are accepted is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daydream.serving.costs import PAGE
from daydream.serving.grid import Grid, before, interpolated

if TYPE_CHECKING:
    from daydream.serving.costs import IterationCosts
    from daydream.serving.requests import Requests
    from daydream.trace.trace import Floats, Ints

#: Shortest gap between two tokens that is distinguished, seconds; how much longer each bin is than the one before.
SHORTEST, STEP, BINS = 1e-6, 0.01, 2100

#: Draws of accepted tokens; a sequence begins at a place of its own, so that schedules of it draw the same.
DRAWS, _APART = 1 << 16, 7919

#: Places of numbers that a simulation changes: free pages, running sequences, those that wait to be computed again,
#: requests admitted, requests answered, preemptions, fewest free pages, most running sequences.
_FREE, _ACTIVE, _RETURNED, _ENTERED, _DONE, _PREEMPTED, _LEAST, _MOST = range(8)


class Host(NamedTuple):
    """Seconds of the host for an iteration.

    Attributes:
        iteration: of its own.
        sequence: for each scheduled sequence besides.
        overlaps: whether it prepares an iteration while the boards compute the one before.
        graphs: whether iterations are launched as a graph, rather than kernel by kernel.
    """

    iteration: float = 0.0
    sequence: float = 0.0
    overlaps: bool = False
    graphs: bool = True


class Schedule(NamedTuple):
    """Simulated requests.

    Attributes:
        arrived: seconds at which each was sent.
        first: at which each had its first token.
        finished: at which each had its last one.
        gaps: tokens of decoding sequences by the time since the one before, in bins of :func:`bin_seconds`.
        iterations: how many there were.
        preemptions: how often pages were given back.
        busy: seconds in which the boards computed.
        running: sequences of an iteration, in the mean.
        pages: most pages in use at a time.
        sequences: most of an iteration.
    """

    arrived: Floats
    first: Floats
    finished: Floats
    gaps: Floats
    iterations: int
    preemptions: int
    busy: float
    running: float
    pages: int
    sequences: int


class _Arrivals(NamedTuple):
    """Requests, and drawn numbers of drafted tokens that are accepted."""

    time: Floats
    prompt: Ints
    output: Ints
    accepted: Ints


class _Limits(NamedTuple):
    """Of an iteration: tokens and sequences; requests under way, tokens that all share, whether pages are reserved and
    prompts carried, and drafted tokens of a sequence."""

    tokens: int
    sequences: int
    concurrency: int
    shared: int
    reserves: bool
    carried: bool
    draft: int


class _Draft(NamedTuple):
    """Seconds of what drafts, as in :class:`_Seconds`."""

    body: Floats
    head: Floats
    decode: Grid
    prefill: Grid


class _Seconds(NamedTuple):
    """Of the boards by tokens, by sampled sequences, and of attention; of the host, and of launching kernels."""

    body: Floats
    head: Floats
    decode: Grid
    prefill: Grid
    iteration: float
    sequence: float
    launch: float
    overlaps: bool
    draft: _Draft


class _State(NamedTuple):
    """Of every request: tokens computed, tokens of its answer, pages, tokens of this iteration; which run and wait."""

    computed: Ints
    generated: Ints
    pages: Ints
    chunk: Ints
    running: Ints
    returned: Ints
    numbers: Ints


def schedule(requests: Requests, costs: IterationCosts, host: Host, *, reserves: bool = False) -> Schedule:
    """Requests served by one replica; :func:`daydream.serving.served.check_fit` says whether they can be."""
    count = len(requests.arrival)
    engine, launch = costs.engine, 0.0 if host.graphs else costs.launch
    arrivals = _Arrivals(requests.arrival, requests.prompt, requests.output, _accepted(engine.acceptance, engine.draft))
    shared = requests.shared // PAGE * PAGE
    limits = _Limits(engine.tokens, engine.sequences, requests.concurrency or count, shared, reserves,
                     requests.carried, engine.draft)  # fmt: skip
    seconds = _Seconds(
        costs.body,
        costs.head,
        costs.decode,
        costs.prefill,
        host.iteration,
        host.sequence,
        launch,
        host.overlaps,
        _drafts(costs),
    )
    arrived, first, finished = (np.zeros(count) for _ in range(3))
    gaps = np.zeros(BINS)
    sizes = (count, count, count, count, engine.sequences + 1, count + 1, _MOST + 1)
    state = _State._make(np.zeros(size, np.int64) for size in sizes)
    free = max(costs.blocks - shared // PAGE, 0)
    state.numbers[_FREE] = state.numbers[_LEAST] = free
    iterations, busy, running = compiled_run()(arrivals, limits, seconds, state, arrived, first, finished, gaps)
    return Schedule(
        arrived, first, finished, gaps, iterations, int(state.numbers[_PREEMPTED]), busy, running / max(iterations, 1),
        costs.blocks - int(state.numbers[_LEAST]), int(state.numbers[_MOST]),
    )  # fmt: skip


@lru_cache(maxsize=4)
def _accepted(acceptance: float, drafted: int) -> Ints:
    """Drafted tokens that are accepted before one is refused, by draw."""
    refused = max(1 - acceptance, 1e-12)
    numbers = np.random.default_rng(0).geometric(refused, DRAWS) - 1
    return np.minimum(numbers, drafted).astype(np.int64)


def _drafts(costs: IterationCosts) -> _Draft:
    """Tables of what drafts, zeros where nothing computes: tokens are then looked up in the prompt."""
    draft = costs.draft
    if draft is None:
        nothing = costs.decode._replace(seconds=np.zeros((len(costs.decode.rows), len(costs.decode.keys))))
        return _Draft(np.zeros(len(costs.body)), np.zeros(len(costs.head)), nothing, nothing)
    return _Draft(draft.body, draft.head, draft.decode, draft.prefill)


def bin_seconds() -> Floats:
    """Seconds of a bin of :attr:`Schedule.gaps`."""
    return np.asarray(SHORTEST * np.exp(STEP * (np.arange(BINS) + 0.5)))


def _run(
    arrivals: _Arrivals, limits: _Limits, seconds: _Seconds, state: _State,
    arrived: Floats, first: Floats, finished: Floats, gaps: Floats,
) -> tuple[int, float, float]:  # fmt: skip
    """Iterations until every request has its last token: how many, seconds of the boards, sequences of them all.

    The last four arguments are written.
    """
    numbers, count = state.numbers, len(arrivals.time)
    now = busy = sequences = 0.0
    iterations = 0
    while numbers[_DONE] < count:
        scheduled = _scheduled(arrivals, limits, state, arrived, now)
        if not scheduled:
            # Nothing runs: the next request starts the clock again.
            now = max(now, arrivals.time[numbers[_ENTERED]])
            continue
        device, decoding = _device_seconds(seconds, arrivals, limits, state, scheduled)
        prepared = seconds.iteration + seconds.sequence * scheduled
        busy += device
        device = max(device, seconds.launch)
        passed = max(device, prepared) if seconds.overlaps else device + prepared
        now += passed
        gaps[min(max(int(np.log(passed / SHORTEST) / STEP), 0), BINS - 1)] += decoding
        iterations += 1
        sequences += scheduled
        numbers[_LEAST] = min(numbers[_LEAST], numbers[_FREE])
        numbers[_MOST] = max(numbers[_MOST], scheduled)
        _finish(arrivals, limits, state, scheduled, now, arrived, first, finished)
    return iterations, busy, sequences


def _scheduled(arrivals: _Arrivals, limits: _Limits, state: _State, arrived: Floats, now: float) -> int:
    """Sequences of the next iteration, the first of those that run; their chunks are written."""
    numbers, budget, place = state.numbers, limits.tokens, 0
    preempted = numbers[_PREEMPTED]
    while place < numbers[_ACTIVE] and budget > 0:
        each = state.running[place]
        size = min(_wanted(arrivals, limits, state, each), budget)
        needed = _pages(state.computed[each] + size, limits.shared) - state.pages[each]
        while needed > numbers[_FREE] and numbers[_ACTIVE] > place:
            _preempt(state)
        if numbers[_ACTIVE] <= place:
            break
        budget -= _take(state, each, max(needed, 0), size)
        place += 1
    if numbers[_PREEMPTED] > preempted or place < numbers[_ACTIVE]:
        return place
    while budget > 0 and numbers[_ACTIVE] < limits.sequences:
        each = _next(arrivals, limits, state, now)
        if each < 0:
            break
        is_new = numbers[_RETURNED] == 0
        if limits.carried and is_new:
            state.generated[each] = 1
        start = arrivals.prompt[each] if limits.carried and is_new else min(limits.shared, arrivals.prompt[each] - 1)
        state.computed[each] = start
        size = min(_wanted(arrivals, limits, state, each), budget)
        end = arrivals.prompt[each] + arrivals.output[each] + limits.draft if limits.reserves else start + size
        needed = _pages(end, limits.shared)
        if needed > numbers[_FREE]:
            break
        if numbers[_RETURNED]:
            numbers[_RETURNED] -= 1
        else:
            arrived[each] = max(arrived[each], arrivals.time[each])
            numbers[_ENTERED] += 1
        state.running[numbers[_ACTIVE]] = each
        numbers[_ACTIVE] += 1
        budget -= _take(state, each, needed, size)
    return numbers[_ACTIVE]


def _next(arrivals: _Arrivals, limits: _Limits, state: _State, now: float) -> int:
    """The request that is admitted next, -1 for none: who was preempted comes first."""
    numbers = state.numbers
    if numbers[_RETURNED]:
        return state.returned[numbers[_RETURNED] - 1]
    entered = numbers[_ENTERED]
    is_free = entered < len(arrivals.time) and entered < numbers[_DONE] + limits.concurrency
    return entered if is_free and arrivals.time[entered] <= now else -1


def _wanted(arrivals: _Arrivals, limits: _Limits, state: _State, each: int) -> int:
    """Tokens that a sequence has to compute, with those drafted where it decodes."""
    left = arrivals.prompt[each] + state.generated[each] - state.computed[each]
    return left + limits.draft if left == 1 and state.generated[each] > 0 else left


def _take(state: _State, each: int, pages: int, size: int) -> int:
    """Gives a sequence pages and a chunk, whose tokens are returned."""
    state.numbers[_FREE] -= pages
    state.pages[each] += pages
    state.chunk[each] = size
    return size


def _preempt(state: _State) -> None:
    """The sequence admitted last gives its pages back, and waits."""
    numbers = state.numbers
    numbers[_ACTIVE] -= 1
    last = state.running[numbers[_ACTIVE]]
    numbers[_FREE] += state.pages[last]
    state.pages[last] = 0
    state.computed[last] = 0
    state.returned[numbers[_RETURNED]] = last
    numbers[_RETURNED] += 1
    numbers[_PREEMPTED] += 1


def _device_seconds(
    seconds: _Seconds, arrivals: _Arrivals, limits: _Limits, state: _State, scheduled: int
) -> tuple[float, int]:
    """Seconds of the boards for an iteration, and how many of its sequences decode."""
    sampled = decoding = tokens = drafted = 0
    context = seen = 0.0
    for place in range(scheduled):
        each = state.running[place]
        size, computed = state.chunk[each], state.computed[each]
        if computed + 1 == arrivals.prompt[each] + state.generated[each] and state.generated[each] > 0:
            decoding += 1
            drafted += size - 1
            context += computed + size
            sampled += 1
        else:
            tokens += size
            seen += size * (computed + (size + 1) / 2)
            sampled += computed + size == arrivals.prompt[each] + state.generated[each]
    total = seconds.body[decoding + drafted + tokens] + seconds.head[sampled + drafted]
    if decoding:
        total += interpolated(seconds.decode, decoding, context / decoding)
    if tokens:
        total += interpolated(seconds.prefill, tokens, seen / tokens)
    if limits.draft:
        draft = seconds.draft
        # What drafts first takes in what was computed, then a token of each sequence at a time.
        total += draft.body[decoding + drafted + tokens] + (limits.draft - 1) * draft.body[sampled]
        total += limits.draft * draft.head[sampled]
        if decoding:
            total += limits.draft * interpolated(draft.decode, decoding, context / decoding)
        if tokens:
            total += interpolated(draft.prefill, tokens, seen / tokens)
    return total, decoding


def _finish(
    arrivals: _Arrivals, limits: _Limits, state: _State, scheduled: int, now: float,
    arrived: Floats, first: Floats, finished: Floats,
) -> None:  # fmt: skip
    """New tokens of an iteration; who has all of them gives way, and whoever got an answer asks again."""
    numbers, staying = state.numbers, 0
    for place in range(numbers[_ACTIVE]):
        each = state.running[place]
        state.running[staying] = each
        staying += 1
        if place >= scheduled:
            continue
        ready = arrivals.prompt[each] + state.generated[each]
        accepted = 0
        if limits.draft and state.generated[each] > 0 and state.computed[each] + 1 == ready:
            drawn = arrivals.accepted[(each * _APART + state.generated[each]) % DRAWS]
            accepted = min(drawn, state.chunk[each] - 1, arrivals.output[each] - state.generated[each] - 1)
            state.computed[each] = ready + accepted
        else:
            state.computed[each] += state.chunk[each]
        if state.computed[each] < ready:
            continue
        state.generated[each] += 1 + accepted
        if state.generated[each] == 1:
            first[each] = now
        if state.generated[each] == arrivals.output[each]:
            finished[each] = now
            numbers[_FREE] += state.pages[each]
            following = numbers[_DONE] + limits.concurrency
            if following < len(arrivals.time):
                arrived[following] = now
            numbers[_DONE] += 1
            staying -= 1
    numbers[_ACTIVE] = staying


def _pages(tokens: int, shared: int) -> int:
    """Pages of a sequence's own: those of a shared prefix are kept once for all."""
    return (max(tokens - shared, 0) + PAGE - 1) // PAGE


@cache
def compiled_run() -> Callable[..., tuple[int, float, float]]:
    """:func:`_run` as machine code, kept on disk between processes; other threads go on while it runs."""
    import numba
    from numba.extending import register_jitable

    for part in (before, interpolated, _pages, _next, _wanted, _take, _preempt, _scheduled, _device_seconds, _finish):
        register_jitable(part)
    compiled: Callable[..., tuple[int, float, float]] = numba.njit(cache=True, nogil=True)(_run)
    return compiled
