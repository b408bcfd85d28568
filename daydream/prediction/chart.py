"""Predicted steps as a picture: a bar per board and batch, divided into phases, and the host's time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from daydream.prediction.step import PredictedStep
from hal.support.errors import InputError

#: The phases' colours, those of the HTML report.
COLOURS = {"forward": "#3b7dc9", "backward": "#db8424", "update": "#2f9e77"}


def write_chart(steps: Sequence[PredictedStep], path: Path) -> None:
    """Draws them into a file, of the kind that its ending names.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.42 * len(steps) + 1.3), dpi=144)
    figure.set_layout_engine("constrained")
    panel: Any = figure.subplots()
    places = range(len(steps))
    ends = [0.0] * len(steps)
    for phase, colour in COLOURS.items():
        lengths = [1e3 * getattr(step.phases, phase) for step in steps]
        if any(lengths):
            panel.barh(places, lengths, left=ends, height=0.62, color=colour, label=phase)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    panel.scatter([1e3 * step.host_seconds for step in steps], places, marker="|", s=180, color="#222", label="host")
    for place, step in zip(places, steps, strict=True):
        pace = step.samples_per_second
        text = "" if pace is None else f"   {pace:,.3g} samples/s" if pace < 100 else f"   {pace:,.0f} samples/s"
        panel.text(max(ends[place], 1e3 * step.host_seconds), place, text, va="center", fontsize=9, color="#444")
    panel.set_yticks(places, [_name(step, steps) for step in steps])
    panel.invert_yaxis()
    panel.set_xlabel("ms per step")
    panel.set_xlim(0, 1.22 * max(ends))
    panel.set_title(
        f"{steps[0].capture.title}, {'training' if steps[0].capture.training else 'inference'} "
        f"in {steps[0].capture.dtype}",
        loc="left",
        fontsize=10,
    )
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22 - 0.3 / len(steps)), ncols=4, frameon=False, fontsize=9)
    try:
        figure.savefig(path)
    except OSError as error:
        raise InputError(str(path), f"cannot be written: {error.strerror or error}") from None


def _name(step: PredictedStep, steps: Sequence[PredictedStep]) -> str:
    batches = {each.capture.batch for each in steps}
    return step.device.name if len(batches) == 1 else f"{step.device.name}, {step.capture.batch}"
