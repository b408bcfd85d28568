"""Records of a run in a folder: one line of JSON for every operator, so that a run can be interrupted and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from hal.support.errors import InputError
from hal.support.store import code_texts, digest

Record = dict[str, Any]

#: What decides over a kernel and its proof. Records of other code say nothing about it.
_ROOMS = ("sokoban", "codegen", "roller/construct", "roller/algorithms", "bench/fuzz")


@lru_cache(maxsize=1)
def code_digest() -> str:
    """A digest of the code that constructs, lowers and verifies kernels."""
    return digest(*code_texts(*_ROOMS))[:12]


class Log:
    """The records of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "operators.jsonl"

    def append(self, record: Record) -> None:
        """One more record."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> Iterator[Record]:
        """All records, whatever code they are of.

        Raises:
            InputError: a line is no record.
        """
        if not self.path.exists():
            return
        with self.path.open() as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    if not line.endswith("\n"):
                        return  # The run was interrupted while it wrote.
                    raise InputError(f"{self.path}:{number}", "is no record", "remove the line") from error
                yield record

    def write_finding(self, record: Record, data: Record, run: Record) -> Path:
        """A failing operator as a file that ``roller verify`` reads, and the failure in another."""
        folder = self.folder / "findings"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{data['name']}.json"
        path.write_text(json.dumps(data, indent=1) + "\n")
        (folder / f"{data['name']}.txt").write_text(json.dumps(run | {"number": record["number"]}, indent=1) + "\n")
        return path
