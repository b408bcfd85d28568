"""Vision networks of NVIDIA's DeepLearningExamples, on one board, as ``daydream predict`` has them.

A step is what their ``main.py`` runs: images come as bytes, become floats and are normalised; in training they are
mixed with one another (``mixup``), in inference the best five classes are compared with labels. float32 and TF32 ran in
NCHW, AMP in NHWC (their ``--memory-format``), and SGD goes from parameter to parameter, as PyTorch's did before its
second release. The board of a training job runs at the clock that it settles at. A rate is the mean of those of 100
steps, of which the first, in which cuDNN tries its kernels, counts for nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from torch import nn

from bench.accuracy.errors import Errors, asked
from daydream.capture.captured import Capture
from daydream.capture.models.timm import timm_subject
from daydream.capture.options import CaptureOptions
from daydream.capture.sources import captured
from daydream.prediction.step import predicted
from hal.catalog import load_device
from hal.spec.power import settled
from hal.support.tables import new_table

#: Largest mean errors asked for: of training, of inference, and of inference that the device bounds.
BAR, INFERENCE_BAR, DEVICE_BAR = 0.08, 0.12, 0.08

#: Processor of a DGX-1, whose calls' time two of the networks decided, in float32 and one image at a time; the boards
#: that have it, or one of its kind.
HOST, HOST_NETWORKS = "xeon-e5-2698v4", ("resnet50", "efficientnet-b0")
_HOSTED = ("v100-sxm2-16gb", "v100-sxm2-32gb", "t4")

#: Networks by their names in timm, with the side of their images.
NETWORKS = {
    "resnet50": ("resnet50", 224), "resnext101-32x4d": ("resnext101_32x4d", 224),
    "se-resnext101-32x4d": ("seresnext101_32x4d", 224), "efficientnet-b0": ("efficientnet_b0", 224),
    "efficientnet-b4": ("efficientnet_b4", 380),
}  # fmt: skip

DTYPES = {"fp32": "float32", "tf32": "tf32", "amp": "amp"}

#: Boards that differ in their memory alone.
BOARDS = {"v100-sxm2-32gb": "v100-sxm2-16gb"}

#: Share of the 100 steps whose rates count.
STEADY = 0.99

#: More than so many times the rate of one board no eight boards reach: the row of one is wrong.
_EIGHT = 8.8

Row = Mapping[str, str]


class _Prepared(nn.Module):
    """A network behind what happens to a batch of bytes on the board."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        channels = torch.zeros(1, 3, 1, 1, device=images.device)
        x = images.float().sub_(channels).div_(channels)
        if self.training:
            order = torch.zeros(len(x), dtype=torch.long, device=x.device)
            x = 0.9 * x + 0.1 * x[order]
        scores: torch.Tensor = self.network(x)
        if self.training:
            return scores
        labels = torch.zeros(len(x), dtype=torch.long, device=x.device)
        best = scores.topk(5).indices.t()
        right = best.eq(labels.view(1, -1).expand_as(best))
        return torch.stack([right[:count].reshape(-1).float().sum() * (100 / len(x)) for count in (1, 5)])


@cache
def _captured(name: str, batch: int, precision: str, mode: str) -> Capture:
    network, image = NETWORKS[name]
    options = CaptureOptions(
        mode=mode, dtype=DTYPES[precision], optimizer="sgd", implementation="for-loop", channels_last=precision == "amp"
    )
    subject = timm_subject(network, batch=batch, image=image, training=mode == "training")
    (images,) = subject.args
    return captured(replace(subject, model=_Prepared(subject.model), args=(images.to(torch.uint8),)), options)


def rows_of(path: Path, mode: str) -> list[Row]:
    """Rows of one board, in training those whose rate agrees with that of eight."""
    with path.open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["mode"] == mode and row["model"] in NETWORKS]

    def key(row: Row) -> tuple[str, ...]:
        return row["model"], row["board"], row["precision"], row["batch"]

    eight = {key(row): float(row["images_per_second"]) for row in rows if row["gpus"] == "8"}
    return [
        row
        for row in rows
        if row["gpus"] == "1" and eight.get(key(row), 0.0) <= _EIGHT * float(row["images_per_second"])
    ]


def step_of(row: Row) -> tuple[float, str]:
    """Predicted over measured step, less one, and what bounds it."""
    capture = _captured(row["model"], int(row["batch"]), row["precision"], row["mode"])
    board = load_device(BOARDS.get(row["board"], row["board"]))
    if row["mode"] == "training":
        board = settled(board)
    (step,) = predicted(capture, [board], host=HOST if row["board"] in _HOSTED else "")
    return step.step_seconds * float(row["images_per_second"]) / STEADY / int(row["batch"]) - 1, step.bound


def table(data: Path, _: Path) -> Iterable[Table]:
    """A line for every board and type of both modes; none where the data are missing."""
    path = data / "jobs" / "dle.csv"
    if path.is_file():
        yield _training(path)
        yield _inference(path)


def _training(path: Path) -> Table:
    errors: dict[tuple[str, str], list[float]] = {}
    for row in rows_of(path, "training"):
        errors.setdefault((row["board"], row["precision"]), []).append(step_of(row)[0])
    view = new_table(
        ("board", "type", "rows", "bias", "mean error", "asked", "worst"),
        title="DeepLearningExamples: vision networks in training on one board, nothing chosen on these rows",
    )
    for names, some in errors.items():
        _line(view, names, some, BAR)
    _line(view, ("all", ""), [error for some in errors.values() for error in some], BAR)
    return view


def _inference(path: Path) -> Table:
    rows = rows_of(path, "inference")
    steps = [step_of(row) for row in rows]
    view = new_table(
        ("board", "type", "bound by", "rows", "bias", "mean error", "asked", "worst"),
        title=f"DeepLearningExamples: vision networks in inference, launched by a {HOST}",
    )
    errors: dict[tuple[str, ...], list[float]] = {}
    for row, (error, bound) in zip(rows, steps, strict=True):
        by = "host" if bound == "host" else "device"
        errors.setdefault((row["board"], row["precision"], by), []).append(error)
        errors.setdefault(("all", "", by), []).append(error)
        errors.setdefault(("all", "", ""), []).append(error)
        if row["model"] not in HOST_NETWORKS:
            errors.setdefault(("networks that chose nothing", "", by), []).append(error)
    for names, some in sorted(errors.items(), key=lambda item: (not item[0][1], item[0])):
        _line(view, names, some, DEVICE_BAR if names[-1] == "device" else INFERENCE_BAR)
    return view


def _line(view: Table, names: Sequence[str], errors: Sequence[float], bar: float) -> None:
    each = Errors(np.array(errors))
    view.add_row(*names, each.count, each.bias, each.mean, asked(bar), each.worst)
