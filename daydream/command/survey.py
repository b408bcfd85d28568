"""``daydream report --dir``: a line for every trace of a folder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from daydream.command.outputs import print_json
from daydream.command.recording import Recording
from hal.support.errors import InputError, listed

if TYPE_CHECKING:
    from daydream.answers import Replay


@dataclass(frozen=True, kw_only=True)
class SurveyRow:
    """A trace of a folder. Times are seconds, NaN where unknown.

    Attributes:
        trace: the file.
        device: the board that it names, empty without.
        steps: how many count.
        step: mean length of one, as recorded.
        worst_error: the largest distance of a replayed step from its recorded length, as a share of it.
        gpu: durations of a step's GPU tasks, added up.
        unknown: share of that in kernels whose kind is not known.
        bottleneck: what most of the critical path runs on.
        warnings: what was skipped, repaired or inferred while reading.
        problem: why it cannot be read; empty where it can.
    """

    trace: str
    device: str = ""
    steps: int = 0
    step: float = math.nan
    worst_error: float = math.nan
    gpu: float = math.nan
    unknown: float = math.nan
    bottleneck: str = ""
    warnings: tuple[str, ...] = ()
    problem: str = ""

    def record(self) -> dict[str, Any]:
        """As JSON; times have their unit in the name."""
        times = {"step": "step_seconds", "gpu": "gpu_seconds", "unknown": "unknown_share_of_gpu_time"}
        values = {times.get(each.name, each.name): getattr(self, each.name) for each in fields(self)}
        return {
            key: None if value != value or value == "" else round(value, 9) if isinstance(value, float) else value
            for key, value in values.items()
        }


def survey_folder(recording: Recording, folder: Path | None, *, as_json: bool) -> None:
    """Prints a line for every trace of a folder.

    Raises:
        InputError: there is no such folder, nothing in it can be read, or options do not go together.
    """
    if folder is None:
        raise InputError("TRACE", "is missing", "name a trace, or a folder of them with --dir")
    names = {"trace": "TRACE", "out": "--out", "html": "--html", "number": "--step"}
    given = [option for name, option in names.items() if getattr(recording, name)]
    if given:
        raise InputError("--dir", f"does not go with {listed(given)}", "leave one of them out")
    rows = []
    for row in survey(folder):
        rows.append(row)
        if as_json:
            print_json(row.record())
    if not as_json:
        _print(rows)
    if all(row.problem for row in rows):
        raise InputError("--dir", f"none of the {len(rows)} files in {folder} can be read", "see the reason of each")


def survey(folder: Path) -> Iterator[SurveyRow]:
    """A line for every trace in a folder and those below it, by name.

    Raises:
        InputError: there is no such folder, or no trace in it.
    """
    from daydream.answers import replay
    from daydream.trace.files import ENDINGS

    if not folder.is_dir():
        raise InputError("--dir", f"{folder} is no directory", "name a folder of traces")
    files = sorted(each for each in folder.rglob("*") if each.name.lower().endswith(ENDINGS) and each.is_file())
    if not files:
        raise InputError("--dir", f"{folder} has no trace", f"give a folder of files that end in {listed(ENDINGS)}")
    for file in files:
        name = str(file.relative_to(folder))
        try:
            yield _row(name, replay(file))
        except InputError as error:
            yield SurveyRow(trace=name, problem=str(error).removeprefix(f"{file}: "))


def _row(name: str, answer: Replay) -> SurveyRow:
    from daydream.report.breakdown import Resource, of_steps, step_breakdowns
    from daydream.report.kinds import kernel_kinds, unknown_share

    graph, steps = answer.graph, answer.steps
    measured = np.array([graph.steps[index].measured_us for index in steps])
    error = np.abs(answer.timeline.step_us[list(steps)] / measured - 1.0)
    critical = np.mean([each.critical_us for each in step_breakdowns(answer.timeline, steps)], axis=0)
    rows = np.flatnonzero(graph.on_gpu & of_steps(graph, steps))
    devices = graph.trace.devices if graph.trace is not None else ()
    return SurveyRow(
        trace=name,
        device=next((str(device["name"]) for device in devices if device.get("name")), ""),
        steps=len(steps),
        step=float(measured.mean()) * 1e-6,
        worst_error=float(error.max()) if np.isfinite(error).all() else math.nan,
        gpu=float(graph.duration_us[rows].sum()) / max(len(steps), 1) * 1e-6,
        unknown=unknown_share(graph, kernel_kinds(graph), rows),
        bottleneck=Resource(int(np.argmax(critical))).label,
        warnings=graph.warnings,
    )


def _print(rows: list[SurveyRow]) -> None:
    from rich.text import Text

    from daydream.report.tables import ms, percent, short, table
    from hal.support.tables import print_line, print_table

    made = table(
        "Traces", "trace", "board", "steps", "step, ms", "error", "GPU, ms", "unknown", "bottleneck", "warnings"
    )
    for row in rows:
        if row.problem:
            continue
        warnings = str(len(row.warnings) or "-")
        numbers = (
            str(row.steps),
            ms(row.step * 1e6),
            percent(row.worst_error),
            ms(row.gpu * 1e6),
            percent(row.unknown),
        )
        made.add_row(Text(short(row.trace)), Text(row.device or "-"), *numbers, row.bottleneck, warnings)
    print_table(made)
    errors = [row.worst_error for row in rows if row.worst_error == row.worst_error]
    if errors:
        print_line(
            f"{len(errors)} traces replayed: mean of the worst steps' errors {percent(float(np.mean(errors)))}, "
            f"worst {percent(max(errors))}. Unknown is the share of GPU time in kernels of no known kind."
        )
    for row in rows:
        if row.problem:
            click.echo(f"daydream: {row.trace}: {row.problem}", err=True)
