"""Large products in bfloat16: our best kernel by RATIONAL and the library's by its model, against measurements.

Where the very size was not measured, the products next to it stand in: as many tokens, both sides of the weights within
a third. A kernel of ours that is predicted slower than the library's tells what RATIONAL says it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from bench.pictures import new_figure, save
from hal.catalog import load_device
from hal.support.tables import new_table
from roller.estimate.operators import Item, estimate_items

#: Boards of the data and our names for them; sides of the products.
BOARDS = {"a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm-80gb"}
SIDES = (4096, 8192)

#: How far the sides of weights that stand in may be from those wanted, as a ratio.
NEIGHBOURS = 4 / 3

#: Largest error asked for of the library's, in per cent.
BAR = 8.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One product on one board; rates in FLOP/s.

    Attributes:
        board: its name in the data.
        side: of all three dimensions.
        ours: rate of our best kernel by RATIONAL.
        bound: what it waits for.
        schedule_tile: its block, rows by columns.
        library: rate of the library by its model.
        tile: its tile, columns by rows as in the library's names.
        measured: the library's measured rate.
        rows: how many measured products that is the median of; 1 is the very size.
    """

    board: str
    side: int
    ours: float
    bound: str
    schedule_tile: str
    library: float
    tile: str
    measured: float
    rows: int


def compare(data: Path) -> list[Comparison]:
    """Every product of :data:`SIDES` on every board."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(data / "tensor_core" / "gemm.parquet")
    comparisons = []
    for board, name in BOARDS.items():
        rows = table.filter(np.asarray(table["board"]) == board)
        sizes = {column: rows[column].to_numpy().astype(float) for column in ("m", "n", "k", "latency_ms")}
        device = load_device(name)
        for side in SIDES:
            measured, count = _measured(sizes, side)
            item = Item("product", {"op": "matmul", "m": side, "n": side, "k": side, "dtype": "bfloat16"}, "forward")
            ours = estimate_items([item], device)[0]
            library = estimate_items([item], device, implementation="library")[0]
            kernel, part = ours.parts[0], library.parts[0]
            assert hasattr(kernel, "schedule") and hasattr(part, "tile")
            block = kernel.schedule["block"]
            flops = 2.0 * side**3
            comparisons.append(
                Comparison(
                    board=board, side=side, ours=flops / ours.seconds, bound=ours.bound,
                    schedule_tile="x".join(str(extent) for extent in block.values()),
                    library=flops / library.seconds, tile=part.tile or "", measured=measured, rows=count,
                )
            )  # fmt: skip
    return comparisons


def _measured(sizes: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]], side: int) -> tuple[float, int]:
    """The measured rate at a size, or the median of those next to it, and of how many."""
    exact = (sizes["m"] == side) & (sizes["n"] == side) & (sizes["k"] == side)
    near = sizes["m"] == side
    for column in ("n", "k"):
        near &= np.abs(np.log(sizes[column] / side)) <= np.log(NEIGHBOURS) + 1e-9
    chosen = exact if exact.any() else near
    rates = 2e3 * sizes["m"] * sizes["n"] * sizes["k"] / sizes["latency_ms"]
    return float(np.median(rates[chosen])), int(chosen.sum())


def table(data: Path, out: Path) -> Iterable[Table]:
    """The comparison in TFLOP/s, and its picture in ``out``."""
    comparisons = compare(data)
    view = new_table(
        ("board",),
        ("cubed", "measured", "rows", "library"),
        ("tile",),
        ("error", "asked", "ours"),
        ("block", "waits for"),
        title="Large products in bfloat16, TFLOP/s",
    )
    for each in comparisons:
        view.add_row(
            each.board, str(each.side), f"{each.measured / 1e12:.0f}", str(each.rows), f"{each.library / 1e12:.0f}",
            each.tile, f"{100 * (each.measured / each.library - 1):+.1f}%", f"{BAR:.1f}%", f"{each.ours / 1e12:.0f}",
            each.schedule_tile, each.bound,
        )  # fmt: skip
    _picture(comparisons, out / "own_products.png")
    return [view]


def _picture(comparisons: list[Comparison], path: Path) -> None:
    figure = new_figure(6.4, 3.2)
    axes = figure.subplots()
    places = np.arange(len(comparisons))
    bars = (
        ("measured library", [each.measured for each in comparisons]),
        ("library by its model", [each.library for each in comparisons]),
        ("our best kernel by RATIONAL", [each.ours for each in comparisons]),
    )
    for position, (label, rates) in enumerate(bars):
        axes.bar(places + 0.27 * (position - 1), np.array(rates) / 1e12, 0.25, label=label)
    axes.set_xticks(places, [f"{each.board.partition('_')[0].upper()}\n{each.side} cubed" for each in comparisons])
    axes.set_ylabel("TFLOP/s, bfloat16")
    axes.legend(frameon=False, loc="upper left")
    save(figure, path)
