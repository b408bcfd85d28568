"""A trace file of any recorder, as columns: its first bytes select the reader."""

from __future__ import annotations

import zlib
from pathlib import Path

from daydream.trace.kineto import trace_of
from daydream.trace.text import Document, Notes, no_collection, read_bytes, read_document
from daydream.trace.trace import Trace
from hal.support.errors import InputError

#: Bytes at the beginning of a file that tell what it is.
_HEAD = 1 << 14

_SQLITE = b"SQLite format 3\0"

#: Endings of trace files in a folder.
ENDINGS = (".json", ".json.gz", ".sqlite", ".sqlite3", ".db", ".rpd")


def read_trace(path: Path) -> Trace:
    """The trace in a file of PyTorch's profiler, of ``nsys export``, of rocprofv3 or of rocmProfileData.

    A file that is cut off or partly damaged gives what is left of it, and `Trace.warnings` says what is missing.

    Raises:
        InputError: there is no such file, it cannot be read, or no usable event is in it; where another command makes
            a readable file of it, the message has that command.
    """
    path, notes = Path(path), Notes()
    head = _head(path)
    if not head.startswith(_SQLITE):
        from daydream.trace.recorders.others import refuse_others

        refuse_others(path, head)
    try:
        with no_collection():
            return trace_of(path, _document(path, head, notes), notes)
    except MemoryError:
        raise InputError(str(path), "needs more memory than there is", "record fewer steps") from None


def _head(path: Path) -> bytes:
    """The first bytes of a file, decompressed; none of one that is no regular file, which the reader will refuse."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            data = file.read(_HEAD)
    except (OSError, ValueError):
        return b""
    if data[:2] == b"\x1f\x8b":
        try:
            data = zlib.decompressobj(31).decompress(data, _HEAD)
        except zlib.error:
            return b""
    return data


def _document(path: Path, head: bytes, notes: Notes) -> Document:
    # Most traces are PyTorch's.
    from daydream.trace.recorders import rocprof

    if not head.startswith(_SQLITE):
        is_rocprof = f'"{rocprof.KEY}"'.encode() in head
        return (
            rocprof.rocprof_document(path, read_bytes(path, notes), notes) if is_rocprof else read_document(path, notes)
        )
    from daydream.trace.recorders import nsys, rpd
    from daydream.trace.recorders.tables import open_tables

    with open_tables(path) as tables:
        if nsys.is_nsys(tables):
            return nsys.nsys_document(tables, notes)
        if rocprof.is_rocpd(tables):
            return rocprof.rocpd_document(tables, notes)
        if rpd.is_rpd(tables):
            return rpd.rpd_document(tables, notes)
    raise InputError(
        str(path), "is a database of no recorder that is known", "give one of nsys export --type sqlite or rocprofv3"
    )
