"""SQLite exports of profilers, read by column: versions of a tool differ in the columns and tables that they write."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from hal.support.errors import InputError


class Tables:
    """The tables and views of a database that is only read."""

    _USABLE: ClassVar = {
        "start": 'typeof("start") = \'integer\' AND abs("start") < 1e18',
        "end": '("end" IS NULL OR typeof("end") = \'integer\' AND abs("end") < 1e18)',
    }

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path
        listed = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self.names = frozenset(str(name) for (name,) in listed)

    def columns(self, table: str) -> frozenset[str]:
        """Names of a table's columns; none where there is no such table."""
        if table not in self.names:
            return frozenset()
        return frozenset(row[1] for row in self._connection.execute(f'PRAGMA table_info("{table}")'))

    def rows(self, table: str, *wanted: str) -> Iterator[tuple[Any, ...]]:
        """These columns of every row, None for a column that the table lacks; nothing where there is no such table.

        Rows whose times are no integers are skipped; an end may be missing.
        """
        present = self.columns(table)
        if not present:
            return iter(())
        listed = ", ".join(f'"{column}"' if column in present else "NULL" for column in wanted)
        usable = " AND ".join(self._USABLE[column] for column in wanted if column in self._USABLE and column in present)
        condition = f" WHERE {usable}" if usable else ""
        return iter(self._connection.execute(f'SELECT {listed} FROM "{table}"{condition}'))

    def texts(self, table: str, key: str = "id", value: str = "value") -> dict[Any, str]:
        """A table of two columns as a mapping."""
        return {number: str(text) for number, text in self.rows(table, key, value)}


@contextmanager
def open_tables(path: Path) -> Iterator[Tables]:
    """A database file, opened to read.

    Raises:
        InputError: it is damaged, or cannot be read.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            connection.text_factory = lambda data: data.decode("utf-8", "replace")
            yield Tables(connection, path)
    except (sqlite3.Error, OverflowError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(str(path), f"cannot be read as SQLite: {error}", "export it again") from None
