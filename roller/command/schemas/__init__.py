"""The published JSON Schemas, generated from the types that read and write the files."""

from __future__ import annotations

import json
from typing import Any


def schema(kind: str) -> dict[str, Any]:
    """The schema of ``"operator"``, ``"device"``, ``"manifest"`` or ``"schedule"`` files."""
    if kind == "operator":
        from sokoban.language.operators import operator_schema

        return operator_schema()
    if kind == "device":
        from hal.spec.file import device_schema

        return device_schema()
    if kind == "schedule":
        from sokoban.schedule.files import schedule_schema

        return schedule_schema()
    from codegen.bundle.manifest import manifest_schema

    return manifest_schema()


def schema_text(kind: str) -> str:
    """The schema as indented JSON, as it stands in this package's ``<kind>.schema.json``."""
    return json.dumps(schema(kind), indent=2) + "\n"
