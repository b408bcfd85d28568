"""JSON files of one type and one format each, written in one step."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from hal.support.atomic import write_atomic
from hal.support.errors import InputError


class _Formatted(Protocol):
    @property
    def format(self) -> int: ...


_T = TypeVar("_T", bound=_Formatted)


def write_file(path: Path, value: _Formatted) -> None:
    """Write ``value`` as indented JSON."""
    write_atomic(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def read_file(path: Path, kind: type[_T], wanted_format: int, made_by: str, remedy: str) -> _T:
    """The value in a file.

    Args:
        made_by: what a file of this kind is, for a name that leads nowhere.
        remedy: what to do about a damaged file, or one of another format than ``wanted_format``.

    Raises:
        InputError: it cannot be read, is damaged, or of another format.
    """
    try:
        value = msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read", f"name {made_by}") from None
    except msgspec.DecodeError as error:
        raise InputError(str(path), str(error), remedy) from None
    if value.format != wanted_format:
        raise InputError(f"{path}: format", f"is {value.format}, not {wanted_format}", remedy)
    return value
