"""The training steps of a trace: by the profiler's marks, else by what repeats.

Without ``ProfilerStep`` a step is what lies between two weight updates, two batches of the loader, or two equal runs of
kernels, in this order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from daydream.graph.graph import TrainingStep
from daydream.trace.nesting import outermost_of
from daydream.trace.trace import NONE, Category, Flags, Floats, Ints, Trace

#: Marks that bound steps: ``auto`` is the profiler's, else the first of the others that repeats; ``none`` reads
#: a trace without marks as one step.
STEPS_BY = ("auto", "optimizer", "loader", "kernels", "none")

_STEP = re.compile(r"^ProfilerStep#\d+$")
_OPTIMIZER = re.compile(r"^Optimizer\.step#")
_LOADER = re.compile(r"^enumerate\(DataLoader\)#")

#: A step with fewer than this share of the usual number of launches was only partly recorded.
CUT_STEP = 0.9

#: Runs of kernels are steps where this share of kernels has its like one run later ...
_REPEATED = 0.95

#: ... the last run is one where this share of its kernels are those of the run before it ...
_ALIKE = 0.8

#: ... and there are at least so many runs, of so many kernels.
_FEWEST_RUNS, _SHORTEST_RUN = 3, 4

#: How many kinds of rare kernels are tried for the length of a run, and of each how many of its next likes.
_TRIALS, _NEXT = 24, 8

_ON_GPU = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)


@dataclass(frozen=True, eq=False)
class Steps:
    """Training steps in order of time, one entry each; times are microseconds. Empty spans: the trace is one step.

    Attributes:
        steps: their names and measured lengths.
        thread: index of the trace's thread that each runs on.
        begin_us: when each began.
        end_us: when each ended.
        warnings: the marks that bound them where the profiler has none, a sentence each.
    """

    steps: tuple[TrainingStep, ...]
    thread: Ints
    begin_us: Floats
    end_us: Floats
    warnings: tuple[str, ...] = ()

    def step_at(self, time_us: Floats) -> Ints:
        """The step in which each time lies, -1 outside; 0 everywhere where the trace is one step."""
        if not len(self.begin_us):
            return np.zeros(len(time_us), np.int64)
        step = np.searchsorted(self.begin_us, time_us, side="right") - 1
        return np.where((step >= 0) & (time_us < self.end_us[step]), step, NONE)


def find_steps(trace: Trace, enclosing: Ints) -> Steps:
    """The steps of a trace, on the thread that has most of their marks.

    A trace in which nothing marks or repeats them is one step from its first event to its last, Python's frames left
    out. A first or last step with clearly fewer launches than its fellows is not full: the recording of the GPU began
    or ended inside.

    Args:
        trace: what was recorded; the profiler's marks come first where its `steps_by` is ``auto`` or ``none``.
        enclosing: for each row the innermost CPU event around it, -1 without.
    """
    by = trace.steps_by
    marks = _named(trace, _STEP)
    if len(marks) and by in ("auto", "none"):
        marks = marks[trace.thread[marks] == np.bincount(trace.thread[marks]).argmax()]
        names = [trace.text(row) for row in marks.tolist()]
        return _steps(trace, names, trace.thread[marks], trace.start_us[marks], _ends(trace)[marks], outer_only=True)
    if by != "none":
        for each, tell in (("optimizer", _by_optimizer), ("loader", _by_loader), ("kernels", _by_kernels)):
            boundaries = tell(trace, enclosing) if by in (each, "auto") else None
            if boundaries is not None:
                return _between(trace, boundaries)
    begin, end = span(trace)
    nothing = np.empty(0, np.int64)
    asked = by not in ("auto", "none")
    warnings = (f"--steps-by {by}: the trace has no two such steps and is read as one",) if asked else ()
    step = TrainingStep("trace", _measured(trace, end - begin))
    return Steps((step,), nothing, np.empty(0), np.empty(0), warnings)


def span(trace: Trace) -> tuple[float, float]:
    """When the first event of a trace began and the last one ended, microseconds.

    Python's frames are left out where there is anything else: those of sleeping threads may outlast a recording by far.
    """
    counted = trace.category != Category.PYTHON
    if not counted.any():
        counted[:] = True
    begin = float(trace.start_us.min(initial=np.inf, where=counted))
    return (begin, float(_ends(trace).max(initial=0.0, where=counted))) if len(trace) else (0.0, 0.0)


@dataclass(frozen=True, eq=False)
class _Boundaries:
    """Begins of steps and the end of the last one on a thread, microseconds; and the words for what tells them."""

    thread: int
    begin_us: Floats
    end_us: float
    words: str


def _between(trace: Trace, boundaries: _Boundaries) -> Steps:
    begin = boundaries.begin_us
    end = np.append(begin[1:], max(boundaries.end_us, begin[-1]))
    names = [f"step {number}" for number in range(len(begin))]
    thread = np.full(len(begin), boundaries.thread)
    warning = (
        f"no ProfilerStep in the trace: {len(begin)} steps are counted by {boundaries.words}"
        " (--steps-by none reads it as one step)"
    )
    return _steps(trace, names, thread, begin, end, outer_only=False, warnings=(warning,))


def _steps(
    trace: Trace,
    names: list[str],
    thread: Ints,
    begin: Floats,
    end: Floats,
    *,
    outer_only: bool,
    warnings: tuple[str, ...] = (),
) -> Steps:
    gpu = np.isin(trace.category, _ON_GPU)
    launching = (trace.category == Category.RUNTIME) & np.isin(trace.correlation, trace.correlation[gpu])
    calls = np.sort(trace.start_us[launching])
    count = np.searchsorted(calls, end) - np.searchsorted(calls, begin)
    usual = float(np.median(count))
    # Around the first step that no mark begins, a model may be built.
    most = np.inf if outer_only else usual / CUT_STEP
    steps = []
    for place, name in enumerate(names):
        outer = place in (0, len(names) - 1) and len(names) > 1
        full = not (outer and not CUT_STEP * usual <= count[place] <= most)
        steps.append(TrainingStep(name, _measured(trace, float(end[place] - begin[place])), full))
    return Steps(tuple(steps), thread, begin, end, warnings)


def _measured(trace: Trace, length_us: float) -> float:
    # What was predicted was never measured.
    return np.nan if "predicted" in trace.metadata else length_us


# By weight updates and batches


def _by_optimizer(trace: Trace, enclosing: Ints) -> _Boundaries | None:
    """Each step ends where the next begins: with the first operator or range behind a weight update."""
    updates = _outer(trace, enclosing, _OPTIMIZER)
    if len(updates) < 2:
        return None
    batches = _outer(trace, enclosing, _LOADER)
    # Several updates in a step, as of two networks that play against each other.
    if len(updates) >= 2 * len(batches) > 2 and len(updates) % len(batches) == 0:
        return None
    thread = int(trace.thread[updates[0]])
    begins = _top_level(trace, enclosing, thread)
    starts, ends = trace.start_us[begins], _ends(trace)[updates]
    place = np.searchsorted(starts, ends)
    following = starts[place[place < len(starts)]]
    last = _last_end(trace, thread) if len(following) < len(updates) else float(following[-1])
    begin = np.append(starts[0], following[: len(updates) - 1])
    return _Boundaries(thread, begin, last, "Optimizer.step")


def _by_loader(trace: Trace, enclosing: Ints) -> _Boundaries | None:
    """Each step begins with its batch; what comes behind a last batch that launches nothing is no step."""
    batches = _outer(trace, enclosing, _LOADER)
    if len(batches) < 2:
        return None
    thread = int(trace.thread[batches[0]])
    begin, last = trace.start_us[batches], _last_end(trace, thread)
    calls = np.sort(trace.start_us[(trace.category == Category.RUNTIME) | (trace.category == Category.OPERATOR)])
    if np.searchsorted(calls, last) == np.searchsorted(calls, _ends(trace)[batches[-1]]):
        begin, last = begin[:-1], float(begin[-1])
    return _Boundaries(thread, begin, last, "the batches of the DataLoader") if len(begin) > 1 else None


def _outer(trace: Trace, enclosing: Ints, pattern: re.Pattern[str]) -> Ints:
    """Rows of ranges of this name outside others of it, on the thread that has most of them."""
    rows = _named(trace, pattern)
    if not len(rows):
        return rows
    chosen = np.zeros(len(trace), np.bool_)
    chosen[rows] = True
    rows = rows[outermost_of(enclosing, chosen)[rows] == rows]
    return rows[trace.thread[rows] == np.bincount(trace.thread[rows]).argmax()]


def _top_level(trace: Trace, enclosing: Ints, thread: int) -> Ints:
    """Rows of the operators and ranges of a thread that lie in no other one."""
    chosen = np.isin(trace.category, (Category.OPERATOR, Category.ANNOTATION))
    rows = np.flatnonzero(chosen & (trace.thread == thread))
    return rows[outermost_of(enclosing, chosen)[rows] == rows]


# By kernels


def _by_kernels(trace: Trace, enclosing: Ints) -> _Boundaries | None:
    """Each step begins with the call that launches the first kernel of a run that repeats."""
    gpu = np.flatnonzero(np.isin(trace.category, _ON_GPU) & (trace.correlation > 0))
    calls = np.flatnonzero((trace.category == Category.RUNTIME) & (trace.correlation > 0))
    if len(gpu) < _FEWEST_RUNS * _SHORTEST_RUN or not len(calls):
        return None
    calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
    place = np.minimum(np.searchsorted(trace.correlation[calls], trace.correlation[gpu]), len(calls) - 1)
    joined = trace.correlation[calls[place]] == trace.correlation[gpu]
    launch, name = calls[place[joined]], trace.name[gpu[joined]]
    order = np.argsort(trace.start_us[launch], kind="stable")
    launch, name = launch[order], name[order]
    length = _period(name)
    if not length:
        return None
    first = _first_repeat(name, length)
    heads = np.arange(first, len(name) - length + 1, length)
    while len(heads) > 1 and (name[heads[-1] :][:length] != name[heads[-2] :][:length]).mean() > 1 - _ALIKE:
        heads = heads[:-1]
    if len(heads) < _FEWEST_RUNS:
        return None
    begin = np.array([_beginning(trace, enclosing, launch, head) for head in heads.tolist()])
    behind = int(heads[-1]) + length
    # Layers repeat, too: behind the last of them comes what no layer has.
    if trace.steps_by == "auto" and not np.isin(name[behind:], name[first:behind]).all():
        return None
    thread = int(np.bincount(trace.thread[launch]).argmax())
    last = _beginning(trace, enclosing, launch, behind) if behind < len(launch) else _last_end(trace, thread)
    return _Boundaries(thread, begin, last, f"a run of {length} kernels that repeats")


def _period(name: Ints) -> int:
    """Length of the run of names that repeats, 0 without: the distance of a rare name from one of its next likes.

    Long runs come first: layers repeat, too, but less exactly than steps do.
    """
    if any(_repeated(name, short) >= _REPEATED for short in range(1, _SHORTEST_RUN)):
        return 0
    codes, count = np.unique(name, return_counts=True)
    rare = codes[np.argsort(count, kind="stable")]
    rare = rare[np.sort(count) >= _FEWEST_RUNS][:_TRIALS]
    lengths: set[int] = set()
    for places in (np.flatnonzero(name == code) for code in rare.tolist()):
        lengths |= {int(np.median(places[k:] - places[:-k])) for k in range(1, min(_NEXT, len(places) - 1) + 1)}
    for length in sorted(lengths, reverse=True):
        if _SHORTEST_RUN <= length <= len(name) // _FEWEST_RUNS and _repeated(name, length) >= _REPEATED:
            return _shortest(name, length)
    return 0


def _repeated(name: Ints, length: int) -> float:
    """Share of names that have their like one run later."""
    return float((name[length:] == name[:-length]).mean())


def _shortest(name: Ints, length: int) -> int:
    """The shortest part of a run that is as good a run: one of several steps is too long."""
    quality = _repeated(name, length)
    for parts in range(2 * _NEXT, 1, -1):
        part, remainder = divmod(length, parts)
        if not remainder and part >= _SHORTEST_RUN and _repeated(name, part) >= quality:
            return part
    return length


def _first_repeat(name: Ints, length: int) -> int:
    """Where the first run begins that is followed by its like."""
    alike = np.append(0, np.cumsum(name[length:] == name[:-length]))
    runs = alike[length:] - alike[:-length]
    return int(np.argmax(runs >= _REPEATED * length)) if len(runs) else 0


def _beginning(trace: Trace, enclosing: Ints, launch: Ints, head: int) -> float:
    """When the outermost operator or range began that launched this task and not the one before it."""
    row = int(launch[head])
    before = float(trace.start_us[launch[head - 1]]) if head else -np.inf
    while (above := int(enclosing[row])) != NONE and trace.start_us[above] > before:
        row = above
    return float(trace.start_us[row])


# Rows and times


def _named(trace: Trace, pattern: re.Pattern[str]) -> Ints:
    wanted: Flags = np.array([pattern.match(name) is not None for name in trace.names], np.bool_)
    return np.flatnonzero(wanted[trace.name] & (trace.category == Category.ANNOTATION))


def _ends(trace: Trace) -> Floats:
    return trace.start_us + trace.duration_us


def _last_end(trace: Trace, thread: int) -> float:
    """When the last event of a thread ended, Python's frames left out."""
    counted = (trace.thread == thread) & (trace.category != Category.PYTHON)
    return float(_ends(trace).max(initial=0.0, where=counted))
