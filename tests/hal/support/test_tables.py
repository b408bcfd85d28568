"""Tables that fit the terminal."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from rich.table import Table

from hal.support.command_line import CONTEXT, Program
from hal.support.tables import print_line, print_table, without_columns


def _table() -> Table:
    table = Table(box=None, pad_edge=False)
    for header in ("kernel", "grid", "regs", "predicted"):
        table.add_column(header, justify="right")
    table.add_row("a" * 20, "784", "128", "408.7 µs")
    return table


@click.group("tables", cls=Program, context_settings=CONTEXT)
def _program() -> None:
    """Prints a table."""


@_program.command("show")
def _show() -> None:
    """Shows it."""
    print_table(_table(), drop=("grid", "regs"))
    print_line("one two three four five six seven eight nine ten")


def _shown(monkeypatch: pytest.MonkeyPatch, columns: int | None, *options: str) -> list[str]:
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    return CliRunner().invoke(_program, ["show", *options]).stdout.splitlines()


def test_a_pipe_gets_everything_in_long_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _shown(monkeypatch, None)
    assert lines[0].split() == ["kernel", "grid", "regs", "predicted"] and len(lines) == 3


def test_a_narrow_terminal_does_without_the_least_important_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _shown(monkeypatch, 38)
    assert lines[0].split() == ["kernel", "regs", "predicted"]
    assert "not shown here: grid (--wide)" in lines
    assert max(map(len, lines)) <= 38


def test_what_cannot_go_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _shown(monkeypatch, 24)
    assert lines[0].split() == ["kernel", "predicted"]
    assert max(map(len, lines)) <= 24


def test_wide_shows_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _shown(monkeypatch, 38, "--wide") == _shown(monkeypatch, None)


def test_rows_keep_their_cells() -> None:
    table = without_columns(_table(), ("regs",))
    assert [list(column.cells) for column in table.columns] == [["a" * 20], ["784"], ["408.7 µs"]]
