"""``python -m bench.accuracy``: every table of predictions against measurements, and a picture of each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import click
from rich.table import Table

from bench.accuracy.data import data_directory
from bench.accuracy.page import write_page
from hal.support.errors import InputError

#: Tables by the room that makes them: modules with a function ``table(data: Path, out: Path)``, or another module and
#: function, which returns tables of rich and may write pictures to ``out``. They are printed in this order.
ROOMS = {
    "schedules": "kernels", "published": "kernels", "library": "library", "models": "steps", "networks": "steps",
    "plans": "steps", "jobs": "steps", "option_jobs": "steps", "vision_jobs": "steps", "backward_calls": "library",
    "ported": "steps", "tensor_core": "library", "kernelbench": "steps", "serving": "library",
    "training_kernels": "library", "own_products": "kernels", "own_attention": "kernels", "thesis": "kernels",
    "today": "library", "narrow_jobs": "steps.jobs:narrow", "served": "steps",
    "tuned_schedules": "kernels", "published_attention": "library",
}  # fmt: skip
TABLES = tuple(ROOMS)


@click.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=None,
    help="The measured data.  [default: $ROLLER_DATA, else the repository's shared/data]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/accuracy"),
    show_default=True,
    help="Where the pictures go.",
)
@click.option("--only", type=click.Choice(TABLES), multiple=True, help="Some tables only.")
@click.option(
    "--page",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Write tables and pictures into this page (docs/accuracy.md) instead of printing them.",
)
def main(data: Path | None, out: Path, only: tuple[str, ...], page: Path | None) -> None:
    """Compare what the cost model predicts with what others measured."""
    from hal.support.tables import print_line, print_table

    try:
        directory = data_directory(data)
        if page is not None:
            for picture in write_page(page, {name: partial(_tables, name, directory) for name in TABLES}, only):
                print_line(str(picture))
            return
        for name in only or TABLES:
            for view in _tables(name, directory, out):
                print_table(view)
                print_line("")
    except InputError as error:
        click.echo(f"bench.accuracy: {error}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        click.echo(f"bench.accuracy: {error}; install what it needs with pip install -e '.[accuracy]'", err=True)
        sys.exit(1)
    print_line(f"pictures in {out}")


def _tables(name: str, data: Path, out: Path) -> Iterable[Table]:
    """The tables of a module of this package, its pictures in ``out``."""
    module, _, function = ROOMS[name].partition(":")
    module = module if function else f"{module}.{name}"
    made: Iterable[Table] = getattr(importlib.import_module(f"bench.accuracy.{module}"), function or "table")(data, out)
    return made


if __name__ == "__main__":
    main()
