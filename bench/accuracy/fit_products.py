"""``python -m bench.accuracy.fit_products``: the constants of products on Tensor Cores, chosen anew.

From constants scattered around those in use, a search along one constant at a time takes what lowers the mean error on
random products of some boards, or of half of their weights' shapes; then it says what the constants come to on all that
was left out. Every constant that the model has is chosen but the exponent of the flows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import click
import numpy as np

from bench.accuracy.data import data_directory
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from roller.library.gemm_types import Floats
from roller.library.matrix_gemm import CONSTANTS, MatrixConstants, matrix_gemm

#: Boards of the data and our names for them.
BOARDS = {"a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm-80gb", "l40s": "l40s", "b200_sxm": "b200"}

#: Constants that stay: sums of flows by a cube root are the fast path.
FIXED = ("feeds", "overlap")

#: Shares that are at most one.
AT_MOST_ONE = ("whole_waves",)

#: Largest error that counts of one product: the data has outliers.
WORST = 1.0

#: First step along a constant, as a factor; every round takes its square root.
FIRST_STEP = 1.4


@dataclass(frozen=True)
class Products:
    """Measured products of one board, an entry each; seconds, and which half of the weights' shapes they belong to."""

    device: DeviceSpec
    m: Floats
    n: Floats
    k: Floats
    seconds: Floats
    half: Floats

    def some(self, chosen: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Products:
        """Those at the positions ``chosen``."""
        columns = (column[chosen] for column in (self.m, self.n, self.k, self.seconds, self.half))
        return Products(self.device, *columns)

    def errors(self, constants: MatrixConstants) -> Floats:
        """Absolute errors, a share each."""
        ones = np.ones(len(self.m))
        found = matrix_gemm(ones, self.m, self.n, self.k, self.device, dtype="bfloat16", constants=constants)
        return np.asarray(np.abs(found.seconds / self.seconds - 1))


def read_products(data: Path) -> dict[str, Products]:
    """The measured products by the data's name of the board; halves go by the weights' shape."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(data / "tensor_core" / "gemm.parquet")
    found = {}
    for board, name in BOARDS.items():
        rows = table.filter(np.asarray(table["board"]) == board)
        m, n, k, milliseconds = (rows[column].to_numpy().astype(float) for column in ("m", "n", "k", "latency_ms"))
        shapes = np.unique(np.stack([n, k]), axis=1).T
        first = np.random.default_rng(0).permutation(len(shapes)) % 2
        halves = {tuple(shape): float(half) for shape, half in zip(shapes.tolist(), first, strict=True)}
        half = np.array([halves[pair] for pair in zip(n.tolist(), k.tolist(), strict=True)])
        found[board] = Products(load_device(name), m, n, k, milliseconds * 1e-3, half)
    return found


def names() -> list[str]:
    """Constants that are chosen; ``bulk.stages`` is one of a feed."""
    shared = [field.name for field in fields(MatrixConstants) if field.name not in FIXED]
    return shared + [f"{feed}.{field.name}" for feed, own in CONSTANTS.feeds.items() for field in fields(own)]


def scaled(constants: MatrixConstants, name: str, factor: float) -> MatrixConstants:
    """The constants with one of them multiplied."""
    feed, _, own = name.rpartition(".")
    holder = constants.feeds[feed] if feed else constants  # type: ignore[index]
    value = getattr(holder, own) * factor
    value = min(value, 1.0) if own in AT_MOST_ONE else value
    if not feed:
        return replace(constants, **{own: value})
    return replace(constants, feeds={**constants.feeds, feed: replace(holder, **{own: value})})  # type: ignore[dict-item]


def search(
    loss: Callable[[MatrixConstants], float], start: MatrixConstants, rounds: int, draw: np.random.Generator
) -> MatrixConstants:
    """Constants of low ``loss``, found one at a time from ``start``."""
    best, least = start, loss(start)
    for turn in range(rounds):
        step = FIRST_STEP ** (0.5**turn)
        for name in draw.permutation(names()).tolist():
            for factor in (step, 1 / step):
                tried = scaled(best, name, factor)
                found = loss(tried)
                if found < least:
                    best, least = tried, found
                    break
        click.echo(f"round {turn + 1} of {rounds}: {least:.4f}", err=True)
    return best


def mean_error(products: Sequence[Products], constants: MatrixConstants) -> float:
    """Mean over boards of the mean error, outliers cut."""
    return float(np.mean([np.minimum(each.errors(constants), WORST).mean() for each in products]))


@click.command()
@click.option("--data", type=click.Path(path_type=Path), default=None, help="The measured data.")
@click.option("--without", "left_out", type=click.Choice(list(BOARDS)), default=None, help="A board left out.")
@click.option("--half", is_flag=True, help="Only half of the weights' shapes; the other half judges.")
@click.option("--rows", default=800, show_default=True, help="Products per board.")
@click.option("--rounds", default=5, show_default=True, help="Times through all constants.")
@click.option("--scatter", default=0.3, show_default=True, help="Spread of the first constants, in logarithms.")
@click.option("--seed", default=0, show_default=True, help="Of the draws.")
def main(
    data: Path | None, left_out: str | None, half: bool, rows: int, rounds: int, scatter: float, seed: int
) -> None:
    """Choose the constants of products on Tensor Cores anew and print them, with what they come to."""
    draw = np.random.default_rng(seed)
    products = read_products(data_directory(data))
    chosen = []
    for board, each in products.items():
        usable = np.flatnonzero(each.half == 0) if half else np.arange(len(each.m))
        if board != left_out:
            chosen.append(each.some(np.sort(draw.choice(usable, min(rows, len(usable)), replace=False))))
    start = CONSTANTS
    for name in names():
        start = scaled(start, name, float(np.exp(draw.normal(0, scatter))))
    found = search(lambda constants: mean_error(chosen, constants), start, rounds, draw)
    for name in names():
        feed, _, own = name.rpartition(".")
        value = getattr(found.feeds[feed] if feed else found, own)  # type: ignore[index]
        click.echo(f'"feeds.{name}" = {value:.4g}' if feed else f"{own} = {value:.4g}")
    for board, each in products.items():
        judged = each.some(np.flatnonzero(each.half == 1)) if half else each
        errors = judged.errors(found)
        long = judged.seconds >= 20e-6
        click.echo(f"# {board}: {errors.mean():.1%}, from 20 us {errors[long].mean():.1%}, {len(errors)} products")


if __name__ == "__main__":
    main()
