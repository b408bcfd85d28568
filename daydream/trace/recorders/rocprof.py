"""AMD's rocprofv3: its JSON (``--output-format json``) and its SQLite file (rocpd, the default since ROCm 7).

Fields of both: ROCm, *ROCprofiler-SDK*, "Using rocprofv3" and "Using rocpd output format". Times are nanoseconds. A
grid counts work-items, as HIP's drivers do; Kineto's counts blocks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from daydream.trace.recorders.events import Range, Recording
from daydream.trace.recorders.ranges import add_ranges
from daydream.trace.recorders.tables import Tables
from daydream.trace.text import Document, Notes
from daydream.trace.trace import NONE
from hal.support.errors import InputError

#: The key that all of rocprofv3's JSON stands under.
KEY = "rocprofiler-sdk-tool"

_GPU = 2
_LETTERS = {"HOST": "H", "DEVICE": "D"}
_MEMORIES = {"H": "Host", "D": "Device"}
_TRACE = "record with rocprofv3 --runtime-trace"


def copy_name(text: str) -> str:
    """A copy in Kineto's words.

    >>> copy_name("MEMORY_COPY_HOST_TO_DEVICE"), copy_name("DEVICE_TO_DEVICE"), copy_name("CopyDeviceToHost")
    ('Memcpy HtoD (Host -> Device)', 'Memcpy DtoD (Device -> Device)', 'Memcpy DtoH (Device -> Host)')
    """
    words = text.upper().replace("_", "").partition("TO")
    source, target = (
        next((letter for word, letter in _LETTERS.items() if word in side), "") for side in (words[0], words[2])
    )
    if not source or not target:
        return "Memcpy Unknown (Unknown -> Unknown)"
    return f"Memcpy {source}to{target} ({_MEMORIES[source]} -> {_MEMORIES[target]})"


def shape(grid: Sequence[Any], group: Sequence[Any]) -> dict[str, Any]:
    """Blocks of a grid of work-items, and work-items of a block; nothing where either is unknown."""
    if None in (*grid, *group) or not all(group):
        return {}
    blocks = [-(-items // size) for items, size in zip(grid, group, strict=True)]
    return {"grid": blocks, "block": list(group)}


# JSON


def rocprof_document(path: Path, data: bytes, notes: Notes) -> Document:
    """The events of the process with the most kernels in a JSON file of rocprofv3.

    Raises:
        InputError: it is no such file, or nothing ran on a GPU.
    """
    import msgspec

    try:
        content = msgspec.json.decode(data)[KEY]
        processes = [each for each in (content if isinstance(content, list) else [content]) if each]
        process: dict[str, Any] = max(processes, key=lambda each: len(_records(each, "kernel_dispatch")), default={})
        if len(processes) > 1:
            number = process["metadata"]["pid"]
            notes.add(f"The file holds {len(processes)} processes; that of number {number}, with most kernels, is read")
        if not _records(process, "kernel_dispatch"):
            raise InputError(str(path), "has no kernel", _TRACE)
        return _document(process, notes)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        where = f"{type(error).__name__}: {error}"
        raise InputError(
            str(path), f"is no complete file of rocprofv3 ({where})", f"{_TRACE} --output-format json"
        ) from None


def _records(process: Any, kind: str) -> list[dict[str, Any]]:
    records = process.get("buffer_records", {}) if isinstance(process, dict) else {}
    # The first versions wrote kernel_dispatches and memory_copies.
    plural = "memory_copies" if kind == "memory_copy" else f"{kind}es"
    listed = records.get(kind, records.get(plural))
    return listed if isinstance(listed, list) else []


def _document(process: dict[str, Any], notes: Notes) -> Document:
    dispatches, copies = _records(process, "kernel_dispatch"), _records(process, "memory_copy")
    calls = [*_records(process, "hip_api"), *_records(process, "rccl_api")]
    markers = _records(process, "marker_api")
    earliest = min(each["start_timestamp"] for each in (*dispatches, *copies, *calls, *markers))
    recording = Recording(int(process["metadata"]["pid"]), base_ns=int(earliest))
    agents = process.get("agents", [])
    boards = [each for each in agents if each.get("type") == _GPU]
    number = {each["id"]["handle"]: place for place, each in enumerate(boards)}
    symbols = _symbols(process.get("kernel_symbols", []))
    kinds = process["strings"]["buffer_records"]
    has_streams = any("stream_id" in each for each in dispatches)
    for each in dispatches:
        info = each["dispatch_info"]
        grid, group = ([info[key][axis] for axis in "xyz"] for key in ("grid_size", "workgroup_size"))
        recording.on_device(
            "kernel", symbols.get(info["kernel_id"], "unnamed kernel"), each["start_timestamp"], each["end_timestamp"],
            device=number.get(info["agent_id"]["handle"], 0),
            stream=(each["stream_id"] if has_streams else info["queue_id"])["handle"],
            correlation=_correlation(each), arguments=shape(grid, group),
        )  # fmt: skip
    for each in copies:
        ends = (each["src_agent_id"]["handle"], each["dst_agent_id"]["handle"])
        recording.on_device(
            "gpu_memcpy", copy_name(_operation(kinds, each)), each["start_timestamp"], each["end_timestamp"],
            device=next((number[handle] for handle in ends if handle in number), 0),
            stream=each.get("stream_id", {}).get("handle", NONE), correlation=_correlation(each),
            arguments={"bytes": each.get("bytes", 0)},
        )  # fmt: skip
    launching = {_correlation(each) for each in (*dispatches, *copies)}
    for each in calls:
        recording.call(
            _operation(kinds, each), each["start_timestamp"], each["end_timestamp"], thread=each["thread_id"],
            correlation=_correlation(each), launches=_correlation(each) in launching,
        )  # fmt: skip
    messages = {entry["key"]: entry["value"] for entry in process["strings"].get("marker_api", [])}
    for each in markers:
        message = messages.get(_correlation(each))
        if message and each["end_timestamp"] > each["start_timestamp"]:
            recording.ranges.append(Range(message, each["thread_id"], each["start_timestamp"], each["end_timestamp"]))
    add_ranges(recording, notes)
    names = [each.get("product_name") or each.get("name") for each in boards]
    return recording.document(_devices(names))


def _correlation(record: dict[str, Any]) -> int:
    return int(record["correlation_id"]["internal"])


def _symbols(listed: Any) -> dict[Any, str]:
    """Names of kernels by their number, which is their place in the files of the first versions."""
    pairs = listed.items() if isinstance(listed, dict) else enumerate(listed)
    return {
        each.get("kernel_id", place): _undecorated(each.get("formatted_kernel_name") or each.get("kernel_name"))
        for place, each in pairs
    }


def _undecorated(symbol: Any) -> str:
    """A kernel's name without the ending of its descriptor in the code object."""
    return str(symbol or "unnamed kernel").removesuffix(".kd")


def _operation(kinds: Any, record: dict[str, Any]) -> str:
    return str(kinds[record["kind"]]["operations"][record["operation"]])


def _devices(names: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"id": place, "name": str(name)} for place, name in enumerate(names) if name]


# SQLite


def is_rocpd(tables: Tables) -> bool:
    """True for a database of rocprofv3."""
    return {"rocpd_info_agent", "kernels", "regions"} <= tables.names


def rocpd_document(tables: Tables, notes: Notes) -> Document:
    """The events of the process with the most kernels in a rocpd file.

    Raises:
        InputError: nothing ran on a GPU.
    """
    kernels = Counter(pid for (pid,) in tables.rows("kernels", "pid"))
    if not kernels:
        raise InputError(str(tables.path), "has no kernel", _TRACE)
    process = min(kernels, key=lambda each: (-kernels[each], each))
    if len(kernels) > 1:
        notes.add(f"The file holds {len(kernels)} processes with kernels; that of number {process} is read")
    starts = [start for table in ("kernels", "regions", "memory_copies") for (start,) in tables.rows(table, "start")]
    recording = Recording(process, base_ns=min(starts))
    launching: set[int] = set()
    sizes = ("grid_x", "grid_y", "grid_z", "workgroup_x", "workgroup_y", "workgroup_z")
    for name, pid, device, stream, begin, end, call, *size in tables.rows(
        "kernels", "name", "pid", "agent_type_index", "stream_id", "start", "end", "stack_id", *sizes
    ):
        if pid == process:
            launching.add(call or 0)
            recording.on_device(
                "kernel", _undecorated(name), begin, end, device=device or 0, stream=stream or 0, correlation=call or 0,
                arguments=shape(size[:3], size[3:]),
            )  # fmt: skip
    agent = ("dst_agent_type", "dst_agent_type_index", "src_agent_type_index")
    for name, pid, stream, begin, end, call, size, kind, target, source in tables.rows(
        "memory_copies", "name", "pid", "stream_id", "start", "end", "stack_id", "size", *agent
    ):
        if pid == process:
            launching.add(call or 0)
            recording.on_device(
                "gpu_memcpy", copy_name(str(name)), begin, end, device=(target if kind == "GPU" else source) or 0,
                stream=NONE if stream is None else stream, correlation=call or 0, arguments={"bytes": size or 0},
            )  # fmt: skip
    for category, name, pid, thread, begin, end, call, more in tables.rows(
        "regions", "category", "name", "pid", "tid", "start", "end", "stack_id", "extdata"
    ):
        if pid != process:
            continue
        if str(category).startswith("MARKER"):
            label = _message(more) or str(name)
            if end > begin and not label.startswith("roctx"):
                recording.ranges.append(Range(label, thread, begin, end))
        elif str(category).startswith(("HIP", "RCCL")):
            recording.call(
                str(name), begin, end, thread=thread, correlation=call or 0, launches=bool(call) and call in launching
            )
    add_ranges(recording, notes)
    boards = sorted(
        (place or 0, product or name)
        for place, kind, product, name in tables.rows("rocpd_info_agent", "type_index", "type", "product_name", "name")
        if kind == "GPU"
    )
    return recording.document(_devices(name for _, name in boards))


def _message(text: Any) -> str:
    """The message of a marker in a region's further data."""
    try:
        message = json.loads(text or "{}").get("message")
    except (ValueError, AttributeError, TypeError):
        return ""
    return message if isinstance(message, str) else ""
