"""ROCm's rocmProfileData (RPD): SQLite files of ``runTracer.sh``.

Schema: ROCm, *rocmProfileData*, ``rocpd_python``. Times are nanoseconds; an operation on a device has its call in
``rocpd_api_ops``, and a range of the program is a call named UserMarker whose arguments are its text.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from daydream.trace.recorders.events import Range, Recording
from daydream.trace.recorders.ranges import add_ranges
from daydream.trace.recorders.rocprof import copy_name
from daydream.trace.recorders.tables import Tables
from daydream.trace.text import Document, Notes
from hal.support.errors import InputError

_CALL = ("id", "pid", "tid", "start", "end", "apiName_id", "args_id")


def is_rpd(tables: Tables) -> bool:
    """True for a database of rocmProfileData."""
    return {"rocpd_api", "rocpd_op", "rocpd_api_ops", "rocpd_string"} <= tables.names


def rpd_document(tables: Tables, notes: Notes) -> Document:
    """The events of the process with the most operations on devices.

    Raises:
        InputError: nothing ran on a GPU.
    """
    texts = tables.texts("rocpd_string", "id", "string")
    call_of = dict(tables.rows("rocpd_api_ops", "op_id", "api_id"))
    process_of = dict(tables.rows("rocpd_api", "id", "pid"))
    operations = list(tables.rows("rocpd_op", "id", "gpuId", "queueId", "start", "end", "description_id", "opType_id"))
    of_process = Counter(process_of[call_of[each[0]]] for each in operations if call_of.get(each[0]) in process_of)
    if not of_process:
        raise InputError(str(tables.path), "has no kernel that a call launched", "record with runTracer.sh again")
    process = min(of_process, key=lambda each: (-of_process[each], each))
    if len(of_process) > 1:
        notes.add(f"The file holds {len(of_process)} processes with kernels; that of number {process} is read")
    calls = [each for each in tables.rows("rocpd_api", *_CALL) if each[1] == process]
    begins = [each[3] for each in (*operations, *calls)]
    recording = Recording(process, base_ns=min(begins))
    launching: set[Any] = set()
    for number, device, queue, begin, end, description, kind in operations:
        call = call_of.get(number)
        if process_of.get(call, process) != process:
            continue
        launching.add(call)
        kind_text, text = texts.get(kind, ""), texts.get(description, "")
        is_copy = "copy" in kind_text.lower()
        category = "gpu_memcpy" if is_copy else "gpu_memset" if "fill" in kind_text.lower() else "kernel"
        recording.on_device(
            category, copy_name(kind_text) if is_copy else text or kind_text or "unnamed kernel", begin, end,
            device=device, stream=queue, correlation=call or 0,
        )  # fmt: skip
    for number, _, thread, begin, end, name, more in calls:
        if texts.get(name) == "UserMarker":
            recording.ranges.append(Range(texts.get(more, ""), thread, begin, end))
        else:
            recording.call(
                texts.get(name, "unnamed call"), begin, end, thread=thread, correlation=number,
                launches=number in launching,
            )  # fmt: skip
    add_ranges(recording, notes)
    return recording.document([])
