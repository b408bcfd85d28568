"""Which productions of the grammar met which lowering, and which lowering operators took on every device."""

from __future__ import annotations

from collections import Counter, defaultdict

import click

from bench.fuzz.log import Log, code_digest
from bench.fuzz.productions import ALL


def met(log: Log) -> dict[str, Counter[str]]:
    """Kernels that agreed, by lowering and production; records of this code alone."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for record in log.records():
        if record["code"] == code_digest():
            for run in record["runs"]:
                if run["outcome"] == "agrees":
                    for lowering, found in run["met"].items():
                        table[lowering].update(found)
                        table[lowering][""] += 1
                        if run["engine"] == "opencl":
                            table["opencl"].update(found)
    return table


def print_tables(log: Log) -> None:
    """Both tables."""
    table = met(log)
    took: dict[str, Counter[str]] = defaultdict(Counter)
    for record in log.records():
        if record["code"] == code_digest():
            for device, kind in record["took"].items():
                took[device][kind] += 1
    for device, kinds in sorted(took.items()):
        click.echo(f"{device}: " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    columns = sorted(table)
    for column in columns:
        missing = [row for row in ALL if not table[column][row]]
        click.echo(f"{column} ({table[column]['']} kernels): {len(ALL) - len(missing)} of {len(ALL)}; not met: {', '.join(missing)}")
