"""Large products in bfloat16: our best kernel by RATIONAL and the library's by its model, against measurements.

Where the very size was not measured, the products next to it stand in: as many tokens, both sides of the weights within
a third. A kernel of ours that is predicted slower than the library's tells what RATIONAL says it waits for.

What a step by ``mma.sync`` takes beyond its products, and what lies between two tiles, are read off the library's
kernels, which are made alike: on half of the weights, and on the other half for comparison (:func:`halves`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from bench.pictures import new_figure, save
from hal.catalog import load_device
from hal.support.tables import new_table
from roller.estimate.operators import Item, estimate_items

Seconds = NDArray[np.float64]

#: Boards of the data and our names for them; sides of the products.
BOARDS = {"a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm-80gb"}
SIDES = (4096, 8192)

#: How far the sides of weights that stand in may be from those wanted, as a ratio.
NEIGHBOURS = 4 / 3

#: Largest error asked for of the library's, in per cent.
BAR = 8.0

#: The board whose products of both halves are compared; their least side, and the most elements of a tensor.
HALVES_BOARD, LEAST_SIDE, MOST_ELEMENTS = "a100_sxm", 1024, 2**31

#: Tiles whose rounds are counted, rows by columns; rounds from which on products are taken, and the least share of a
#: last round's units that have a tile.
TILES, LEAST_ROUNDS, LEAST_SHARE = ((128, 256), (256, 128)), 3.0, 0.93

#: Products further above the line than that are another kernel's, or of another clock: every fourth takes a sixth more.
ABOVE_LINE = 1.05


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


@dataclass(frozen=True, kw_only=True)
class Half:
    """Products of half of the weights.

    Attributes:
        name: what the half is for.
        products: how many there are, and of how many the line is.
        slope: time of a tile's step over that of its products at the peak.
        tile_seconds: time of a tile besides its steps.
        median_error, mean_error: of our best kernel's time as an estimate of the library's.
        rate: ours over the library's measured rate, geometric mean.
    """

    name: str
    products: tuple[int, int]
    slope: float
    tile_seconds: float
    median_error: float
    mean_error: float
    rate: float


def halves(data: Path) -> list[Half]:
    """The half of the weights on which the constants of steps by ``mma.sync`` were chosen, and the other one."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(data / "tensor_core" / "gemm.parquet")
    rows = table.filter(np.asarray(table["board"]) == HALVES_BOARD)
    m, n, k, milliseconds = (rows[column].to_numpy().astype(float) for column in ("m", "n", "k", "latency_ms"))
    taken = np.minimum(np.minimum(m, n), k) >= LEAST_SIDE
    taken &= np.maximum(np.maximum(m * n, m * k), n * k) < MOST_ELEMENTS
    m, n, k, seconds = m[taken], n[taken], k[taken], milliseconds[taken] * 1e-3
    weights = np.unique(np.stack([n, k], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    # Knuth's multiplicative hash: neighbours in size fall into either half.
    judged = (weights * 2654435761 >> 8) % 2 == 1
    device = load_device(BOARDS[HALVES_BOARD])
    items = [
        Item("product", {"op": "matmul", "m": int(a), "n": int(b), "k": int(c), "dtype": "bfloat16"}, "forward")
        for a, b, c in zip(m, n, k, strict=True)
    ]
    ours = np.array([estimate.seconds for estimate in estimate_items(items, device)])
    instruction = device.matrix_instruction("bfloat16")
    assert instruction is not None
    rounds = np.minimum.reduce([np.ceil(m / down) * np.ceil(n / across) for down, across in TILES]) / device.unit_count
    at_peak = 2.0 * TILES[0][0] * TILES[0][1] * k / (instruction.peak_flops / device.unit_count)
    whole = (rounds > LEAST_ROUNDS) & (rounds / np.ceil(rounds) > LEAST_SHARE)
    tile_seconds = (seconds - device.launch_overhead_seconds) / np.ceil(rounds)
    found = []
    for name, half in (("chosen on", ~judged), ("judged", judged)):
        slope, end, count = _line(at_peak[half & whole], tile_seconds[half & whole])
        error, ratio = np.abs(ours / seconds - 1)[half], (seconds / ours)[half]
        found.append(
            Half(
                name=name, products=(int(half.sum()), count), slope=slope, tile_seconds=end,
                median_error=float(np.median(error)), mean_error=float(error.mean()),
                rate=float(np.exp(np.log(ratio).mean())),
            )
        )  # fmt: skip
    return found


def _line(at_peak: Seconds, seconds: Seconds) -> tuple[float, float, int]:
    """The line of tiles' times over those of their products at the peak, by the faster kernels: its slope, its seconds
    at none, and of how many products it is, by least squares of relative errors."""
    near = np.ones(len(seconds), dtype=bool)
    slope, end = 1.0, 0.0
    for _ in range(30):
        rows = np.stack([at_peak, np.ones(len(seconds))], axis=1)[near] / seconds[near, None]
        slope, end = np.linalg.lstsq(rows, np.ones(int(near.sum())), rcond=None)[0]
        near = seconds < ABOVE_LINE * (slope * at_peak + end)
    return float(slope), float(end), int(near.sum())


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
    return [view, _halves_view(halves(data))]


def _halves_view(both: Iterable[Half]) -> Table:
    view = new_table(
        ("weights",),
        ("products", "in whole rounds", "a step over its products", "a tile besides", "median error", "mean error"),
        ("ours over the library",),
        title="Products in bfloat16 from 1,024 on an A100 SXM: the library's tiles, and our best kernel against them",
    )
    for half in both:
        view.add_row(
            half.name, str(half.products[0]), str(half.products[1]), f"{half.slope:.3f}",
            f"{half.tile_seconds * 1e6:.1f} µs", f"{half.median_error:.1%}", f"{half.mean_error:.1%}",
            f"{half.rate:.3f}",
        )  # fmt: skip
    return view


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
