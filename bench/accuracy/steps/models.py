"""Whole float32 transformers, NeuSight's: steps captured from the models' configurations against the measured ones.

A model is built from its configuration on tensors without data, its step is captured operator by operator, and the
device times of all kernels are summed. No constant was chosen on these steps. What differs from what was measured is
the version of the models' code: GPT-2 of 2023 divided the scores and then took the mask by ``where``, today it
multiplies and adds; OPT of 2023 compared the scores with the least number as well. BERT of 2023 made a mask of its own,
which is given here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from bench.accuracy.library.library import boards
from bench.pictures import new_figure, save
from daydream.capture.captured import Capture
from daydream.capture.fusion.inductor import fused
from daydream.operators.calls import OperatorPrice, operator_prices
from hal.spec.device import DeviceSpec
from hal.support.tables import new_table

if TYPE_CHECKING:
    from daydream.capture.pytorch.step import Subject

#: Largest mean errors asked for, in per cent: over all boards, and of any board.
BAR, BOARD_BAR = 9.0, 15.0

#: Classes of the models, by the beginning of their names: for inference and for training.
_CLASSES: Mapping[str, tuple[str, str]] = {
    "bert": ("AutoModelForSequenceClassification", "AutoModelForPreTraining"),
    "gpt": ("AutoModelForCausalLM", "AutoModelForCausalLM"),
    "opt": ("AutoModelForCausalLM", "AutoModelForCausalLM"),
}

#: Changes of a captured step by what the data calls the option of a run. Models that several boards share, and those
#: whose routing was patched, are not captured.
OPTIONS: dict[str, Callable[[Capture], Capture]] = {"": lambda capture: capture, "fusion": fused, "dp4": lambda c: c}

#: Boards among which an option divides the batch.
BOARDS = {"dp4": 4}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A measured step.

    Attributes:
        board: name in the data.
        model: name of the configuration.
        training: whether a step is forward and backward; else forward alone.
        batch: samples of the step.
        sequence: tokens of a sample.
        option: how the model was changed, one of :data:`OPTIONS`.
        measured: seconds of the step.
    """

    board: str
    model: str
    training: bool
    batch: int
    sequence: int
    option: str
    measured: float

    @property
    def mode(self) -> str:
        """Mode of the run: ``training`` or ``inference``."""
        return "training" if self.training else "inference"

    @property
    def label(self) -> str:
        """Model, mode, sizes and option."""
        return f"{self.model} {self.mode} {self.batch} x {self.sequence} {self.option}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Score:
    """A run and its predicted step; ``by_bytes`` is the share of it that no model but the bytes' prices."""

    device: str
    mode: str
    label: str
    measured: float
    predicted: float
    by_bytes: float = 0.0

    @property
    def error(self) -> float:
        """Signed, a share."""
        return self.predicted / self.measured - 1.0


# Steps


def read_runs(data: Path) -> list[Run]:
    """The measured steps of models that can be captured."""
    import pyarrow.csv as csv

    rows = csv.read_csv(data / "models" / "neusight_models.csv").to_pylist()
    runs = [
        Run(
            board=row["board"],
            model=row["model"],
            training=row["mode"] == "training",
            batch=int(row["batch"]),
            sequence=int(row["sequence"]),
            option=row["option"] or "",
            measured=row["step_ms"] / 1e3,
        )
        for row in rows
    ]
    return [run for run in runs if run.option in OPTIONS and _class_of(run)]


def _class_of(run: Run) -> str | None:
    return next((names[run.training] for start, names in _CLASSES.items() if run.model.startswith(start)), None)


def subject_of(run: Run, configurations: Path) -> Subject:
    """The model of a run without data, attention written out.

    Raises:
        InputError: the configuration cannot be read or its model not be built.
    """
    import torch

    from daydream.capture.sources import load_subject

    subject = load_subject(
        f"hf:{configurations / run.model}.json",
        batch=run.batch // BOARDS.get(run.option, 1),
        sequence=run.sequence,
        class_name=_class_of(run),
        training=run.training,
        attention="eager",
    )
    if run.model.startswith("bert"):
        mask = torch.empty(run.batch, 1, 1, run.sequence, device="meta")
        subject = replace(subject, kwargs={**subject.kwargs, "attention_mask": mask})
    return subject


def captured_step(run: Run, configurations: Path) -> Capture:
    """The step of a run, captured: dropout in training, no optimizer; raises what :func:`subject_of` does."""
    from daydream.capture.sources import CaptureOptions, captured

    options = CaptureOptions(mode=run.mode, optimizer="none", attention="eager")
    return OPTIONS[run.option](captured(subject_of(run, configurations), options))


def evaluate(runs: Sequence[Run], configurations: Path) -> list[Score]:
    """Every run on a board that has a spec; equal steps are captured once."""
    names = {run.board.replace("_", " "): run.board for run in runs}
    devices = {names[name]: device for name, device in boards(names).items()}
    steps: dict[tuple[Any, ...], Capture] = {}
    scores = []
    for run in runs:
        if run.board not in devices:
            continue
        key = (run.model, run.training, run.batch, run.sequence, run.option)
        if key not in steps:
            steps[key] = captured_step(run, configurations)
        scores.append(_score(run, devices[run.board], steps[key]))
    return scores


def _score(run: Run, device: DeviceSpec, step: Capture) -> Score:
    prices = operator_prices([(each.name, each.inputs, each.outputs) for each in step.operators], device)
    predicted = sum(price.seconds for price in prices)
    if run.option in BOARDS:
        predicted = _data_parallel_seconds(step, device, BOARDS[run.option])
    return Score(
        device=device.name,
        mode=run.mode,
        label=run.label,
        measured=run.measured,
        predicted=predicted,
        by_bytes=_by_bytes(prices) / predicted,
    )


def _data_parallel_seconds(step: Capture, device: DeviceSpec, workers: int) -> float:
    """The step of one of the boards of a node that exchange gradients as DistributedDataParallel does."""
    from daydream.answers import predict, replay_of
    from daydream.prediction.step import predicted
    from daydream.prediction.trace import predicted_trace
    from daydream.whatif import parse_pass
    from roller.library.collectives import node_for

    before = replay_of(predicted_trace(predicted(step, [device])[0]))
    requested = parse_pass(f"ddp:workers={workers},node={node_for(device, None).name}")
    return float(predict(before, [requested]).after.timeline.step_us[0]) * 1e-6


def _by_bytes(prices: Iterable[OperatorPrice]) -> float:
    return sum(kernel.seconds for price in prices for kernel in price.kernels if kernel.model == "bytes")


def mean_errors(scores: Sequence[Score], mode: str) -> dict[str, float]:
    """Mean error of each board in one mode, a share."""
    errors: dict[str, list[float]] = {}
    for score in scores:
        if score.mode == mode:
            errors.setdefault(score.device, []).append(abs(score.error))
    return {device: float(np.mean(values)) for device, values in errors.items()}


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """The table of all runs, and a picture of them in ``out``; none where the measured models are missing."""
    configurations = data / "models" / "neusight_configs"
    if not configurations.is_dir():
        return []
    scores = evaluate(read_runs(data), configurations)
    chart(scores, out / "models.png")
    return [score_table(scores)]


def score_table(scores: Sequence[Score]) -> Table:
    """A row per run, the mean error per board and mode, and over all boards, each board counting once."""
    view = new_table(
        ("board", "model"),
        ("measured", "predicted", "error", "by bytes alone", "asked"),
        title="Whole models in float32, device time of a step",
    )
    modes = list(dict.fromkeys(score.mode for score in scores))
    means = {mode: mean_errors(scores, mode) for mode in modes}
    for device in dict.fromkeys(score.device for score in scores):
        for each in (score for score in scores if score.device == device):
            times = (f"{1e3 * each.measured:.1f} ms", f"{1e3 * each.predicted:.1f} ms")
            view.add_row(device, each.label, *times, f"{each.error:+.1%}", f"{each.by_bytes:.1%}", "")
        for mode in modes:
            if device in means[mode]:
                asked = f"{BOARD_BAR:g}%"
                view.add_row(device, f"mean of {mode}", "", "", f"{means[mode][device]:.1%}", "", asked, style="bold")
        view.add_section()
    for mode in modes:
        total = f"{np.mean(list(means[mode].values())):.1%}"
        view.add_row("mean", f"all boards, {mode}", "", "", total, "", f"{BAR:g}%", style="bold")
    return view


def chart(scores: Sequence[Score], path: Path) -> None:
    """Signed errors as bars, a colour per board, as a PNG."""
    devices = list(dict.fromkeys(score.device for score in scores))
    figure = new_figure(9, 0.24 * len(scores) + 1.4)
    panel: Any = figure.subplots()
    for number, device in enumerate(devices):
        rows = [position for position, score in enumerate(scores) if score.device == device]
        panel.barh(rows, [100 * scores[row].error for row in rows], color=f"C{number}", label=device)
    panel.set_yticks(range(len(scores)), [score.label for score in scores], fontsize=8)
    panel.invert_yaxis()
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_xlabel("predicted step over the measured one, % more or less")
    panel.grid(axis="x", alpha=0.25)
    panel.legend(fontsize=8)
    panel.set_title("Whole models in float32")
    save(figure, path)
