"""Products of 1,024 and more in bfloat16: our kernels by RATIONAL against every rate that the library was measured at.

For boards with warp groups the kernels that RATIONAL chooses from grow row by row, from those whose threads copy to
those that construction proposes; what bound the chosen ones is told beside the rate, so that it shows what each step
took away. Algorithms of several kernels (slices of k) count in the last row alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from roller.estimate.operators import Item, estimate_items
from sokoban.kernel.form import kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from sokoban.model.rational import estimate
from sokoban.schedule.bulk_copies import bulk_schedules
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import WIDTHS, warp_group_schedules
from sokoban.search.bands import in_bands

BOARDS = {"a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm-80gb"}

#: Least side of a product, most elements of a tensor, and which of so many products steps are told for.
LEAST_SIDE, MOST_ELEMENTS, EVERY = 1024, 2**31, 20

#: What the kernels of a row have; every row has those of the rows before, too.
STEPS: dict[str, Callable[[TileSchedule, int], bool]] = {
    "threads copy": lambda schedule, width: not schedule.cluster,
    "bulk copies, a warp group for them": lambda schedule, width: schedule.cluster <= 1 and width in WIDTHS,
    "clusters of two, one operand in common": lambda schedule, width: schedule.cluster <= 2 and width in WIDTHS,
    "clusters of four, both in common": lambda schedule, width: width in WIDTHS,
    "tiles of 96, 160 and 224 columns": lambda schedule, width: True,
}


@dataclass(frozen=True, kw_only=True)
class Share:
    """Our rate over the measured one; over some products of a board.

    Attributes:
        board: its name in the data.
        kernels: which kernels are chosen from.
        products: how many.
        mean: geometric mean over the products.
        quartiles: the lower and the upper one.
        bounds: what sets the pace of the chosen kernels, most frequent first, with its share of the products.
    """

    board: str
    kernels: str
    products: int
    mean: float
    quartiles: tuple[float, float]
    bounds: tuple[tuple[str, float], ...]


def shares(data: Path, every: int = EVERY) -> list[Share]:
    """The rows of every board; ``every``: of so many products one."""
    found = []
    for board, name in BOARDS.items():
        device, items, measured = load_device(name), *_products(data, board, every)
        if device.warp_group_instruction("bfloat16") is not None:
            found += _steps(board, device, items, measured)
        estimates = estimate_items(items, device)
        seconds = np.array([each.seconds for each in estimates])
        found.append(_share(board, "all that construction proposes", measured / seconds, [e.bound for e in estimates]))
    return found


def _products(data: Path, board: str, every: int) -> tuple[list[Item], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Products of a board and their measured seconds; weights lie by rows of k, as frameworks keep them."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(data / "tensor_core" / "gemm.parquet")
    table = table.filter(np.asarray(table["board"]) == board)
    m, n, k, latency = (table[column].to_numpy().astype(float) for column in ("m", "n", "k", "latency_ms"))
    elements = np.maximum(np.maximum(m * n, n * k), m * k)
    chosen = np.flatnonzero((np.minimum(np.minimum(m, n), k) >= LEAST_SIDE) & (elements < MOST_ELEMENTS))[::every]
    operators = [
        {"op": "matmul", "m": int(m[i]), "n": int(n[i]), "k": int(k[i]), "dtype": "bfloat16", "transpose_b": True}
        for i in chosen
    ]
    return [Item(f"product {i}", each, "forward") for i, each in enumerate(operators)], latency[chosen] * 1e-3


def _steps(
    board: str, device: DeviceSpec, items: Sequence[Item], measured: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> list[Share]:
    """A row per step, of single kernels by warp groups."""
    ratios: dict[str, list[float]] = {step: [] for step in STEPS}
    bounds: dict[str, list[str]] = {step: [] for step in STEPS}
    for item, seconds in zip(items, measured, strict=True):
        form = kernel_form(operator_from_data(item.data))
        placed, roles = PlacedForm(form, device), form.roles
        assert roles is not None
        schedules = [*warp_group_schedules(placed), *bulk_schedules(placed)]
        table = ScheduleTable.of(form, schedules)
        plain = estimate(table, placed)
        order = np.argsort(plain.seconds, kind="stable")
        _, estimates = in_bands(table, order, plain, placed)
        for step, has in STEPS.items():
            rows = [i for i, row in enumerate(order) if has(schedules[row], schedules[row].block_of[roles.n])]
            best = min(rows, key=lambda row: float(estimates.seconds[row]))
            ratios[step].append(float(seconds / estimates.seconds[best]))
            bounds[step].append(estimates.rows([best])[0].bound)
    return [_share(board, step, np.array(ratios[step]), bounds[step]) for step in STEPS]


def _share(board: str, kernels: str, ratios: np.ndarray[tuple[int], np.dtype[np.float64]], bounds: list[str]) -> Share:
    lower, upper = np.percentile(ratios, (25, 75))
    counted = Counter(bounds).most_common()
    return Share(
        board=board,
        kernels=kernels,
        products=len(ratios),
        mean=float(np.exp(np.log(ratios).mean())),
        quartiles=(float(lower), float(upper)),
        bounds=tuple((bound, count / len(bounds)) for bound, count in counted),
    )


def table(data: Path, out: Path) -> Iterable[Table]:
    """The rows of all boards; no picture."""
    view = Table(title="Our rate over the library's measured one, in bfloat16", title_justify="left", box=None)
    for column in ("board", "kernels", "products", "geometric mean", "quartiles", "waits for"):
        view.add_column(column, justify="left" if column in ("board", "kernels", "waits for") else "right")
    for each in shares(data):
        waits = ", ".join(f"{bound} {100 * share:.0f}%" for bound, share in each.bounds)
        quartiles = f"{each.quartiles[0]:.2f} to {each.quartiles[1]:.2f}"
        view.add_row(each.board, each.kernels, str(each.products), f"{each.mean:.3f}", quartiles, waits)
    return [view]
