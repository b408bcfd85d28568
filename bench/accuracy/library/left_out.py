"""Constants that were chosen without a board: where they are written, and the model with them for a while."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

#: What was chosen, by kind of call and board; the file explains itself.
CHOSEN = Path(__file__).with_name("without.toml")


def fitted_without(board: str, kind: str, path: Path = CHOSEN) -> AbstractContextManager[None] | None:
    """The model of a kind of call, its constants chosen without a board, inside the block; None where there are none.

    Raises:
        AttributeError: a field that the model's constants lack.
    """
    table = _chosen(path).get(kind, {})
    values = table.get("without", {}).get(board)
    if values is None:
        return None
    module, _, name = table["constants"].partition(":")
    constants = import_module(module)
    return replaced(getattr(constants, name) if name else constants, values)


@contextmanager
def replaced(constants: object, values: Mapping[str, Any]) -> Iterator[None]:
    """Fields of a frozen value, or of a module, with other values inside the block, in place.

    Functions hold the value as a default. Fields of fields are joined by dots; a step into a mapping is its key.
    """
    before: list[tuple[object, str, Any]] = []
    try:
        for path, value in values.items():
            *steps, name = path.split(".")
            owner = reduce(_part, steps, constants)
            before.append((owner, name, _part(owner, name)))
            _put(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            _put(owner, name, value)


def _put(owner: object, name: str, value: Any) -> None:
    """A field of a value that may be frozen, of a mapping, or of a module."""
    if isinstance(owner, MutableMapping):
        owner[name] = value
    elif isinstance(owner, ModuleType):
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)


def _part(owner: object, name: str) -> object:
    return owner[name] if isinstance(owner, Mapping) else getattr(owner, name)


@cache
def _chosen(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text("utf-8"))
