"""Roller against Sokoban: ``python -m bench.agreement --device v100`` (thesis 6.6).

For large regular operators aligned construction and exhaustive search should come to the same predicted time; for
small or irregular ones the search finds what alignment rules out. Both are estimates of one model, RATIONAL: the table
says how much of what the model sees construction finds, not how fast kernels are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click
from rich.table import Table

from bench.suites import suite_names, suite_path
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from hal.support.tables import new_table, print_table
from roller.construct.construct import construct
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import load_operators, operator_from_data
from sokoban.search.search import search

#: Predicted times within this factor agree.
AGREEMENT = 1.05

#: An axis is regular if tiles of this many elements divide it, or if it is shorter and a power of two.
ALIGNED = 16

#: The thesis's example of a small operator: 6.74 times slower without, 1.41 times with the adjustment for those.
THESIS_EXAMPLE = {"name": "thesis_6.6", "op": "matmul", "m": 128, "n": 256, "k": 256}

#: Programs among which those without an adjustment are looked for.
MANY = 400


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Best predicted seconds of one operator: constructed, constructed without shrinking tiles for small operators
    (None where construction knows no other), and searched."""

    name: str
    kind: str
    constructed: float
    unadjusted: float | None
    searched: float
    constructed_bound: str
    searched_bound: str

    @property
    def ratio(self) -> float:
        """Time of construction's best over that of the search's best."""
        return self.constructed / self.searched


def kind_of(form: KernelForm, device: DeviceSpec) -> str:
    """``"small"``: fewer outputs than the device holds threads. ``"irregular"``: an axis that no aligned tile divides.
    ``"regular"``: all others."""
    if math.prod(form.sizes[axis] for axis in form.final.axes) < device.unit_count * device.limits.threads_per_unit:
        return "small"
    return "regular" if all(_is_regular(form.sizes[axis]) for axis in form.spatial) else "irregular"


def _is_regular(size: int) -> bool:
    return size % ALIGNED == 0 or (size < ALIGNED and size & (size - 1) == 0)


def compare(form: KernelForm, device: DeviceSpec) -> Comparison:
    """Construct and search one operator."""
    programs = construct(form, device).programs
    result = search(form, device, 1)
    unshrunk = [
        p for p in construct(form, device, MANY).programs if all(reason.layer != "scale out" for reason in p.reasons)
    ]
    tiles = [p.estimate.seconds for p in unshrunk if p.shared_tile is not None]
    return Comparison(
        name=form.expr.name,
        kind=kind_of(form, device),
        constructed=programs[0].estimate.seconds,
        unadjusted=min(tiles, default=None),
        searched=result.estimates[0].seconds,
        constructed_bound=programs[0].estimate.bound,
        searched_bound=result.estimates[0].bound,
    )


def summary(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """One line per kind: how many agree, and what construction loses in the middle and at worst."""
    for kind in ("regular", "irregular", "small"):
        rows = [row for row in comparisons if row.kind == kind]
        if rows:
            agree = sum(row.ratio <= AGREEMENT for row in rows)
            worst = max(rows, key=lambda row: row.ratio)
            yield (
                f"{kind:10} {agree:3} of {len(rows):3} within {100 * (AGREEMENT - 1):.0f}%, construction takes "
                f"{statistics.median(row.ratio for row in rows):.2f} times as long in the middle, "
                f"{worst.ratio:.2f} times at worst ({worst.name})"
            )


def table_of(comparisons: Sequence[Comparison]) -> Table:
    """The comparisons as a table, by kind and then by what construction loses."""
    table = new_table(("operator", "kind"), ("construction µs", "unadjusted µs", "search µs", "ratio"), ("bound by",))
    for row in sorted(comparisons, key=lambda row: (("regular", "irregular", "small").index(row.kind), -row.ratio)):
        bounds = dict.fromkeys((row.constructed_bound, row.searched_bound))
        table.add_row(
            row.name,
            row.kind,
            f"{1e6 * row.constructed:.1f}",
            "-" if row.unadjusted is None else f"{1e6 * row.unadjusted:.1f}",
            f"{1e6 * row.searched:.1f}",
            f"{row.ratio:.2f}",
            ", ".join(bounds),
        )
    return table


@click.command()
@click.option("--device", "device_name", default="v100", show_default=True, metavar="NAME|FILE", help="A board.")
@click.option("--suite", type=click.Choice(suite_names()), default="roller119", show_default=True)
@click.option("--name", "names", multiple=True, help="Only these operators; may be repeated.")
def main(device_name: str, suite: str, names: tuple[str, ...]) -> None:
    """Compare construction with exhaustive search, operator by operator."""
    try:
        device = load_device(device_name)
        expressions = [operator_from_data(THESIS_EXAMPLE), *load_operators(suite_path(suite))]
        if names:
            expressions = [expr for expr in expressions if expr.name in names]
        if not expressions:
            raise InputError("--name", f"none of {', '.join(names)} is in {suite}", "name its operators")
        comparisons = [compare(kernel_form(expr), device) for expr in expressions]
    except InputError as error:
        raise click.ClickException(str(error)) from error
    print_table(table_of(comparisons))
    for line in summary(comparisons):
        click.echo(line)


if __name__ == "__main__":
    main()
