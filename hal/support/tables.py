"""Tables and lines for the terminal, as wide as it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from textwrap import fill

from rich.console import Console
from rich.table import Table

from hal.support.command_line import WIDE


def new_table(*groups: Sequence[str], title: str | None = None) -> Table:
    """A table without lines, of columns of text and of numbers in turns.

    >>> table = new_table(("board",), ("ms", "error"), ("bound by",), title="Times")
    >>> [(str(column.header), column.justify) for column in table.columns]
    [('board', 'left'), ('ms', 'right'), ('error', 'right'), ('bound by', 'left')]

    Args:
        groups: headers of columns, the first of text, the next of numbers, and so on; what is too long breaks.
        title: of the table.
    """
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for place, headers in enumerate(groups):
        for header in headers:
            table.add_column(header, justify="right" if place % 2 else "left", overflow="fold")
    return table


def print_table(table: Table, drop: Sequence[str] = ()) -> None:
    """Print a table to stdout; a pipe, and ``--wide``, get the full width that it needs.

    Args:
        drop: headers of the columns that a narrower terminal can do without, the least important first. As many stay as
            fit, and a last line says which are missing.
    """
    columns = columns_at_hand()
    console = Console(width=_needed(table) if columns is None else columns, highlight=False)
    headers = {str(column.header) for column in table.columns}
    missing = [header for header in drop if header in headers] if columns is not None else []
    for header in reversed(missing.copy()):
        others = [each for each in missing if each != header]
        if columns is not None and _needed(without_columns(table, others)) <= columns:
            missing = others
    console.print(without_columns(table, missing))
    if missing:
        print_line(f"not shown here: {', '.join(missing)} (--wide)")


def print_line(text: str = "") -> None:
    """Print a line as it is, without markup; where it is longer than the terminal is wide it breaks between words."""
    columns = columns_at_hand()
    if columns is not None and len(text) > columns:
        indent = " " * (len(text) - len(text.lstrip()))
        text = fill(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    print(text)


def columns_at_hand() -> int | None:
    """Columns of the terminal, or as many as ``COLUMNS`` says; None where nothing limits them, and with ``--wide``."""
    if WIDE.get():
        return None
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return Console().width if sys.stdout.isatty() else None


def without_columns(table: Table, headers: Collection[str]) -> Table:
    """The table without the columns of those headers."""
    if not headers:
        return table
    columns = [column for column in table.columns if column.header not in headers]
    narrower = Table(
        title=table.title, title_justify=table.title_justify, box=table.box, pad_edge=table.pad_edge
    )  # fmt: skip
    for column in columns:
        narrower.add_column(
            column.header, justify=column.justify, overflow=column.overflow, style=column.style, no_wrap=column.no_wrap
        )
    cells = zip(*(column.cells for column in columns), strict=True)
    for row, texts in zip(table.rows, cells, strict=True):
        narrower.add_row(*texts, style=row.style, end_section=row.end_section)
    return narrower


def _needed(table: Table) -> int:
    """Columns of the terminal that a table takes where nothing limits it."""
    console = Console(width=100_000, highlight=False)
    return max(1, console.measure(table).maximum)
