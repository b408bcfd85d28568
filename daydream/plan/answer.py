"""Answers of `daydream plan`: tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from daydream.plan.planned import PlannedStep
from daydream.plan.search import FittingPlan, reason
from daydream.report.tables import percent, table
from hal.support.tables import print_line, print_table


def print_plan(step: PlannedStep, rows: int) -> None:
    """One plan: the step, what each stage does, and what a rank holds."""
    print_summary([step])
    print_line(
        f"model FLOPs utilisation {100 * step.usual_utilisation:.0f} % as it is usually reported, "
        f"{100 * step.utilisation:.0f} % without what masks of attention leave out"
    )
    print_line()
    print_table(_stages(step, rows))
    print_line()
    print_table(_memory(step))
    for sentence in (*step.costs.units.capture.assumed, *step.layout.assumed):
        print_line(f"assumed: {sentence}")


def print_summary(steps: Sequence[PlannedStep]) -> None:
    """A line per plan."""
    node = steps[0].costs.node
    where = steps[0].device.name + (f" in {node.name}" if node is not None else "")
    view = table(
        f"{steps[0].costs.units.capture.title} on {steps[0].layout.ranks} x {where}",
        "plan", "micro-batches", "step ms", "samples/s", "TFLOP/s a board", "memory GB",
    )  # fmt: skip
    for step in steps:
        pace = step.samples_per_second
        view.add_row(
            Text(step.layout.words), str(step.layout.micro_batches), f"{1e3 * step.seconds:,.1f}",
            "-" if pace is None else f"{pace:,.1f}", f"{step.flops / step.seconds / 1e12:.0f}", _gigabytes(step),
        )  # fmt: skip
    print_table(view)


def print_plans(plans: Sequence[FittingPlan], tried: int) -> None:
    """The best plans with the reason why they win."""
    best = plans[0].step
    node = best.costs.node
    where = best.device.name + (f" in {node.name}" if node is not None else "")
    title = f"{best.costs.units.capture.title} on {best.layout.ranks} x {where}: best of {tried} plans"
    view = table(title, "plan", "step ms", "samples/s", "memory GB", "reason")
    view.columns[-1].justify = "left"
    for place, each in enumerate(plans):
        pace = each.step.samples_per_second
        view.add_row(
            Text(each.candidate.words), f"{1e3 * each.step.seconds:,.1f}", "-" if pace is None else f"{pace:,.1f}",
            _gigabytes(each.step), reason(plans, place),
        )  # fmt: skip
    print_table(view, drop=("samples/s", "memory GB"))


def _stages(step: PlannedStep, rows: int) -> Table:
    view = table(
        "What a rank of each stage does", "stage", "kernels", "exchange in layers", "other exchange, alone", "waiting"
    )
    for stage, shares in list(enumerate(step.shares))[:rows]:
        parts = (shares.kernels, shares.tensor, shares.exposed, shares.waiting)
        view.add_row(str(stage), *(percent(share, 1.0) for share in parts))
    return view


def _memory(step: PlannedStep) -> Table:
    memory = step.memory
    view = table("Memory of the rank that needs most, at its peak", "held", "GB", "share")
    total_bytes = sum(memory.owners.values())
    for kind, size in sorted(memory.owners.items(), key=lambda item: -item[1]):
        view.add_row(kind.value, f"{size / 1e9:.2f}", percent(size, total_bytes))
    for name, size in (("allocated", memory.allocated), ("reserved", memory.reserved), ("device", memory.on_device)):
        view.add_row(name, f"{size / 1e9:.2f}", "")
    return view


def _gigabytes(step: PlannedStep) -> str:
    text = f"{step.memory.on_device / 1e9:.1f}"
    return text if step.fits else f"{text}, too much"
