"""Mutants of emitted kernels, run as verification runs kernels: ``python -m bench.mutants --device a100``.

Programs of operators are cut down and emitted, and their texts changed in one place each: a barrier, a wait or a commit
taken out, an index moved, a guard turned round, buffers swapped, a loop one turn longer (bench/mutants/mutations.py).
Whatever is wrong then should be noticed. A mutant that is not makes the same accesses with the same values as the
kernel, also on a problem with other edges, and is harmless, or it was missed and is listed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bench.mutants.mutations import KINDS
from bench.mutants.results import read_results, write_results
from bench.mutants.run import Plan, run
from bench.mutants.tables import summary, tables, write_tables
from hal.support.errors import InputError
from hal.support.threads import cores

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option("--device", "devices", multiple=True, default=("v100", "a100", "h200"), show_default=True, help="Boards.")
@click.option("--suite", default="mutants", show_default=True, metavar="NAME|FILE", help="The operators.")
@click.option("--name", "names", multiple=True, help="Only these operators; may be repeated.")
@click.option("--top-k", default=3, show_default=True, help="Programs of every operator on every board.")
@click.option("--kinds", multiple=True, type=click.Choice(KINDS), help="Only these mutations; may be repeated.")
@click.option("--sample", default=6, show_default=True, help="Mutants of a kernel besides those of synchronizations, "
              "which are all taken; 0 takes all of the others, too.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="What the sample is drawn by.")
@click.option("--jobs", default=None, type=int, help="Mutants at a time.  [default: the cores]")
@click.option("--json", "out", type=_FILE, help="Write what was found into this file.")
@click.option("--read", "files", multiple=True, type=_FILE, help="Show what earlier runs have written; runs nothing.")
@click.option("--page", type=_FILE, help="Write the tables into this page (docs/proof.md) instead of printing them.")
def main(
    *, devices: tuple[str, ...], suite: str, names: tuple[str, ...], top_k: int, kinds: tuple[str, ...], sample: int,
    seed: int, jobs: int | None, out: Path | None, files: tuple[Path, ...], page: Path | None,
) -> None:  # fmt: skip
    """Change emitted kernels in one place each, and see whether verification notices."""
    from roller.command.tables import print_line, print_table

    try:
        if files:
            results = read_results(files)
        else:
            results = run(
                Plan(
                    devices=devices,
                    suite=suite,
                    names=names,
                    top_k=top_k,
                    kinds=kinds or KINDS,
                    sample=sample,
                    seed=seed,
                    jobs=jobs or cores(),
                )
            )
        if out is not None:
            write_results(results, out)
        if page is not None:
            write_tables(results, page)
            return
    except InputError as error:
        click.echo(f"bench.mutants: {error}", err=True)
        sys.exit(2)
    for view in tables(results):
        print_table(view)
        print_line("")
    for line in summary(results):
        print_line(line)


if __name__ == "__main__":
    main()
