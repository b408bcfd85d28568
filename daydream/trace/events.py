"""Kineto's events sorted out: which of them a Trace holds, on which thread, and what the others say of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daydream.trace.text import Document, Event, Key, Notes
from daydream.trace.trace import NONE, Category, ThreadName

#: Categories of what happens on a stream rather than on a CPU thread.
ON_DEVICE = frozenset({Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.SYNC, Category.GPU_ANNOTATION})

#: Times beyond this (the year 2255, in microseconds) are damage; nanoseconds up to it fit 64 bits.
_LIMIT_US = 9e15

#: Larger numbers of threads and streams are damage, and fit no column.
_LARGEST = 2**62

_CATEGORIES = {
    "cpu_op": Category.OPERATOR,
    "operator": Category.OPERATOR,
    "user_annotation": Category.ANNOTATION,
    "python_function": Category.PYTHON,
    "runtime": Category.RUNTIME,
    "hpu_op": Category.RUNTIME,  # calls on the host, despite its name
    "kernel": Category.KERNEL,
    "mtia_ccp_events": Category.KERNEL,
    "memcpy": Category.MEMCPY,
    "memset": Category.MEMSET,
}
#: The rest carries the maker's or the backend's name: cuda, hip, xpu, mtia, mlu, privateuse1, gpu.
_SUFFIXES = {
    "_runtime": Category.RUNTIME,
    "_driver": Category.RUNTIME,
    "_memcpy": Category.MEMCPY,
    "_memset": Category.MEMSET,
    "_sync": Category.SYNC,
    "_user_annotation": Category.GPU_ANNOTATION,
}

#: Name of instants that stand for an allocation or a free, in every generation.
MEMORY = "[memory]"

#: What Kineto writes as events although nothing runs: markers, counters, and copies of other events.
_NOT_TASKS = frozenset(
    {
        "trace",
        "overhead",
        "cpu_instant_event",
        "external_correlation",
        "cuda_event",
        "cuda_profiler_range",
        "mtia_counters",
        "mtia_insight",
        "xpu_scope_profiler",
        "collective_comm",
        "gpu_pm_counter",
    }
)

#: Ranges that the first profiler recorded under the category of operators.
_ANNOTATIONS = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)#", "DistributedDataParallel.", "## ", "nccl:")

_FORWARD_BACKWARD = frozenset({"fwdbwd", "forward_backward", "fwd_bwd"})
_LAUNCH = frozenset({"ac2g", "async", "async_cpu_to_gpu", "async_gpu"})


# Comparing with a member of an enumeration calls Python.
_OPERATOR, _ANNOTATION = int(Category.OPERATOR), int(Category.ANNOTATION)


@dataclass
class Sorted:
    """The events by what they are for. `tasks` and `categories` go together."""

    tasks: list[Event] = field(default_factory=list)
    categories: list[int] = field(default_factory=list)
    forward_backward: list[Event] = field(default_factory=list)
    launches: list[Event] = field(default_factory=list)
    labels: dict[tuple[int, int], str] = field(default_factory=dict)
    memory: list[Event] = field(default_factory=list)


class Numbers:
    """Process, thread and stream numbers, which some profilers write as text."""

    _WRITTEN = re.compile(r"(?:(?:stream|thread|queue|tid|pid)\s*)?(-?\d{1,18})", re.IGNORECASE)

    def __init__(self) -> None:
        self._known: dict[Key, int] = {}
        self._unwritten = 0

    def __getitem__(self, key: Any) -> int:
        """``7`` for 7, "7" and "stream 7"; a number below NONE of its own for other text; NONE for the rest."""
        if type(key) is int:
            return key if -_LARGEST <= key <= _LARGEST else NONE
        if isinstance(key, str):
            if key not in self._known:
                self._known[key] = self._number(key)
            return self._known[key]
        return int(key) if isinstance(key, float) and abs(key) <= _LARGEST and key.is_integer() else NONE

    def _number(self, key: str) -> int:
        written = self._WRITTEN.fullmatch(key.strip())
        if written:
            return int(written[1])
        self._unwritten += 1
        return NONE - self._unwritten


class _Categories(dict[str | None, int]):
    """The category of each spelling; NONE for those that are not tasks, `UNKNOWN` for those never heard of."""

    UNKNOWN = -2

    def __missing__(self, spelling: str | None) -> int:
        self[spelling] = category = int(self._find((spelling or "").strip().lower()))
        return category

    def _find(self, spelling: str) -> int:
        if spelling in _NOT_TASKS:
            return NONE
        if spelling in _CATEGORIES:
            return _CATEGORIES[spelling]
        suffixes = (category for suffix, category in _SUFFIXES.items() if spelling.endswith(suffix))
        return next(suffixes, self.UNKNOWN)


def sort_out(document: Document, numbers: Numbers, notes: Notes) -> Sorted:
    """Tasks, arrows, labels and allocations among the document's events, in the file's order."""
    lists = Sorted()
    categories = _Categories()
    unknown: Counter[str] = Counter()
    halves: list[Event] = []
    add_task, add_category = lists.tasks.append, lists.categories.append

    def add(event: Event) -> None:
        category = categories[event.cat]
        if category == _OPERATOR and event.name is not None and event.name.startswith(_ANNOTATIONS):
            category = _ANNOTATION
        if category >= 0:
            add_task(event)
            add_category(category)
        elif category == _Categories.UNKNOWN:
            unknown[event.cat or "none"] += 1

    for event in document.events:
        phase = event.ph
        if phase == "X":
            add(event)
        elif phase == "s" or phase == "f":
            _sort_arrow(event, lists)
        elif phase == "B" or phase == "E":
            halves.append(event)
        elif phase == "M" and event.name == "thread_name":
            _label(event, numbers, lists.labels)
        elif event.name == MEMORY:
            lists.memory.append(event)
    for event in _paired(halves, numbers, notes):
        add(event)
    if unknown:
        # Braces in a category would be taken for a place to fill in.
        listed = ", ".join(sorted(unknown)[:8]).replace("{", "(").replace("}", ")")
        notes.add(f"{{}} of a category that is not known, left out ({listed})", unknown.total())
    return lists


def _sort_arrow(event: Event, lists: Sorted) -> None:
    if event.cat in _FORWARD_BACKWARD or event.name in _FORWARD_BACKWARD:
        lists.forward_backward.append(event)
    elif event.cat in _LAUNCH:
        lists.launches.append(event)


def _label(event: Event, numbers: Numbers, labels: dict[tuple[int, int], str]) -> None:
    name = (event.args or {}).get("name")
    if isinstance(name, str) and name:
        labels[numbers[event.pid], numbers[event.tid]] = name.strip()


def _paired(halves: list[Event], numbers: Numbers, notes: Notes) -> list[Event]:
    """Events written as their begin and their end: an end closes the latest begin of its thread."""
    usable = [event for event in halves if _is_time(event.ts)]
    usable.sort(key=lambda event: event.ts)
    open_by_thread: dict[tuple[int, int], list[Event]] = {}
    pairs = []
    alone = len(halves) - len(usable)
    for event in usable:
        stack = open_by_thread.setdefault((numbers[event.pid], numbers[event.tid]), [])
        if event.ph == "B":
            stack.append(event)
        elif stack:
            begin = stack.pop()
            arguments = {**(begin.args or {}), **(event.args or {})}
            pairs.append(
                Event(
                    "X",
                    begin.cat,
                    begin.name,
                    begin.pid,
                    begin.tid,
                    begin.ts,
                    float(event.ts - begin.ts),
                    args=arguments,
                )
            )
        else:
            alone += 1
    alone += sum(map(len, open_by_thread.values()))
    notes.add("{} with a beginning or an end only, left out", alone)
    return pairs


def _is_time(value: Any) -> bool:
    try:
        return value is not None and bool(abs(value) <= _LIMIT_US)
    except ArithmeticError:  # a Decimal that is not a number
        return False


def _are_times(values: list[Any]) -> bool:
    try:
        return not values or bool(min(values) >= -_LIMIT_US and max(values) <= _LIMIT_US)
    except (ArithmeticError, TypeError):  # one is not a number, or missing
        return False


@dataclass(frozen=True)
class Clock:
    """Times of the file, and as microseconds since the earliest task."""

    exact: bool

    def raw(self, times: Iterable[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Microseconds as float, or whole nanoseconds if `exact`; and which are usable (the others are 0)."""
        if self.exact:
            values = list(times)
            usable = np.full(len(values), True)
            if not _are_times(values):
                usable = np.array([_is_time(time) for time in values], bool)
                values = [time if good else 0 for time, good in zip(values, usable, strict=True)]
            # As exact as Decimal.scaleb and faster: 19 digits are far from Decimal's 28.
            return np.array([int(time * 1000) for time in values], np.int64), usable
        floats = np.array(list(times), np.float64)  # None becomes NaN
        usable = np.abs(floats) <= _LIMIT_US
        return np.where(usable, floats, 0.0), usable

    def since(self, origin: Any, raw: NDArray[Any]) -> NDArray[np.float64]:
        """Microseconds from `origin`, both as :meth:`raw` gives them."""
        # What a float keeps of such times beyond nanoseconds is noise.
        return (raw - origin) / 1000.0 if self.exact else np.round(raw - origin, 3)


@dataclass(frozen=True)
class Places:
    """Where each task runs.

    The arguments `device` and `stream` name the stream where they are given: pid and tid may be lanes for show.
    """

    thread: list[int]
    """Index into `threads`."""
    threads: tuple[ThreadName, ...]
    line: list[int]
    """Index of the task's pid and tid, which is how arrows name a place."""
    lines: dict[tuple[int, int], int]


def places_of(
    tasks: list[Event], categories: list[int], labels: dict[tuple[int, int], str], numbers: Numbers
) -> Places:
    """The thread or stream of each task."""
    threads: dict[ThreadName, int] = {}
    lines: dict[tuple[int, int], int] = {}
    place_of: dict[Any, tuple[int, int]] = {}

    def find(event: Event, category: int) -> tuple[int, int]:
        process, number = line = numbers[event.pid], numbers[event.tid]
        label = labels.get(line, "")
        device = NONE
        if category in ON_DEVICE:
            arguments = event.args or {}
            device_id, stream = arguments.get("device"), arguments.get("stream")
            device = device_id if type(device_id) is int and 0 <= device_id <= _LARGEST else max(process, 0)
            number = stream if type(stream) is int and abs(stream) <= _LARGEST else number
            # A wait for the whole device, written as an unsigned number.
            number = NONE if number == 2**32 - 1 else number
        thread = ThreadName(process, number, device, label)
        return threads.setdefault(thread, len(threads)), lines.setdefault(line, len(lines))

    places = []
    for event, category in zip(tasks, categories, strict=True):
        key: Any = (event.pid, event.tid)
        if category in ON_DEVICE:
            arguments = event.args or {}
            key = (*key, arguments.get("device"), arguments.get("stream"))
        try:
            places.append(place_of[key])
        except KeyError:
            place_of[key] = place = find(event, category)
            places.append(place)
        except TypeError:  # a device that is a list or an object
            places.append(find(event, category))
    return Places([thread for thread, _ in places], tuple(threads), [line for _, line in places], lines)
