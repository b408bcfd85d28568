"""Attention in bfloat16: our best kernel by RATIONAL against FlashAttention's measured times, and written out.

The measured calls are those of a server: a kernel writes new keys and values into pages, FlashAttention (2 on A100 and
L40S, 3 on H100) reads them. Ours takes the place of the second; the first is priced by the library's model and added,
so that both sides are the same work. Written out are two products and a softmax between them, each by the library's
model, with the logits in memory. One row of :data:`EVERY` is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import convert
from rich.table import Table

from bench.accuracy.library.tensor_core_rows import KINDS, read_calls
from bench.pictures import new_figure, save
from hal.spec.device import DeviceSpec
from hal.support.tables import new_table
from roller.estimate.operators import Item, estimate_items
from roller.library.attention.times import AttentionSizes, attention_seconds
from roller.library.parts import attention
from sokoban.language.named.attention import Attention

#: Boards of the data; the shortest sequence; one row of so many.
BOARDS = ("a100_sxm", "h100_sxm", "l40s")
TOKENS = 1024
EVERY = 8

#: Largest departure of the mean ratio asked for, and the least gain over the written-out form.
BAR, GAIN = 0.20, 5.0


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Rows of one board and one kind.

    Attributes:
        board: its name in the data.
        kind: what they have in common: ``all``, ``no window``, ``window``.
        measured: ours in its place, by measured.
        bare: ours alone, by measured.
        library: ours alone, by the library's model of attention without pages.
        gain: the written-out form by ours.
    """

    board: str
    kind: str
    measured: np.ndarray[Any, np.dtype[np.float64]]
    bare: np.ndarray[Any, np.dtype[np.float64]]
    library: np.ndarray[Any, np.dtype[np.float64]]
    gain: np.ndarray[Any, np.dtype[np.float64]]


def compare(data: Path) -> list[Compared]:
    """Every board, all rows and by whether they have a window."""
    kind = next(each for each in KINDS if each.name == "prefill")
    comparisons = []
    for calls in read_calls(data, kind):
        if calls.board not in BOARDS:
            continue
        rows, seconds = [], []
        for operator, measured in list(zip(calls.operators, calls.seconds.tolist(), strict=True)):
            if operator["queries"] >= TOKENS and operator["head_dim"] <= 256:
                rows.append(operator)
                seconds.append(measured)
        writing = _writing_seconds(rows[::EVERY], calls.device)
        rows, seconds = [each | {"page": 0} for each in rows[::EVERY]], seconds[::EVERY]
        ours = _seconds(rows, calls.device, "best")
        library = _seconds(rows, calls.device, "library")
        written = _seconds([each | {"algorithm": "eager"} for each in rows], calls.device, "library")
        has_window = np.array([bool(each.get("window")) for each in rows])
        for name, chosen in (("all", has_window >= 0), ("no window", ~has_window), ("window", has_window)):
            if chosen.any():
                comparisons.append(
                    Compared(
                        board=calls.board, kind=name,
                        measured=((ours + writing) / np.array(seconds))[chosen],
                        bare=(ours / np.array(seconds))[chosen],
                        library=(ours / library)[chosen], gain=(written / ours)[chosen],
                    )
                )  # fmt: skip
    return comparisons


def _seconds(
    rows: Sequence[Mapping[str, Any]], device: DeviceSpec, implementation: Literal["best", "library"]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    items = [Item(str(number), dict(row), "forward") for number, row in enumerate(rows)]
    return np.array([each.seconds for each in estimate_items(items, device, implementation=implementation)])


def _writing_seconds(rows: Sequence[Mapping[str, Any]], device: DeviceSpec) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Seconds of writing new keys and values into pages."""
    sizes = [attention(convert(row, type=Attention))[0].sizes for row in rows]
    names = [each.name for each in fields(AttentionSizes)]
    columns = dict(zip(names, np.array(sizes, np.float64).T, strict=True))
    return np.asarray(attention_seconds(AttentionSizes(**columns), device).stages["update"])


def table(data: Path, out: Path) -> Iterable[Table]:
    """The comparison, and its picture in ``out``."""
    comparisons = compare(data)
    view = new_table(
        ("board",),
        ("rows",),
        ("kind",),
        ("ours by measured", "10 to 90 %", "asked", "alone", "by the library's model", "gain", "asked "),
        title="Attention in bfloat16 from 1,024 tokens",
    )
    for each in comparisons:
        low, high = np.percentile(each.measured, [10, 90])
        numbers = [each.measured.size, f"{_mean(each.measured):.2f}", f"{low:.2f} to {high:.2f}"]
        numbers += [f"{1 - BAR:.2f} to {1 + BAR:.2f}", f"{_mean(each.bare):.2f}", f"{_mean(each.library):.2f}"]
        view.add_row(
            each.board, str(numbers[0]), each.kind, *map(str, numbers[1:]), f"{_mean(each.gain):.1f}x", f"{GAIN:.0f}x"
        )
    _picture(comparisons, out / "own_attention.png")
    return [view]


def _mean(ratios: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    return math.exp(float(np.log(ratios).mean()))


def _picture(comparisons: list[Compared], path: Path) -> None:
    figure = new_figure(6.4, 3.2)
    axes = figure.subplots()
    for each in comparisons:
        if each.kind != "all":
            ordered = np.sort(each.measured)
            axes.plot(
                np.linspace(0, 100, ordered.size), ordered, label=f"{each.board.partition('_')[0].upper()}, {each.kind}"
            )
    axes.axhspan(1 - BAR, 1 + BAR, color="0.9", zorder=0)
    axes.set_xlabel("rows, %")
    axes.set_ylabel("ours predicted by measured")
    axes.set_yscale("log")
    axes.set_yticks([0.25, 0.5, 0.8, 1.0, 1.25, 2.0], ["0.25", "0.5", "0.8", "1", "1.25", "2"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    save(figure, path)
