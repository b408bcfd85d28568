"""Events as Kineto writes them, made from the records of another profiler, whose times are nanoseconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from daydream.trace.text import Document, Event, Key

#: What CUPTI's symbols end in: the version that introduced them, and how the default stream is meant.
_SUFFIX = re.compile(r"(_v\d+)?(_pt[sd]z)?$")


class Range(NamedTuple):
    """A range that a program named (NVTX, ROCTX): name, thread, begin and end in nanoseconds."""

    name: str
    thread: int
    begin_ns: int
    end_ns: int


@dataclass
class Recording:
    """The events of one process, collected.

    Attributes:
        process: its number.
        base_ns: subtracted from every time, so that microseconds as floats resolve nanoseconds.
        events: as Kineto would have written them.
        ranges: named by the program, in no order.
        launches: begins of the calls that set off work on a device, in nanoseconds, with their threads.
        labels: names of threads.
    """

    process: int
    base_ns: int = 0
    events: list[Event] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    launches: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self,
        category: str,
        name: str,
        begin_ns: int,
        end_ns: int,
        *,
        process: Key | None = None,
        thread: Key,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        """An event of the process, or on a stream of the device `process`."""
        # Times and durations fit a float's 53 bits: they are from the base on.
        self.events.append(
            Event(
                ph="X",
                cat=category,
                name=name,
                pid=self.process if process is None else process,
                tid=thread,
                ts=(begin_ns - self.base_ns) / 1000.0,
                dur=(end_ns - begin_ns) / 1000.0,
                args=arguments or {},
            )
        )

    def on_device(
        self,
        category: str,
        name: str,
        begin_ns: int,
        end_ns: int,
        *,
        device: int,
        stream: int,
        correlation: int,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        """A kernel, a copy, a set or a wait on a stream."""
        shared = {"device": device, "stream": stream, "correlation": correlation}
        self.add(
            category, name, begin_ns, end_ns, process=device, thread=stream, arguments={**shared, **(arguments or {})}
        )

    def call(self, name: str, begin_ns: int, end_ns: int, *, thread: int, correlation: int, launches: bool) -> None:
        """A call of the runtime or the driver; whether work on a device has its correlation."""
        category = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
        self.add(category, name, begin_ns, end_ns, thread=thread, arguments={"correlation": correlation})
        if launches:
            self.launches.append((begin_ns, thread))

    def label(self, thread: int, name: str) -> None:
        """Give a thread its name."""
        self.events.append(Event(ph="M", name="thread_name", pid=self.process, tid=thread, args={"name": name}))

    def document(self, devices: Sequence[dict[str, Any]], *, host: str = "", epoch_ns: int = 0) -> Document:
        """All of it; `epoch_ns` is the time since 1970 at which the recorder's clock stood at 0, 0 where unknown."""
        head: dict[str, Any] = {"deviceProperties": list(devices)}
        if host:
            head["host_name"] = host
        if epoch_ns:
            head["baseTimeNanoseconds"] = epoch_ns + self.base_ns
        return Document(self.events, head, exact=False)


def base_call(symbol: str) -> str:
    """The name of a call without its version.

    >>> base_call("cudaLaunchKernel_v7000"), base_call("cudaMemcpyAsync_ptsz"), base_call("cuLaunchKernel")
    ('cudaLaunchKernel', 'cudaMemcpyAsync', 'cuLaunchKernel')
    """
    return _SUFFIX.sub("", symbol)
