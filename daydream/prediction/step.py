"""A captured step on a board: the kernels of every operator, when the host launches them and when they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daydream.capture.captured import Capture
from daydream.capture.narrow import narrow_places
from daydream.graph.graph import Phase
from daydream.memory.predicted import StepMemory, step_memory
from daydream.operators.calls import Choice, KernelPrice, OperatorPrice, operator_prices
from daydream.operators.pricing import bound_of
from daydream.prediction.host import host_seconds
from daydream.trace.trace import Floats, Ints

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: From the end of a launch call to the start of its kernel on an idle device, seconds: the board's own figure is the
#: time between kernels of a full queue.
LAUNCH_LATENCY = 4e-6

#: A step is bound by its host where the device idles for more than this share of it.
IDLE_SHARE = 0.1


class PhaseSeconds(NamedTuple):
    """Seconds of a step's phases; a phase ends with the last of its kernels."""

    forward: float
    backward: float
    update: float


@dataclass(frozen=True, eq=False, kw_only=True)
class PredictedStep:
    """One step of a captured model on a board.

    Attributes:
        capture: the step.
        device: the board.
        prices: of every operator of the capture, in order.
        host: seconds of the host for every operator.
    """

    capture: Capture
    device: DeviceSpec
    prices: tuple[OperatorPrice, ...]
    host: Floats

    # Kernels, in the order in which they are launched

    @cached_property
    def kernels(self) -> tuple[KernelPrice, ...]:
        """All kernels of the step."""
        return tuple(kernel for price in self.prices for kernel in price.kernels)

    @cached_property
    def operator(self) -> Ints:
        """The operator of every kernel."""
        return np.repeat(np.arange(len(self.prices)), [len(price.kernels) for price in self.prices])

    @cached_property
    def seconds(self) -> Floats:
        """Duration of every kernel."""
        return np.array([kernel.seconds for kernel in self.kernels], np.float64)

    @cached_property
    def launched(self) -> Floats:
        """When the call that launches every kernel returns: the launches of an operator end its time on the host."""
        if not len(self.kernels):
            return np.empty(0)
        counts = np.bincount(self.operator, minlength=len(self.prices))
        first = np.cumsum(counts) - counts
        position = np.arange(len(self.kernels)) - first[self.operator]
        share = (position + 1) / counts[self.operator]
        ends = np.cumsum(self.host)
        return np.asarray(ends[self.operator] - self.host[self.operator] * (1 - share), np.float64)

    @cached_property
    def starts(self) -> Floats:
        """When every kernel starts: it has been launched, and the one before it has ended."""
        done = np.cumsum(self.seconds)
        ready = self.launched + LAUNCH_LATENCY
        return np.asarray(np.maximum.accumulate(ready - (done - self.seconds)) + done - self.seconds, np.float64)

    @property
    def step_seconds(self) -> float:
        """Length of the step: its last kernel has ended, and the host has seen that."""
        return max(float((self.starts + self.seconds).max(initial=0.0)), float(self.host.sum()))

    @property
    def host_seconds(self) -> float:
        """Time that the host needs to launch everything."""
        return float(self.host.sum())

    @property
    def busy_seconds(self) -> float:
        """Time that the device works."""
        return float(self.seconds.sum())

    @cached_property
    def phases(self) -> PhaseSeconds:
        """The step's length by phase."""
        ends = self.starts + self.seconds
        phase = np.array([operator.phase for operator in self.capture.operators], np.int64)[self.operator]
        until = [float(ends[phase <= each].max(initial=0.0)) for each in (Phase.FORWARD, Phase.BACKWARD)]
        forward = until[0] if self.capture.training else self.step_seconds
        backward = max(until[1] - until[0], 0.0) if self.capture.training else 0.0
        return PhaseSeconds(forward, backward, max(self.step_seconds - forward - backward, 0.0))

    @cached_property
    def memory(self) -> StepMemory:
        """Memory that the step needs on the board."""
        return step_memory(self.capture, self.prices, self.device)

    # What the answer says of itself

    @cached_property
    def priced_by(self) -> dict[str, float]:
        """Share of the device's time by kind of model, the largest first."""
        totals: dict[str, float] = {}
        for kernel in self.kernels:
            totals[kernel.model] = totals.get(kernel.model, 0.0) + kernel.seconds
        busy_seconds = self.busy_seconds or 1.0
        return {model: total / busy_seconds for model, total in sorted(totals.items(), key=lambda item: -item[1])}

    @cached_property
    def bound(self) -> str:
        """Bound of the step: ``host``, ``compute`` or ``memory``."""
        if self.step_seconds > self.busy_seconds / (1 - IDLE_SHARE):
            return "host"
        compute = sum(
            sum(kernel.seconds for kernel in price.kernels)
            for price in self.prices
            if price.work is not None and price.kernels and bound_of(price.work, self.device) == "compute"
        )
        return "compute" if compute > self.busy_seconds / 2 else "memory"

    @cached_property
    def flops(self) -> float:
        """Arithmetic of products, convolutions and attention, a multiply-add being two."""
        return float(sum(price.flops for price in self.prices))

    @property
    def samples_per_second(self) -> float | None:
        """Throughput; None where the batch is unknown."""
        batch = self.capture.batch
        return None if batch is None or not self.step_seconds else batch / self.step_seconds


def predicted(
    capture: Capture, devices: Sequence[DeviceSpec], implementation: Choice = "library", host: str = ""
) -> list[PredictedStep]:
    """A captured step on every board, by the host of the board's file or by a processor with a name.

    Raises:
        InputError: a board runs no such library or attention.
    """
    launching = [place for place, operator in enumerate(capture.operators) if operator.launches]
    calls = [(each.name, each.inputs, each.outputs) for each in map(capture.operators.__getitem__, launching)]
    narrow = narrow_places(capture)
    groups = {precision: [row for row, place in enumerate(launching) if (place in narrow) == bool(precision)]
              for precision in dict.fromkeys(("", capture.precision if narrow else ""))}  # fmt: skip
    steps = []
    for device in devices:
        prices = [OperatorPrice()] * len(capture.operators)
        for precision, rows in groups.items():
            priced = operator_prices(
                [calls[row] for row in rows], device, implementation, attention=capture.attention, tf32=capture.tf32,
                tf32_products=capture.dtype == "tf32", precision=precision, experts=capture.expert_kernels,
                packed=capture.packed,
            )  # fmt: skip
            for row, price in zip(rows, priced, strict=True):
                prices[launching[row]] = price
        counts = [len(price.kernels) for price in prices]
        launches = host_seconds(capture.operators, counts, device, host)
        steps.append(PredictedStep(capture=capture, device=device, prices=tuple(prices), host=launches))
    return steps
