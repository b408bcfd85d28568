"""``python -m bench.fuzz``: operators drawn over the whole grammar, run as kernels of every kind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from bench.fuzz.campaign import campaign
from bench.fuzz.log import Log, code_digest
from bench.fuzz.tables import Met, lines_of
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
    failed = False
    # Ended from outside as by a key: a run in the background hears no interrupt.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        log = Log(folder)
        if not table:
            totals = campaign(log, seed, minutes, operators, click.echo)
            failed = bool(totals.failures)
        for line in lines_of(Met.of(record for record in log.records() if record["code"] == code_digest())):
            click.echo(line)
    except InputError as error:
        click.echo(f"bench.fuzz: {error}", err=True)
        sys.exit(2)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
