"""``python -m bench.fuzz``: operators drawn over the whole grammar, run as kernels of every kind."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bench.fuzz.campaign import campaign
from bench.fuzz.log import Log
from hal.support.errors import InputError


@click.command()
@click.option("--minutes", default=10.0, show_default=True, help="How long to draw; operators of earlier runs count.")
@click.option("--operators", type=click.IntRange(1), help="How many to examine at most.")
@click.option("--seed", default=0, show_default=True, help="What all operators are drawn by, with their number.")
@click.option("--folder", default="out/fuzz", show_default=True, type=click.Path(file_okay=False, path_type=Path),
              help="Where records and findings go; a run goes on from those.")  # fmt: skip
@click.option("--table", is_flag=True, help="Only show which productions met which lowering in the folder's records.")
def main(*, minutes: float, operators: int | None, seed: int, folder: Path, table: bool) -> None:
    """Examine drawn operators; exit code 1 where one disagrees, raises or hangs."""
    from bench.fuzz.tables import print_tables

    try:
        if table:
            print_tables(Log(folder))
            return
        totals = campaign(folder, seed, minutes, operators, lambda line: click.echo(line))
        print_tables(Log(folder))
    except InputError as error:
        click.echo(f"bench.fuzz: {error}", err=True)
        sys.exit(2)
    sys.exit(1 if totals.failures else 0)


if __name__ == "__main__":
    main()
