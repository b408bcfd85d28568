"""A recorded trace as columns: what every reader makes and the graph is built from."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: An integer column's value where the trace says nothing.
NONE = -1


class Category(IntEnum):
    """Category of an event, whatever its profiler generation calls it."""

    OPERATOR = 0  # cpu_op, Operator
    ANNOTATION = 1  # user_annotation on a CPU thread, ProfilerStep#n included
    PYTHON = 2  # python_function: frames and nn.Module calls of with_stack / with_modules
    RUNTIME = 3  # CUDA or HIP calls: cuda_runtime, cuda_driver, Runtime, hip_runtime
    KERNEL = 4
    MEMCPY = 5
    MEMSET = 6
    SYNC = 7  # cuda_sync: which stream or event a call waited for
    GPU_ANNOTATION = 8  # a user annotation projected on a stream


@dataclass(frozen=True)
class ThreadName:
    """A row of the timeline: a CPU thread, or a stream of a device.

    `device` is -1 on a CPU thread. `number` is the system's thread id or the stream; NONE for the line of waits for
    a whole device, and below NONE where the file has a name instead. `process` is the file's pid, which on a stream
    is the device in most files.
    """

    process: int
    number: int
    device: int = NONE
    label: str = ""

    @property
    def is_stream(self) -> bool:
        """True if this is a stream of a device."""
        return self.device != NONE


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryEvents:
    """Allocations and frees ("[memory]" events of ``profile_memory``) in the order in which they happened.

    Attributes:
        time_us: when, microseconds from the trace's `origin_us`.
        thread: index into the trace's `threads` of where it was called, NONE where nothing else ran there.
        device: whose memory, NONE for the host's.
        bytes: allocated, or below 0 freed; on a GPU those of the allocator's block.
        address: of the block; NONE in the profilers of 2021.
        allocated: bytes in use on the device behind it ("Total Allocated"), NONE where not recorded.
        reserved: bytes that the device's allocator holds ("Total Reserved"), NONE where not recorded.
    """

    time_us: Floats
    thread: Ints
    device: Ints
    bytes: Ints
    address: Ints
    allocated: Ints
    reserved: Ints

    def __len__(self) -> int:
        return len(self.time_us)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The complete events of one trace, sorted by start time (longer first where starts are equal).

    One entry per event and column. Times are microseconds from `origin_us`. `arguments[i]` is the event's own
    `args` object as recorded (never None), for what no column holds: input dimensions and types, grid, block,
    module hierarchy, call stack. Use :func:`argument` to read it, since spellings differ between generations.
    """

    path: str
    names: tuple[str, ...]
    """Every distinct event name; `name` indexes it."""
    threads: tuple[ThreadName, ...]
    """Every thread and stream with an event; `thread` indexes it."""
    name: Ints
    category: Ints
    start_us: Floats
    duration_us: Floats
    thread: Ints
    correlation: Ints
    """Joins a CUDA call and what it set off. Several kernels may share one (CUDA graphs)."""
    external: Ints
    """Joins a kernel or a CUDA call with its operator, in that operator's own `external` ("External id").

    NONE in all calls and kernels of the profilers of 2022 and 2023 that repeat the correlation here: find their
    operator by time and thread.
    """
    sequence: Ints
    """Autograd's sequence number: a backward operator has that of its forward operator."""
    forward_thread: Ints
    """Autograd's small number of the forward thread, on backward operators only (0 or NONE elsewhere)."""
    bytes: Floats
    """Bytes copied or set; NaN where not recorded."""
    arguments: tuple[dict[str, Any], ...]
    forward_backward: Ints
    """Arrows fwdbwd, shape [arrows, 2]: row of the forward operator, row of the backward one. Older traces
    have none: `sequence` and `forward_thread` say the same there."""
    devices: tuple[dict[str, Any], ...] = ()
    """The profiler's deviceProperties, as recorded."""
    distributed: dict[str, Any] = field(default_factory=dict)
    """The profiler's distributedInfo, as recorded."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What `daydream record` added (key "daydream"): gradient sizes and DDP buckets; empty elsewhere."""
    memory: MemoryEvents | None = None
    """Allocations and frees, None where none were recorded."""
    origin_us: float = 0.0
    """Time of the earliest event, microseconds as recorded: since 1970, or from 2024 on since a base time that the
    file names (and which is not added)."""
    base_us: float = 0.0
    """The base time that the file names, microseconds since 1970; 0 where it names none."""
    host: str = ""
    """The machine that it was recorded on; empty where the file does not tell."""
    complete: bool = True
    """Whether the file was read to its end."""
    steps_by: str = "auto"
    """What tells its steps where the profiler marks none (:data:`daydream.tasks.steps.STEPS_BY`)."""
    warnings: tuple[str, ...] = ()
    """What was left out or repaired while reading, one sentence each."""

    def __len__(self) -> int:
        return len(self.name)

    def text(self, row: int) -> str:
        """The event's name."""
        return self.names[self.name[row]]


def argument(arguments: dict[str, Any], *spellings: str) -> Any:
    """The first of these keys that `arguments` has, or None."""
    for spelling in spellings:
        if spelling in arguments:
            return arguments[spelling]
    return None


def looked_up(column: Any, rows: Ints, otherwise: float) -> Any:
    """For each row its entry in `column`, `otherwise` where the row is NONE; `column` may be empty then.

    >>> looked_up(np.array([5.0, 7.0]), np.array([1, NONE]), 0.0).tolist()
    [7.0, 0.0]
    """
    values = np.full(len(rows), otherwise, np.asarray(column).dtype)
    given_rows = rows != NONE
    values[given_rows] = column[rows[given_rows]]
    return values
