"""Frozen records made in loops that run some hundred times per millisecond."""

from __future__ import annotations

from typing import Any, TypeVar

Record = TypeVar("Record")


def quick(kind: type[Record], **fields: Any) -> Record:
    """``kind(**fields)`` of a frozen dataclass, with every field given: a third of the time that its constructor takes,
    which sets one field after the other.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Tile:
    ...     rows: int
    >>> quick(Tile, rows=3) == Tile(rows=3)
    True
    """
    record = object.__new__(kind)
    record.__dict__.update(fields)
    return record
