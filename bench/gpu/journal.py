"""Measurements of a harvest: a journal that survives being killed, results.json made of it, archives of traces.

The journal (``journal.jsonl``) gets one line per finished item, in one write that is flushed to disk; a line cut off by
a kill is dropped when it is read. An item that was begun and never finished has crashed or hung its process, and is
not tried again.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from pathlib import Path
from typing import Any

from hal.support.atomic import write_atomic
from roller.profile.harvested import HARVEST, HARVEST_FORMAT

SECTIONS = ("microbench", "profile", "operators", "training")

#: No output may be larger than this, traces included.
MOST_BYTES = 16 << 20
#: An archive takes no trace beyond this, to leave room for its headers.
MOST_ARCHIVE_BYTES = MOST_BYTES - (1 << 20)

Item = dict[str, Any]


class Journal:
    """Items of a harvest by section and key, kept in `directory`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.path = directory / "journal.jsonl"
        self._items: dict[tuple[str, str], Item] = {}
        self._begun: tuple[str, str] | None = None
        self._notes: dict[str, Any] = {}
        for line in self._lines():
            self._read(line)

    def _lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        if lines[-1]:  # cut off by a kill: what comes next must begin a line of its own
            with self.path.open("ab") as file:
                file.write(b"\n")
        return [line for line in lines if line]

    def _read(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            kind = entry["kind"]
        except (ValueError, KeyError, TypeError):
            return
        if kind == "begin":
            self._begun = entry["section"], entry["key"]
        elif kind == "item":
            self._items[entry["section"], entry["key"]] = entry["item"]
            self._begun = None
        elif kind == "forget":
            self._items.pop((entry["section"], entry["key"]), None)
        elif kind == "note":
            self._note(entry["name"], entry["value"])

    def _note(self, name: str, value: Any) -> None:
        note = self._notes.get(name)
        if isinstance(note, dict) and isinstance(value, dict):
            note.update(value)
        elif isinstance(note, list) and isinstance(value, list):
            note.extend(value)
        else:
            self._notes[name] = value

    def done(self, section: str, key: str) -> bool:
        """True if the item was measured or has failed."""
        return (section, key) in self._items

    def begin(self, section: str, key: str) -> None:
        """Say that an item is about to be measured."""
        self._begun = section, key
        self._append({"kind": "begin", "section": section, "key": key})

    def add(self, section: str, key: str, item: Item) -> None:
        """Keep a finished item; one that failed has a key ``error``."""
        self._items[section, key] = item
        self._begun = None
        self._append({"kind": "item", "section": section, "key": key, "item": item})

    def note(self, name: str, value: Any) -> None:
        """Keep something besides the items; dictionaries of one name are merged, lists are joined."""
        self._note(name, value)
        self._append({"kind": "note", "name": name, "value": value})

    def abandon(self, error: str) -> tuple[str, str] | None:
        """Fail the item that was begun and not finished; returns it, or None if there is none."""
        begun = self._begun
        if begun is not None:
            self.add(*begun, {"error": error})
        return begun

    def drop_failures(self) -> int:
        """Forget failed items, so that they are tried again; returns how many."""
        failed = [key for key, item in self._items.items() if item.get("error")]
        for section, key in failed:
            del self._items[section, key]
            self._append({"kind": "forget", "section": section, "key": key})
        return len(failed)

    def noted(self, name: str) -> Any:
        """Value kept under a name, or None."""
        return self._notes.get(name)

    def items(self, section: str) -> list[Item]:
        """The items of a section that were measured, each with its ``key``, in the order of their first line."""
        entries = [(key, item) for (name, key), item in self._items.items() if name == section]
        return [{"key": key, **item} for key, item in entries if not item.get("error")]

    def _append(self, entry: Item) -> None:
        data = json.dumps(entry, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)

    def write_results(self) -> Path:
        """Write ``results.json`` of all there is so far; see docs/harvest.md for its keys."""
        errors = [
            {"section": section, "key": key, "error": str(item["error"])}
            for (section, key), item in self._items.items()
            if item.get("error")
        ]
        results: dict[str, Any] = {
            "format": HARVEST_FORMAT,
            "dry_run": bool(self._notes.get("dry_run", False)),
            "started": self._notes.get("started", ""),
            "environment": self._notes.get("environment", {}),
            "sections": self._notes.get("sections", {}),
            **{section: self.items(section) for section in SECTIONS},
            "correctness": self._correctness(),
            "samples": thinned(self._notes.get("samples", [])),
            "errors": errors,
        }
        path = self.directory / HARVEST
        write_atomic(path, json.dumps(results, indent=0, allow_nan=False).encode() + b"\n")
        return path

    def _correctness(self) -> list[Item]:
        """One line for every candidate of an operator and every profiled kernel: how far from the reference."""
        log = []
        for section, of in (("operators", "candidates"), ("profile", "kernels")):
            for item in self.items(section):
                for one in item.get(of, []):
                    check = one.get("check")
                    log.append(
                        {
                            "where": f"{section} {item['key']}",
                            "what": str(one["name"]) if "name" in one else f"rank {one['rank']}",
                            "passed": bool(check and check["passed"]),
                            "check": check,
                            "reason": one.get("reason", ""),
                        }
                    )
        return log


def thinned(samples: list[Any], most: int = 2000) -> list[Any]:
    """At most `most` of a long list, evenly spaced."""
    step = -(-len(samples) // most) if samples else 1
    return samples[::step]


def archive(path: Path, name: str, data: bytes, most_bytes: int = MOST_ARCHIVE_BYTES) -> bool:
    """Add a file to a tar archive, which is replaced as a whole; False if it would become larger than `most_bytes`."""
    old = path.read_bytes() if path.exists() else b""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as new:
        if old:
            with tarfile.open(fileobj=io.BytesIO(old)) as before:
                for member in before.getmembers():
                    if member.name != name:
                        new.addfile(member, before.extractfile(member))
        info = tarfile.TarInfo(name)
        info.size, info.mtime = len(data), int(time.time())
        new.addfile(info, io.BytesIO(data))
    if len(buffer.getvalue()) > most_bytes:
        return False
    write_atomic(path, buffer.getvalue())
    return True
