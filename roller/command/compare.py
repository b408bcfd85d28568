"""``roller compare``: predicted against measured times, and what to mend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from roller.profile.comparison import ComparedKernel, GroupErrors

#: Kernels that are listed one by one.
WORST = 10


@click.command("compare")
@click.argument("results", metavar="RESULTS", type=click.Path(path_type=Path))
@click.option("--json/--no-json", "as_json", default=False, help="All kernels, groups and numbers as one JSON object.")
def compare_command(results: Path, *, as_json: bool) -> None:
    """Compare predicted with measured times: RESULTS is the folder of a harvest, or one of profiled bundles.

    Errors come by kind of kernel and by the stage that sets the pace, then the kernels that are furthest off, and what
    to mend: numbers of the board that were measured otherwise, and stages that are off as a whole.
    """
    from hal.support.tables import print_line, print_table
    from roller.profile.comparison import far_off, group_errors, read_comparison, remedies

    comparison = read_comparison(results)
    kinds = group_errors(comparison.kernels, lambda kernel: kernel.kind)
    stages = group_errors(comparison.kernels, lambda kernel: kernel.bound)
    mends = list(remedies(comparison))
    if as_json:
        import msgspec

        record = {"comparison": comparison, "kinds": kinds, "bounds": stages, "remedies": mends}
        click.echo(msgspec.json.encode(record).decode())
        return
    if comparison.is_dry:
        print_line("These times are of a dry run and mean nothing.")
    print_line(f"{len(comparison.kernels)} kernels predicted for {comparison.board} and timed")
    for head, groups in (("kind of kernel", kinds), ("bound", stages)):
        print_line()
        print_table(_errors(head, groups), ("operators", "rank 1 is best"))
    worst = far_off(comparison.kernels)
    if worst:
        print_line()
        print_table(_worst(worst[:WORST]), ("kind",))
        if len(worst) > WORST:
            print_line(f"... and {len(worst) - WORST} more")
    print_line()
    for line in mends or ["Nothing stands out: no number of the board and no stage is off as a whole."]:
        print_line(line)


def _errors(head: str, groups: list[GroupErrors]) -> Table:
    from hal.support.tables import new_table

    numbers = ("operators", "kernels", "mean error", "predicted / measured", "rank 1 is best")
    table = new_table((head,), numbers)
    for group in groups:
        first = "-" if group.first_is_best is None else f"{100 * group.first_is_best:.0f} %"
        counts = (str(group.operators), str(group.kernels))
        table.add_row(group.name or "-", *counts, f"{100 * group.mean_error:.1f} %", f"{group.median_ratio:.2f}", first)
    return table


def _worst(kernels: list[ComparedKernel]) -> Table:
    from hal.support.tables import new_table
    from roller.text.quantities import time_text

    table = new_table(("furthest off", "kind", "bound"), ("predicted", "measured", "ratio"))
    for kernel in kernels:
        times = (time_text(kernel.predicted), time_text(kernel.measured))
        table.add_row(kernel.operator, kernel.kind, kernel.bound or "-", *times, f"{kernel.ratio:.2f}")
    return table
