"""TBD's figures (thesis 3.3): throughput, how busy GPU and CPU are, and how much of the arithmetic peak is used.

Shares of a step are of its time: what ran in it counts, whichever step launched it. FLOPs and tables are of what the
step launched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from daydream.graph.graph import Mark, TaskGraph
from daydream.graph.simulate import Timeline
from daydream.report.arithmetic import Arithmetic, PeakShare, arithmetic_of, kernels_of
from daydream.report.breakdown import Cover, cpu_busy_until, of_steps, windows
from daydream.report.kinds import KernelKind, kernel_kinds, unknown_share
from daydream.trace.trace import Floats, Ints

#: Steps that complete slower than they pass on the CPU, by more than this share, tell that the CPU ran ahead.
RUN_AHEAD = 0.02

#: From this share of the kernels' time on, FLOPs count as known for all of it: the rest would be rounded away.
FULL_COVERAGE = 0.9995


@dataclass(frozen=True, kw_only=True)
class StepUtilisation:
    """One step, or the mean of several. NaN where the graph does not say.

    Attributes:
        name: the step's, or ``mean``.
        length_us: from its begin to its end.
        active_us: time within it in which a GPU runs any kernel, mean of the GPUs; copies and sets do not count.
        cpu_us: time within it that a core is busy, mean of the cores.
        flops: of the kernels that the step launched.
        model_flops: of these, those of convolutions, matrix products and attention.
        peak_us: what the FLOPs executed within the step would take at peak, mean of the GPUs.
        model_peak_us: the same for those of convolutions, matrix products and attention.
    """

    name: str
    length_us: float
    active_us: float
    cpu_us: float
    flops: float
    model_flops: float
    peak_us: float
    model_peak_us: float

    @property
    def gpu(self) -> float:
        """GPU compute utilisation (3.1): share of time in which the GPU runs any kernel."""
        return _share(self.active_us, self.length_us)

    @property
    def cpu(self) -> float:
        """CPU utilisation: busy core time over cores times elapsed time."""
        return _share(self.cpu_us, self.length_us)

    @property
    def of_peak(self) -> float:
        """FLOPs executed over those possible at peak while the GPU is active (3.2): TBD's FP32 utilisation."""
        return _share(self.peak_us, self.active_us)

    @property
    def model_of_peak(self) -> float:
        """Model-FLOPs utilisation: the model's FLOPs over those possible at peak in the whole step."""
        return _share(self.model_peak_us, self.length_us)


@dataclass(frozen=True, kw_only=True)
class WorkUtilisation:
    """Kernels of one name, of one kind or of one layer, per step.

    Attributes:
        name: the kernel's, the kind's or the layer's.
        count: kernels.
        total_us: sum of their durations.
        share: of the durations of all kernels.
        flops: that they execute; NaN where those of none are known.
        of_peak: FLOPs over those possible at peak in that time (3.2); NaN where those of none are known.
        flops_per_second: achieved by the kernels whose FLOPs are known; NaN where those of none are.
        bytes_per_second: achieved by the kernels whose bytes are known; NaN where those of none are.
        kind: of kernels of one name; empty elsewhere.
    """

    name: str
    count: float
    total_us: float
    share: float
    flops: float
    of_peak: float
    flops_per_second: float
    bytes_per_second: float
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """TBD's figures of some steps of a timeline.

    Attributes:
        steps: figures of each step.
        mean: their mean; its shares are those of the whole time of all steps.
        sustained_us: time between the completions of steps (:attr:`Timeline.sustained_us`), NaN unless all full steps
            were asked for.
        batch: samples per step; None where it was not given.
        cores: number by which the CPU's time is divided.
        cores_recorded: whether the trace tells the machine's cores, else they are the threads seen.
        board: title of the board whose peaks count; empty without.
        note: which board it stands in for, or why there are no FLOPs; may be empty.
        peaks: by their share of FLOPs.
        known: share of the kernels' time whose FLOPs are known; the rest counts for none.
        kinds: GPU tasks by what they do, copies included, the longest first; shares are of all GPU tasks.
        tasks: all GPU tasks by name, copies included, the longest first; shares are of all GPU tasks.
        unknown: share of the time of GPU tasks whose kind is not known.
        bandwidth: bytes/s of the board's memory under load; NaN without a board.
        kernels: the longest, by name.
        slow_kernels: the longest of those below the average (tables 3.5 and 3.6).
        layers: all with kernels, the longest first.
    """

    steps: tuple[StepUtilisation, ...]
    mean: StepUtilisation
    sustained_us: float
    batch: int | None
    cores: int
    cores_recorded: bool
    board: str
    note: str
    peaks: tuple[PeakShare, ...]
    known: float
    kinds: tuple[WorkUtilisation, ...]
    tasks: tuple[WorkUtilisation, ...]
    unknown: float
    bandwidth: float
    kernels: tuple[WorkUtilisation, ...]
    slow_kernels: tuple[WorkUtilisation, ...]
    layers: tuple[WorkUtilisation, ...]

    def samples_per_second(self, step_us: float) -> float:
        """Throughput at a step of so many microseconds; NaN without a batch."""
        return _share((self.batch or math.nan) * 1e6, step_us)

    @property
    def ran_ahead(self) -> bool:
        """True if the CPU ran ahead of the GPU in these steps, so that they are shorter than those of a training."""
        # The first step passes before the first completion.
        lengths = [step.length_us for step in self.steps[1:]]
        return bool(lengths) and self.sustained_us > (1 + RUN_AHEAD) * float(np.mean(lengths))

    @property
    def variation(self) -> float:
        """Coefficient of variation of the steps' lengths (sample standard deviation over mean); NaN for one step."""
        lengths = [step.length_us for step in self.steps]
        return _share(float(np.std(lengths, ddof=1)), self.mean.length_us) if len(lengths) > 1 else math.nan

    @property
    def spread(self) -> float:
        """The longest step over the shortest."""
        lengths = [step.length_us for step in self.steps]
        return _share(max(lengths), min(lengths)) if lengths else math.nan

    @property
    def cores_text(self) -> str:
        """The cores in words."""
        several = "" if self.cores == 1 else "s"
        return f"{self.cores} core{several}" if self.cores_recorded else f"{self.cores} thread{several} seen"

    def sentences(self) -> list[str]:
        """Basis of the numbers, in words."""
        texts = []
        if self.peaks:
            shown = [
                f"{rate.name} {rate.flops_per_second / 1e12:.4g} TFLOP/s ({100 * share:.1f} % of FLOPs)"
                for rate, share in self.peaks
                if share > 1 - FULL_COVERAGE
            ]
            texts.append(f"Peak of {self.board}: {', '.join(shown)}.")
            if self.note:
                texts.append(f"The trace was {self.note}.")
            if self.known < FULL_COVERAGE:
                coverage = f"{100 * self.known:.1f} % of the kernels' time"
                texts.append(f"FLOPs are known for {coverage}; the other kernels count as if they executed none.")
        else:
            texts.append(f"No FLOPs: {self.note}.")
        if self.batch is None:
            texts.append("No throughput: the trace does not tell the batch; give --batch.")
        texts.append(f"CPU is the share of {self.cores_text}.")
        if len(self.steps) > 1:
            variation = f"coefficient of variation {100 * self.variation:.1f} %"
            texts.append(f"Lengths of steps: {variation}, the longest {self.spread:.2f} times the shortest.")
        if self.ran_ahead:
            pace = f", {self.samples_per_second(self.sustained_us):.1f} samples/s" if self.batch is not None else ""
            every = f"{self.sustained_us / 1000:.2f} ms"
            texts.append(
                f"The CPU ran ahead of the GPU: steps complete every {every}{pace}, the pace of a long training."
            )
        return texts

    def record(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {
            **_step_record(self, self.mean),
            "sustained_samples_per_second": _number(self.samples_per_second(self.sustained_us), 3),
            "batch": self.batch,
            "cpu_cores": self.cores,
            "cpu_cores_recorded": self.cores_recorded,
            "device": self.board or None,
            "note": self.note,
            "peaks": [
                {"name": rate.name, "flops_per_second": rate.flops_per_second, "share": _number(share)}
                for rate, share in self.peaks
            ],
            "known_share_of_kernel_time": _number(self.known),
            "step_variation": _number(self.variation),
            "step_spread": _number(self.spread),
            "steps": [{"name": step.name, **_step_record(self, step)} for step in self.steps],
            "memory_bytes_per_second": _number(self.bandwidth, 0),
            "kinds": [_work_record(kind) for kind in self.kinds],
            "unknown_share_of_gpu_time": _number(self.unknown),
            "kernels": [_work_record(kernel) for kernel in self.kernels],
            "slow_kernels": [_work_record(kernel) for kernel in self.slow_kernels],
            "layers": [_work_record(layer) for layer in self.layers],
        }


def utilisation(
    timeline: Timeline, steps: Sequence[int], *, device: str = "auto", batch: int | None = None, rows: int = 15
) -> Utilisation:
    """TBD's figures of these steps.

    Args:
        timeline: recorded or predicted.
        steps: their indices.
        device: the board whose peaks count, ``auto`` for the one that the trace was recorded on. Without one that
            is known there are no FLOPs, and a note says why.
        batch: samples per step; by default, what the trace says.
        rows: of the tables of kernels, at most.

    Raises:
        InputError: there is no board of that name.
    """
    graph = timeline.graph
    kernels = kernels_of(graph)
    arithmetic = arithmetic_of(graph, kernels, device)
    cores, cores_recorded = _cores(timeline)
    step_figures = _steps(timeline, kernels, arithmetic, cores)
    chosen = tuple(step_figures[index] for index in steps)
    mean = _mean(chosen)
    all_full = {index for index, step in enumerate(graph.steps) if step.full} == set(steps)
    step_kernels = kernels[of_steps(graph, steps)[kernels]]
    on_gpu = np.flatnonzero(graph.on_gpu & of_steps(graph, steps) & (graph.mark == Mark.NONE))
    kinds = kernel_kinds(graph)
    kind_of = _kinds_by_name(graph, kinds, on_gpu)
    by_name, tasks = (
        [
            replace(each, kind=kind_of[each.name])
            for each in _table(graph.names, graph.name, graph, rows_of_table, arithmetic, len(steps))
        ]
        for rows_of_table in (step_kernels, on_gpu)
    )
    by_layer = _table(
        (*graph.layers, ""), graph.layer % (len(graph.layers) + 1), graph, step_kernels, arithmetic, len(steps)
    )
    by_kind = _table([kind.label for kind in KernelKind], kinds, graph, on_gpu, arithmetic, len(steps))
    slow = [kernel for kernel in by_name if kernel.of_peak < mean.of_peak]
    durations = graph.duration_us[step_kernels]
    return Utilisation(
        steps=chosen,
        mean=mean,
        sustained_us=timeline.sustained_us if all_full else math.nan,
        batch=batch if batch is not None else _recorded_count(graph, "batch"),
        cores=cores,
        cores_recorded=cores_recorded,
        board=arithmetic.board,
        note=arithmetic.note,
        peaks=arithmetic.peaks(step_kernels),
        known=_share(float(durations[arithmetic.known[step_kernels]].sum()), float(durations.sum())),
        kinds=tuple(by_kind),
        tasks=tuple(tasks),
        unknown=unknown_share(graph, kinds, on_gpu),
        bandwidth=arithmetic.bandwidth,
        kernels=tuple(by_name[:rows]),
        slow_kernels=tuple(slow[:rows]),
        layers=tuple(layer for layer in by_layer if layer.name),
    )


# Steps


def _steps(timeline: Timeline, kernels: Ints, arithmetic: Arithmetic, cores: int) -> list[StepUtilisation]:
    """Every step of the timeline."""
    graph = timeline.graph
    begin, end = windows(graph, timeline.start_us, timeline.end_us)
    active, cpu = _active(timeline, kernels, begin, end), _cpu(timeline, begin, end) / max(cores, 1)
    devices = max(len(_devices(graph, kernels)), 1)
    rows = kernels[arithmetic.known[kernels]]
    start, duration, peak_us = timeline.start_us[rows], graph.duration_us[rows], arithmetic.peak_us[rows]
    of_model = arithmetic.of_model[rows]
    result = []
    for index, step in enumerate(graph.steps):
        flops = peak_us_per_device = model_flops = model_us = math.nan
        if len(rows):
            inside = np.minimum(start + duration, end[index]) - np.maximum(start, begin[index])
            part = np.clip(np.divide(inside, duration, out=np.zeros(len(rows)), where=duration > 0), 0.0, 1.0)
            peak_us_per_device, model_us = float(part @ peak_us) / devices, float((part * of_model) @ peak_us) / devices
            is_in_step = of_steps(graph, [index])[rows]
            flops = float(arithmetic.flops[rows][is_in_step].sum())
            model_flops = float(arithmetic.flops[rows][is_in_step & of_model].sum())
        result.append(
            StepUtilisation(
                name=step.name,
                length_us=float(end[index] - begin[index]),
                active_us=float(active[index]),
                cpu_us=float(cpu[index]),
                flops=flops,
                model_flops=model_flops,
                peak_us=peak_us_per_device,
                model_peak_us=model_us,
            )
        )
    return result


def _mean(steps: Sequence[StepUtilisation]) -> StepUtilisation:
    names = ("length_us", "active_us", "cpu_us", "flops", "model_flops", "peak_us", "model_peak_us")
    means = {name: float(np.mean([getattr(step, name) for step in steps])) if steps else math.nan for name in names}
    return StepUtilisation(name="mean", **means)


def _devices(graph: TaskGraph, kernels: Ints) -> list[int]:
    return sorted({int(graph.boards.of_thread[thread]) for thread in np.unique(graph.thread[kernels]).tolist()})


def _active(timeline: Timeline, kernels: Ints, begin: Floats, end: Floats) -> Floats:
    """Time of each window in which a GPU runs kernels, mean of the GPUs; NaN without any."""
    graph = timeline.graph
    of_thread = graph.boards.of_thread
    covered = []
    for device in _devices(graph, kernels):
        rows = kernels[of_thread[graph.thread[kernels]] == device]
        covered.append(Cover(timeline.start_us[rows], timeline.end_us[rows]).within(begin, end))
    return np.mean(covered, axis=0) if covered else np.full(len(begin), np.nan)


def _threads(timeline: Timeline) -> Ints:
    """CPU threads with work of their own."""
    graph = timeline.graph
    return np.unique(graph.thread[graph.on_cpu & graph.working & (graph.mark == Mark.NONE) & (graph.duration_us > 0)])


def _cpu(timeline: Timeline, begin: Floats, end: Floats) -> Floats:
    """Busy time of all CPU threads in each window: tasks and the time behind them, without waiting."""
    graph = timeline.graph
    busy_until = cpu_busy_until(graph, timeline.end_us)
    total = np.zeros(len(begin))
    for thread in _threads(timeline).tolist():
        rows = np.flatnonzero(graph.thread == thread)
        total += Cover(timeline.start_us[rows], busy_until[rows]).within(begin, end)
    return total


def _cores(timeline: Timeline) -> tuple[int, bool]:
    """Cores, and whether the trace tells them; else the threads seen."""
    cores = _recorded_count(timeline.graph, "cores")
    return (cores, True) if cores is not None else (len(_threads(timeline)), False)


def _recorded_count(graph: TaskGraph, key: str) -> int | None:
    """A number that ``daydream record`` wrote into the trace; None where it is no count."""
    value = graph.trace.metadata.get(key) if graph.trace is not None else None
    return value if type(value) is int and value > 0 else None


# Tables


def _table(
    names: Sequence[str], place: Ints, graph: TaskGraph, rows: Ints, arithmetic: Arithmetic, steps: int
) -> list[WorkUtilisation]:
    """Kernels by what `place` says of each task, an index of `names`; the longest first."""
    duration = graph.duration_us[rows]
    flops, moved = arithmetic.flops[rows], arithmetic.bytes[rows]
    amounts = {
        "count": np.ones(len(rows)),
        "total": duration,
        "flops": flops,
        "peak": arithmetic.peak_us[rows],
        "known": arithmetic.known[rows],
        "bytes": moved,
        "computing": np.where(flops > 0, duration, 0.0),
        "moving": np.where(moved > 0, duration, 0.0),
    }
    sums = {key: np.bincount(place[rows], amount, len(names)) for key, amount in amounts.items()}
    everything, steps = float(duration.sum()), max(steps, 1)
    table = []
    for key in np.argsort(-sums["total"], kind="stable").tolist():
        of = {name: float(column[key]) for name, column in sums.items()}
        if of["count"]:
            table.append(
                WorkUtilisation(
                    name=names[key],
                    count=of["count"] / steps,
                    total_us=of["total"] / steps,
                    share=_share(of["total"], everything),
                    flops=of["flops"] / steps if of["known"] else math.nan,
                    of_peak=_share(of["peak"], of["total"]) if of["known"] else math.nan,
                    flops_per_second=_share(of["flops"] * 1e6, of["computing"]),
                    bytes_per_second=_share(of["bytes"] * 1e6, of["moving"]),
                )
            )
    return table


def _kinds_by_name(graph: TaskGraph, kinds: Ints, rows: Ints) -> dict[str, str]:
    """Label of the kind of each name's longest task: operators tell kinds, so that those of a name may differ."""
    rows = rows[np.argsort(graph.duration_us[rows], kind="stable")]
    return {
        graph.text(row): KernelKind(kind).label for row, kind in zip(rows.tolist(), kinds[rows].tolist(), strict=True)
    }


def _share(part: float, total: float) -> float:
    return part / total if total else math.nan


# For programs: shares, and None for what is not known


def _step_record(figures: Utilisation, step: StepUtilisation) -> dict[str, Any]:
    return {
        "samples_per_second": _number(figures.samples_per_second(step.length_us), 3),
        "gpu_utilisation": _number(step.gpu),
        "flops_utilisation": _number(step.of_peak),
        "model_flops_utilisation": _number(step.model_of_peak),
        "cpu_utilisation": _number(step.cpu),
        "flops": _number(step.flops, 0),
        "model_flops": _number(step.model_flops, 0),
    }


def _work_record(work: WorkUtilisation) -> dict[str, Any]:
    return {
        "name": work.name,
        "count": round(work.count, 3),
        "seconds": _number(work.total_us * 1e-6, 9),
        "share": _number(work.share),
        "flops": _number(work.flops, 0),
        "flops_utilisation": _number(work.of_peak),
        "flops_per_second": _number(work.flops_per_second, 0),
        "bytes_per_second": _number(work.bytes_per_second, 0),
        **({"kind": work.kind} if work.kind else {}),
    }


def _number(value: float, digits: int = 6) -> float | None:
    return round(value, digits) if math.isfinite(value) else None
