"""Measured truth: models timed in turns, and the time of each kernel inside its model."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.cpu.machine import Machine, pin
from codegen.runtime.cpu import CpuOperator
from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import simulate
from daydream.passes.unprofiled import unprofiled
from daydream.record.record import record
from daydream.record.timing import custom_call_us
from daydream.swap.calls import operator_calls
from daydream.tasks.build import read_graph
from roller.profile.cpu import private_bytes, rotating_sets

WARM_STEPS = 5


@contextlib.contextmanager
def on_first_core(machine: Machine) -> Iterator[None]:
    """This thread stays on the first core meanwhile: the kernels' other threads have the others, one each.

    Threads and processes that are started here would stay there too, so that everybody's have to exist before.
    """
    pin(machine.cpus[:1])
    try:
        yield
    finally:
        pin(machine.cpus)


def start_threads(machine: Machine) -> None:
    """Lets PyTorch start its threads, which inherit the cores of this one."""
    torch.set_num_threads(machine.threads)
    pin(machine.cpus)
    torch.mm(torch.ones(512, 512), torch.ones(512, 512)).relu_()


def recorded(model: Any, inputs: Sequence[Any], path: Path, steps: int) -> TaskGraph:
    """A trace of so many inference steps as `daydream record` makes it, as many more being timed without profiler."""
    with (
        torch.inference_mode(),
        record(path, steps=steps, warmup=WARM_STEPS, timed=steps, model=model, with_modules=False) as recorder,
    ):
        while recorder.written is None:
            model(*inputs)
            recorder.step()
    return read_graph(path)


class Alone:
    """The kernel of a bundle by itself, on inputs that take turns as `roller profile` has them.

    The first of them, what a network computes with, has just been written as the operator before would have done it;
    the others, mostly parameters, were last read long ago.
    """

    def __init__(self, bundle: Path) -> None:
        kernel = CpuOperator.load(bundle)
        shapes = [(argument.shape, argument.dtype) for argument in kernel.inputs]
        count = rotating_sets(sum(math.prod(shape) * 4 for shape, _ in shapes), private_bytes())
        numbers = np.random.default_rng(0)
        sets = [[numbers.random(shape, np.float32).astype(dtype) for shape, dtype in shapes] for _ in range(count)]
        out = np.empty(kernel.output.shape, kernel.output.dtype)
        firsts = [torch.from_numpy(arrays[0]) for arrays in sets]
        self._written = firsts[0].clone()
        calls = [kernel.bound(*arrays, out=out) for arrays in sets]
        self._calls = itertools.cycle(zip(firsts, calls, strict=True))

    def seconds(self) -> float:
        """The time of one call."""
        first, call = next(self._calls)
        first.copy_(self._written)
        started = time.perf_counter()
        call()
        return time.perf_counter() - started


@dataclass(frozen=True)
class Truth:
    """Times of the rounds.

    Attributes:
        steps: seconds of a step by model, one value a round.
        kernels: seconds of a call of each kernel by itself, the median of the rounds, by its bundle's folder.
        call_us: what PyTorch adds to a call of an operator of ours, microseconds, the median of the rounds.
    """

    steps: Mapping[str, Sequence[float]]
    kernels: Mapping[Path, float]
    call_us: float


def in_turns(
    models: Mapping[str, Any],
    inputs: Sequence[Any],
    rounds: int,
    steps: int,
    kernels: Mapping[str, Mapping[Path, Alone]],
) -> Truth:
    """Models, kernels alone and calls of PyTorch, timed in turns; of a model a round gives the median of so many steps.

    In every round each model has a turn, another one first each time; a turn begins with steps that do not count. After
    each step of a model all its kernels (its entry of ``kernels``) have a call, one after the other: a machine whose
    pace changes does so for both, and in a network too every kernel finds the caches as others left them.
    """
    seconds_by_model: dict[str, list[float]] = {name: [] for name in models}
    alone: dict[Path, list[float]] = {folder: [] for some in kernels.values() for folder in some}
    calls, names = list[float](), list(models)
    with torch.inference_mode():
        for number in range(rounds):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                kernels_of_model, times, times_of = kernels.get(name, {}), list[float](), list[dict[Path, float]]()
                for _ in range(steps + 2):
                    times.append(_seconds(models[name], inputs))
                    times_of.append({folder: kernel.seconds() for folder, kernel in kernels_of_model.items()})
                seconds_by_model[name].append(statistics.median(times[2:]))
                for folder in kernels_of_model:
                    alone[folder].append(statistics.median(some[folder] for some in times_of[2:]))
            calls.append(custom_call_us(torch))
    kernel_seconds = {folder: statistics.median(times) for folder, times in alone.items()}
    return Truth(seconds_by_model, kernel_seconds, statistics.median(calls))


def _seconds(model: Any, inputs: Sequence[Any]) -> float:
    started = time.perf_counter()
    model(*inputs)
    return time.perf_counter() - started


@dataclass(frozen=True)
class Inside:
    """A model's step by operator, from a trace without what the profiler costs; seconds.

    Attributes:
        calls: operator -> median of a call.
        totals: operator -> sum of its calls in a step.
        between: what of a step belongs to no call.
    """

    calls: Mapping[str, float]
    totals: Mapping[str, float]
    between: float


def inside(graph: TaskGraph) -> Inside:
    """Where the steps of a graph go."""
    steps = [index for index, step in enumerate(graph.steps) if step.full]
    times: dict[str, list[float]] = {}
    for call in operator_calls(graph):
        if call.step in steps:
            times.setdefault(call.name, []).append(call.duration_us * 1e-6)
    totals = {name: sum(seconds) / len(steps) for name, seconds in times.items()}
    step = float(simulate(graph).step_us[steps].mean()) * 1e-6
    calls = {name: statistics.median(seconds) for name, seconds in times.items()}
    return Inside(calls, totals, step - sum(totals.values()))


def within(model: Any, inputs: Sequence[Any], steps: int) -> Inside:
    """Where the steps of a model go."""
    with tempfile.TemporaryDirectory() as folder:
        graph = recorded(model, inputs, Path(folder) / "model.json", steps)
    return inside(unprofiled(graph).graph)


def largest_difference(model: Any, other: Any, inputs: Sequence[Any]) -> float:
    """Largest difference of the outputs of two models over the largest output of the first."""
    with torch.inference_mode():
        wanted, output = model(*inputs), other(*inputs)
    return float((output - wanted).abs().max() / wanted.abs().max())
