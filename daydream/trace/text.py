"""The text of a Kineto trace as events of known types, however old, large or damaged the file is.

A well-formed file is decoded in one go into typed events. Where that fails, events are decoded one by one:
what is complete and makes sense is kept, and a note counts the rest.
"""

from __future__ import annotations

import gc
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from hal.support.errors import InputError

#: Longest text that is read; a small gzip file can hold far more than any memory.
MAX_BYTES = 4 << 30

#: Damaged places after which the rest of a file is not looked at.
_MAX_DAMAGE = 1000
#: Places nested too deep after which the rest is not looked at: each may cost a pass over the file.
_MAX_DEEP = 50

Key = int | str | float


class Event(msgspec.Struct, gc=False):
    """One entry of traceEvents. Times are microseconds; missing entries are None."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: Key | None = None
    tid: Key | None = None
    ts: Any = None
    """float or None; Decimal where the file needs more digits than a float has (`Document.exact`)."""
    dur: float | None = None
    id: Key | None = None
    args: dict[str, Any] | None = None


# The two ways to decode a time; everything else is inherited.
class _FloatEvent(Event, gc=False):
    ts: float | None = None


class _ExactEvent(Event, gc=False):
    ts: Decimal | None = None


class _Head(msgspec.Struct):
    deviceProperties: Any = None
    distributedInfo: Any = None
    daydream: Any = None
    baseTimeNanoseconds: Any = None
    host_name: Any = None


class _FloatFile(_Head):
    traceEvents: list[_FloatEvent] | None = None


class _ExactFile(_Head):
    traceEvents: list[_ExactEvent] | None = None


@dataclass
class Notes:
    """What was left out or repaired, counted. A `{}` in a sentence becomes "1 event" or "12 events"."""

    counts: dict[str, int] = field(default_factory=dict)
    cut_off: bool = False
    """Whether the end of the file is missing."""

    def add_cut(self, sentence: str) -> None:
        """Note that the file ends too early, or that its rest is not read."""
        self.add(sentence)
        self.cut_off = True

    def add(self, sentence: str, count: int = 1) -> None:
        """Count `count` more events under this sentence; none if `count` is 0."""
        if count:
            self.counts[sentence] = self.counts.get(sentence, 0) + count

    def sentences(self) -> tuple[str, ...]:
        """One finished sentence per kind of note, in the order in which the kinds were met."""
        return tuple(text.format(f"{n} event{'s' * (n != 1)}") for text, n in self.counts.items())


@dataclass
class Document:
    """A decoded trace: its events in the file's order, and the other entries of the file that matter."""

    events: list[Event]
    head: dict[str, Any]
    exact: bool
    """Whether times are Decimal: microseconds since 1970 with nanoseconds, of which a float keeps every 250th."""


def read_document(path: Path, notes: Notes) -> Document:
    """The events of the trace at `path`, plain or compressed with gzip.

    Raises:
        InputError: there is no such file, it cannot be read, or it is not a trace.
    """
    data = read_bytes(path, notes)
    if not _WRITTEN.search(data):
        raise InputError(str(path), "is empty", "give a trace that the PyTorch profiler exported")
    exact = _needs_exact(data)
    return _decode(data, exact) or _recover(path, data, exact, notes)


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause garbage collection: there is a dict per event, and it would walk all of them again and again.

    What was read is frozen then: it has no cycles, counting references frees it, and the first collections afterwards
    would walk it all the same (6 of 15 s for a million events).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()


def read_bytes(path: Path, notes: Notes) -> bytes:
    """The text of a file, decompressed, without a byte order mark.

    Raises:
        InputError: there is no such file, it cannot be read, or it holds more than :data:`MAX_BYTES`.
    """
    try:
        if path.is_dir():
            raise InputError(str(path), "is a directory", "give a trace file")
        # A device or a pipe may never end.
        if path.exists() and not path.is_file():
            raise InputError(str(path), "is not a regular file", "give a trace file")
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(str(path), "no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if data[:2] == b"\x1f\x8b":
        data = _decompress(path, data, notes)
    return data.removeprefix(b"\xef\xbb\xbf")


def _decompress(path: Path, data: bytes, notes: Notes) -> bytes:
    """Every member of a gzip file; of a cut or damaged one, what comes before the damage."""
    texts: list[bytes] = []
    room = MAX_BYTES
    while data[:2] == b"\x1f\x8b":
        member = zlib.decompressobj(31)
        try:
            text = member.decompress(data, room + 1)
        except zlib.error:
            texts.append(_until_damage(data, room))
            notes.add_cut("The compressed data is damaged; what comes before the damage is used")
            break
        room -= len(text)
        if room < 0:
            raise InputError(str(path), f"holds more than {MAX_BYTES >> 30} GiB of text", "record fewer steps")
        texts.append(text)
        if not member.eof:
            notes.add_cut("The compressed file is cut off; what is there is used")
            break
        data = member.unused_data
    return texts[0] if len(texts) == 1 else b"".join(texts)


def _until_damage(data: bytes, room: int, piece: int = 1024) -> bytes:
    member = zlib.decompressobj(31)
    texts: list[bytes] = []
    for start in range(0, len(data), piece):
        try:
            texts.append(member.decompress(data[start : start + piece], room))
        except zlib.error:
            break
        room -= len(texts[-1])
        if room <= 0:
            break
    return b"".join(texts)


_WRITTEN = re.compile(rb"\S")
_LONG_TIME = re.compile(rb'"ts"\s*:\s*"?\d{13,}\.\d')


def _needs_exact(data: bytes) -> bool:
    return _LONG_TIME.search(data, 0, 1 << 20) is not None


def _decode(data: bytes, exact: bool) -> Document | None:
    """The whole file at once; None if it is not JSON or an event has an unexpected type."""
    first = _WRITTEN.search(data)
    is_list = first is not None and first[0] == b"["
    target: Any = _ExactFile if exact else _FloatFile
    if is_list:
        target = list[_ExactEvent] if exact else list[_FloatEvent]
    for strict in (True, False):  # times written as text pass the second
        try:
            decoded = msgspec.json.Decoder(target, strict=strict).decode(data)
        except msgspec.ValidationError:
            continue
        except (ValueError, RecursionError):
            return None
        if is_list:
            return Document(decoded, {}, exact)
        if decoded.traceEvents is None:
            return None
        head = {name: getattr(decoded, name) for name in _Head.__struct_fields__}
        return Document(decoded.traceEvents, head, exact)
    return None


_EVENTS = re.compile(r'"traceEvents"\s*:\s*(?=\[)')
_OPENING = re.compile(r"[\s,\[]*")
_CLOSING = re.compile(r"[\s,\]]*")
_EVENT_START = re.compile(r'\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id|bp|s|args)"\s*:')
_SURROGATES = re.compile(
    r"(\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)


def _recover(path: Path, data: bytes, exact: bool, notes: Notes) -> Document:
    """Every event that is complete, from a file that does not decode as a whole."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        notes.add("The text is not UTF-8 throughout; what is not was replaced")
    # Half a surrogate pair decodes to text that cannot be printed or written.
    text = _SURROGATES.sub(lambda match: match[1] or "\ufffd", text)
    begin = _EVENTS.search(text)
    if begin is None and not text.lstrip().startswith("["):
        raise InputError(
            str(path), "is not a trace: it has no list traceEvents", "give a trace of the PyTorch profiler"
        )
    scan = _Scan(text, begin.end() if begin else 0, exact, notes)
    events = list(scan.events())
    head = _head(text[: begin.start()], text[scan.position :]) if begin else {}
    return Document(events, head, exact)


class _Scan:
    """Walks a list of events, one event at a time, and past what is damaged."""

    def __init__(self, text: str, position: int, exact: bool, notes: Notes) -> None:
        self.text = text
        self.position = position
        self.exact = exact
        self.notes = notes
        self.decode = json.JSONDecoder(strict=False, parse_float=_long_float if exact else None).raw_decode
        self.damaged = 0
        self.too_deep = 0

    def events(self) -> Iterator[Event]:
        """The events that are complete. Afterwards `position` is behind the list."""
        resumed = False  # what follows damage may be a fragment of the damaged event: not worth a note
        while self._to_next_entry():
            try:
                entry, self.position = self.decode(self.text, self.position)
            except (ValueError, RecursionError) as error:
                resumed = True
                if not self._resume(error):
                    break
                continue
            event = _event(entry, self.exact, self.notes, quiet=resumed)
            if event is not None:
                resumed = False
                yield event
        self.notes.add("{} damaged or cut, left out", self.damaged)

    def _to_next_entry(self) -> bool:
        """Over separators and the brackets of lists within the list; False behind its end."""
        self.position = _skip(_OPENING, self.text, self.position)
        if self.text[self.position : self.position + 1] == "]":
            self.position = _skip(_CLOSING, self.text, self.position)
            self.position = _skip(_OPENING, self.text, self.position)
            return self.text[self.position : self.position + 1] == "{"
        if self.position >= len(self.text):
            self.notes.add_cut("The file is cut off; every complete event is used")
            return False
        return True

    def _resume(self, error: ValueError | RecursionError) -> bool:
        """Move to where the next event seems to start; False if there is none or too much is damaged."""
        self.damaged += 1
        if isinstance(error, json.JSONDecodeError):
            # Not from the event's own start: a damaged place would be read again for every object around it.
            self.position = max(self.position + 1, error.pos - 1)
        else:
            self.too_deep += 1
            self.position += 1
        following = _EVENT_START.search(self.text, self.position)
        if following is None:
            self.position = len(self.text)
            self.notes.add_cut("The file is cut off; every complete event is used")
            return False
        self.position = following.start()
        if self.damaged >= _MAX_DAMAGE or self.too_deep >= _MAX_DEEP:
            self.notes.add_cut("The file is damaged in too many places; the rest of it is left out")
            return False
        return True


def _skip(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position


class _LongFloat(float):
    """A float that remembers its digits; anywhere but in a time it is as good as any."""

    digits: str


def _long_float(digits: str) -> float:
    if digits.find(".") < 13:
        return float(digits)
    value = _LongFloat(digits)
    value.digits = digits
    return value


def _head(before: str, after: str) -> dict[str, Any]:
    """The entries of the file before and after its events, as far as they can be read."""
    head: dict[str, Any] = {}
    for text in (before.rstrip().rstrip(",") + "}", "{" + after):
        try:
            entries = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            continue
        head.update({name: entries[name] for name in _Head.__struct_fields__ if name in entries})
    return head


def _event(entry: Any, exact: bool, notes: Notes, quiet: bool) -> Event | None:
    """This entry with every field of its type or None; None for what is no event at all."""
    if not isinstance(entry, dict) or not isinstance(entry.get("ph"), str):
        notes.add("{} without a phase, left out", 0 if quiet else 1)
        return None
    arguments = entry.get("args")
    if arguments is not None and not isinstance(arguments, dict):
        notes.add("{} with arguments that are not an object; these were dropped")
        arguments = None
    time: Any = _number(entry.get("ts"))
    if time is not None:
        time = Decimal(getattr(time, "digits", time)) if exact else float(time)
    duration = _number(entry.get("dur"))
    return Event(
        ph=entry["ph"],
        cat=_text(entry.get("cat")),
        name=_text(entry.get("name")),
        pid=_key(entry.get("pid")),
        tid=_key(entry.get("tid")),
        ts=time,
        dur=None if duration is None else float(duration),
        id=_key(entry.get("id")),
        args=arguments,
    )


def _text(value: Any) -> str | None:
    if isinstance(value, int | float):
        return str(value)
    return value if isinstance(value, str) else None


def _key(value: Any) -> Key | None:
    return value if isinstance(value, int | str | float) and not isinstance(value, bool) else None


def _number(value: Any) -> int | float | None:
    """A number, also one written as text; None for anything else, and for those that no time can be."""
    if isinstance(value, str):
        try:
            value = _long_float(value.strip())
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < 1e18 else None
