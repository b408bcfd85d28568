"""Everything that the tables and the report say about one timeline, worked out once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from daydream.graph.simulate import Timeline
from daydream.report.breakdown import (
    Busy,
    LayerTimes,
    PhaseTimes,
    Resource,
    Share,
    StepBreakdown,
    layer_times,
    path_tasks,
    phase_times,
    recorded_busy,
    step_breakdowns,
    top_kernels,
)
from daydream.report.idle import Idle, idle_times
from daydream.trace.trace import Floats

if TYPE_CHECKING:
    from daydream.report.utilisation import Utilisation

#: A predicted step may be further from its pace than the recorded one by this share of a step before its marks say
#: more about the backlog than about the step.
UNEVEN = 0.25


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A timeline and what it shows within some of its steps. Times are microseconds, means of these steps."""

    timeline: Timeline
    steps: tuple[int, ...]
    step_times: list[StepBreakdown]
    recorded: list[Busy] | None
    """The breakdown of the recorded times, where every step has some; not for a graph that passes changed."""
    phases: list[PhaseTimes]
    layers: list[LayerTimes]
    kernels: list[Share]
    idle: Idle
    path: list[tuple[Resource, Share]]
    utilisation: Utilisation | None = None
    """TBD's figures, where they were asked for."""

    @property
    def mean_us(self) -> float:
        """Mean simulated length of a step, microseconds."""
        return float(np.mean([step.length_us for step in self.step_times]))

    @property
    def measured_us(self) -> float:
        """Mean length of a step in the trace, microseconds."""
        return float(np.mean([self.timeline.graph.steps[index].measured_us for index in self.steps]))

    @property
    def busy(self) -> Busy:
        """Mean breakdown of a step."""
        return mean_busy([step.busy for step in self.step_times])

    @property
    def critical_us(self) -> tuple[float, ...]:
        """Time on the critical path within a step, by :class:`Resource`."""
        return tuple(np.mean([step.critical_us for step in self.step_times], axis=0).tolist())

    @property
    def bottleneck(self) -> Resource:
        """The resource that most of the critical path runs on, over all these steps."""
        return Resource(int(np.argmax(self.critical_us)))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Lengths of the same steps before and after a change, microseconds.

    `paced` says that they are those of a long training (:attr:`daydream.graph.simulate.Timeline.paced_us`), not those
    of the CPU's marks.
    """

    before_us: Floats
    after_us: Floats
    paced: bool

    @property
    def means_us(self) -> tuple[float, float]:
        """Mean step before and after."""
        return float(np.mean(self.before_us)), float(np.mean(self.after_us))


def compared(before: Analysis, after: Analysis) -> Comparison:
    """The steps of two timelines by the same measure.

    A change may let the CPU run ahead of a GPU with a backlog: its marks then say when kernels were launched, and the
    step that waits at last pays for all. Such steps are compared by when they are completed.
    """
    lengths = [np.array([step.length_us for step in each.step_times], np.float64) for each in (before, after)]
    marked = Comparison(lengths[0], lengths[1], paced=False)
    if len(before.steps) < 2:
        return marked
    paces = [each.timeline.paced_us[list(before.steps)] for each in (before, after)]
    if not np.isfinite(paces).all():
        return marked
    uneven = [
        float(np.abs(length - pace).max() / max(pace.mean(), 1e-9)) for length, pace in zip(lengths, paces, strict=True)
    ]
    return Comparison(paces[0], paces[1], paced=True) if uneven[1] > uneven[0] + UNEVEN else marked


def analyse(
    timeline: Timeline,
    steps: Sequence[int],
    *,
    recorded: bool = False,
    rows: int = 15,
    device: str | None = None,
    batch: int | None = None,
) -> Analysis:
    """Works everything out.

    Args:
        timeline: recorded or predicted.
        steps: their indices.
        recorded: also breaks the recorded times down.
        rows: of each table, at most.
        device: also works utilisations out, against the peaks of this board; ``auto`` for the one recorded on.
        batch: samples per step, for these; by default, what the trace says.

    Raises:
        InputError: there is no board of that name.
    """
    graph, figures = timeline.graph, None
    if device is not None:
        # Most answers do without sizes and boards.
        from daydream.report.utilisation import utilisation

        figures = utilisation(timeline, steps, device=device, batch=batch, rows=rows)
    return Analysis(
        timeline=timeline,
        steps=tuple(steps),
        step_times=step_breakdowns(timeline, steps),
        recorded=recorded_busy(graph, steps) if recorded else None,
        phases=phase_times(timeline, steps),
        layers=layer_times(graph, steps, rows),
        kernels=top_kernels(graph, steps, rows),
        idle=idle_times(timeline, steps, rows),
        path=path_tasks(timeline, steps, rows),
        utilisation=figures,
    )


def mean_busy(parts: Sequence[Busy]) -> Busy:
    """The mean of some steps' breakdowns."""
    return Busy(*(float(np.mean([getattr(part, field.name) for part in parts])) for field in fields(Busy)))


def ratio(before_us: float, after_us: float) -> float:
    """Factor of speed; infinite where nothing is left of something.

    >>> ratio(30.0, 20.0), ratio(0.0, 0.0), ratio(1.0, 0.0)
    (1.5, 1.0, inf)
    """
    return before_us / after_us if after_us else 1.0 if not before_us else math.inf


# For programs: seconds, and words instead of numbers


def step_record(analysis: Analysis, step: StepBreakdown) -> dict[str, Any]:
    """One step of a report as JSON."""
    measured = analysis.timeline.graph.steps[step.index].measured_us
    return {
        "name": step.name,
        "measured_seconds": seconds(measured),
        "simulated_seconds": seconds(step.length_us),
        "breakdown_seconds": _busy_record(step.busy),
        "critical_path_seconds": critical_record(step.critical_us),
        "bottleneck": step.bottleneck.label,
    }


def report_record(analysis: Analysis) -> dict[str, Any]:
    """The whole report as JSON."""
    return {
        "measured_seconds": seconds(analysis.measured_us),
        "simulated_seconds": seconds(analysis.mean_us),
        "bottleneck": analysis.bottleneck.label,
        "breakdown_seconds": _busy_record(analysis.busy),
        "recorded_breakdown_seconds": _busy_record(mean_busy(analysis.recorded)) if analysis.recorded else None,
        "critical_path_seconds": critical_record(analysis.critical_us),
        "critical_path": [{"resource": kind.label, **_share_record(share)} for kind, share in analysis.path],
        "steps": [step_record(analysis, step) for step in analysis.step_times],
        "phases": [
            {
                "name": phase.name,
                "cpu_seconds": seconds(phase.cpu_us),
                "gpu_seconds": seconds(phase.gpu_us),
                "gpu_tasks": phase.gpu_tasks,
            }
            for phase in analysis.phases
        ],
        "layers": [_layer_record(layer) for layer in analysis.layers],
        "kernels": [_share_record(kernel) for kernel in analysis.kernels],
        "idle": [
            {
                "name": lane.name,
                "seconds": seconds(lane.idle_us),
                "pauses": lane.pauses,
                "by_reason_seconds": {reason: seconds(amount) for reason, amount in lane.by_reason.items()},
            }
            for lane in analysis.idle.lanes
        ],
        "idle_operators": [_share_record(share) for share in analysis.idle.operators],
        "utilisation": analysis.utilisation.record() if analysis.utilisation is not None else None,
    }


def seconds(microseconds: float) -> float | None:
    """Seconds to the nanosecond; None for a time that is not known.

    >>> seconds(1234.5), seconds(float("nan"))
    (0.0012345, None)
    """
    return round(microseconds * 1e-6, 9) if np.isfinite(microseconds) else None


def critical_record(critical_us: Sequence[float]) -> dict[str, float | None]:
    """Time on the critical path by resource."""
    return {resource.label: seconds(critical_us[resource]) for resource in Resource}


def _busy_record(busy: Busy) -> dict[str, float | None]:
    return {field.name.removesuffix("_us"): seconds(getattr(busy, field.name)) for field in fields(Busy)}


def _share_record(share: Share) -> dict[str, Any]:
    return {
        "name": share.name,
        "count": round(share.count, 3),
        "seconds": seconds(share.total_us),
        "share": round(share.share, 6),
    }


def _layer_record(layer: LayerTimes) -> dict[str, Any]:
    forward, backward, update, other = (seconds(amount) for amount in layer.gpu_us)
    parts = {"forward": forward, "backward": backward, "update": update, "other": other}
    return {
        "name": layer.name,
        "gpu_seconds": parts,
        "cpu_seconds": seconds(layer.cpu_us),
        "gpu_tasks": layer.gpu_tasks,
    }
