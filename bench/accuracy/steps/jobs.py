"""Steps of jobs that really ran: llm-foundry's MPT with FSDP, and Nemotron with Megatron's tensor ranks.

What a job does besides its model (its attention, its norms, its metrics, its mixed precision) is what its sources say;
what boards do in jobs (one clock for all kernels, operands that draw more than benchmarks') has sources of its own.
Two numbers of FlashAttention 1 in Triton were chosen with half of the models of llm-foundry in sight; the other half
and Nemotron judge.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.accuracy.errors import Errors, asked
from bench.accuracy.steps.mpt_model import mpt_subject
from bench.accuracy.steps.nemotron_model import nemotron_subject
from bench.pictures import new_figure, save
from daydream.capture.options import CaptureOptions
from daydream.plan.layout import Layout
from daydream.plan.planned import PlannedStep, planned
from daydream.plan.source import planned_units
from daydream.plan.units import Units
from hal.catalog import load_device
from hal.node_catalog import usual_node
from hal.support.tables import new_table

#: Largest mean errors asked for: llm-foundry's, its bias, that of each of its boards, NeMo's, and NeMo's in eight bits.
BARS = {"llm-foundry": 0.08, "bias": 0.03, "board": 0.10, "dgxc": 0.06, "narrow": 0.15}

#: Precision by the data's word; NeMo's FP8 of these releases scales whole tensors by the steps before.
PRECISIONS = {"FP8": "fp8-tensorwise"}

#: Models of llm-foundry on which numbers were chosen; the others judge.
CHOSEN = ("760m", "13b")

#: Bytes in which gradients were exchanged: Composer's DEFAULT is float32 since October 2023 (its pull request 2628),
#: and H100's jobs ran with PyTorch 2.1, which older releases of it do not know; before, and in PURE, 16 bits.
REDUCED = {"h100_80gb": 4, "a100_80gb": 2, "a100_40gb": 2}

BOARDS = {"h100_80gb": "h100-sxm-80gb", "a100_80gb": "a100-sxm-80gb", "a100_40gb": "a100-sxm-40gb"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A measured job.

    Attributes:
        model, board, boards, sequence: what ran on what.
        batch: samples of a micro-batch of a board.
        micro_batches: of a step.
        checkpoints: whether blocks are computed again.
        seconds: of a step.
    """

    model: str
    board: str
    boards: int
    sequence: int
    batch: int
    micro_batches: int
    checkpoints: bool
    seconds: float

    def step(self) -> PlannedStep:
        """The job predicted."""
        units = _mpt(self.model, self.sequence, self.batch, self.checkpoints)
        units = replace(units, capture=replace(units.capture, attention="triton"))
        layout = Layout(
            data=self.boards, shard="fsdp", micro_batches=self.micro_batches, reduce_bytes=REDUCED[self.board]
        )
        device = load_device(BOARDS[self.board])
        return planned(units, layout, device, usual_node(device))


@cache
def _mpt(model: str, sequence: int, batch: int, checkpoints: bool) -> Units:
    options = CaptureOptions(
        batch=batch, dtype="amp-bfloat16", parameters="bfloat16", optimizer="adamw",
        implementation="for-loop", clip=True, checkpoint="full" if checkpoints else "none",
    )  # fmt: skip
    return planned_units(partial(mpt_subject, model, sequence=sequence, batch=batch), options)


def read_jobs(path: Path) -> list[Job]:
    """llm-foundry's rows in 16 bits."""
    with path.open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if "fp8" not in row["precision"]]
    return [
        Job(
            model=row["model"], board=row["board"], boards=int(row["gpus"]), sequence=int(row["sequence"]),
            batch=int(row["micro_batch"]), micro_batches=int(row["micro_batches"]),
            checkpoints=row["checkpointing"] == "True", seconds=float(row["step_ms"]) / 1e3,
        )
        for row in rows
    ]  # fmt: skip


# NeMo


@dataclass(frozen=True, kw_only=True)
class NemoRun:
    """A row of Nemotron-15B on H100s, with its prediction."""

    boards: int
    step: PlannedStep
    seconds: float


def read_nemo(path: Path, word: str = "BF16", precision: str = "") -> list[NemoRun]:
    """Rows of Nemotron-15B of a data type: Megatron's tensor ranks with parts of the sequence and overlapped exchange.

    Args:
        path: of the rows.
        word: the data's name of the type.
        precision: of products in eight bits.
    """
    with path.open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["dtype"] == word and "nemotron" in row["recipe"]]
    device = load_device("h100-sxm-80gb")
    runs = []
    for row in rows:
        tensor = int(row["tp"])
        layout = Layout(
            data=int(row["gpus"]) // tensor, tensor=tensor, micro_batches=int(row["micro_batches"]), shard="zero1",
            sequence=True, overlap_tensor=True,
        )  # fmt: skip
        units = nemotron_units(int(row["micro_batch"]), tensor)
        if precision:
            units = replace(units, capture=replace(units.capture, precision=precision))
        step = planned(units, layout, device, usual_node(device))
        runs.append(NemoRun(boards=int(row["gpus"]), step=step, seconds=float(row["step_seconds"])))
    return runs


@cache
def nemotron_units(batch: int, tensor: int) -> Units:
    options = CaptureOptions(
        batch=batch, dtype="bfloat16", optimizer="adamw", implementation="fused", clip=True, attention="cudnn"
    )
    make = partial(nemotron_subject, sequence=4096, batch=batch)
    return planned_units(make, options, tensor=tensor, sequence_parallel=True, in_place=True, compiles=True)


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """A table a source, and a picture in ``out``; none where the data are missing."""
    folder = data / "jobs"
    if not (folder / "llmfoundry.csv").is_file():
        return
    jobs = read_jobs(folder / "llmfoundry.csv")
    errors = Errors.of([job.step().seconds for job in jobs], [job.seconds for job in jobs])
    yield foundry_table(jobs, errors)
    runs = read_nemo(folder / "dgxc.csv")
    yield nemo_table(runs)
    _picture(jobs, errors, runs, out / "jobs.png")


def narrow(data: Path, _: Path) -> Iterable[Table]:
    """Rows in eight bits; none where the data are missing.

    Transformer Engine casts within norms and activations what is priced as kernels of their own here, so that
    predictions are too long.
    """
    path = data / "jobs" / "dgxc.csv"
    if not path.is_file():
        return
    view = new_table(
        ("data type", "precision", "rows", "bias", "mean error", "asked", "worst"),
        title="dgxc: Nemotron-15B in eight bits on 16 to 2,048 H100, nothing chosen on these rows",
    )
    for word, precision in PRECISIONS.items():
        errors = nemo_errors(read_nemo(path, word, precision))
        view.add_row(word, precision, errors.count, errors.bias, errors.mean, asked(BARS["narrow"]), errors.worst)
    yield view


def nemo_errors(runs: Sequence[NemoRun]) -> Errors:
    """Errors of rows of Nemotron."""
    return Errors.of([run.step.seconds for run in runs], [run.seconds for run in runs])


def foundry_table(jobs: Sequence[Job], errors: Errors) -> Table:
    """Bias and mean error of all rows, by board, and by half of the models."""
    view = new_table(
        ("rows", "number", "bias", "asked", "mean error", "asked", "median", "worst"),
        title="llm-foundry: MPT under Composer with FSDP, predicted from the model's code and the plan",
    )
    groups = [("all", [True] * len(jobs), BARS["llm-foundry"])]
    groups += [(board, [job.board == name for job in jobs], BARS["board"]) for name, board in BOARDS.items()]
    half = [job.model in CHOSEN for job in jobs]
    groups.append((f"models {' and '.join(CHOSEN)}, in sight", half, BARS["llm-foundry"]))
    groups.append(("the other models", [not each for each in half], BARS["llm-foundry"]))
    for name, chosen, bar in groups:
        some = Errors(errors.values[np.array(chosen)])
        bias = asked(BARS["bias"]) if name == "all" else ""
        view.add_row(name, some.count, some.bias, bias, some.mean, asked(bar), some.median, some.worst)
    return view


def nemo_table(runs: Sequence[NemoRun]) -> Table:
    """Mean error of Nemotron's rows, and how many are said to fit."""
    errors = nemo_errors(runs)
    view = new_table(
        ("rows", "bias", "mean error", "asked", "worst", "said to fit, of rows that ran", "reserved GB"),
        title="dgxc: Nemotron-15B under NeMo on 16 to 2,048 H100, nothing chosen on these rows",
    )
    view.add_row(
        errors.count, errors.bias, errors.mean, asked(BARS["dgxc"]), errors.worst,
        f"{sum(run.step.fits for run in runs)} of {len(runs)}",
        f"{min(run.step.memory.reserved for run in runs) / 1e9:.1f} to "
        f"{max(run.step.memory.reserved for run in runs) / 1e9:.1f}",
    )  # fmt: skip
    return view


def _picture(jobs: Sequence[Job], errors: Errors, runs: Sequence[NemoRun], path: Path) -> None:
    """Errors by tokens of a sample, by board; and of Nemotron by boards."""
    figure = new_figure(11, 5)
    panels: Any = figure.subplots(1, 2, sharey=True)
    tokens = np.array([job.sequence for job in jobs])
    for name, board in BOARDS.items():
        mine = np.array([job.board == name for job in jobs])
        panels[0].plot(tokens[mine], 100 * errors.values[mine], "o", markersize=4, alpha=0.7, label=board)
    panels[0].set(xscale="log", xlabel="tokens of a sample", ylabel="error, %", title="llm-foundry")
    panels[0].legend(frameon=False, fontsize=8)
    panels[1].plot([run.boards for run in runs], 100 * nemo_errors(runs).values, "o", markersize=4, alpha=0.7)
    panels[1].set(xscale="log", xlabel="boards", title="dgxc, Nemotron-15B")
    for panel in panels:
        panel.axhline(0, color="#444", lw=1)
    save(figure, path)
