"""Texts of schedules in a file: one a line, a list of them, or a single one, none of them decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hal.support.errors import InputError
from sokoban.schedule.columns import decoder_message
from sokoban.schedule.table import Ints

MAX_FILE_BYTES = 512 * 1024 * 1024


def file_text(path: str | Path) -> bytes:
    """The text of a file, one byte more than :data:`MAX_FILE_BYTES` at most.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}", "") from None


@dataclass(frozen=True)
class ScheduleTexts:
    """The JSON texts of the schedules of a file, and the place of each: its line, or its position in a list."""

    items: Sequence[bytes]
    source: str
    numbers: Sequence[int] | None

    @staticmethod
    def of(text: bytes, source: str) -> ScheduleTexts:
        """The texts of a file, one per schedule, none of them decoded yet."""
        if len(text) > MAX_FILE_BYTES:
            raise InputError(source, f"larger than {MAX_FILE_BYTES // 2**20} MiB", "split it into several files")
        text = text.removeprefix(b"\xef\xbb\xbf")
        numbers: Sequence[int] | None
        if text[:64].lstrip().startswith(b"["):
            try:
                items = [bytes(raw) for raw in msgspec.json.decode(text, type=list[msgspec.Raw])]
            except (msgspec.DecodeError, RecursionError) as error:
                raise InputError(source, f"broken JSON: {decoder_message(error)}") from None
            numbers = range(len(items))
        else:
            lines = text.split(b"\n")
            numbers = [number for number, line in enumerate(lines, start=1) if line and not line.isspace()]
            items = [lines[number - 1] for number in numbers]
            if len(items) > 1 and not _is_json(items[0]) and _is_json(text):
                items, numbers = [text], None
        if not items:
            raise InputError(source, "holds no schedules", 'write one a line: {"block": {...}, "thread": {...}}')
        return ScheduleTexts(items, source, numbers)

    def picked(self, positions: Ints) -> ScheduleTexts:
        """The texts at some positions."""
        if len(positions) == len(self.items):
            return self
        picked = positions.tolist()
        numbers = None if self.numbers is None else [self.numbers[i] for i in picked]
        return ScheduleTexts([self.items[i] for i in picked], self.source, numbers)

    def place(self, position: int) -> str:
        """``schedules.jsonl[17]``; the file alone where it is one schedule."""
        return self.source if self.numbers is None else f"{self.source}[{self.numbers[position]}]"


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
