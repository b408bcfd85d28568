"""Reader of PyTorch-profiler (Kineto) traces of every generation, from 2021's spelling to today's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daydream.trace.events import ON_DEVICE, Clock, Numbers, Places, Sorted, places_of, sort_out
from daydream.trace.links import Ends, launch_correlations, operator_arrows
from daydream.trace.memory import memory_events
from daydream.trace.text import Document, Event, Notes
from daydream.trace.trace import NONE, Category, Floats, Ints, Trace
from hal.support.errors import InputError

#: A longer duration, 30 years, is damage.
_LONGEST_US = 1e15

_GPU_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
_CPU_WORK = (Category.OPERATOR, Category.ANNOTATION, Category.RUNTIME)

#: Begin of the names of steps.
_STEP = "ProfilerStep#"

_CORRELATION = ("correlation", "correlation id", "Correlation ID")
_EXTERNAL = ("External id", "external id", "External Id")


def trace_of(path: Path, document: Document, notes: Notes) -> Trace:
    """The columns of a decoded document.

    Raises:
        InputError: no usable event is in it.
    """
    numbers, clock = Numbers(), Clock(document.exact)
    lists = sort_out(document, numbers, notes)
    tasks, categories, raw, duration = _in_order(lists, clock, path, notes)
    origin = raw.min()
    start = clock.since(origin, raw)
    places = places_of(tasks, categories, lists.labels, numbers)
    category, line = np.array(categories, np.int64), np.array(places.line, np.int64)
    arguments = tuple([{} if event.args is None else event.args for event in tasks])
    names: dict[str, int] = {}
    name = [names.setdefault(event.name or "", len(names)) for event in tasks]

    calls = np.flatnonzero((category == Category.RUNTIME) | np.isin(category, list(ON_DEVICE)))
    operators = np.flatnonzero(category == Category.OPERATOR)
    correlation = _positive(_integers(arguments, calls, *_CORRELATION))
    if lists.launches and (correlation[calls] == NONE).any():
        ends = _ends(lists.launches, places, clock, origin, numbers)
        launch_correlations(ends, correlation, calls, line, start)
    external = _positive(_integers(arguments, np.arange(len(tasks)), *_EXTERNAL))
    # From 2022 to 2024 a CUDA call or kernel outside every operator repeats its own correlation here, a number
    # that may also be an operator's.
    external[calls] = np.where(external[calls] == correlation[calls], NONE, external[calls])
    sequence = _integers(arguments, operators, "Sequence number")
    ends = _ends(lists.forward_backward, places, clock, origin, numbers)
    arrows = operator_arrows(ends, category, line, start, start + duration, sequence, notes)
    return Trace(
        path=str(path),
        names=tuple(names),
        threads=places.threads,
        name=np.array(name, np.int64),
        category=category,
        start_us=start,
        duration_us=duration,
        thread=np.array(places.thread, np.int64),
        correlation=correlation,
        external=external,
        sequence=sequence,
        forward_thread=_integers(arguments, operators, "Fwd thread id"),
        bytes=_floats(arguments, calls, "bytes"),
        arguments=arguments,
        forward_backward=arrows,
        devices=tuple(entry for entry in _of_type(document, "deviceProperties", list) if isinstance(entry, dict)),
        distributed=_of_type(document, "distributedInfo", dict),
        metadata=_of_type(document, "daydream", dict),
        memory=memory_events(lists.memory, clock, origin, places.threads, numbers, notes),
        origin_us=float(origin) / (1000.0 if document.exact else 1.0),
        base_us=_base_us(document),
        host=_of_type(document, "host_name", str),
        complete=not notes.cut_off,
        warnings=notes.sentences(),
    )


def _in_order(
    lists: Sorted, clock: Clock, path: Path, notes: Notes
) -> tuple[list[Event], list[int], NDArray[Any], Floats]:
    """Tasks with usable times, by begin, of equal ones the longest first: events, categories, begins, durations.

    Raises:
        InputError: there is none.
    """
    tasks, categories, raw = _timed(lists.tasks, lists.categories, clock, notes)
    if not tasks:
        reasons = ". ".join(notes.sentences()[:3])
        raise InputError(
            str(path),
            "has no usable event" + (f" ({reasons})" if reasons else ""),
            "give a trace that the PyTorch profiler exported",
        )
    duration = _durations(tasks, categories, notes)
    timed = _with_time(raw, duration, np.array(categories, np.int64), notes)
    if not timed.all():
        rows = np.flatnonzero(timed).tolist()
        tasks, categories = [tasks[row] for row in rows], [categories[row] for row in rows]
        raw, duration = raw[timed], duration[timed]
    _mend_steps(tasks, categories, raw, duration, clock)
    order = np.lexsort((-duration, raw))
    tasks = [tasks[row] for row in order.tolist()]
    categories = [categories[row] for row in order.tolist()]
    return tasks, categories, raw[order], duration[order]


def _timed(
    tasks: list[Event], categories: list[int], clock: Clock, notes: Notes
) -> tuple[list[Event], list[int], NDArray[Any]]:
    """The tasks that have a usable time, their categories and these times."""
    raw, usable = clock.raw([event.ts for event in tasks])
    if not usable.all():
        notes.add("{} without a usable time, left out", int((~usable).sum()))
        rows = np.flatnonzero(usable).tolist()
        tasks, categories, raw = [tasks[row] for row in rows], [categories[row] for row in rows], raw[rows]
    return tasks, categories, raw


def _durations(tasks: list[Event], categories: list[int], notes: Notes) -> Floats:
    duration = np.array([event.dur for event in tasks], np.float64)  # None becomes NaN
    negative, unusable = duration < 0, ~(duration <= _LONGEST_US) & ~(duration < 0)
    if not (negative | unusable).any():
        return duration
    on_gpu = np.isin(categories, _GPU_WORK)
    steps = np.array([(event.name or "").startswith(_STEP) for event in tasks], np.bool_)
    notes.add("{} with a negative duration, taken as 0", int((negative & ~steps).sum()))
    notes.add("{} without a usable duration, taken as 0", int((unusable & ~on_gpu & ~steps).sum()))
    notes.add(
        "{} of steps without a usable duration: such a step ends where the last event in it does",
        int(((negative | unusable) & steps).sum()),
    )
    notes.add(
        "{} on the GPU without a usable duration, taken as 0: GPU times are too small by them",
        int((unusable & on_gpu).sum()),
    )
    return np.where(negative | unusable, 0.0, duration)


def _with_time(raw: NDArray[Any], duration: Floats, category: Ints, notes: Notes) -> NDArray[np.bool_]:
    """All but GPU events that take no time before everything on the CPU: the profiler lost theirs.

    They would lengthen the trace up to the clock's origin (PyTorch's issue 188481, Kineto's 109).
    """
    on_gpu = np.isin(category, _GPU_WORK)
    on_cpu = np.isin(category, _CPU_WORK)
    if not on_gpu.any() or not on_cpu.any():
        return np.full(len(raw), True)
    lost = on_gpu & (duration == 0) & (raw < raw[on_cpu].min())
    notes.add(
        "{} on the GPU without time (start and length 0), left out: GPU times of the steps that launched them are too"
        " small, and waiting for them counts as work of the CPU",
        int(lost.sum()),
    )
    return ~lost


def _mend_steps(tasks: list[Event], categories: list[int], raw: NDArray[Any], duration: Floats, clock: Clock) -> None:
    """Gives steps without a usable duration an end, in place: where their last child on their thread ends."""
    open_ended = [
        place for place in np.flatnonzero(duration == 0).tolist() if (tasks[place].name or "").startswith(_STEP)
    ]
    if not open_ended:
        return
    steps = [place for place, event in enumerate(tasks) if (event.name or "").startswith(_STEP)]
    unit = 1000.0 if clock.exact else 1.0
    for place in open_ended:
        begin, line = raw[place], (tasks[place].pid, tasks[place].tid)
        next_begin = min((raw[other] for other in steps if raw[other] > begin), default=math.inf)
        ends = [
            raw[row] + duration[row] * unit
            for row in np.flatnonzero((raw >= begin) & (raw < next_begin)).tolist()
            if (tasks[row].pid, tasks[row].tid) == line and categories[row] not in (Category.PYTHON, *_GPU_WORK)
        ]
        duration[place] = max((min(max(ends, default=begin), next_begin) - begin) / unit, 0.0)


def _ends(arrows: list[Event], places: Places, clock: Clock, origin: Any, numbers: Numbers) -> Ends:
    raw, usable = clock.raw([event.ts for event in arrows])
    times = np.where(usable, clock.since(origin, raw), math.nan)
    where = [(numbers[event.pid], numbers[event.tid]) for event in arrows]
    return Ends(
        is_start=[event.ph == "s" for event in arrows],
        id=[event.id for event in arrows],
        process=[process for process, _ in where],
        line=[places.lines.get(line, NONE) for line in where],
        time_us=times.tolist(),
    )


def _positive(column: Ints) -> Ints:
    # 0 is what Kineto writes for "none", and would join events that have nothing in common.
    return np.where(column > 0, column, NONE)


def _integers(arguments: Sequence[dict[str, Any]], rows: Ints, *spellings: str) -> Ints:
    """One argument of the events in `rows`, under the first of the spellings that each has.

    NONE in all other rows, and for what is no whole number or below NONE.
    """
    column = np.full(len(arguments), NONE, np.int64)
    for spelling in spellings:
        values: list[Any] = [arguments[row].get(spelling, NONE) for row in rows.tolist()]
        if not set(map(type, values)) <= {int}:
            values = [_integer(value) for value in values]
        try:
            column[rows] = values
        except OverflowError:
            column[rows] = [value if abs(value) < 2**63 else NONE for value in values]
        rows = rows[column[rows] == NONE]
    return np.maximum(column, NONE)


def _integer(value: Any) -> int:
    if isinstance(value, str):
        try:
            return int(value[:20], 0)
        except ValueError:
            return NONE
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NONE
    return int(value) if math.isfinite(value) and value == int(value) else NONE


def _floats(arguments: Sequence[dict[str, Any]], rows: Ints, spelling: str) -> Floats:
    """For every event the argument of this spelling where it is a number that is not negative; NaN elsewhere."""
    column = np.full(len(arguments), math.nan)
    for row in rows.tolist():
        value = arguments[row].get(spelling)
        # Ints beyond a float's range are possible, and as useless as other types.
        if type(value) in (int, float) and 0 <= value < 1e18:
            column[row] = value
    return column


def _base_us(document: Document) -> float:
    base = document.head.get("baseTimeNanoseconds")
    return base / 1000.0 if isinstance(base, int | float) and 0 <= base < _LONGEST_US * 1e6 else 0.0


def _of_type(document: Document, entry: str, kind: type) -> Any:
    value = document.head.get(entry)
    return value if isinstance(value, kind) else kind()
