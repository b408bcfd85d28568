"""Steps of jobs in eight bits that really ran: Nemotron-15B under NeMo on H100s, predicted from code and plan.

Nothing was chosen on these rows. Transformer Engine casts within norms and activations what is priced as kernels of
their own here, so that predictions are too long.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.table import Table

from bench.accuracy.steps.jobs import nemotron_units
from daydream.plan.layout import Layout
from daydream.plan.planned import planned
from hal.catalog import load_device
from hal.node_catalog import usual_node

#: Largest mean error asked for of rows in eight bits.
BAR = 0.15

#: Precision by the data's word; NeMo's FP8 of these releases scales whole tensors by the steps before.
PRECISIONS = {"FP8": "fp8-tensorwise"}


def errors(path: Path, word: str) -> np.ndarray:
    """Relative errors of Nemotron's rows of a data type, too long ones positive."""
    with path.open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["dtype"] == word and "nemotron" in row["recipe"]]
    device = load_device("h100-sxm-80gb")
    out = []
    for row in rows:
        tensor = int(row["tp"])
        units = nemotron_units(int(row["micro_batch"]), tensor)
        units = replace(units, capture=replace(units.capture, precision=PRECISIONS[word]))
        layout = Layout(
            data=int(row["gpus"]) // tensor, tensor=tensor, micro_batches=int(row["micro_batches"]), shard="zero1",
            sequence=True, overlap_tensor=True,
        )  # fmt: skip
        seconds = planned(units, layout, device, usual_node(device)).seconds
        out.append(seconds / float(row["step_seconds"]) - 1)
    return np.array(out)


def table(data: Path, out: Path) -> Iterable[Table]:
    """A row per data type; none where the data are missing."""
    path = data / "jobs" / "dgxc.csv"
    if not path.is_file():
        return
    view = Table(title="dgxc: Nemotron-15B in eight bits on 16 to 2,048 H100, nothing chosen on these rows")
    for column in ("data type", "precision", "rows", "bias", "mean error", "asked", "worst"):
        view.add_column(column)
    for word, precision in PRECISIONS.items():
        each = errors(path, word)
        view.add_row(
            word, precision, str(len(each)), f"{each.mean():+.1%}", f"**{np.abs(each).mean():.1%}**", f"{BAR:.0%}",
            f"{each[np.abs(each).argmax()]:+.0%}",
        )  # fmt: skip
    yield view
