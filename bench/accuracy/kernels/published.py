"""Predictions against times that others published of matrix products, ``published.toml`` in this folder.

Two questions. *Kernels* whose tiles their authors tell: how far off is the model, on boards and code that none of its
constants was chosen on? *Library* products of the same size: how does what we predict for our best kernel compare with
what the vendor's was measured to reach? The first is an error, the second a claim that carries the first's error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from bench.pictures import new_figure, save
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.tables import new_table
from roller.programs import find_programs
from roller.text.quantities import si_text, time_text
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operators_from_json
from sokoban.model.rational import estimate
from sokoban.schedule.files import table_from_json

FILE = Path(__file__).with_name("published.toml")

#: Key of the file, title of the table, and what its last column holds.
QUESTIONS = (
    ("kernels", "Kernels of others, their tiles known", "error"),
    ("library", "Our best kernel, predicted, against library products as measured", "ours/theirs"),
)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product ``C[m, n] = sum(k, A[m, k] * B[k, n])`` that somebody timed.

    Attributes:
        who: whose kernel it was. source: where its time stands.
        sizes: m, n and k.
        flops: FLOP/s that were measured.
        schedule: its tiles as a schedule of ours; None of a library's kernel.
    """

    device: DeviceSpec
    who: str
    source: str
    sizes: tuple[int, int, int]
    dtype: str
    flops: float
    schedule: dict[str, Any] | None

    @property
    def form(self) -> KernelForm:
        """The operator, accumulated in float32."""
        m, n, k = self.sizes
        operator = {"name": "product", "op": "matmul", "m": m, "n": n, "k": k, "dtype": self.dtype}
        return kernel_form(
            operators_from_json(msgspec.json.encode({**operator, "accumulate": "float32"}), str(FILE))[0]
        )

    @property
    def measured_seconds(self) -> float:
        """The time that the published rate stands for."""
        return 2.0 * float(np.prod(self.sizes, dtype=float)) / self.flops

    @property
    def predicted_seconds(self) -> float:
        """By RATIONAL: of the published schedule, or of our best kernel where there is none."""
        if self.schedule is None:
            return find_programs(self.form, self.device, 1).direct[0].estimate.seconds
        table = table_from_json(msgspec.json.encode(self.schedule), self.form)
        return float(estimate(table, PlacedForm(table.form, self.device)).seconds[0])


def products(kind: str) -> list[Product]:
    """The entries of ``published.toml`` under ``kernels`` or ``library``."""
    return [
        Product(
            device=load_device(entry["device"]),
            who=entry["who"],
            source=entry["source"],
            sizes=tuple(entry["sizes"]),
            dtype=entry.get("dtype", "float32"),
            flops=float(entry["flops"]),
            schedule=entry.get("schedule"),
        )
        for entry in tomllib.loads(FILE.read_text(encoding="utf-8"))[kind]
    ]


def table(data: Path, out: Path) -> Iterable[Table]:
    """Both questions, and a picture of each in ``out``; ``data`` is not needed."""
    views = []
    for kind, title, last in QUESTIONS:
        rows = [(product, product.predicted_seconds / product.measured_seconds) for product in products(kind)]
        views.append(_table(title, rows, last))
        chart(rows, out / f"published_{kind}.png", title)
    return views


def chart(rows: Sequence[tuple[Product, float]], path: Path, title: str) -> None:
    """A bar per product from one to its predicted time over the measured one."""
    figure = new_figure(9.0, 1.3 + 0.3 * len(rows))
    panel = figure.subplots()
    ratios = [ratio for _, ratio in rows]
    labels = [
        f"{product.device.name}: {product.who}, {' x '.join(map(str, product.sizes))}, {product.dtype}"
        for product, _ in rows
    ]
    panel.barh(
        range(len(rows)), [ratio - 1 for ratio in ratios], left=1, color=["C3" if r > 1 else "C0" for r in ratios]
    )
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_yticks(range(len(rows)), labels, fontsize=8)
    panel.set(xlabel="predicted over measured time", ylim=(len(rows) - 0.4, -0.6))
    panel.grid(axis="x", alpha=0.25)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def _table(title: str, rows: Sequence[tuple[Product, float]], last: str) -> Table:
    view = new_table(
        ("device", "kernel", "type", "m x n x k"),
        ("measured", "predicted", "rate measured", "rate predicted", last),
        title=title,
    )
    for row, ratio in rows:
        view.add_row(
            row.device.name,
            row.who,
            row.dtype,
            " x ".join(map(str, row.sizes)),
            time_text(row.measured_seconds),
            time_text(row.measured_seconds * ratio),
            si_text(row.flops, "FLOP/s"),
            si_text(row.flops / ratio, "FLOP/s"),
            f"{100 * (ratio - 1):+.1f}%" if last == "error" else f"{ratio:.2f}",
        )
    return view
