"""Allocations and frees among Kineto's events, which every generation spells "[memory]"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from daydream.trace.events import Clock, Numbers
from daydream.trace.text import Event, Notes
from daydream.trace.trace import NONE, Ints, MemoryEvents, ThreadName

#: "Device Type" of the host (c10::DeviceType).
_HOST = 0

#: Larger addresses are damage, and so are sizes of a petabyte, whose sums may not fit a column.
_LARGEST, _LARGEST_SIZE = 2**62, 2**50


def memory_events(
    events: Sequence[Event], clock: Clock, origin: Any, threads: Sequence[ThreadName], numbers: Numbers, notes: Notes
) -> MemoryEvents | None:
    """The columns of these events, those without time or bytes left out; None without any.

    Profilers of 2021 wrote "Device Type", "Device Id" and "Bytes"; later ones added "Addr", then "Total Allocated" and
    "Total Reserved". An allocator that reports failures of its own writes them with 0 bytes, which says nothing here.
    """
    if not events:
        return None
    arguments = [event.args or {} for event in events]
    size = _column(arguments, "Bytes", 0)
    raw, usable = clock.raw([event.ts for event in events])
    is_usable = usable & (size != 0) & (np.abs(size) <= _LARGEST_SIZE)
    notes.add("{} of memory without a usable time or size, left out", int((~is_usable).sum()))
    if not is_usable.any():
        return None
    # A stable order: times may have no more than microseconds, and the file keeps the order of calls.
    rows = np.flatnonzero(is_usable)
    rows = rows[np.argsort(raw[rows], kind="stable")]
    device = _column(arguments, "Device Id", NONE)
    on_host = _column(arguments, "Device Type", _HOST) == _HOST
    lanes = {(thread.process, thread.number): i for i, thread in enumerate(threads) if not thread.is_stream}
    places = {place: lanes.get((numbers[place[0]], numbers[place[1]]), NONE) for place in {_place(e) for e in events}}
    thread = np.array([places[_place(event)] for event in events], np.int64)
    return MemoryEvents(
        time_us=clock.since(origin, raw[rows]),
        thread=thread[rows],
        device=np.where(on_host, NONE, np.maximum(device, 0))[rows],
        bytes=size[rows],
        address=_column(arguments, "Addr", NONE)[rows],
        allocated=_column(arguments, "Total Allocated", NONE)[rows],
        reserved=_column(arguments, "Total Reserved", NONE)[rows],
    )


def _place(event: Event) -> tuple[Any, Any]:
    return event.pid, event.tid


def _column(arguments: Sequence[dict[str, Any]], key: str, otherwise: int) -> Ints:
    """An argument of every event; `otherwise` where it is missing or no whole number."""
    values: list[Any] = [each.get(key, otherwise) for each in arguments]
    if not set(map(type, values)) <= {int}:
        values = [_integer(value, otherwise) for value in values]
    if max(values) > _LARGEST or min(values) < -_LARGEST:
        values = [value if abs(value) <= _LARGEST else otherwise for value in values]
    return np.array(values, np.int64)


def _integer(value: Any, otherwise: int) -> int:
    """A number as it is, or written as text in any base."""
    if isinstance(value, str):
        try:
            return int(value[:24], 0)
        except ValueError:
            return otherwise
    if isinstance(value, float):
        return int(value) if value.is_integer() else otherwise
    return value if type(value) is int else otherwise
