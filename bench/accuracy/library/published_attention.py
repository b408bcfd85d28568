"""Library attention against rates that its authors published, ``published_attention.toml`` in this folder.

Rates by the length of sequences are compared one by one: which tiles kernels have, forward and backward, shows in how
fast the rate grows. Two constants of FlashAttention 3's backward pass were chosen on every second length.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from bench.pictures import new_figure, save
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.tables import new_table
from roller.library.attention.tiles import Family
from roller.library.attention.times import AttentionSizes, attention_seconds
from roller.library.streaming.elementwise import Direction

FILE = Path(__file__).with_suffix(".toml")
#: FLOP per pair of a query and a key, head and element of a head.
PAIR_FLOPS = {"forward": 4, "backward": 10}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Published rates of one kernel.

    Attributes:
        device: the board.
        kernels: the family of kernels.
        source: where the rates stand.
        direction: ``forward`` or ``backward``.
        head_dim: elements of a head.
        causal: True where a query sees no later key.
        tokens: of all sequences of a call.
        width: elements of all heads.
        lengths: of the sequences, one per rate.
        measured: FLOP/s.
    """

    device: DeviceSpec
    kernels: Family
    source: str
    direction: Direction
    head_dim: int
    causal: bool
    tokens: int
    width: int
    lengths: NDArray[np.int64]
    measured: NDArray[np.float64]

    @property
    def predicted(self) -> NDArray[np.float64]:
        """FLOP/s by the library's model."""
        heads = self.width // self.head_dim
        sizes = AttentionSizes(
            b=self.tokens // self.lengths, heads=heads, kv_heads=heads, queries=self.lengths, keys=self.lengths,
            head_dim=self.head_dim, value_dim=self.head_dim, causal=int(self.causal), window=0, page=0,
        )  # fmt: skip
        times = attention_seconds(
            sizes, self.device, dtype="float16", direction=self.direction, kernels=self.kernels
        ).kernel_seconds
        pairs = self.tokens * self.lengths / (2 if self.causal else 1)
        rates: NDArray[np.float64] = PAIR_FLOPS[self.direction] * pairs * self.width / times
        return rates

    @property
    def label(self) -> str:
        """The kernel in words."""
        mask = ", causal" if self.causal else ""
        return f"{self.kernels}, {self.direction}, heads of {self.head_dim}{mask}"


def published_rates() -> list[Rates]:
    """The entries of the file."""
    file = tomllib.loads(FILE.read_text(encoding="utf-8"))
    lengths = np.array(file["lengths"])
    return [
        Rates(
            device=load_device(entry["device"]), kernels=entry["kernels"], source=entry["source"],
            direction=entry.get("direction", "forward"), head_dim=entry["head_dim"],
            causal=entry.get("causal", False), tokens=file["tokens"], width=file["width"], lengths=lengths,
            measured=np.array(entry["tflops"]) * 1e12,
        )
        for entry in file["rates"]
    ]  # fmt: skip


def errors(rates: Rates) -> NDArray[np.float64]:
    """Predicted over measured time, less one, by length."""
    deviations: NDArray[np.float64] = rates.measured / rates.predicted - 1
    return deviations


def table(data: Path, out: Path) -> Iterable[Table]:
    """Errors by length, and a picture of the rates in ``out``; ``data`` is not needed."""
    rows = published_rates()
    lengths = [str(length) for length in rows[0].lengths]
    view = new_table(
        ("device", "kernel"), (*lengths, "mean error"), title="Attention that its authors timed: error by length"
    )
    for row in rows:
        found = errors(row)
        cells = [f"{100 * error:+.1f}%" for error in found]
        view.add_row(row.device.name, row.label, *cells, f"{100 * np.abs(found).mean():.1f}%")
    chart(rows, out / "published_attention.png")
    return [view]


def chart(rows: Sequence[Rates], path: Path) -> None:
    """Rates by the length of sequences, measured and predicted: a panel for each direction and mask."""
    kinds = list(dict.fromkeys((row.direction, row.causal) for row in rows))
    figure = new_figure(4.2 * len(kinds), 4.0)
    for panel, (direction, causal) in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        of_kind = [row for row in rows if (row.direction, row.causal) == (direction, causal)]
        for number, row in enumerate(of_kind):
            panel.plot(row.lengths, row.measured / 1e12, f"C{number}o", label=f"{row.kernels}, {row.head_dim}")
            panel.plot(row.lengths, row.predicted / 1e12, f"C{number}-")
        panel.set_xscale("log", base=2)
        panel.set(xlabel="length of sequences", title=f"{direction}{', causal' if causal else ''}", ylim=(0, None))
        panel.grid(alpha=0.25)
        panel.legend(fontsize=8)
    figure.axes[0].set_ylabel("TFLOP/s: measured (points), predicted (lines)")
    save(figure, path)
