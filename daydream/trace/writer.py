"""Trace to Kineto file: what the reader reads, written, so that a predicted step is read like a recorded one."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from daydream.trace.events import MEMORY
from daydream.trace.trace import NONE, Category, Trace
from hal.support.atomic import write_atomic

_CATEGORIES = {
    Category.OPERATOR: "cpu_op",
    Category.ANNOTATION: "user_annotation",
    Category.PYTHON: "python_function",
    Category.RUNTIME: "cuda_runtime",
    Category.KERNEL: "kernel",
    Category.MEMCPY: "gpu_memcpy",
    Category.MEMSET: "gpu_memset",
    Category.SYNC: "cuda_sync",
    Category.GPU_ANNOTATION: "gpu_user_annotation",
}


def write_trace(trace: Trace, path: Path) -> None:
    """Writes a trace as the JSON of PyTorch's profiler, compressed where the name ends in .gz.

    The file appears whole or not at all. Names of rows, arrows from launches to kernels and everything that
    :func:`daydream.trace.files.read_trace` reads stand in it.

    Raises:
        OSError: the file cannot be written.
    """
    text = encoded_trace(trace)
    write_atomic(path, gzip.compress(text, 3, mtime=0) if path.suffix == ".gz" else text)


def encoded_trace(trace: Trace) -> bytes:
    """The JSON text."""
    encoder = msgspec.json.Encoder()
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "deviceProperties": trace.devices,
        "distributedInfo": trace.distributed,
        "daydream": trace.metadata,
    }
    events = b",\n".join(encoder.encode(event) for event in _events(trace))
    return b"".join([encoder.encode(head)[:-1], b',"traceEvents":[\n', events, b"\n]}\n"])


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    yield from _row_names(trace)
    columns = zip(
        trace.name.tolist(), trace.category.tolist(), trace.start_us.tolist(), trace.duration_us.tolist(),
        trace.thread.tolist(), trace.correlation.tolist(), trace.external.tolist(), trace.sequence.tolist(),
        trace.arguments, strict=True,
    )  # fmt: skip
    for name, category, start, duration, thread, correlation, external, sequence, arguments in columns:
        place = trace.threads[thread]
        args = dict(arguments)
        for key, value in (("External id", external), ("correlation", correlation), ("Sequence number", sequence)):
            if value != NONE:
                args[key] = value
        if place.is_stream:
            args |= {"device": place.device, "stream": place.number}
        # Nanoseconds are what the profiler's clocks resolve.
        begin = round(start + trace.origin_us, 3)
        yield {
            "ph": "X", "cat": _CATEGORIES[Category(category)], "name": trace.names[name], "pid": place.process,
            "tid": place.number, "ts": begin, "dur": round(duration, 3), "args": args,
        }  # fmt: skip
        arrow = {"pid": place.process, "tid": place.number, "ts": begin, "id": correlation, "cat": "ac2g"}
        if correlation != NONE and category == Category.RUNTIME:
            yield {"ph": "s", "name": "ac2g", **arrow}
        elif correlation != NONE and place.is_stream:
            yield {"ph": "f", "name": "ac2g", "bp": "e", **arrow}
    yield from _memory(trace)


def _memory(trace: Trace) -> Iterator[dict[str, Any]]:
    memory = trace.memory
    if memory is None:
        return
    columns = (memory.time_us, memory.thread, memory.device, memory.bytes, memory.address, memory.allocated)
    for time, thread, device, size, address, allocated, reserved in zip(
        *(column.tolist() for column in (*columns, memory.reserved)), strict=True
    ):
        place = trace.threads[thread] if thread != NONE else None
        args = {"Device Type": int(device != NONE), "Device Id": device, "Bytes": size}
        optional = (("Addr", address), ("Total Allocated", allocated), ("Total Reserved", reserved))
        yield {
            "ph": "i", "s": "t", "cat": "cpu_instant_event", "name": MEMORY, "pid": place.process if place else 0,
            "tid": place.number if place else 0, "ts": round(time + trace.origin_us, 3),
            "args": args | {key: value for key, value in optional if value != NONE},
        }  # fmt: skip


def _row_names(trace: Trace) -> Iterator[dict[str, Any]]:
    for process in dict.fromkeys(thread.process for thread in trace.threads):
        on_device = any(thread.is_stream and thread.process == process for thread in trace.threads)
        name = {"name": "GPU" if on_device else "python"}
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "ts": 0, "args": name}
    for thread in trace.threads:
        label = thread.label or (f"stream {thread.number}" if thread.is_stream else f"thread {thread.number}")
        place = {"pid": thread.process, "tid": thread.number, "ts": 0}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": label}}
