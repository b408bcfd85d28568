"""A planned step as a picture: what every stage computes and sends, micro-batch after micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from daydream.graph.graph import Phase, TaskKind
from daydream.plan.planned import PlannedStep
from daydream.prediction.chart import COLOURS
from hal.support.errors import InputError

#: Of collectives and messages.
_EXCHANGE = "#8a6fb3"


def write_chart(step: PlannedStep, path: Path) -> None:
    """Draws one rank of each stage into a file, of the kind that its ending names.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    graph, timeline = step.timeline.graph, step.timeline
    stages = step.layout.pipeline
    figure = Figure(figsize=(11, 0.5 * stages + 1.6), dpi=144)
    figure.set_layout_engine("constrained")
    panel: Any = figure.subplots()
    phases = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.UPDATE: "update"}
    for stage in range(stages):
        of_stage = [graph.threads[thread].process == stage for thread in graph.thread.tolist()]
        rows = [
            row
            for row, is_on_stage in enumerate(of_stage)
            if is_on_stage and graph.on_gpu[row] and graph.duration_us[row] > 0
        ]
        for phase, name in phases.items():
            bars = [row for row in rows if graph.kind[row] == TaskKind.KERNEL and graph.phase[row] == phase]
            panel.broken_barh(_spans(timeline, bars), (stage - 0.4, 0.5), color=COLOURS[name], ec="white", lw=0.2)
        sent = [row for row in rows if graph.kind[row] == TaskKind.COMMUNICATION]
        panel.broken_barh(_spans(timeline, sent), (stage + 0.14, 0.22), color=_EXCHANGE, ec="white", lw=0.2)
    panel.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    panel.invert_yaxis()
    panel.set_xlim(0, 1e3 * step.seconds)
    panel.set_xlabel("ms")
    panel.set_title(
        f"{step.costs.units.capture.title}: {step.layout.words} on {step.device.name}", loc="left", fontsize=10
    )
    panel.spines[["top", "right"]].set_visible(False)
    colours = {**COLOURS, "exchange": _EXCHANGE}
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    try:
        figure.savefig(path)
    except OSError as error:
        raise InputError(str(path), f"cannot be written: {error.strerror or error}") from None


def _spans(timeline: Any, rows: list[int]) -> list[tuple[float, float]]:
    """Begin and length of tasks in milliseconds."""
    return [(timeline.start_us[row] / 1e3, timeline.graph.duration_us[row] / 1e3) for row in rows]
