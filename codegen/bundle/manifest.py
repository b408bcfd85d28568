"""Manifests where the compiler runs: their JSON written, read by types, and described by a JSON Schema.

``manifest.json`` holds everything a caller needs to launch a kernel; its records are in :mod:`codegen.bundle.records`.
A bundle depends on the operator, the device and the compilers alone: no dates, no times, no paths, so that two runs
give the same bytes. ``roller profile`` adds measured times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from codegen.bundle.records import MANIFEST, KernelRecord, Manifest


def json_of(value: object) -> Any:
    """A value as JSON data: a record as an object without the fields that are at their defaults.

    >>> from codegen.bundle.records import Argument
    >>> json_of([Argument(name="A", role="input", dtype="float32", shape=(3, 5))])
    [{'name': 'A', 'role': 'input', 'dtype': 'float32', 'shape': [3, 5]}]
    """
    if is_dataclass(value) and not isinstance(value, type):
        members = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: json_of(member) for field, member in members if not _is_default(field, member)}
    if isinstance(value, Mapping):
        return {key: json_of(member) for key, member in value.items()}
    return [json_of(member) for member in value] if isinstance(value, list | tuple) else value


def _is_default(field: Field[Any], value: object) -> bool:
    """True if a record's field may be left out of its JSON."""
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    return field.default is not MISSING and bool(value == field.default)


def to_json(value: object) -> bytes:
    """Indented JSON with a final newline; keys in declaration order."""
    return msgspec.json.format(msgspec.json.encode(json_of(value)), indent=2) + b"\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a bundle directory.

    Raises:
        OSError: it cannot be read.
        msgspec.ValidationError: it is not a manifest of this format.
    """
    return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)


def manifest_schema() -> dict[str, Any]:
    """JSON Schema of ``manifest.json``."""
    schema = msgspec.json.schema(Manifest)
    for record in (KernelRecord, Manifest):
        properties = schema["$defs"][record.__name__]["properties"]
        for field in fields(record):
            # msgspec tells of defaults, but not of those that are made anew for every record.
            if field.default_factory is not MISSING:
                properties[field.name]["default"] = field.default_factory()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
