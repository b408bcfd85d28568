"""``python -m bench.daydream.cpu_loop``: kernels of ours in two networks, predicted from a trace and then measured.

A step is recorded, its operators are compiled and profiled, the step with them is predicted by simulation, and the
network is run with them. Once with the fastest kernels, once with slow ones: a prediction has to be right both ways.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from bench.cpu.machine import Machine, busy_notes, this_machine, thread_environment
from bench.daydream.cpu_results import (
    FORMAT,
    LIMIT,
    KernelTimes,
    LoopResults,
    ModelResult,
    Parts,
    Scenario,
    kernel_table,
    read_loop,
    step_table,
    write_loop,
)
from bench.timed.statistics import WIDE, Spread, spread
from codegen import write_atomic
from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import simulate
from daydream.passes.kernels.replace_operator import recorded_call_us, replaced
from daydream.passes.unprofiled import unprofiled
from daydream.swap.bundles import BundledOperator, read_bundles
from daydream.swap.plan import Replacement, replaceable, replacements
from hal.support.errors import InputError

if TYPE_CHECKING:
    from bench.daydream.cpu_truth import Truth

ROOT = Path(__file__).resolve().parents[2]
RESULTS, WORK = ROOT / "bench" / "results" / "cpu", ROOT / "out" / "cpu-loop"
#: Name -> the function of `bench.daydream.cpu_models` that makes it.
MODELS = {"resnet": "small_resnet", "transformer": "small_transformer"}
SCENARIOS = ("faster", "slower")
WAITING = ("passive", "active")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--models", default="resnet,transformer", show_default=True, metavar="NAME,NAME", help="Which networks.")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Of PyTorch and of ours.")
@click.option("--steps", type=click.IntRange(3, 1000), default=10, show_default=True, help="To record and to time.")
@click.option("--rounds", type=click.IntRange(3, 1000), default=15, show_default=True, help="Turns of each model.")
@click.option("--candidates", type=click.IntRange(1, 100), default=10, show_default=True, help="Kernels to profile.")
@click.option("--waiting", type=click.Choice(WAITING), default="passive", show_default=True,
              help="How PyTorch's threads wait for work: asleep, or spinning on a core that ours need.")  # fmt: skip
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=WORK,
              help="Traces and bundles.  [default: out/cpu-loop]")  # fmt: skip
@click.option("--reuse", is_flag=True,
              help="Take the kernels of the last run of the same operators, and profile them again.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=None,
              help="Where daydream.json goes.  [default: bench/results/cpu/DATE]")  # fmt: skip
@click.option("--show", type=click.Path(dir_okay=False, path_type=Path), default=None,
              help="Print this daydream.json again, measure nothing.")  # fmt: skip
@click.option("--limits", is_flag=True, help=f"Exit with 1 where a prediction is off by more than {LIMIT:.0%}.")
def main(
    *,
    models: str,
    threads: int,
    steps: int,
    rounds: int,
    candidates: int,
    waiting: str,
    work: Path,
    reuse: bool,
    out: Path | None,
    show: Path | None,
    limits: bool,
) -> None:
    """Predict networks with kernels of ours from a trace, then measure them."""
    try:
        if show is not None:
            results = read_loop(show)
        else:
            names, machine = _chosen(models), this_machine(threads)
            settings = environment(machine, waiting)
            if any(os.environ.get(name) != value for name, value in settings.items()):
                # Libraries read these when they are loaded.
                command = [sys.executable, "-m", "bench.daydream.cpu_loop", *sys.argv[1:]]
                sys.exit(subprocess.run(command, env={**os.environ, **settings}).returncode)
            results = measured(names, machine, settings, Loop(work, steps, rounds, candidates, reuse))
            keep(results, out or RESULTS / results.started[:10])
        tell(results)
    except InputError as error:
        click.echo(f"bench.daydream.cpu_loop: {error}", err=True)
        sys.exit(2)
    if limits and not results.met:
        sys.exit(1)


def environment(machine: Machine, waiting: str) -> dict[str, str]:
    """What the threads of PyTorch and of ours need to share the cores.

    PyTorch's OpenMP threads spin for milliseconds behind every parallel loop, on the core that a kernel of ours needs
    next. `passive` makes them sleep at once. NumPy's only compute references; they spin for tens of milliseconds.
    """
    shared = {
        "OPENBLAS_NUM_THREADS": "1",
        "ROLLER_NUM_THREADS": str(machine.threads),
        "OMP_WAIT_POLICY": waiting.upper(),
    }
    return {**thread_environment(machine.cpus), **shared}


def _chosen(text: str) -> list[str]:
    names = [name for part in text.split(",") if (name := part.strip())]
    for name in names:
        if name not in MODELS:
            raise InputError("--models", f"there is no {name!r}", f"name some of {', '.join(MODELS)}")
    return names


# The loop


class Loop(msgspec.Struct, frozen=True):
    """How it is done: folder of traces and bundles, steps recorded and timed, rounds of truth, kernels to profile."""

    work: Path
    steps: int
    rounds: int
    candidates: int
    reuse: bool = False


def measured(names: Sequence[str], machine: Machine, settings: Mapping[str, str], loop: Loop) -> LoopResults:
    """The loop over these models."""
    from bench.daydream import cpu_models
    from bench.daydream.cpu_truth import start_threads

    started = datetime.datetime.now().isoformat(timespec="seconds")
    start_threads(machine)
    found = [run_model(Original(name, *getattr(cpu_models, MODELS[name])()), machine, loop) for name in names]
    wide = [(f"{model.name}, {one.name}", one.measured.width) for model in found for one in model.scenarios]
    widest = max(wide, key=lambda pair: pair[1], default=None)
    return LoopResults(
        format=FORMAT, started=started, machine=machine, environment=dict(settings), rounds=loop.rounds,
        notes=busy_notes(machine, widest, WIDE), models=found,
    )  # fmt: skip


class Original(msgspec.Struct, frozen=True):
    """A model as it was, with inputs for it."""

    name: str
    model: Any
    inputs: Sequence[Any]


def run_model(original: Original, machine: Machine, loop: Loop) -> ModelResult:
    """Record, compile, predict, run with our kernels, compare.

    Raises:
        InputError: a kernel cannot be compiled or profiled, or changes what the model computes.
    """
    from bench.daydream.cpu_truth import Alone, in_turns, on_first_core, recorded

    folder = loop.work / original.name
    folder.mkdir(parents=True, exist_ok=True)
    _say(f"{original.name}: recording")
    with on_first_core(machine):
        graph = recorded(original.model, original.inputs, folder / "trace.json.gz", loop.steps)
    bundles = _bundles(original.name, graph, folder, loop)
    clean = unprofiled(graph)
    profiles = {scenario: Plan(clean.graph, path) for scenario, path in bundles.items()}
    _say(f"{original.name}: running with our kernels")
    swaps = {scenario: _swapped(original, scenario, path) for scenario, path in bundles.items()}
    models = {"original": original.model, **{scenario: one.model for scenario, one in swaps.items()}}
    kernels = {name: {folder: Alone(folder) for folder in plan.profile} for name, plan in profiles.items()}
    with on_first_core(machine):
        truth = in_turns(models, original.inputs, loop.rounds, loop.steps, kernels)
        times = truth.steps
        # Once more with what was measured in the same minutes, the original's steps among it.
        clean = unprofiled(graph, step_ms=1e3 * statistics.median(times["original"]))
        plans = {scenario: Plan(clean.graph, path, truth) for scenario, path in bundles.items()}
        scenarios = [
            _scenario(scenario, plan, swaps[scenario], original, spread(times[scenario]), loop.steps)
            for scenario, plan in plans.items()
        ]
    call_us = next(iter(plans.values())).call_us
    return ModelResult(
        name=original.name, recorded=statistics.median(step.measured_us for step in graph.steps) * 1e-6,
        timed=statistics.median(_timed(graph)), baseline=simulated_seconds(clean.graph),
        measured=spread(times["original"]), call_seconds=call_us * 1e-6, notes=list(clean.notes), scenarios=scenarios,
    )  # fmt: skip


class Plan:
    """What a folder of bundles does to a trace.

    Attributes:
        found: the replacements in all steps.
        profile: seconds of each kernel by its bundle's folder, as profiled or else predicted.
        call_us: what calling an operator of ours costs.
        predicted: the simulated step in seconds.
        parts: what the steps consist of, on average.
    """

    def __init__(self, graph: TaskGraph, bundles: Path, truth: Truth | None = None) -> None:
        """``truth``: seconds of kernels and calls, in place of those of their profiles and of the recording."""
        self.steps = len(graph.steps)
        self.alone = truth.kernels if truth else {}
        found, kept = replacements(graph, read_bundles(bundles))
        self.profile = {one.kernel.folder: one.kernel.seconds for one in found}
        self.found = [replace(one, kernel=self._timed(one.kernel)) for one in found]
        self.call_us = truth.call_us if truth else recorded_call_us(graph)
        steps = simulate(replaced(graph, self.found, self.call_us)).step_us * 1e-6
        self.predicted = statistics.median(steps.tolist())
        kernels = sum(one.kernel.seconds + self.call_us * 1e-6 for one in self.found) / self.steps
        stay = sum(call.duration_us for call in kept) * 1e-6 / self.steps
        self.parts = Parts(kernels=kernels, others=stay, between=float(steps.mean()) - kernels - stay)

    def _timed(self, kernel: BundledOperator) -> BundledOperator:
        return replace(kernel, seconds=self.alone.get(kernel.folder, kernel.seconds))


def simulated_seconds(graph: TaskGraph) -> float:
    """The median of the simulated steps."""
    return statistics.median(simulate(graph).step_us.tolist()) * 1e-6


def _timed(graph: TaskGraph) -> list[float]:
    assert graph.trace is not None
    return list(graph.trace.metadata["timed_seconds"])


def _say(text: str) -> None:
    click.echo(f"  {text}", err=True)


def _bundles(name: str, graph: TaskGraph, folder: Path, loop: Loop) -> dict[str, Path]:
    """Bundles of the trace's operators, fast and slow."""
    from bench.daydream.cpu_kernels import compiled, profiled, slowed

    operators = msgspec.json.format(msgspec.json.encode(replaceable(graph)), indent=1) + b"\n"
    known, paths = folder / "operators.json", {scenario: folder / scenario for scenario in SCENARIOS}
    same = known.is_file() and known.read_bytes() == operators and all(path.is_dir() for path in paths.values())
    if loop.reuse and same:
        _say(f"{name}: profiling")
        for path in paths.values():
            profiled(path)
        return paths
    for path in paths.values():
        shutil.rmtree(path, ignore_errors=True)
    write_atomic(known, operators)
    _say(f"{name}: compiling and profiling")
    compiled(known, paths["faster"], loop.candidates)
    _say(f"{name}: slow kernels")
    slowed(paths["faster"], paths["slower"])
    return paths


def _swapped(original: Original, scenario: str, bundles: Path) -> Any:
    from daydream.swap.swap import swap

    kernels = read_bundles(bundles)
    return swap(original.model, original.inputs, kernels, namespace=_namespace(original.name, scenario))


def _namespace(model: str, scenario: str) -> str:
    return f"roller_{model}_{scenario}"


#: Of a network's outputs: many layers of float32, each in another order of additions.
TOLERANCE = 1e-3


def _scenario(name: str, plan: Plan, swapped: Any, original: Original, times: Spread, steps: int) -> Scenario:
    from bench.daydream.cpu_truth import largest_difference, within

    difference = largest_difference(original.model, swapped.model, original.inputs)
    if not difference <= TOLERANCE:
        raise InputError(name, f"the model's outputs differ by {difference:.1e}", "a kernel computes something else")
    kept = list(swapped.kept)
    planned, done = len(plan.found) // plan.steps, len(swapped.replaced)
    if planned != done:
        kept.append(f"the trace suggests {planned} kernels, the model got {done}")
    inside, namespace = within(swapped.model, original.inputs, steps), _namespace(original.name, name)
    ours = sum(seconds for called, seconds in inside.totals.items() if called.startswith(f"{namespace}::"))
    others = sum(inside.totals.values()) - ours
    return Scenario(
        name=name, predicted=plan.predicted, measured=times, difference=difference, kept=kept,
        predicted_parts=plan.parts, recorded_parts=Parts(kernels=ours, others=others, between=inside.between),
        kernels=kernel_times(plan.found, plan.steps, plan.profile, inside.calls, namespace),
    )  # fmt: skip


def kernel_times(
    found: Sequence[Replacement],
    steps: int,
    profile: Mapping[Path, float],
    inside: Mapping[str, float],
    namespace: str,
) -> list[KernelTimes]:
    """What is known of every kernel; `inside` has the seconds of a call by operator."""
    from daydream.swap.swap import operator_name

    counts = Counter(one.kernel.name for one in found)
    times = []
    for name, count in counts.items():
        some = [one for one in found if one.kernel.name == name]
        kernel = some[0].kernel
        times.append(
            KernelTimes(
                name=name,
                count=count // steps,
                calls=" ".join(call.name.removeprefix("aten::") for call in some[0].run.calls),
                recorded=statistics.median(one.run.duration_us for one in some) * 1e-6,
                kernel=kernel.seconds,
                profile=profile[kernel.folder],
                within=inside.get(operator_name(kernel, namespace)),
            )
        )
    return times


# What comes of it


def keep(results: LoopResults, out: Path) -> None:
    """Write ``daydream.json``."""
    out.mkdir(parents=True, exist_ok=True)
    write_loop(out / "daydream.json", results)
    click.echo(f"results in {out / 'daydream.json'}", err=True)


def tell(results: LoopResults) -> None:
    """Print the results."""
    from bench.cpu.tables import machine_lines
    from hal.support.tables import print_line, print_table

    for line in machine_lines(results.machine):
        print_line(line)
    for model in results.models:
        print_line("")
        print_line(f"{model.name}: recorded {model.recorded * 1e3:.2f} ms, timed {model.timed * 1e3:.2f} ms a step")
        for note in model.notes:
            print_line(f"  {note}")
        for scenario in model.scenarios:
            print_line("")
            print_line(f"{model.name}, {scenario.name}: calling a kernel costs {model.call_seconds * 1e6:.1f} µs")
            print_table(kernel_table(scenario, model.call_seconds))
            print_line(f"  predicted: {scenario.predicted_parts.text}")
            print_line(f"  recorded:  {scenario.recorded_parts.text}")
            for line in scenario.kept:
                print_line(f"  {line}")
    print_line("")
    print_table(step_table(results))
    for line in results.notes:
        print_line(line)
    print_line(f"within {LIMIT:.0%}: {'yes' if results.met else 'no'}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
