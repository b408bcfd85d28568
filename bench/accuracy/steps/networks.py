"""Vision networks of timm on an RTX 3090 with autocast: captured steps against the measured ones, both layouts.

Every network is built without weights, its step captured operator by operator and its kernels' device times summed,
in worker processes. Constants of convolutions were chosen on networks at even places of the sorted names; the others
judge them. What the host adds is left out: the batches are those that fill the board.

``python -m bench.accuracy.steps.networks --every 10`` takes every tenth pair of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.accuracy.steps.network_rows import NetworkRow, NetworkScore, read_rows
from bench.pictures import draw_comparison
from hal.catalog import load_device
from hal.support.errors import InputError
from hal.support.tables import new_table

if TYPE_CHECKING:
    from collections.abc import Iterator


#: What is asked for: median and mean error in per cent, rank correlation.
MEDIAN_BAR, MEAN_BAR, RANK_BAR = 15.0, 20.0, 0.97

#: Names under which today's timm builds another network than the one that was measured have other parameters.
_SAME_PARAMETERS = 0.03

#: All networks take most of an hour: the page has those of every seventh pair.
SAMPLED = 7

#: Rows in a worker before a new process takes its place: captured operators are remembered.
_TASKS_PER_WORKER = 150


# Predicted


def evaluate(rows: Sequence[NetworkRow], workers: int) -> list[NetworkScore]:
    """The prediction of every row, in order; progress goes to the terminal."""
    scores: list[NetworkScore] = []
    with (
        get_context("spawn").Pool(workers, maxtasksperchild=_TASKS_PER_WORKER) as pool,
        Progress(console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("networks", total=len(rows))
        for score in pool.imap(score_of, rows):
            scores.append(score)
            progress.advance(task)
    return scores


def score_of(row: NetworkRow) -> NetworkScore:
    """The prediction of one row; what fails says why."""
    from daydream.capture.options import CaptureOptions
    from daydream.capture.sources import captured
    from daydream.operators.calls import operator_prices

    # PyTorch 1.12, which ran the training steps, had no fused attention, and its SGD went from parameter to parameter.
    options = CaptureOptions(
        batch=row.batch,
        image=row.image,
        mode="training" if row.training else "inference",
        dtype="amp",
        implementation="for-loop",
        attention="eager" if row.training else "flash",
        channels_last=row.channels_last,
    )
    try:
        with _software(training=row.training):
            step = captured(f"timm:{row.model}", options)
    except InputError as error:
        return NetworkScore(row=row, shares={}, failure=str(error))
    # Captures have each parameter's elements.
    parameters = float(sum(parameter.tensor.elements for parameter in step.parameters))
    if abs(parameters - row.parameters) > _SAME_PARAMETERS * row.parameters + 2e4:
        failure = (
            f"timm:{row.model}: has {parameters / 1e6:.1f} M parameters, was measured with {row.parameters / 1e6:.1f}"
        )
        return NetworkScore(row=row, shares={}, failure=failure)
    launched = Counter((each.name, each.inputs, each.outputs) for each in step.operators if each.launches)
    prices = operator_prices(list(launched), load_device("rtx-3090"))
    shares: Counter[str] = Counter()
    for price, times in zip(prices, launched.values(), strict=True):
        for kernel in price.kernels:
            shares[kernel.model] += kernel.seconds * times  # type: ignore[assignment]
    return NetworkScore(
        row=row,
        predicted=float(sum(shares.values())),
        shares=dict(shares),
    )


@contextmanager
def _software(*, training: bool) -> Iterator[None]:
    """timm as it was measured: norms of halves and fused attention in inference, neither in training.

    That norms ran in halves is not written down, but their times tell: in float32 networks with group norm would move
    twice the bytes that the board can move in the measured time.
    """
    from daydream.capture.models.torchvision_operators import import_torchvision

    import_torchvision()
    import timm.layers
    import torch

    _norms_of_halves()
    timm.layers.set_fused_attn(not training)
    timm.layers.set_fast_norm(not training)
    # Attention that no fused kernel takes was written out in halves before PyTorch 2.5.
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
        timm.layers.set_fast_norm(False)
        timm.layers.set_fused_attn(True)


@cache
def _norms_of_halves() -> None:
    """timm's norms in the type of autocast, which ask PyTorch for the autocast of a device, which ``meta`` has not."""
    import timm.layers.norm
    import timm.layers.norm_act
    import torch

    from daydream.capture.pytorch.autocast import Autocast

    autocast = Autocast()

    def of_halves(function: Any) -> Any:
        def norm(x: Any, sizes: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
            # Some networks run their first layers once while they are built.
            if not torch.is_autocast_enabled("cuda"):
                return function(x, sizes, weight, bias, eps)
            halves = [None if tensor is None else tensor.half() for tensor in (x, weight, bias)]
            with autocast.paused():
                return function(halves[0], sizes, halves[1], halves[2], eps)

        return norm

    for module in (timm.layers.norm, timm.layers.norm_act):
        for name in ("group_norm", "layer_norm"):
            if hasattr(module, f"fast_{name}"):
                setattr(module, f"fast_{name}", of_halves(getattr(torch.nn.functional, name)))


# Tables


def table(data: Path, out: Path, *, every: int = SAMPLED, workers: int = 0) -> Iterable[Table]:
    """The networks' table and a picture in ``out``; none where the rows or timm are missing.

    Args:
        data: directory of the measurements.
        out: of pictures.
        every: take every n-th pair of networks.
        workers: processes; 0 takes one for every core.
    """
    path = data / "models" / "timm.csv"
    missing = [name for name in ("torch", "timm", "scipy") if find_spec(name) is None]
    if missing:
        click.echo(f"networks: skipped for want of {missing[0]}; pip install 'roller[models,accuracy]'", err=True)
        return []
    if not path.is_file():
        return []
    rows = read_rows(path)
    # Neighbours belong to different halves.
    models = {name for place, name in enumerate(sorted({row.model for row in rows})) if place // 2 % every == 0}
    scores = evaluate([row for row in rows if row.model in models], workers or os.cpu_count() or 1)
    good = [score for score in scores if not score.failure]
    if not good:
        return [failure_table(scores)]
    chart(good, out / "networks.png")
    return [score_table(good), failure_table(scores)]


def score_table(scores: Sequence[NetworkScore]) -> Table:
    """A row per mode, layout and half: what was chosen on, and the others; then one per mode."""
    view = new_table(
        ("steps", "networks"),
        ("rows", "median error", "mean error", "rank of steps", "rank of times per image", "asked"),
        title="Vision networks on an RTX 3090 with autocast",
    )
    asked = f"{MEDIAN_BAR:g}%, {MEAN_BAR:g}%, {RANK_BAR:g}"
    kinds = sorted({score.row.kind for score in scores})
    modes = sorted({kind.split()[0] for kind in kinds})
    groups = [(kind, half, [score for score in scores if score.row.kind == kind and score.row.chosen_on == is_chosen])
              for kind in kinds for half, is_chosen in (("chosen on", True), ("others", False))]  # fmt: skip
    groups += [(mode, "all", [score for score in scores if score.row.kind.startswith(mode)]) for mode in modes]
    for kind, half, members in groups:
        if len(members) > 2:
            view.add_row(kind, half, str(len(members)), *accuracy(members), asked if half == "all" else "")
    return view


def accuracy(scores: Sequence[NetworkScore]) -> tuple[str, ...]:
    """Median and mean error, rank correlation of steps and of times per image."""
    from scipy.stats import spearmanr

    measured, batch, predicted = np.array([(each.row.measured, each.row.batch, each.predicted) for each in scores]).T
    errors = np.abs(predicted / measured - 1)
    ranks = [
        spearmanr(predicted, measured).statistic,
        spearmanr(predicted / batch, measured / batch).statistic,
    ]
    return f"{np.median(errors):.1%}", f"{errors.mean():.1%}", *(f"{rank:.3f}" for rank in ranks)


def failure_table(scores: Sequence[NetworkScore]) -> Table:
    """Names that were not captured, with their reason, and the share that was."""
    names = {score.row.model for score in scores}
    failures = {score.row.model: score.failure for score in scores if score.failure}
    captured_share = 1 - len(failures) / max(len(names), 1)
    title = f"Networks captured: {captured_share:.1%} of {len(names)} names"
    view = new_table(("not captured", "reason"), title=title)
    for name, reason in sorted(failures.items()):
        view.add_row(name, reason)
    return view


def chart(scores: Sequence[NetworkScore], path: Path) -> None:
    """Predicted against measured time per image, a colour per mode and layout, as a PNG."""
    groups = {}
    for kind in sorted({score.row.kind for score in scores}):
        rows = [(each.row.measured, each.predicted, each.row.batch) for each in scores if each.row.kind == kind]
        measured, predicted, batch = np.array(rows).T
        groups[kind] = (measured / batch, predicted / batch)
    draw_comparison(path, "Vision networks on an RTX 3090 with autocast", {"time per image": groups})


@click.command()
@click.option("--every", type=click.IntRange(1), default=1, show_default=True, help="Take every n-th pair of networks.")
@click.option("--workers", type=click.IntRange(1), default=None, help="Processes.  [default: the machine's cores]")
@click.option("--data", type=click.Path(path_type=Path), default=None, help="The measured data.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/accuracy"), show_default=True
)
def main(every: int, workers: int | None, data: Path | None, out: Path) -> None:
    """Compare predicted steps of vision networks with measured ones."""
    from bench.accuracy.data import data_directory
    from hal.support.tables import print_table

    for view in table(data_directory(data), out, every=every, workers=workers or 0):
        print_table(view)


if __name__ == "__main__":
    main()
