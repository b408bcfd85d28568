"""Numbers of a device by key path, and device files as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from hal.spec.device import DeviceSpec
from hal.spec.numbers import leaves


def number_at(device: DeviceSpec, path: str) -> float | None:
    """The number under that key path; None where the device has none."""
    return next((value for leaf, value in leaves(device) if leaf == path), None)


def toml_text(device: msgspec.Struct) -> str:
    """A device or a description of cores as TOML, laid out like the shipped files: scalars first, then the tables."""
    return "\n".join(_toml(msgspec.to_builtins(device)))


def json_text(device: msgspec.Struct) -> str:
    """A device or a description of cores as indented JSON, absent numbers left out."""
    present = {key: value for key, value in msgspec.to_builtins(device).items() if value is not None}
    return msgspec.json.format(msgspec.json.encode(present), indent=2).decode() + "\n"


def _toml(fields: Mapping[str, Any]) -> Iterator[str]:
    tables = {key: value for key, value in fields.items() if _is_table(value)}
    for key, value in fields.items():
        if key not in tables and value not in (None, "", [], ()):
            yield f"{key} = {_value(value)}"
    yield ""
    for key in sorted(tables, key=lambda key: key == "provenance"):
        for entry in tables[key] if isinstance(tables[key], list | tuple) else [tables[key]]:
            yield f"[[{key}]]" if isinstance(tables[key], list | tuple) else f"[{key}]"
            yield from (f"{_key(name)} = {_value(item)}" for name, item in entry.items() if item is not None)
            yield ""


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict))


def _key(name: str) -> str:
    return name if name.replace("_", "").isalnum() else json.dumps(name)


def _value(value: Any) -> str:
    """JSON's notation of text, numbers and arrays of them is TOML's too."""
    return json.dumps(value, ensure_ascii=False)
