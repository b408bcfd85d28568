"""Tables of Daydream for the terminal."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from daydream.passes import WhatIf
from daydream.report.analysis import Analysis, compared, mean_busy, ratio
from daydream.report.breakdown import Busy, Resource, Share
from daydream.whatif import AppliedPass, parameter_text, written
from hal.support.tables import print_line, print_table

if TYPE_CHECKING:
    from daydream.report.utilisation import Utilisation, WorkUtilisation

#: Names of kernels are templates of hundreds of characters; the end says least.
LONGEST_NAME = 72

#: The sustained pace is shown where it differs by more than this share from the mean step.
RUN_AHEAD = 0.02

SUSTAINED = (
    "Sustained is the time between completions of steps on the GPU, or what the CPU takes where that is longer: the CPU"
    " ran ahead in these steps."
)

#: Said where :attr:`daydream.report.analysis.Comparison.paced`.
PACED = (
    "Steps are counted by their completions, as in a long training: after the change the CPU runs ahead of the GPU, so"
    " that its own marks say little."
)


def ms(microseconds: float) -> str:
    """Milliseconds as text; a dash for what is not known.

    >>> ms(176_080.0), ms(float("nan"))
    ('176.08', '-')
    """
    return f"{microseconds / 1000:.2f}" if microseconds == microseconds else "-"


def percent(part: float, total: float = 1.0) -> str:
    """A share as text; a dash where it is not known or the whole is nothing.

    >>> percent(1.0, 8.0), percent(1.0, 0.0), percent(float("nan"))
    ('12.5 %', '-', '-')
    """
    return f"{100 * part / total:.1f} %" if total and part == part else "-"


def number(value: float) -> str:
    """A number with one digit behind the point; a dash for what is not known.

    >>> number(183.04), number(float("nan"))
    ('183.0', '-')
    """
    return f"{value:.1f}" if value == value else "-"


def short(name: str) -> str:
    """A name on one line, cut to :data:`LONGEST_NAME`; what a kernel returns says nothing."""
    folded = "".join(c if c.isprintable() else "?" for c in " ".join(name.removeprefix("void ").split()))
    return folded if len(folded) <= LONGEST_NAME else folded[: LONGEST_NAME - 1] + "…"


def table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    result = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for place, column in enumerate(columns):
        result.add_column(column, justify="left" if place == 0 else "right", overflow="fold", no_wrap=place > 0)
    return result


def _add(target: Table, *cells: str) -> None:
    from rich.text import Text

    # Names hold brackets, which would be markup.
    target.add_row(*(Text(cell) for cell in cells))


def print_steps(analysis: Analysis, partial: Iterable[str] = ()) -> None:
    """Measured and simulated length of every step."""
    steps_table = table("Steps, ms", "step", "measured", "simulated", "error", "bottleneck")
    graph = analysis.timeline.graph
    for step in analysis.step_times:
        measured = graph.steps[step.index].measured_us
        _add(
            steps_table,
            step.name,
            ms(measured),
            ms(step.length_us),
            _error(step.length_us, measured),
            step.bottleneck.label,
        )
    if len(analysis.steps) > 1:
        mean, measured = analysis.mean_us, analysis.measured_us
        _add(steps_table, "mean", ms(measured), ms(mean), _error(mean, measured), analysis.bottleneck.label)
    print_table(steps_table)
    omitted = list(partial)
    if omitted:
        print_line(f"Recorded only in part and left out: {', '.join(omitted)}")


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.2f} %" if measured and measured == measured else "-"


def print_breakdown(named: Sequence[tuple[str, Busy]]) -> None:
    """CPU only, GPU only, both, neither, for several variants of a step (4.6.2)."""
    breakdown_table = table(
        "Who works, ms per step", "", "CPU only", "GPU only", "both", "neither", "of it communication", "step"
    )
    for name, busy in named:
        parts = (busy.cpu_only_us, busy.gpu_only_us, busy.both_us, busy.neither_us, busy.communication_us)
        _add(breakdown_table, name, *(ms(part) for part in parts), ms(busy.total_us))
    print_table(breakdown_table)


def print_critical(named: Sequence[tuple[str, Analysis]]) -> None:
    """Critical path by resource."""
    critical_table = table("Critical path, ms per step", "", *(resource.label for resource in Resource), "bottleneck")
    for name, analysis in named:
        _add(critical_table, name, *(ms(amount) for amount in analysis.critical_us), analysis.bottleneck.label)
    print_table(critical_table)


def print_report(analysis: Analysis, rows: int) -> None:
    """Everything about one timeline."""
    named = [("recorded", mean_busy(analysis.recorded))] if analysis.recorded else []
    print_breakdown([*named, ("simulated", analysis.busy)])
    print_line()
    print_critical([("simulated", analysis)])
    print_line()
    made = table("Phases, ms per step", "phase", "CPU", "GPU", "GPU tasks")
    for phase in analysis.phases:
        _add(made, phase.name, ms(phase.cpu_us), ms(phase.gpu_us), f"{phase.gpu_tasks:.0f}")
    print_table(made)
    print_line()
    if analysis.layers:
        made = table(
            "Layers, ms per step", "layer", "GPU", "forward", "backward", "update", "other", "CPU", "GPU tasks"
        )
        of_peak = {layer.name: layer.of_peak for layer in analysis.utilisation.layers} if analysis.utilisation else {}
        if of_peak:
            made.add_column("of peak", justify="right", no_wrap=True)
        for layer in analysis.layers[:rows]:
            parts = [ms(part) for part in layer.gpu_us]
            cells = [layer.name, ms(layer.total_us), *parts, ms(layer.cpu_us), f"{layer.gpu_tasks:.0f}"]
            _add(made, *cells, *([percent(of_peak.get(layer.name, math.nan))] if of_peak else []))
        print_table(made)
        print_line()
    _print_kernels(analysis, rows)
    shares = [Share(f"{kind.label}: {s.name}", s.count, s.total_us, s.share) for kind, s in analysis.path[:rows]]
    _print_shares("Critical path, per step", "task", shares, "of the path")
    print_idle(analysis, rows)
    if analysis.utilisation is not None:
        print_utilisation(analysis.utilisation, rows)


def _print_kernels(analysis: Analysis, rows: int) -> None:
    """The longest GPU tasks by name; with utilisations their kinds and rates, too."""
    if analysis.utilisation is None or not analysis.kernels:
        _print_shares("GPU tasks, per step", "kernel", analysis.kernels[:rows], "of GPU time")
        return
    figures = {task.name: task for task in analysis.utilisation.tasks}
    made = table("GPU tasks, per step", "kernel", "kind", "count", "ms", "of GPU time", "TFLOP/s", "GB/s")
    made.columns[1].justify = "left"
    for share in analysis.kernels[:rows]:
        kernel = figures.get(share.name)
        rates = (kernel.flops_per_second / 1e12, kernel.bytes_per_second / 1e9) if kernel else (math.nan, math.nan)
        numbers = (f"{share.count:.1f}", ms(share.total_us), f"{100 * share.share:.1f} %", *map(number, rates))
        _add(made, short(share.name), kernel.kind if kernel else "-", *numbers)
    print_table(made)
    print_line()


def _print_shares(title: str, what: str, shares: Sequence[Share], of: str) -> None:
    if not shares:
        return
    shares_table = table(title, what, "count", "ms", of)
    for share in shares:
        _add(shares_table, short(share.name), f"{share.count:.1f}", ms(share.total_us), f"{100 * share.share:.1f} %")
    print_table(shares_table)
    print_line()


def print_idle(analysis: Analysis, rows: int) -> None:
    """Why each device and stream paused."""
    if not analysis.idle.lanes:
        return
    idle_table = table("GPU idle, ms per step", "", "idle", "pauses", "because")
    for lane in analysis.idle.lanes:
        largest = sorted(lane.by_reason.items(), key=lambda item: -item[1])
        because = ", ".join(f"{reason} {ms(amount)}" for reason, amount in largest)
        _add(idle_table, lane.name, ms(lane.idle_us), f"{lane.pauses:.0f}", because or "-")
    idle_table.columns[-1].justify = "left"
    idle_table.columns[-1].no_wrap = False
    print_table(idle_table)
    print_line()
    _print_shares("What the GPU waited for on the CPU, per step", "operator", analysis.idle.operators[:rows], "of it")


def print_utilisation(figures: Utilisation, rows: int) -> None:
    """TBD's figures (thesis 3.3), and the longest kernels below the average (tables 3.5 and 3.6)."""
    made = table("Utilisation", "step", "samples/s", "GPU", "of peak", "model of peak", "CPU", "GFLOP", "of it model")
    for step in (*figures.steps, figures.mean) if len(figures.steps) > 1 else figures.steps:
        pace = number(figures.samples_per_second(step.length_us))
        shares = (step.gpu, step.of_peak, step.model_of_peak, step.cpu)
        flops = (number(step.flops * 1e-9), number(step.model_flops * 1e-9))
        _add(made, step.name, pace, *(percent(share) for share in shares), *flops)
    print_table(made)
    for sentence in figures.sentences():
        print_line(sentence)
    print_line()
    made = table("Kinds of GPU tasks, per step", "kind", "count", "ms", "share", *ACHIEVED)
    for kind in figures.kinds:
        _add(made, kind.name, f"{kind.count:.1f}", ms(kind.total_us), percent(kind.share), *achieved(figures, kind))
    print_table(made)
    if figures.slow_kernels:
        print_line()
        title = f"Longest kernels below the average of {percent(figures.mean.of_peak)} of peak, per step"
        made = table(title, "kernel", "count", "ms", "of kernel time", *ACHIEVED)
        for kernel in figures.slow_kernels[:rows]:
            numbers = (f"{kernel.count:.1f}", ms(kernel.total_us), percent(kernel.share))
            _add(made, short(kernel.name), *numbers, *achieved(figures, kernel))
        print_table(made)


#: Columns of what kernels achieve, and of what the board could.
ACHIEVED = ("TFLOP/s", "of peak", "GB/s", "of memory's")


def achieved(figures: Utilisation, work: WorkUtilisation) -> tuple[str, str, str, str]:
    """Rates that kernels achieve, as text, with their shares of the board's: of its peaks, and of its memory's rate."""
    flops, moved = work.flops_per_second, work.bytes_per_second
    of_peak = work.of_peak if flops == flops else math.nan
    return (number(flops / 1e12), percent(of_peak), number(moved / 1e9), percent(moved / figures.bandwidth))


def print_whatif(before: Analysis, after: Analysis, applied: Sequence[AppliedPass]) -> None:
    """Measured, simulated baseline and predicted step, and what changed."""
    steps_table = table("Steps, ms", "step", "measured", "baseline", "predicted", "speed-up", "bottleneck")
    graph = before.timeline.graph
    comparison = compared(before, after)
    lengths = zip(comparison.before_us.tolist(), comparison.after_us.tolist(), strict=True)
    for old, new, (old_us, new_us) in zip(before.step_times, after.step_times, lengths, strict=True):
        measured = ms(graph.steps[old.index].measured_us)
        _add(steps_table, old.name, measured, ms(old_us), ms(new_us), _speedup(old_us, new_us), new.bottleneck.label)
    if len(before.steps) > 1:
        means = comparison.means_us
        measured = ms(before.measured_us)
        _add(steps_table, "mean", measured, *map(ms, means), _speedup(*means), after.bottleneck.label)
    sustained = (before.timeline.sustained_us, after.timeline.sustained_us)
    ran_ahead = len(before.steps) == sum(step.full for step in graph.steps) and any(
        abs(pace / analysis.mean_us - 1) > RUN_AHEAD
        for pace, analysis in zip(sustained, (before, after), strict=True)
        if analysis.mean_us
    )
    if ran_ahead:
        _add(steps_table, "sustained", "", *map(ms, sustained), _speedup(*sustained), "")
    print_table(steps_table)
    if ran_ahead:
        print_line(SUSTAINED)
    if comparison.paced:
        print_line(PACED)
    print_line()
    print_breakdown([("baseline", before.busy), ("predicted", after.busy)])
    print_line()
    print_critical([("baseline", before), ("predicted", after)])
    for applied_pass in applied:
        print_line()
        print_line(f"{applied_pass.name}{applied_pass.settings}")
        for note in applied_pass.notes:
            print_line(f"  {note}")
        if applied_pass.memory_bytes:
            kinds = ", ".join(f"{kind} {size / 1e6:+,.1f} MB" for kind, size in applied_pass.memory_bytes.items())
            print_line(f"  at the peak of memory: {kinds}")


def _speedup(before_us: float, after_us: float) -> str:
    return f"{ratio(before_us, after_us):.3f}"


def print_passes(passes: Sequence[WhatIf]) -> None:
    """All passes, one a line, with parameters below."""
    passes_table = Table(box=None, pad_edge=False)
    passes_table.add_column("pass", no_wrap=True)
    passes_table.add_column("what it models, and its parameters with their defaults", overflow="fold")
    for what_if in passes:
        _add(passes_table, what_if.name, what_if.summary)
        if what_if.parameters:
            _add(passes_table, "", "  " + ", ".join(parameter_text(parameter) for parameter in what_if.parameters))
    print_table(passes_table)


def print_pass(what_if: WhatIf) -> None:
    """The docstring of a pass, without what it raises, and its parameters."""
    print_line(f"{what_if.name}: {(inspect.getdoc(what_if.function) or '').partition('Raises:')[0].rstrip()}")
    if not what_if.parameters:
        return
    print_line()
    keys_table = Table(box=None, pad_edge=False)
    for column in ("parameter", "type", "default"):
        keys_table.add_column(column)
    for parameter in what_if.parameters:
        default = "required" if parameter.required else written(parameter.default)
        _add(keys_table, parameter.name, parameter.type.__name__, default or '""')
    print_table(keys_table)
