"""What communication costs: one function a primitive, and the collectives that a trace already holds.

Everywhere sizes are bytes, bandwidths GB/s (1e9 bytes a second, so 1 GB/s is 1000 bytes a microsecond), times
microseconds. Bandwidths are those of one worker's link in one direction: the *bus bandwidth* of nccl-tests
(``doc/PERFORMANCE.md``), which does not depend on the number of workers. To each bandwidth term comes one of
latency, `latency_us` for every step of the ring that has to wait for the one before it. One worker communicates
nothing, in no time. The formulas are the ones by which the thesis (4.4.2, 4.5) sizes communication tasks; its
figure 4.9 found real NCCL calls 34 % slower on average where they compete with kernels, which is no matter of
the formula: see the parameter `interference` of the passes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from daydream.graph.graph import Mark, TaskGraph, TaskKind, ThreadKind
from daydream.trace.collectives import collective_word
from daydream.trace.dtypes import element_bytes
from daydream.trace.trace import NONE, Category, Floats, Ints, argument
from hal.spec.node import NodeSpec
from hal.support.errors import InputError

#: By how much NCCL's calls were slower beside running kernels than the formulas, and than alone (thesis 4.6.5, figure
#: 4.9: 34 % on average over measured all-reduces of DDP).
INTERFERENCE = 0.34

#: Bytes a microsecond in one GB/s.
BYTES_PER_US = 1e3

#: What PyTorch calls a megabyte in `bucket_cap_mb`.
MEBIBYTE = float(2**20)

# Point to point


def transfer_us(size: float, bandwidth: float, latency_us: float = 0.0) -> float:
    """Microseconds of a message of `size` bytes over one link of `bandwidth` GB/s.

    >>> transfer_us(1e6, bandwidth=10.0, latency_us=5.0)
    105.0
    """
    return latency_us + size / (bandwidth * BYTES_PER_US)


# Collectives (nccl-tests, PERFORMANCE.md)


def all_reduce_us(size: float, workers: int, bandwidth: float, latency_us: float = 0.0) -> float:
    """Microseconds of a ring all-reduce of `size` bytes on every worker: 2 (n-1)/n S / B (section AllReduce).

    The ring has 2 (n-1) steps one after another: n-1 that reduce, n-1 that gather.

    >>> all_reduce_us(1e6, workers=4, bandwidth=10.0)
    150.0
    """
    return reduce_scatter_us(size, workers, bandwidth, latency_us) + all_gather_us(size, workers, bandwidth, latency_us)


def reduce_scatter_us(size: float, workers: int, bandwidth: float, latency_us: float = 0.0) -> float:
    """Microseconds of a ring reduce-scatter: (n-1)/n S / B and n-1 steps (section ReduceScatter); S is the whole array.

    >>> reduce_scatter_us(1e6, workers=4, bandwidth=10.0, latency_us=2.0)
    81.0
    """
    if workers <= 1:
        return 0.0
    return transfer_us(size * (workers - 1) / workers, bandwidth, (workers - 1) * latency_us)


def all_gather_us(size: float, workers: int, bandwidth: float, latency_us: float = 0.0) -> float:
    """Microseconds of a ring all-gather: (n-1)/n S / B and n-1 steps (section AllGather); S is the gathered array.

    >>> all_gather_us(1e6, workers=4, bandwidth=10.0)
    75.0
    """
    return reduce_scatter_us(size, workers, bandwidth, latency_us)


def stage_bytes(size: float, workers: Sequence[int]) -> list[float]:
    """Array of each level of a hierarchical all-reduce, bytes: S, S / p1, S / (p1 p2)...

    >>> stage_bytes(1e6, (2, 4))
    [1000000.0, 500000.0]
    """
    return [float(size / np.prod(workers[:level], initial=1.0)) for level in range(len(workers))]


# Collectives of the library on a node


def node_of(pass_name: str, name: str, workers: int) -> NodeSpec | None:
    """The node of that name or file with room for so many workers; None where none is named.

    Raises:
        InputError: there is no such node, or it has fewer boards and no network.
    """
    if not name:
        return None
    from hal.node_catalog import load_node
    from roller.library.collectives import check_ranks

    try:
        node = load_node(name)
        if workers > 1:
            check_ranks(workers, node)
    except InputError as error:
        field = "workers" if error.field == "ranks" else error.field
        raise InputError(f"{pass_name}: {field}", error.problem, error.remedy) from None
    return node


def on_node_us(collective: str, size: float, workers: int, node: NodeSpec) -> float:
    """Microseconds of NCCL's collective of `size` bytes on a node's boards (:mod:`roller.library.collectives`)."""
    if workers <= 1 or size < 1:
        return 0.0
    from roller.library.collectives import collective_seconds

    return float(collective_seconds(collective, size, workers, node, dtype="float32").kernel_seconds) * 1e6


# Parameter server (Li et al., OSDI 2014: a worker pushes gradients and pulls parameters)


def push_us(size: float, workers: int, servers: int, bandwidth: float, latency_us: float = 0.0) -> float:
    """Microseconds in which every worker sends `size` bytes to servers on machines of their own, evenly spread.

    The worker's link carries S, a server's n S / k for k servers; the longer of both decides.

    >>> push_us(1e6, workers=8, servers=4, bandwidth=10.0)
    200.0
    """
    return transfer_us(size * max(1.0, workers / servers), bandwidth, latency_us)


def pull_us(size: float, workers: int, servers: int, bandwidth: float, latency_us: float = 0.0) -> float:
    """Microseconds in which every worker fetches `size` bytes from servers: a push's links, the other way round.

    >>> pull_us(1e6, workers=8, servers=4, bandwidth=10.0)
    200.0
    """
    return push_us(size, workers, servers, bandwidth, latency_us)


# What users write


def check(pass_name: str, *, workers: int | None = None, **positive: float) -> None:
    """Refuses what no formula can take.

    Raises:
        InputError: fewer than one worker, or another number that is not finite and above 0.
    """
    if workers is not None and workers < 1:
        raise InputError(f"{pass_name}: workers", f"{workers} is no number of workers", "write 1 or more")
    for name, value in positive.items():
        if not (np.isfinite(value) and value > 0):
            raise InputError(f"{pass_name}: {name.replace('_', '-')}", f"{value} is not above 0", "write a number > 0")


def check_not_negative(pass_name: str, **numbers: float) -> None:
    """Refuses numbers below 0 or not finite.

    Raises:
        InputError: one of them is.
    """
    for name, value in numbers.items():
        if not (np.isfinite(value) and value >= 0):
            raise InputError(f"{pass_name}: {name.replace('_', '-')}", f"{value} is below 0", "write 0 or more")


def numbers(field: str, text: str) -> list[float]:
    """Numbers above 0 joined by x.

    Raises:
        InputError: something else stands there.

    >>> numbers("factors", "8x4"), numbers("bandwidths", "150x12.5")
    ([8.0, 4.0], [150.0, 12.5])
    """
    try:
        values = [float(part) for part in text.lower().split("x")]
    except ValueError:
        raise InputError(field, f"{text!r} is not numbers joined by x", "write for example 8x4") from None
    if not all(np.isfinite(values)) or min(values) <= 0:
        raise InputError(field, f"{text!r} holds a number that is not above 0", "write for example 8x4")
    return values


# Collectives in the graph

_ALL_REDUCE = "allreduce"
_COLLECTIVE_CALL = re.compile(r"(nccl|rccl|c10d|gloo|xccl|ucc)::?|record_param_comms$")


def all_reduces(graph: TaskGraph) -> Ints:
    """Rows of all-reduce tasks, recorded (kernels on a stream) and inserted (on a channel) alike."""
    chosen = (graph.kind == TaskKind.COMMUNICATION) & (graph.mark == Mark.NONE) & (graph.thread_kinds[graph.thread] > 0)
    rows = np.flatnonzero(chosen)
    return rows[np.array([collective_kind(graph, row) == _ALL_REDUCE for row in rows.tolist()], np.bool_)]


def collective_kind(graph: TaskGraph, row: int) -> str:
    """A collective's kind in NCCL's words (``allreduce``, ``reducescatter``, ...), empty where nothing says.

    By the profiler's "Collective name", then by the calls around its launch, then by its name.
    """
    said = collective_arguments(graph, row)
    return collective_word(said.get("Collective name"), said.get("call"), graph.text(row))


def collective_arguments(graph: TaskGraph, row: int) -> dict[str, Any]:
    """What the trace says of a collective: its own arguments, then those of the calls around its launch.

    The innermost call's name is the argument ``call``.
    """
    trace = graph.trace
    if trace is None:
        return {}
    event = int(graph.event[row])
    said = dict(trace.arguments[event]) if event != NONE else {}
    if "Collective name" in said:
        return said
    call = int(graph.launch[row])
    above = int(graph.event[call]) if call != NONE else int(graph.operator[row])
    while above != NONE:
        name = trace.text(above)
        if trace.category[above] in (Category.OPERATOR, Category.ANNOTATION) and _COLLECTIVE_CALL.match(name):
            said.setdefault("call", name)
            said = {**trace.arguments[above], **said}
            if name == "record_param_comms":
                break
        above = int(graph.enclosing[above])
    return said


def recorded_collectives(graph: TaskGraph) -> Ints:
    """Rows of collectives that ran on a stream when the trace was recorded, of every kind."""
    on_stream = graph.thread_kinds[graph.thread] == ThreadKind.STREAM
    return np.flatnonzero((graph.kind == TaskKind.COMMUNICATION) & on_stream & (graph.mark == Mark.NONE))


def message_bytes(graph: TaskGraph, rows: Ints) -> Floats:
    """Bytes that each of these collectives works on, NaN where nothing says.

    From the task where a pass wrote it, else from "In msg nelems" and "dtype" of the kernel or of the calls around its
    launch (newer profilers), else from the input dimensions that these calls recorded (``nccl:all_reduce``,
    ``record_param_comms``), the innermost first.
    """
    sizes = graph.bytes[rows].copy()
    for position, row in enumerate(rows):
        if np.isnan(sizes[position]):
            sizes[position] = _recorded_bytes(graph, int(row))
    return sizes


def _recorded_bytes(graph: TaskGraph, row: int) -> float:
    trace = graph.trace
    if trace is None:
        return np.nan
    said = collective_arguments(graph, row)
    elements = argument(said, "In msg nelems", "in msg nelems")
    if isinstance(elements, int | float) and elements > 0:
        return float(elements) * element_bytes(argument(said, "dtype"))
    call = int(graph.launch[row])
    above = int(graph.event[call]) if call != NONE else int(graph.operator[row])
    while above != NONE:
        if _COLLECTIVE_CALL.match(trace.text(above)) and (size := sum(tensor_bytes(trace.arguments[above]))):
            return float(size)
        above = int(graph.enclosing[above])
    return np.nan


def tensor_bytes(arguments: dict[str, object]) -> list[int]:
    """Bytes of every input that an operator recorded as a tensor; 0 for other inputs.

    >>> tensor_bytes({"Input Dims": [[2, 3], []], "Input type": ["c10::Half", "Scalar"]})
    [12, 0]
    """
    return [elements * size for elements, size in zip(*tensor_elements(arguments), strict=True)]


def tensor_elements(arguments: dict[str, object]) -> tuple[list[int], list[int]]:
    """Elements of every input of an operator (0 where it is no plain tensor), and bytes of an element of each."""
    dims = argument(arguments, "Input Dims", "Input dims")
    types = argument(arguments, "Input type")
    if not isinstance(dims, list):
        return [], []
    types = types if isinstance(types, list) and len(types) == len(dims) else ["float"] * len(dims)
    counts = [_elements(shape) if _is_tensor(name) else 0 for shape, name in zip(dims, types, strict=True)]
    return counts, [element_bytes(name) for name in types]


def _is_tensor(type_name: object) -> bool:
    return str(type_name) not in ("", "Scalar", "ScalarList", "TensorList", "GenericList", "None")


def _elements(shape: object) -> int:
    if not isinstance(shape, list) or not all(isinstance(side, int) for side in shape):
        return 0
    return int(np.prod(shape, dtype=np.int64)) if shape else 1
