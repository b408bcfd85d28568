"""The accuracy page: tables and pictures of this package put between the marks of docs/accuracy.md.

A page marks a place by a pair of comments, and what stands between them is written anew::

    <!-- accuracy: library -->
    <!-- end of accuracy: library -->

The text around the marks is set by hand.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path

from rich.table import Table

from hal.support.atomic import write_atomic
from hal.support.errors import InputError

#: Of tables with more rows the page has those in bold alone: what others measured stays where it is.
MOST_ROWS = 32

_PLACE = re.compile(
    r"(<!-- accuracy: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(<!-- end of accuracy: (?P=name) -->)", re.DOTALL
)

#: What makes the tables of a name, and pictures in a folder.
Maker = Callable[[Path], Iterable[Table]]


def places(text: str) -> tuple[str, ...]:
    """The names of the places of a page, in order.

    >>> places("<!-- accuracy: library -->\\nold\\n<!-- end of accuracy: library -->")
    ('library',)
    """
    return tuple(match["name"] for match in _PLACE.finditer(text))


def write_page(page: Path, makers: dict[str, Maker], names: Sequence[str] = ()) -> list[Path]:
    """Write the places of a page, all or some by name, and their pictures into its folder.

    Returns:
        The pictures.

    Raises:
        InputError: the page cannot be read, has no such place, or one that nothing is made for.
    """
    try:
        text = page.read_text("utf-8")
    except OSError as error:
        raise InputError(str(page), f"cannot be read: {error.strerror}", "name the page with --page") from None
    all_names = places(text)
    for name in (*names, *all_names):
        if name not in all_names or name not in makers:
            raise InputError(str(page), f"has no place {name!r} to write", f"write <!-- accuracy: NAME --> for one of "
                             f"{', '.join(makers)}")  # fmt: skip
    folder = page.parent / "pictures" / "accuracy"
    pictures: list[Path] = []
    for name in names or all_names:
        body, drawn = _place(makers[name], folder, page.parent)
        pictures += drawn
        text = _PLACE.sub(lambda match, name=name, body=body: _filled(match, name, body), text)  # type: ignore[misc]
    text = re.sub(r"Taken on \d{4}-\d\d-\d\d", f"Taken on {date.today().isoformat()}", text)
    write_atomic(page, text.encode())
    return pictures


def _filled(match: re.Match[str], name: str, body: str) -> str:
    return f"{match[1]}{body}{match[4]}" if match["name"] == name else match[0]


def _place(maker: Maker, folder: Path, root: Path) -> tuple[str, list[Path]]:
    """The text of one place, every table followed by pictures, and the pictures, which lie in ``folder`` then."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        tables = [markdown(view) for view in maker(Path(made))]
        drawn = []
        for picture in sorted(Path(made).glob("*.png"), key=lambda path: path.stat().st_mtime_ns):
            drawn.append(folder / picture.name)
            os.replace(picture, drawn[-1])
    links = [f"![{path.stem.replace('_', ' ')}]({path.relative_to(root).as_posix()})" for path in drawn]
    # A picture belongs to the table of its turn; what is over stands behind the last.
    parts = []
    for number, text in enumerate(tables):
        last = number + 1 == len(tables)
        parts += [text, *(links[number:] if last else links[number : number + 1])]
    return "\n" + "".join(f"{part}\n\n" for part in parts), drawn


def markdown(view: Table) -> str:
    """A table of the terminal as one of Markdown, its title above it; of a long one the rows in bold.

    >>> view = Table(title="Times")
    >>> view.add_column("board"); view.add_column("ms", justify="right"); view.add_row("t4", "3")
    >>> print(markdown(view))
    **Times**
    <BLANKLINE>
    | board | ms |
    |---|---:|
    | t4 | 3 |
    """
    columns = [[_cell(str(cell)) for cell in column.cells] for column in view.columns]
    rows = ["| " + " | ".join(row) + " |" for row in zip(*columns, strict=True)]
    head = "\n\n| " + " | ".join(_cell(str(column.header)) for column in view.columns) + " |\n"
    head += "|" + "|".join("---:" if column.justify == "right" else "---" for column in view.columns) + "|\n"
    title = str(view.title or "")
    if len(rows) > MOST_ROWS:
        bold = [text for text, row in zip(rows, view.rows, strict=True) if row.style == "bold"]
        if not bold:
            return f"**{title}**: {len(rows)} rows, which the command prints."
        if len(bold) < len(rows):
            head = f", the means of {len(rows) - len(bold)} rows that the command prints{head}"
        rows = bold
    return f"**{title}**{head}" + "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
