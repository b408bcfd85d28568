"""A bundle of many sizes against the best kernel of each: ``python -m bench.launch_sizes examples/matmul-sizes.json``.

The rule of an operator one of whose sizes is known at launch names a kernel for every size. Both that kernel and the
best one constructed for the size alone are priced by RATIONAL; the table has their ratio, the largest first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from hal.support.tables import new_table, print_line, print_table
from roller.algorithms import ALGORITHMS
from roller.construct.construct import construct
from roller.programs import Programs
from roller.sizes import SizedPrograms
from sokoban.kernel.form import kernel_form
from sokoban.language.expression import LaunchSize, TensorExpr
from sokoban.language.launch_size import at_size
from sokoban.language.operators import load_operators

#: Sizes up to which every one is looked at, and how many above, in even ratios.
EACH, ABOVE = 128, 80


@dataclass(frozen=True)
class SizeRatio:
    """Predicted seconds for one size: of the kernel that the rule names, of the best candidate, and of the best kernel
    constructed for the size alone."""

    size: int
    by_rule: float
    best_candidate: float
    alone: float

    @property
    def ratio(self) -> float:
        """Time of the rule's kernel over that of the best kernel of the size."""
        return self.by_rule / self.alone


def sizes_of(size: LaunchSize) -> list[int]:
    """Sizes that are looked at, from two on: of one an axis is none.

    >>> sizes_of(LaunchSize("m", 6))
    [2, 3, 4, 5, 6]
    """
    counts = size.most // size.multiple
    many = set(range(1, min(EACH, counts) + 1))
    many |= set(np.unique(np.geomspace(min(EACH, counts), counts, ABOVE).astype(int)).tolist())
    return [count * size.multiple for count in sorted(many) if count * size.multiple > 1]


def ratios(expr: TensorExpr, device: DeviceSpec) -> Iterator[SizeRatio]:
    """Every size of an operator that is looked at, by the bundle and alone."""
    assert expr.launch_size is not None
    programs = SizedPrograms.of(expr, device, "roller")
    rule = programs.rule()
    for size in sizes_of(expr.launch_size):
        prices = programs.prices(size)
        form = kernel_form(at_size(expr, size))
        alone = Programs.of(construct(form, device, 1), None, top_k=1, algorithms=ALGORITHMS, method="roller")
        best = [each.estimate.seconds for each in alone.direct[:1]] + [
            each.estimate.seconds for each in alone.chains[:1]
        ]
        by_rule = rule.price(size, dict(zip(programs.candidates, prices.tolist(), strict=True)))
        yield SizeRatio(size, by_rule, float(prices.min()), min(best))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--device", "device_name", default="h100-sxm", show_default=True, help="The board.")
@click.option("--rows", type=click.IntRange(1, 1000), default=8, show_default=True, help="Of the table.")
def main(file: Path, device_name: str, rows: int) -> None:
    """Compare the kernels of bundles of many sizes with the best of each size, for the operators of FILE."""
    device = load_device(device_name)
    for expr in load_operators(file):
        if expr.launch_size is None:
            raise InputError(expr.name, "has no size that is known at launch", 'write {"up to": 8192} for one')
        looked_at = sorted(ratios(expr, device), key=lambda each: each.ratio, reverse=True)
        table = new_table((expr.launch_size.axis, "ratio"), ("by the bundle", "best candidate", "alone"))
        for each in looked_at[:rows]:
            seconds = (each.by_rule, each.best_candidate, each.alone)
            table.add_row(str(each.size), f"{each.ratio:.3f}", *(f"{one * 1e6:.1f} µs" for one in seconds))
        print_table(table)
        print_line(f"{expr.name} on {device.title}: at most {looked_at[0].ratio:.3f} of {len(looked_at)} sizes")


if __name__ == "__main__":
    main()
