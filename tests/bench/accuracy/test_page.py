"""Writing the accuracy page: its places, tables as Markdown, pictures beside it, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.table import Table

from bench.accuracy.__main__ import TABLES, main
from bench.accuracy.page import MOST_ROWS, markdown, places, write_page
from hal.support.errors import InputError

PAGE = Path(__file__).parents[3] / "docs" / "accuracy.md"

TEXT = """# Page

Taken on 2000-01-01.

<!-- accuracy: one -->
old
<!-- end of accuracy: one -->

by hand

<!-- accuracy: two -->
<!-- end of accuracy: two -->
"""


def view(title: str, rows: int = 1) -> Table:
    table = Table(title=title)
    table.add_column("board")
    table.add_column("a|b", justify="right")
    for row in range(rows):
        table.add_row(f"t{row}", str(row), style="bold" if row == 1 else None)
    return table


def one(out: Path) -> Iterable[Table]:
    (out / "first_picture.png").write_bytes(b"1")
    return [view("First"), view("Second")]


def two(out: Path) -> Iterable[Table]:
    return [view("Third")]


def test_places_are_filled_and_the_text_around_them_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    (picture,) = write_page(page, {"one": one, "two": two})
    text = page.read_text()
    assert picture == tmp_path / "pictures" / "accuracy" / "first_picture.png"
    assert picture.read_bytes() == b"1"
    assert [path.name for path in picture.parent.iterdir()] == ["first_picture.png"]
    assert "old" not in text and "2000-01-01" not in text
    assert text.index("**First**") < text.index("![first picture](pictures/accuracy/first_picture.png)")
    assert text.index("first_picture.png") < text.index("**Second**") < text.index("by hand") < text.index("**Third**")
    assert places(text) == ("one", "two")


def test_some_places_are_written_and_others_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    write_page(page, {"one": one, "two": two}, ["two"])
    assert "old" in page.read_text() and "**Third**" in page.read_text()


def test_of_long_tables_the_page_has_the_bold_rows_alone() -> None:
    text = markdown(view("Long", MOST_ROWS + 1))
    assert text == (
        f"**Long**, the means of {MOST_ROWS} rows that the command prints\n\n| board | a\\|b |\n|---|---:|\n| t1 | 1 |"
    )
    plain = Table("board", title="Plain")
    for _ in range(MOST_ROWS + 1):
        plain.add_row("t4")
    assert markdown(plain) == f"**Plain**: {MOST_ROWS + 1} rows, which the command prints."
    assert markdown(view("Short", MOST_ROWS)).count("\n| t") == MOST_ROWS


@pytest.mark.parametrize(
    ("names", "makers", "problem"),
    [(["three"], {"one": one, "two": two, "three": two}, "'three'"), ([], {"one": one}, "'two'")],
)
def test_a_page_and_its_tables_have_to_agree(
    tmp_path: Path, names: list[str], makers: dict[str, object], problem: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    with pytest.raises(InputError, match=f"has no place {problem} to write"):
        write_page(page, makers, names)  # type: ignore[arg-type]
    assert page.read_text() == TEXT


def test_a_page_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--data", str(tmp_path), "--page", str(tmp_path / "no.md")])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1 and "cannot be read: No such file or directory" in result.output


def test_the_page_has_a_place_for_every_table_but_the_ablation_and_its_pictures_are_there() -> None:
    text = PAGE.read_text("utf-8")
    assert set(places(text)) <= set(TABLES)
    assert {"schedules", "published", "library", "tensor_core", "thesis"} <= set(places(text))
    pictures = sorted(line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("!["))
    folder = PAGE.parent / "pictures" / "accuracy"
    assert pictures == sorted(f"pictures/accuracy/{path.name}" for path in folder.glob("*.png"))
