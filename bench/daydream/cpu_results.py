"""``daydream.json`` of the loop on the CPU as types, and its tables; docs/cpu-loop.md describes it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from bench.cpu.machine import Machine
from bench.timed.files import read_file, write_file
from bench.timed.statistics import Spread
from roller.text.quantities import time_text

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = 1

#: How far a predicted step may be from the measured one.
LIMIT = 0.07


class KernelTimes(Struct, frozen=True, kw_only=True):
    """A kernel in one scenario; seconds of one call, medians.

    Attributes:
        name: the bundle's.
        count: calls of it in a step.
        calls: the operators whose place it takes, such as `conv2d batch_norm relu_`.
        recorded: what they took in the trace, the profiler's cost taken off.
        profile: what `roller profile` measured of it before.
        kernel: the same kernel by itself between the rounds in which models are timed, which the prediction takes: the
            machine's pace may have changed.
        within: what calling it took in a recording of the model that runs it.
    """

    name: str
    count: int
    calls: str
    recorded: float
    profile: float
    kernel: float
    within: float | None


class Parts(Struct, frozen=True, kw_only=True):
    """Parts of a step, in seconds: calls of our kernels, of other operators, and what no call explains."""

    kernels: float
    others: float
    between: float

    @property
    def text(self) -> str:
        parts = (self.kernels, self.others, self.between)
        kernels, others, between = (f"{part * 1e3:.2f} ms" for part in parts)
        return f"{sum(parts) * 1e3:.2f} ms a step: kernels {kernels}, other operators {others}, between calls {between}"


class Scenario(Struct, frozen=True, kw_only=True):
    """A model with some kernels of ours.

    Attributes:
        predicted: the simulated step in seconds.
        measured: of the rounds, in seconds.
        difference: largest difference of its output from that of the original, over the largest output.
        kept: what was not replaced though planned, and why.
        predicted_parts, recorded_parts: what the predicted step consists of, and one of a recording of the model.
    """

    name: str
    predicted: float
    predicted_parts: Parts
    recorded_parts: Parts
    measured: Spread
    difference: float
    kernels: list[KernelTimes]
    kept: list[str]

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured.median - 1


class ModelResult(Struct, frozen=True, kw_only=True):
    """A model by PyTorch alone, and what was predicted and measured of it with kernels of ours.

    Attributes:
        recorded, timed: a step with the profiler, and one without, in seconds.
        baseline: the simulated step that predictions start from.
        measured: of the same rounds as the scenarios.
        call_seconds: what calling an operator of ours costs besides its kernel.
        notes: how the profiler's cost was taken off.
    """

    name: str
    recorded: float
    timed: float
    baseline: float
    measured: Spread
    call_seconds: float
    notes: list[str]
    scenarios: list[Scenario]


class LoopResults(Struct, frozen=True, kw_only=True):
    """The loop on one machine; ``environment`` is what was set for the threads of PyTorch."""

    format: int
    started: str
    machine: Machine
    environment: dict[str, str]
    rounds: int
    notes: list[str]
    models: list[ModelResult]

    @property
    def met(self) -> bool:
        """True if every prediction is within the limit, and there are some."""
        errors = [abs(scenario.error) for model in self.models for scenario in model.scenarios]
        return bool(errors) and max(errors) <= LIMIT


def write_loop(path: Path, results: LoopResults) -> None:
    """Write ``daydream.json`` in one step."""
    write_file(path, results)


def read_loop(path: Path) -> LoopResults:
    """The results in a file.

    Raises:
        InputError: it cannot be read, is damaged, or of another format.
    """
    remedy = "measure again with python -m bench.daydream.cpu_loop"
    return read_file(path, LoopResults, FORMAT, "a file of python -m bench.daydream.cpu_loop", remedy)


# Tables


def step_table(results: LoopResults) -> Table:
    """Predicted and measured steps of every scenario."""
    from hal.support.tables import new_table

    table = new_table(
        ("model", "kernels"),
        ("original", "baseline", "predicted", "measured", "quartiles", "error", "outputs differ by"),
    )
    for model in results.models:
        for one in model.scenarios:
            span = f"{one.measured.low * 1e3:.2f} to {one.measured.high * 1e3:.2f}"
            times = (model.measured.median, model.baseline, one.predicted, one.measured.median)
            cells = (*(f"{seconds * 1e3:.2f} ms" for seconds in times), span)
            table.add_row(model.name, one.name, *cells, f"{one.error:+.1%}", f"{one.difference:.0e}")
    return table


def kernel_table(scenario: Scenario, call_seconds: float) -> Table:
    """The kernels of a scenario, those that take the most of a step first."""
    from hal.support.tables import new_table

    table = new_table(
        ("kernel", "in place of"),
        ("calls", "recorded", "profiled", "alone", "with call", "in the model", "off by", "of the step"),
    )
    for one in sorted(scenario.kernels, key=lambda one: -one.count * one.kernel):
        called = one.kernel + call_seconds
        cells = ["-", "-", "-"]
        if one.within is not None:
            share = (called - one.within) * one.count / scenario.measured.median
            cells = [time_text(one.within), f"{called / one.within - 1:+.0%}", f"{share:+.1%}"]
        times = [time_text(seconds) for seconds in (one.recorded, one.profile, one.kernel, called)]
        table.add_row(one.name, one.calls, str(one.count), *times, *cells)
    return table
