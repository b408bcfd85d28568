"""Answers of `daydream predict`: JSON objects, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from daydream.graph.graph import Phase
from daydream.memory.footprint import MemoryKind
from daydream.prediction.errors import MODEL_ERRORS
from daydream.prediction.processor import ProcessorStep
from daydream.prediction.step import PredictedStep
from daydream.report.arithmetic import peak_of
from daydream.report.tables import percent, table
from daydream.trace.trace import NONE
from hal.support.tables import print_line, print_table

_PHASES = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.UPDATE: "update"}


def step_record(step: PredictedStep, prices: Mapping[str, float] | None = None) -> dict[str, Any]:
    """One board and batch as JSON; ``prices`` are of an hour on a board, by name."""
    phases = step.phases
    record = {
        "model": step.capture.title,
        "device": step.device.name,
        "batch": step.capture.batch,
        "dtype": step.capture.dtype,
        "mode": "training" if step.capture.training else "inference",
        "step_seconds": _rounded(step.step_seconds),
        "forward_seconds": _rounded(phases.forward),
        "backward_seconds": _rounded(phases.backward),
        "optimizer_seconds": _rounded(phases.update),
        "gpu_busy_seconds": _rounded(step.busy_seconds),
        "host_seconds": _rounded(step.host_seconds),
        "samples_per_second": _significant(step.samples_per_second),
        "model_flops": step.flops,
        "model_flops_utilization": _significant(utilisation(step)),
        "bound": step.bound,
        "memory": step.memory.record(),
        "priced_by": {model: round(share, 6) for model, share in step.priced_by.items()},
        "assumed": list(step.capture.assumed),
    }
    cost = samples_per_unit(step, prices or {})
    return record if cost is None else {**record, "samples_per_currency_unit": _significant(cost)}


def utilisation(step: PredictedStep) -> float | None:
    """Model-FLOPs utilisation (thesis 3.2): what the arithmetic of products, convolutions and attention would take at
    the data sheet's peak of its type, over the step; None without such arithmetic."""
    at_peak = 0.0
    for price in step.prices:
        peak = (
            peak_of(step.device, price.work, [kernel.name for kernel in price.kernels])
            if price.flops and price.work is not None
            else None
        )
        if peak is not None:
            at_peak += price.flops / peak.flops_per_second
    return at_peak / step.step_seconds if at_peak and step.step_seconds else None


def samples_per_unit(step: PredictedStep, prices: Mapping[str, float]) -> float | None:
    """Samples per unit of currency; None where the board has no price or the batch is unknown."""
    hourly, pace = prices.get(step.device.name), step.samples_per_second
    return None if hourly is None or pace is None else 3600 * pace / hourly


def _rounded(seconds: float) -> float:
    return round(seconds, 9)


def _significant(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


# Tables


def print_comparison(steps: Sequence[PredictedStep], prices: Mapping[str, float]) -> None:
    """A line per board and batch."""
    training = steps[0].capture.training
    columns = ["device", "batch", "step ms"]
    columns += ["forward", "backward", "update"] if training else []
    columns += ["samples/s", "GPU busy", "MFU", "bound", "memory GB"] + (["samples per unit"] if prices else [])
    view = table(_title(steps[0]), *columns)
    view.columns[columns.index("bound")].justify = "left"
    for step in steps:
        phases = [_ms(seconds) for seconds in step.phases] if training else []
        used = utilisation(step)
        cells = [step.device.name, _count(step.capture.batch), _ms(step.step_seconds), *phases]
        cells += [_pace(step.samples_per_second), percent(step.busy_seconds, step.step_seconds)]
        cells += ["-" if used is None else f"{100 * used:.0f} %", step.bound, _gigabytes(step)]
        view.add_row(*cells, *([_pace(samples_per_unit(step, prices))] if prices else []))
    print_table(view, drop=("update", "forward", "backward", "GPU busy", "MFU", "samples/s"))


def print_answer(step: PredictedStep, rows: int) -> None:
    """One board and batch: the step, what it consists of, and how right that is."""
    print_comparison([step], {})
    print_line()
    print_table(_models(step))
    print_line()
    print_table(_operators(step, rows))
    print_line()
    print_table(_modules(step, rows))
    print_line()
    print_table(_memory(step, rows))
    print_assumed(step)


def print_processor_step(step: ProcessorStep) -> None:
    """A model on a processor: the call, what it consists of, and what kernels of ours take."""
    price, decisions = step.explanation.price, step.explanation.decisions
    view = table(f"{step.title}, inference in float32, {step.device.title}", "part", "ms", "share")
    parts = {
        "kernels of ours": price.kernels,
        "products, convolutions and attention of the library": price.library,
        "everything else": price.loops,
        "calls": price.calls,
    }
    for part, seconds in parts.items():
        view.add_row(part, _ms(seconds), percent(seconds, price.seconds))
    view.add_row("step", _ms(price.seconds), percent(price.seconds, price.seconds))
    print_table(view)
    taken = sum(decision.is_taken for decision in decisions)
    print_line(f"{taken} of {len(decisions)} products and convolutions by kernels of ours")
    for sentence in step.assumed:
        print_line(f"assumed: {sentence}")


def print_assumed(step: PredictedStep) -> None:
    """Assumptions of the capture, a line each."""
    for sentence in step.capture.assumed:
        print_line(f"assumed: {sentence}")


def _title(step: PredictedStep) -> str:
    mode = "training" if step.capture.training else "inference"
    return f"{step.capture.title}, {mode} in {step.capture.dtype}"


def _models(step: PredictedStep) -> Table:
    view = table("Priced by", "model", "ms", "share", "mean error", "measured on")
    view.columns[0].no_wrap = True
    view.columns[-1].justify, view.columns[-1].no_wrap = "left", False
    for model, share in step.priced_by.items():
        errors = MODEL_ERRORS[model]
        error = "-" if errors.mean is None else f"{100 * errors.mean:.0f} %"
        view.add_row(errors.title, _ms(share * step.busy_seconds), percent(share, 1.0), error, errors.measured)
    return view


def _operators(step: PredictedStep, rows: int) -> Table:
    """Time by operator and phase."""
    totals: dict[tuple[str, str], list[float]] = {}
    for operator, price in zip(step.capture.operators, step.prices, strict=True):
        if price.kernels:
            key = (operator.name.removeprefix("aten::"), _PHASES.get(operator.phase, ""))
            entry = totals.setdefault(key, [0.0, 0.0])
            entry[0] += 1
            entry[1] += sum(kernel.seconds for kernel in price.kernels)
    view = table("Operators", "operator", "phase", "calls", "ms", "share")
    for (name, phase), (calls, seconds) in sorted(totals.items(), key=lambda item: -item[1][1])[:rows]:
        view.add_row(name, phase, f"{calls:.0f}", _ms(seconds), percent(seconds, step.busy_seconds))
    return view


def _modules(step: PredictedStep, rows: int) -> Table:
    """Time by module: repeated ones together, as deep as the table has lines for."""
    totals = module_seconds(step)
    depth = max((path.count(".") + 1 for path in totals), default=1)
    while depth > 1 and len({_cut(path, depth) for path in totals}) > rows:
        depth -= 1
    longest = sorted(_merged(totals, lambda path: _cut(path, depth)).items(), key=lambda item: -sum(item[1]))
    shown = longest if len(longest) <= rows else longest[: rows - 1]
    others = [parts for _, parts in longest[len(shown) :]]
    view = table("Modules, ms (* is every number)", "module", "forward", "backward", "update", "share")
    for path, parts in [
        *shown,
        *([(f"{len(others)} others", tuple(map(sum, zip(*others, strict=True))))] if others else []),
    ]:
        view.add_row(Text(path), *(_ms(part) for part in parts), percent(sum(parts), step.busy_seconds))
    return view


def _cut(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])


def _merged(totals: Mapping[str, tuple[float, ...]], name: Callable[[str], str]) -> dict[str, tuple[float, ...]]:
    """Seconds of modules that get the same name added up."""
    merged: dict[str, tuple[float, ...]] = {}
    for path, parts in totals.items():
        before = merged.get(name(path), (0.0,) * len(parts))
        merged[name(path)] = tuple(a + b for a, b in zip(before, parts, strict=True))
    return merged


def module_seconds(step: PredictedStep) -> dict[str, tuple[float, ...]]:
    """Seconds of the device in the forward pass, the backward pass and the update by module, numbers in paths being
    ``*``; what is outside all modules is called ``(loss and update)``."""
    totals: dict[str, list[float]] = {}
    modules = step.capture.modules
    for operator, price in zip(step.capture.operators, step.prices, strict=True):
        if not price.kernels:
            continue
        path = "(loss and update)"
        if operator.module != NONE:
            path = ".".join("*" if part.isdigit() else part for part in modules[operator.module].path.split("."))
        place = {Phase.FORWARD: 0, Phase.BACKWARD: 1}.get(operator.phase, 2)
        totals.setdefault(path or "(model)", [0.0, 0.0, 0.0])[place] += sum(each.seconds for each in price.kernels)
    return {path: tuple(parts) for path, parts in totals.items()}


def _gigabytes(step: PredictedStep) -> str:
    """Memory that nvidia-smi would show, and whether the board has it."""
    return f"{step.memory.on_device / 1e9:.1f}" + ("" if step.memory.fits else " does not fit")


def _memory(step: PredictedStep, rows: int) -> Table:
    """Bytes at the peak by kind, and the modules that hold most of the feature maps then."""
    memory = step.memory
    view = table(f"Memory at the peak, {memory.limiting}", "held", "GB", "share")
    total_bytes = sum(memory.owners.values())
    for kind, size in sorted(memory.owners.items(), key=lambda item: -item[1]):
        view.add_row(kind.value, f"{size / 1e9:.2f}", percent(size, total_bytes))
    totals: dict[str, int] = {}
    for allocation in memory.footprint.at_peak():
        if allocation.kind is MemoryKind.FEATURE_MAPS:
            path = ".".join("*" if part.isdigit() else part for part in memory.path_of(allocation).split("."))
            totals[path or "(model)"] = totals.get(path or "(model)", 0) + allocation.bytes
    for path, size in sorted(totals.items(), key=lambda item: -item[1])[: max(rows // 2, 1)]:
        view.add_row(Text(f"  feature maps of {path}"), f"{size / 1e9:.2f}", percent(size, total_bytes))
    for name, size in (("allocated", memory.allocated), ("reserved", memory.reserved), ("device", memory.on_device)):
        view.add_row(name, f"{size / 1e9:.2f}", "")
    return view


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _pace(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
