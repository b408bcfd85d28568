"""NVIDIA Nsight Systems: the SQLite file of ``nsys export --type sqlite``.

Schema: NVIDIA, *Nsight Systems User Guide*, SQLite schema reference. Times are nanoseconds from the start of the
session. A `globalTid` holds the process in bits 24 to 47 and the thread below; correlations and device numbers are a
process's own. CUPTI's numbers for copies, memory kinds and waits are those of ``cupti_activity.h``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from daydream.trace.recorders.events import Range, Recording, base_call
from daydream.trace.recorders.ranges import add_ranges
from daydream.trace.recorders.tables import Tables
from daydream.trace.text import Document, Notes
from daydream.trace.trace import NONE
from hal.support.errors import InputError

_KERNEL, _GRAPH = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_MEMCPY, _MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_RUNTIME, _SYNC = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_EVENT = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
_PLACE = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId")

#: CUpti_ActivityMemcpyKind.
_COPIES = {
    1: "HtoD",
    2: "DtoH",
    3: "HtoA",
    4: "AtoH",
    5: "AtoA",
    6: "AtoD",
    7: "DtoA",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
}
#: CUpti_ActivityMemoryKind.
_MEMORIES = {0: "Unknown", 1: "Pageable", 2: "Pinned", 3: "Device", 4: "Array", 5: "Managed", 6: "Device", 7: "Managed"}
#: CUpti_ActivitySynchronizationType, in Kineto's words.
_WAITS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
_STREAM_WAIT = 2
#: nsys's event types of NVTX ranges: pushed and popped on a thread, and started and ended anywhere.
_RANGES = (59, 60)


def is_nsys(tables: Tables) -> bool:
    """True for an export of Nsight Systems."""
    return "StringIds" in tables.names and any(name.startswith(("CUPTI_", "NVTX_", "TARGET_")) for name in tables.names)


def nsys_document(tables: Tables, notes: Notes) -> Document:
    """The events of the process with the most kernels.

    Raises:
        InputError: nothing ran on a GPU.
    """
    process = _busiest(tables, notes)
    recording = Recording(process, base_ns=_earliest(tables))
    strings = tables.texts("StringIds")
    launching = _on_device(recording, tables, strings)
    calls = _calls(recording, tables, strings, launching)
    _waits(recording, tables, calls)
    _ranges(recording, tables, strings)
    for name, thread in tables.rows("ThreadNames", "nameId", "globalTid"):
        if _process(thread) == process and name in strings:
            recording.label(_thread(thread), strings[name])
    add_ranges(recording, notes)
    return recording.document(_devices(tables, process), host=_host(tables), epoch_ns=_epoch_ns(tables))


def _process(number: Any) -> int:
    """The process in a serialised number; 0 where the export has none."""
    return (int(number) >> 24) & 0xFFFFFF if number is not None else 0


def _thread(number: Any) -> int:
    return int(number) & 0xFFFFFF if number is not None else 0


def _busiest(tables: Tables, notes: Notes) -> int:
    kernels: Counter[int] = Counter()
    for table in (_KERNEL, _GRAPH):
        kernels.update(_process(number) for (number,) in tables.rows(table, "globalPid"))
    if not kernels:
        remedy = "record with nsys profile --trace=cuda,nvtx, and export that"
        raise InputError(str(tables.path), "has no kernel: CUDA was not traced", remedy)
    process = min(kernels, key=lambda each: (-kernels[each], each))
    if len(kernels) > 1:
        notes.add(f"The file holds {len(kernels)} processes with kernels; that of number {process} is read")
    return process


def _earliest(tables: Tables) -> int:
    starts = [start for table in (_RUNTIME, _KERNEL, "NVTX_EVENTS") for (start,) in tables.rows(table, "start")]
    return min((start for start in starts if isinstance(start, int)), default=0)


def _on_device(recording: Recording, tables: Tables, strings: dict[Any, str]) -> set[int]:
    """Adds what ran on streams; the correlations of the calls that set it off."""
    launching: set[int] = set()

    def add(category: str, name: str, place: tuple[Any, ...], **arguments: Any) -> None:
        begin, end, number, device, stream, correlation = place
        if _process(number) != recording.process:
            return
        launching.add(correlation or 0)
        recording.on_device(
            category, name, begin, max(begin, end if end is not None else begin),
            device=device or 0, stream=stream or 0, correlation=correlation or 0, arguments=arguments,
        )  # fmt: skip

    shape = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
    detail = ("registersPerThread", "staticSharedMemory", "dynamicSharedMemory", "graphNodeId")
    for row in tables.rows(_KERNEL, *_PLACE, "demangledName", "shortName", *shape, *detail):
        place, texts, sizes, (registers, static, dynamic, node) = row[:6], row[6:8], row[8:14], row[14:]
        arguments: dict[str, Any] = {}
        if None not in sizes:
            arguments = {"grid": list(sizes[:3]), "block": list(sizes[3:])}
        if registers is not None:
            arguments["registers per thread"] = registers
            arguments["shared memory"] = (static or 0) + (dynamic or 0)
        if node:
            arguments["graph node id"] = node
        add("kernel", next((strings[each] for each in texts if each in strings), "unnamed kernel"), place, **arguments)
    for row in tables.rows(_GRAPH, *_PLACE, "graphId"):
        add("kernel", f"CUDA graph {row[6]}", row[:6])
    for row in tables.rows(_MEMCPY, *_PLACE, "copyKind", "srcKind", "dstKind", "bytes"):
        source, target = (_MEMORIES.get(kind, "Unknown") for kind in row[7:9])
        name = f"Memcpy {_COPIES.get(row[6], 'Unknown')} ({source} -> {target})"
        add("gpu_memcpy", name, row[:6], bytes=row[9] or 0)
    for row in tables.rows(_MEMSET, *_PLACE, "bytes", "memKind"):
        add("gpu_memset", f"Memset ({_MEMORIES.get(row[7], 'Device')})", row[:6], bytes=row[6] or 0)
    return launching


def _calls(recording: Recording, tables: Tables, strings: dict[Any, str], launching: set[int]) -> dict[int, int]:
    """Adds calls of CUDA's runtime and driver; when each began, by correlation."""
    begins: dict[int, int] = {}
    for begin, end, number, correlation, name in tables.rows(
        _RUNTIME, "start", "end", "globalTid", "correlationId", "nameId"
    ):
        if _process(number) != recording.process:
            continue
        begins.setdefault(correlation, begin)
        recording.call(
            base_call(strings.get(name, "unnamed call")), begin, begin if end is None else end,
            thread=_thread(number), correlation=correlation, launches=correlation in launching,
        )  # fmt: skip
    return begins


def _waits(recording: Recording, tables: Tables, calls: dict[int, int]) -> None:
    """Adds what streams and calls waited for, with the record that an event was waited for at."""
    records: dict[int, list[tuple[int, int, int]]] = {}
    for number, stream, correlation, event in tables.rows(_EVENT, "globalPid", "streamId", "correlationId", "eventId"):
        if _process(number) == recording.process and correlation in calls:
            records.setdefault(event, []).append((calls[correlation], correlation, stream))
    for of_event in records.values():
        of_event.sort()
    for row in tables.rows(_SYNC, *_PLACE, "syncType", "eventId"):
        begin, end, number, device, stream, correlation, kind, event = row
        if _process(number) != recording.process or kind not in _WAITS:
            continue
        # A wait of the whole device names the largest unsigned number as its stream.
        stream = NONE if stream is None or stream >= 2**32 - 1 else stream
        arguments: dict[str, Any] = {}
        called = calls.get(correlation, begin)
        before = [each for each in records.get(event, ()) if each[0] <= called]
        if before and kind in (1, _STREAM_WAIT):
            _, record, recorded_on = before[-1]
            arguments = {"wait_on_stream": recorded_on, "wait_on_cuda_event_record_corr_id": record}
        recording.on_device(
            "cuda_sync", _WAITS[kind], begin, max(begin, end if end is not None else begin),
            device=device or 0, stream=stream, correlation=correlation or 0, arguments=arguments,
        )  # fmt: skip


def _ranges(recording: Recording, tables: Tables, strings: dict[Any, str]) -> None:
    for begin, end, number, kind, text, text_id in tables.rows(
        "NVTX_EVENTS", "start", "end", "globalTid", "eventType", "text", "textId"
    ):
        name = text if text else strings.get(text_id, "")
        if end is None or not name or (kind is not None and kind not in _RANGES):
            continue
        if number is None or _process(number) == recording.process:
            recording.ranges.append(Range(str(name), _thread(number), begin, end))


def _devices(tables: Tables, process: int) -> list[dict[str, Any]]:
    """The boards that the process sees, by the number that it calls them; all where the export does not tell."""
    listed = list(tables.rows("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid"))
    visible = {gpu: cuda for gpu, cuda, pid in listed if pid == process} or {gpu: cuda for gpu, cuda, _ in listed}
    boards = [(visible.get(gpu, gpu), name) for gpu, name in tables.rows("TARGET_INFO_GPU", "id", "name") if name]
    seen = [(number, name) for number, name in boards if not visible or number in visible.values()]
    return [{"id": number, "name": str(name)} for number, name in sorted(seen or boards, key=str)]


def _host(tables: Tables) -> str:
    return tables.texts("TARGET_INFO_SYSTEM_ENV", "name").get("Hostname", "")


def _epoch_ns(tables: Tables) -> int:
    return next((value for (value,) in tables.rows("TARGET_INFO_SESSION_START_TIME", "utcEpochNs") if value), 0)
