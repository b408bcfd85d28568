"""A simulated timeline as a Chrome trace, to open in Perfetto together with its recording."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind, ThreadKind
from daydream.graph.simulate import Timeline
from daydream.report.breakdown import Resource, critical_segments, resources, windows
from daydream.report.spans import returns, spans
from daydream.trace.trace import NONE, Category, Floats, Ints

#: Added to every process number, and more than any of Linux: so both files can be loaded together.
PROCESS_OFFSET = 10_000_000

#: Offsets to that: CPU processes stand above all devices, which have their number; then two rows of Daydream's own.
_CPU, _NETWORK, _CRITICAL = 1_000, 900, 901

_CATEGORIES = {
    Category.OPERATOR: "cpu_op",
    Category.ANNOTATION: "user_annotation",
    Category.PYTHON: "cpu_op",
    Category.RUNTIME: "cuda_runtime",
}
_GPU_CATEGORIES = {TaskKind.MEMCPY: "gpu_memcpy", TaskKind.MEMSET: "gpu_memset"}


@dataclass(frozen=True, eq=False)
class Counter:
    """Amounts that change over time.

    Attributes:
        name: of the row.
        device: the GPU that it stands below; -1 for the host.
        time_us: in the timeline, ascending.
        series: amounts from each time on, by their names.
        process: of the host that it stands below where there is no device.
    """

    name: str
    device: int
    time_us: Floats
    series: dict[str, Ints]
    process: int = 0


def write_timeline(timeline: Timeline, path: Path, label: str = "predicted", counters: Sequence[Counter] = ()) -> None:
    """Writes a timeline as Chrome trace JSON, compressed if the name ends in .gz; the file appears whole or not at all.

    Times are absolute as in the recording, and the first step begins where it began there. Operators last, as there,
    until the last task inside them is done; what is their own is the argument `own_us`. Processes and threads have
    their recorded names and numbers, the processes with `label` behind the name and :data:`PROCESS_OFFSET` added.
    Counters are rows of their own.

    Raises:
        OSError: the file cannot be written.
    """
    from hal.support.atomic import write_atomic

    text = encoded(timeline, label, counters)
    write_atomic(path, gzip.compress(text, 3, mtime=0) if path.suffix == ".gz" else text)


def encoded(timeline: Timeline, label: str = "predicted", counters: Sequence[Counter] = ()) -> bytes:
    """The JSON text."""
    graph, encoder = timeline.graph, msgspec.json.Encoder()
    head: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms", "traceName": f"daydream: {label}"}
    if graph.trace is not None:
        head["deviceProperties"] = graph.trace.devices
        head["distributedInfo"] = graph.trace.distributed
        head["daydream"] = graph.trace.metadata
    events = ",\n".join(_events(timeline, label, counters))
    return b"".join([encoder.encode(head)[:-1], b',"traceEvents":[\n', events.encode(), b"\n]}\n"])


def _events(timeline: Timeline, label: str, counters: Sequence[Counter]) -> Iterator[str]:
    """Names of rows, steps, tasks, arrows from launches to what they launch, the critical path, and counters."""
    times = _Times(timeline)
    for event in (*_names(timeline.graph, label), *_steps(timeline, times)):
        yield msgspec.json.encode(event).decode()
    yield from _tasks(timeline, times)
    yield from _modules(timeline, times)
    yield from _arrows(timeline, times)
    yield from _critical_path(timeline, times)
    for counter in counters:
        yield from _counted(counter, times)


class _Times:
    """Times as they stand in the file: microseconds since 1970 have more digits than a float keeps."""

    def __init__(self, timeline: Timeline) -> None:
        trace = timeline.graph.trace
        microseconds, part = divmod(trace.origin_us if trace is not None else 0.0, 1.0)
        self._origin_ns = int(microseconds) * 1000 + round(part * 1000)
        self._shift_us = _shift(timeline)

    def __call__(self, time_us: float) -> msgspec.Raw:
        return msgspec.Raw(self.text(np.array([time_us]))[0])

    def text(self, time_us: Floats) -> list[str]:
        nanoseconds = self._origin_ns + np.rint((time_us + self._shift_us) * 1000).astype(np.int64)
        microseconds, fraction = np.divmod(nanoseconds, 1000)
        return [f"{a}.{b:03d}" for a, b in zip(microseconds.tolist(), fraction.tolist(), strict=True)]


def _shift(timeline: Timeline) -> float:
    """Shift that brings the first step to where it was recorded, microseconds."""
    graph = timeline.graph
    begins = np.flatnonzero((graph.mark == Mark.STEP_BEGIN) & np.isfinite(graph.recorded_us))
    if not len(begins):
        return 0.0
    first = begins[np.argmin(graph.recorded_us[begins])]
    return float(graph.recorded_us[first] - timeline.start_us[first])


# Rows


def _places(graph: TaskGraph) -> list[tuple[int, int]]:
    """pid and tid of every thread."""
    places: list[tuple[int, int]] = []
    for index, thread in enumerate(graph.threads):
        if graph.ranks and not thread.is_meeting:
            place = (PROCESS_OFFSET + _CPU + thread.process, thread.number)
        elif thread.kind is ThreadKind.STREAM:
            place = (PROCESS_OFFSET + max(thread.device, 0), thread.number)
        elif thread.kind is ThreadKind.CHANNEL:
            place = (PROCESS_OFFSET + _NETWORK, index)
        else:
            place = (PROCESS_OFFSET + _CPU + max(thread.process, 0), thread.number)
        # A stream with tasks side by side is several threads of the graph, and needs as many rows.
        places.append(place if place not in places else (place[0], PROCESS_OFFSET + index))
    return places


def _names(graph: TaskGraph, label: str) -> Iterator[dict[str, Any]]:
    shown = set(graph.thread[_visible(graph)].tolist())
    processes: dict[int, str] = {}
    for index, (thread, (pid, tid)) in enumerate(zip(graph.threads, _places(graph), strict=True)):
        if index not in shown:
            continue
        what = {ThreadKind.STREAM: f"GPU {thread.device}", ThreadKind.CHANNEL: "network"}
        name = f"rank {thread.process}" if graph.ranks else what.get(thread.kind, f"CPU process {thread.process}")
        processes.setdefault(pid, name)
        yield _meta("thread_name", pid, tid, name=thread.label or f"thread {thread.number}")
        yield _meta("thread_sort_index", pid, tid, sort_index=index)
    processes[PROCESS_OFFSET + _CRITICAL] = "critical path"
    yield _meta("thread_name", PROCESS_OFFSET + _CRITICAL, 0, name="critical path")
    for order, (pid, name) in enumerate(sorted(processes.items(), key=_rank)):
        yield _meta("process_name", pid, 0, name=f"{name} ({label})")
        yield _meta("process_sort_index", pid, 0, sort_index=PROCESS_OFFSET + order)


def _rank(process: tuple[int, str]) -> tuple[int, int]:
    """The critical path first, then CPU, GPUs and the network."""
    pid = process[0] - PROCESS_OFFSET
    return (0 if pid == _CRITICAL else 1 if pid >= _CPU else 3 if pid == _NETWORK else 2, pid)


def _meta(name: str, pid: int, tid: int, /, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": values}


# Events


def _visible(graph: TaskGraph) -> NDArray[np.bool_]:
    """Everything but marks, tasks without duration that the builder adds, and what other events stand for.

    That is the end of calls that wait, which their beginning shows, and the annotations of steps.
    """
    shown = (graph.mark == Mark.NONE) & ((graph.duration_us > 0) | (graph.event != NONE) | graph.on_gpu)
    ends = returns(graph)
    shown[ends[ends != NONE]] = False
    if (graph.mark != Mark.NONE).any():
        steps = {step.name for step in graph.steps}
        shown &= ~np.array([name in steps for name in graph.names], np.bool_)[graph.name]
    return shown


def _steps(timeline: Timeline, times: _Times) -> Iterator[dict[str, Any]]:
    graph, places = timeline.graph, _places(timeline.graph)
    begin, end = windows(graph, timeline.start_us, timeline.end_us)
    rows = graph.step_marks[graph.mark[graph.step_marks] == Mark.STEP_BEGIN]
    for row in rows.tolist():
        step = int(graph.step[row])
        if end[step] > begin[step]:
            pid, tid = places[graph.thread[row]]
            length = round(float(end[step] - begin[step]), 3)
            event = {"ph": "X", "cat": "user_annotation", "name": graph.steps[step].name, "pid": pid, "tid": tid}
            measured = {"measured_us": round(graph.steps[step].measured_us, 3), "full": graph.steps[step].full}
            yield {**event, "ts": times(float(begin[step])), "dur": length, "args": measured}


def _categories(graph: TaskGraph) -> list[str]:
    """Category of every task in Kineto's words; calls that a pass added are known by what they launch."""
    recorded = np.full(len(graph), NONE)
    if graph.trace is not None:
        from_trace = graph.event != NONE
        recorded[from_trace] = graph.trace.category[graph.event[from_trace]]
    launches = np.zeros(len(graph), np.bool_)
    launches[graph.launch[graph.launch != NONE]] = True
    categories = []
    columns = zip(graph.kind.tolist(), graph.on_gpu.tolist(), recorded.tolist(), launches.tolist(), strict=True)
    for kind, on_gpu, category, launch in columns:
        if on_gpu:
            categories.append(_GPU_CATEGORIES.get(kind, "kernel"))
        elif kind == TaskKind.COMMUNICATION:
            categories.append("collective_comm")
        else:
            categories.append("cuda_runtime" if launch else _CATEGORIES.get(category, "cpu_op"))
    return categories


def _tasks(timeline: Timeline, times: _Times) -> Iterator[str]:
    """Tasks as text: ten times as many as of anything else, and text is made faster than objects are encoded."""
    graph = timeline.graph
    rows = np.flatnonzero(_visible(graph))
    names = [_quoted(name) for name in graph.names]
    where = [f'"pid":{pid},"tid":{tid}' for pid, tid in _places(graph)]
    heads = [f'{{"ph":"X","cat":"{category}","name":' for category in _categories(graph)]
    critical = np.zeros(len(graph), np.bool_)
    critical[timeline.critical_path] = True
    arguments = _arguments(timeline)
    start_us, end_us = timeline.start_us.copy(), timeline.end_us.copy()
    begin, end, _ = spans(timeline)
    host_rows = np.flatnonzero((graph.event != NONE) & graph.on_cpu)
    start_us[host_rows], end_us[host_rows] = begin[graph.event[host_rows]], end[graph.event[host_rows]]
    length = np.round(end_us - start_us, 3)[rows].tolist()
    columns = (rows, graph.name[rows], graph.thread[rows], critical[rows])
    starts = times.text(start_us[rows])
    for row, name, thread, is_critical, start, duration in zip(
        *(column.tolist() for column in columns), starts, length, strict=True
    ):
        mark = ',"cname":"terrible"' if is_critical else ""
        more = ',"critical":true' if is_critical else ""
        yield (
            f'{heads[row]}{names[name]},{where[thread]},"ts":{start},"dur":{duration}{mark},'
            f'"args":{{"task":{row}{arguments[row]}{more}}}}}'
        )


def _modules(timeline: Timeline, times: _Times) -> Iterator[str]:
    """Modules around tasks, and arrows from forward operators to their backward ones."""
    graph, trace, places = timeline.graph, timeline.graph.trace, _places(timeline.graph)
    if trace is None or not len(trace):
        return
    begin, end, last = spans(timeline)
    named = np.array([name.startswith("nn.Module:") for name in trace.names], np.bool_)[trace.name]
    rows = np.flatnonzero(named & (trace.category == Category.PYTHON) & (last != NONE))
    length = np.round(end[rows] - begin[rows], 3).tolist()
    for row, start, duration in zip(rows.tolist(), times.text(begin[rows]), length, strict=True):
        pid, tid = places[graph.thread[last[row]]]
        head = f'{{"ph":"X","cat":"python_function","name":{_quoted(trace.text(row))},"pid":{pid},"tid":{tid}'
        yield f'{head},"ts":{start},"dur":{duration},"args":{{}}}}'
    arrows = trace.forward_backward
    arrows = arrows[(last[arrows] != NONE).all(axis=1)] if len(arrows) else arrows
    for ends, phase in zip(arrows.T, ("s", "f"), strict=True) if len(arrows) else ():
        for number, (row, start) in enumerate(zip(ends.tolist(), times.text(begin[ends]), strict=True), start=1):
            pid, tid = places[graph.thread[last[row]]]
            head = f'{{"ph":"{phase}","bp":"e","id":{number},"cat":"fwdbwd","name":"fwdbwd"'
            yield f'{head},"pid":{pid},"tid":{tid},"ts":{start}}}'


def _arguments(timeline: Timeline) -> list[str]:
    """Facts of each task besides time and place, as the inside of a JSON object."""
    graph = timeline.graph
    layers = [f',"layer":{_quoted(layer)}' for layer in graph.layers] + [""]
    phases = {int(phase): f',"phase":"{phase.name.lower()}"' for phase in Phase}
    lanes = [f',"device":{t.device},"stream":{t.number}' if t.device != NONE else "" for t in graph.threads]
    correlation = graph.launch.copy()
    launches = graph.launch[graph.launch != NONE]
    correlation[launches] = launches
    durations, gaps, sizes = np.round(graph.duration_us, 3), np.round(graph.gap_us, 3), graph.bytes
    columns = (graph.layer, graph.phase, graph.step, graph.thread, durations, gaps, sizes, correlation, timeline.cause)
    texts = [
        layers[layer]
        + phases[phase]
        + f',"step":{step}'
        + lanes[thread]
        + (f',"own_us":{length}' if not lanes[thread] else "")
        + (f',"gap_us":{gap}' if gap else "")
        + (f',"bytes":{size:.0f}' if size == size else "")  # NaN differs from itself
        + (f',"correlation":{number + 1}' if number != NONE else "")
        + (f',"waited_for":{cause}' if cause != NONE else "")
        for layer, phase, step, thread, length, gap, size, number, cause in zip(
            *(c.tolist() for c in columns), strict=True
        )
    ]
    for row, number, thread in _sequence_numbers(graph):
        texts[row] += f',"Sequence number":{number},"Fwd thread id":{thread}'
    for row, start, duration in _recorded(graph):
        texts[row] += f',"recorded_start_us":{start},"recorded_duration_us":{duration}'
    for row, sources in _dependencies(graph).items():
        texts[row] += f',"depends_on":["{sources}"]'
    return texts


def _sequence_numbers(graph: TaskGraph) -> Iterator[tuple[int, int, int]]:
    """Autograd's numbers of operators, by which backward ones are known."""
    if graph.trace is None or not len(graph.trace):
        return
    rows = np.flatnonzero((graph.event != NONE) & graph.on_cpu)
    rows = rows[graph.trace.sequence[graph.event[rows]] != NONE]
    sequence, thread = graph.trace.sequence[graph.event[rows]], graph.trace.forward_thread[graph.event[rows]]
    yield from zip(rows.tolist(), sequence.tolist(), np.maximum(thread, 0).tolist(), strict=True)


def _recorded(graph: TaskGraph) -> Iterator[tuple[int, float, str | float]]:
    """Rows with their start in the trace, and their duration there: of a call that waits, its waiting included."""
    rows = np.flatnonzero(np.isfinite(graph.recorded_us))
    start = np.round(graph.recorded_us[rows], 3).tolist()
    duration: list[str | float] = ["null"] * len(rows)
    if graph.trace is not None and len(graph.trace):
        lengths = np.round(graph.trace.duration_us[graph.event[rows]], 3).tolist()
        from_trace = (graph.event[rows] != NONE).tolist()
        duration = [length if has else "null" for length, has in zip(lengths, from_trace, strict=True)]
    yield from zip(rows.tolist(), start, duration, strict=True)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _dependencies(graph: TaskGraph) -> dict[int, str]:
    """For each task with stored edges what they come from: ``sync 1234","launch 5``."""
    kinds = [kind.name.lower() for kind in Dependency]
    edges_of: dict[int, str] = {}
    edges = zip(graph.edge_source.tolist(), graph.edge_target.tolist(), graph.edge_kind.tolist(), strict=True)
    for source, target, kind in edges:
        text = f"{kinds[kind]} {source}"
        edges_of[target] = f'{edges_of[target]}","{text}' if target in edges_of else text
    return edges_of


def _arrows(timeline: Timeline, times: _Times) -> Iterator[str]:
    graph, places = timeline.graph, _places(timeline.graph)
    targets: Ints = np.flatnonzero((graph.launch != NONE) & _visible(graph))
    sources = graph.launch[targets]
    begin, end = times.text(timeline.start_us[sources]), times.text(timeline.start_us[targets])
    where = [f'"cat":"ac2g","name":"ac2g","pid":{pid},"tid":{tid},"ts":' for pid, tid in places]
    columns = zip(graph.thread[sources].tolist(), graph.thread[targets].tolist(), begin, end, strict=True)
    for number, (source, target, departed, reached) in enumerate(columns, start=1):
        yield f'{{"ph":"s","id":{number},{where[source]}{departed}}}'
        yield f'{{"ph":"f","bp":"e","id":{number},{where[target]}{reached}}}'


def _critical_path(timeline: Timeline, times: _Times) -> Iterator[str]:
    """The path as a row of its own; each task lasts there until it lets the next one start."""
    graph = timeline.graph
    rows, start, until = critical_segments(timeline)
    names = [_quoted(name) for name in graph.names]
    labels = [resource.label for resource in Resource]
    # Readers of Kineto's files skip "Trace": these are copies of other events.
    head = f'{{"ph":"X","cat":"Trace","pid":{PROCESS_OFFSET + _CRITICAL},"tid":0,"cname":"terrible","name":'
    columns = (rows, graph.name[rows], resources(graph)[rows], np.round(until - start, 3))
    for row, name, kind, length, begin in zip(*(c.tolist() for c in columns), times.text(start), strict=True):
        if length > 0:
            args = f'{{"task":{row},"resource":"{labels[kind]}","critical":true}}'
            yield f'{head}{names[name]},"ts":{begin},"dur":{length},"args":{args}}}'


def _counted(counter: Counter, times: _Times) -> Iterator[str]:
    pid = PROCESS_OFFSET + (counter.device if counter.device != NONE else _CPU + max(counter.process, 0))
    head = f'{{"ph":"C","name":{_quoted(counter.name)},"pid":{pid},"tid":0,"ts":'
    names = [_quoted(name) for name in counter.series]
    columns = zip(*(amounts.tolist() for amounts in counter.series.values()), strict=True)
    for begin, amounts in zip(times.text(counter.time_us), columns, strict=True):
        series = ",".join(f"{name}:{amount}" for name, amount in zip(names, amounts, strict=True))
        yield f'{head}{begin},"args":{{{series}}}}}'
