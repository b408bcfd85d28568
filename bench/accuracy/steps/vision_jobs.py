"""Vision networks of NVIDIA's DeepLearningExamples in training, on one board, as ``daydream predict`` has them.

float32 and TF32 ran in NCHW, AMP in NHWC (their ``--memory-format``). Nothing is chosen on these rows.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
from rich.table import Table

from daydream.capture.captured import Capture
from daydream.capture.options import CaptureOptions
from daydream.capture.sources import captured
from daydream.prediction.step import predicted
from hal.catalog import load_device

#: Largest mean error asked for.
BAR = 0.08

#: Networks by their names in timm, with the side of their images.
NETWORKS = {
    "resnet50": ("resnet50", 224), "resnext101-32x4d": ("resnext101_32x4d", 224),
    "se-resnext101-32x4d": ("seresnext101_32x4d", 224), "efficientnet-b0": ("efficientnet_b0", 224),
    "efficientnet-b4": ("efficientnet_b4", 380),
}  # fmt: skip

DTYPES = {"fp32": "float32", "tf32": "tf32", "amp": "amp"}

#: Boards that differ in their memory alone.
BOARDS = {"v100-sxm2-32gb": "v100-sxm2-16gb"}


@cache
def _captured(name: str, batch: int, precision: str) -> Capture:
    network, image = NETWORKS[name]
    options = CaptureOptions(
        batch=batch, image=image, dtype=DTYPES[precision], optimizer="sgd", channels_last=precision == "amp"
    )
    return captured(f"timm:{network}", options)


def table(data: Path, _: Path) -> Iterable[Table]:
    """A line for every board and type; none where the data are missing."""
    path = data / "jobs" / "dle.csv"
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["mode"] == "training" and row["gpus"] == "1"]
    errors: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["model"] not in NETWORKS:
            continue
        capture = _captured(row["model"], int(row["batch"]), row["precision"])
        (step,) = predicted(capture, [load_device(BOARDS.get(row["board"], row["board"]))])
        measured = int(row["batch"]) / float(row["images_per_second"])
        errors.setdefault((row["board"], row["precision"]), []).append(step.step_seconds / measured - 1)
    view = Table(title="DeepLearningExamples: vision networks in training on one board, nothing chosen on these rows")
    for column in ("board", "type", "rows", "bias", "mean error", "asked", "worst"):
        view.add_column(column)
    for (board, precision), some in errors.items():
        each = np.array(some)
        view.add_row(
            board, precision, str(len(each)), f"{100 * each.mean():+.1f} %", f"**{100 * np.abs(each).mean():.1f} %**",
            f"{100 * BAR:.0f} %", f"{100 * each[np.abs(each).argmax()]:+.0f} %",
        )  # fmt: skip
    yield view
