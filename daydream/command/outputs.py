"""Inputs and outputs of commands, checked before they begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.graph.graph import TaskGraph
    from daydream.graph.simulate import Timeline
    from daydream.report.analysis import Analysis
    from daydream.report.timeline import Counter
    from daydream.whatif import AppliedPass


def with_options(*given: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator that gives a command options and arguments, which stand in the help in this order."""

    def put(command: Any) -> Any:
        # The one that is put around last stands first.
        for option in reversed(given):
            command = option(command)
        return command

    return put


def check_outputs(out: Path | None, html: Path | None) -> None:
    """Refuses files that cannot be written.

    Raises:
        InputError: a name has another ending, or its directory is missing.
    """
    for option, path, endings in (("--out", out, (".json", ".json.gz")), ("--html", html, (".html", ".htm"))):
        if path is None:
            continue
        if not path.name.endswith(endings):
            raise InputError(option, f"{path} has no ending that is known", f"use {' or '.join(endings)}")
        if not path.parent.is_dir():
            raise InputError(option, f"there is no directory {path.parent}", "make it first")


def write_timeline_file(
    path: Path | None, timeline: Timeline, label: str, counters: Callable[[], Sequence[Counter]] = tuple
) -> None:
    """Writes a timeline where a path is given; `label` stands in its rows' names, `counters` are worked out then."""
    if path is not None:
        from daydream.report.timeline import write_timeline

        write_timeline(timeline, path, label, counters())


def write_html(
    path: Path,
    before: Analysis,
    after: Analysis | None = None,
    applied: Sequence[AppliedPass] = (),
    more: str = "",
) -> None:
    """Writes the report of one timeline, or of two; `more` is HTML for its end."""
    from daydream.report.html import write_report

    write_report(path, before, after, applied, more)


def warn(graph: TaskGraph) -> None:
    """Prints the warnings of a graph."""
    for warning in graph.warnings:
        click.echo(f"daydream: warning: {warning}", err=True)


def print_json(record: dict[str, Any]) -> None:
    """Prints a JSON object on a line."""
    import msgspec

    click.echo(msgspec.json.encode(record).decode())
