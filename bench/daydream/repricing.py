"""The page docs/repricing.md: ``python -m bench.daydream.repricing TRACE --device v100 > docs/repricing.md``.

Every convolution and matrix product of a recorded trace, against Roller's prediction for it, by its models of the
vendor's library and by the best kernels that it can build itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap

import click
import numpy as np

from daydream.operators.pricing import device_of
from daydream.operators.repricing import RepricedRow, repriced_table, totals
from daydream.tasks.build import read_graph
from hal.support.errors import InputError

#: Rows whose library price is this factor from the recording are listed one by one.
FAR_OFF = 1.5

MOST_LISTED = 24

WIDTH = 120

EXPLANATIONS = {
    "older engines": "`implicit_convolve_sgemm`, `explicit_convolve_sgemm`, `dgrad_engine` and `wgrad_alg0_engine` of"
    " cuDNN. The library model is made of what version 8.9 runs, which is faster, above all for gradients with a stride"
    " and for 1x1 windows; `wgrad_alg0_engine` adds its partial sums with atomics, which no model of ours has",
    "fused Winograd": "F(2x2, 3x3): one kernel with 16 multiplications where the others have 36. The library model"
    " knows it; Roller's own Winograd passes its transformed tensors through memory, so that `best` lies a little above"
    " the recording here",
    "non-fused Winograd": "F(4x4, 3x3): transforms, 36 GEMMs, a transform back: four kernels, here as there. `best`"
    " takes nothing off for what one of them leaves in L2 for the next, the library model counts the pauses between"
    " the four, which recorded durations leave out, and is too high on 7x7 images",
    "split-K": "the sum over all pixels is cut into slices that several blocks add up, because the result, some"
    " filters, is too small to fill the device; `best` adds them up by a second kernel",
    "GEMM": "matrix products of linear layers. What follows in the same kernel (a bias) counts with them",
    "implicit GEMM": "the kernels that the library model was made for; their tables of offsets, kernels of their own in"
    " the recording, count with them",
    "TF32": "Tensor Cores with rounded operands. The library model is that of float32 without TF32, so that it lies"
    " far above the recording",
    "half precision": "Tensor Cores with 16-bit operands",
    "FFT": "a convolution by Fourier transforms, which the library model does not have",
    "other": "kernels whose names tell no algorithm",
}


@click.command(help="Recorded against predicted durations of a trace, as a page in Markdown.")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--device", default="auto", help="Board to price for; that of the recording by default.")
@click.option("--search", default="roller", help="How Roller's own kernels are found: roller, sokoban or both.")
def main(trace: Path, device: str, search: str) -> None:
    try:
        for line in page(trace, device, search):
            click.echo(line)
    except InputError as error:
        raise click.ClickException(str(error)) from None


def page(trace: Path, device: str, search: str) -> Iterator[str]:
    """The lines of the page."""
    graph = read_graph(trace)
    spec, stands_in = device_of(graph, device)
    library = repriced_table(graph, spec, "library")
    best = repriced_table(graph, spec, "best", search=search)
    board = f"{spec.title} ({stands_in})" if stands_in else spec.title
    yield "# Re-pricing a trace"
    yield ""
    yield from wrap(
        "What `--pass replace-kernel:op=auto,device=NAME` puts in place of the recorded convolutions and matrix"
        f" products of `{trace.name}`, for {board}: microseconds of device time, all kernels of an operator call"
        " together, mean over the full steps. *Library* is the model of cuBLAS and cuDNN (`implementation=library`),"
        " made from cuDNN 8.9 and CUDA 12.1; *best* is the best kernel that Roller can build (`implementation=best`,"
        f" found by {'construction' if search == 'roller' else search}). Made by `python -m bench.daydream.repricing"
        f" {trace.name} --device {spec.name}`.",
        WIDTH,
    )
    yield ""
    priced = [row for row in library if np.isfinite(row.priced_us)]
    calls = sum(row.calls for row in library)
    yield f"{sum(row.calls for row in priced):.0f} of {calls:.0f} calls of a step have a price."
    yield ""
    yield "## A step"
    yield ""
    yield from _totals(library, best)
    yield ""
    yield "The mean is the geometric one of predicted over recorded, each call counting once."
    yield ""
    yield "## By recorded algorithm"
    yield ""
    yield from _by_algorithm(library, best)
    yield ""
    yield from _explained(library)
    yield ""
    yield f"## More than {FAR_OFF:g} times apart"
    yield ""
    yield from _far_off(library)
    yield ""
    yield "## Layer by layer"
    yield ""
    yield from _layers(library, best)


def _totals(library: Sequence[RepricedRow], best: Sequence[RepricedRow]) -> Iterator[str]:
    yield "| Pass | Recorded ms | Library ms | Mean | Best ms | Mean |"
    yield "|---|--:|--:|--:|--:|--:|"
    ours = totals(best)
    sums = np.zeros(3)
    for name, (recorded, predicted, mean) in totals(library).items():
        _, ours_us, ours_mean = ours.get(name, (0.0, np.nan, np.nan))
        sums += (recorded, predicted, ours_us)
        title = name if name == "matrix product" else f"convolution, {name}"
        yield f"| {title} | {recorded:.2f} | {predicted:.2f} | {mean:.2f} | {ours_us:.2f} | {ours_mean:.2f} |"
    yield f"| all | {sums[0]:.2f} | {sums[1]:.2f} | | {sums[2]:.2f} | |"


def _by_algorithm(library: Sequence[RepricedRow], best: Sequence[RepricedRow]) -> Iterator[str]:
    yield "| Recorded algorithm | Calls | Recorded ms | Library over recorded | Best over recorded |"
    yield "|---|--:|--:|--:|--:|"
    for family in dict.fromkeys(row.algorithm for row in library):
        mine = [(a, b) for a, b in zip(library, best, strict=True) if a.algorithm == family]
        calls = sum(a.calls for a, _ in mine)
        recorded = sum(a.calls * a.recorded_us for a, _ in mine)
        theirs = sum(a.calls * a.priced_us for a, _ in mine) / recorded
        ours = sum(b.calls * b.priced_us for _, b in mine) / recorded
        yield f"| {family} | {calls:.0f} | {recorded / 1e3:.2f} | {theirs:.2f} | {ours:.2f} |"


def _explained(library: Sequence[RepricedRow]) -> Iterator[str]:
    for family in dict.fromkeys(row.algorithm for row in library):
        yield from wrap(f"- **{family}**: {EXPLANATIONS[family]}.", WIDTH, subsequent_indent="  ")


def _far_off(library: Sequence[RepricedRow]) -> Iterator[str]:
    far = [row for row in library if np.isfinite(row.ratio) and not 1 / FAR_OFF <= row.ratio <= FAR_OFF]
    far.sort(key=lambda row: -row.calls * abs(row.priced_us - row.recorded_us))
    if not far:
        yield "None."
        return
    yield "| Layer | Operator | Pass | Recorded | Library | Recorded kernel | Assumed |"
    yield "|---|---|---|--:|--:|---|---|"
    for row in far[:MOST_LISTED]:
        yield (
            f"| {row.layer} | {row.operator} | {row.direction} | {row.recorded_us:.0f} | {row.priced_us:.0f}"
            f" | `{row.kernel}` | {row.assumed} |"
        )
    if len(far) > MOST_LISTED:
        yield ""
        yield f"The {MOST_LISTED} largest of {len(far)}."


def _layers(library: Sequence[RepricedRow], best: Sequence[RepricedRow]) -> Iterator[str]:
    yield "| Layer | Operator | Pass | Calls | Recorded | Library | Best | Recorded algorithm | Assumed |"
    yield "|---|---|---|--:|--:|--:|--:|---|---|"
    order = {layer: place for place, layer in enumerate(dict.fromkeys(row.layer for row in library))}
    for row, best_row in sorted(zip(library, best, strict=True), key=lambda pair: order[pair[0].layer]):
        yield (
            f"| {row.layer} | {row.operator} | {row.direction} | {row.calls:.0f} | {row.recorded_us:.0f}"
            f" | {row.priced_us:.0f} | {best_row.priced_us:.0f} | {row.algorithm} | {row.assumed} |"
        )


if __name__ == "__main__":
    main()
