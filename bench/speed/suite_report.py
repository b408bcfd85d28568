"""A whole suite for one device, summed up: ``python -m bench.speed.suite_report --device v100``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import click

from bench.speed.construction import ConstructionTimes, construction_times
from bench.suites import suite_names, suite_path
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.compile.pipeline import CompiledOperator, compile_operators
from roller.compile.workers import worker_pool
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import load_operators


@dataclass(frozen=True, kw_only=True)
class OperatorResult:
    """Result of one operator of a suite.

    Attributes:
        spills: spilled bytes of every kernel with a binary, by rank.
        verified: whether each kernel that was run, from rank 1 down, agreed with the reference.
        needless: synchronizations that ordered nothing there: ``rank 2, line 41: __syncthreads();``.
    """

    name: str
    programs: int
    kernels: int
    cubins: int
    spills: tuple[int, ...]
    verified: tuple[bool, ...]
    needless: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SuiteReport:
    """A suite on a device. ``compile_seconds`` is wall time; it and ``results`` are None where nothing was compiled.
    ``absent`` are the operators whose element types the device does not multiply."""

    suite: str
    device: str
    times: ConstructionTimes
    results: Sequence[OperatorResult] | None
    compile_seconds: float | None
    absent: Sequence[str] = ()

    def lines(self) -> list[str]:
        """The report as text, one figure a line."""
        name, worst = self.times.worst
        count = len(self.times.by_operator)
        out = [
            f"suite                    {self.suite}, {count} operators, for {self.device}",
            f"construction, median     {1e3 * self.times.median_seconds:.2f} ms per operator",
            f"construction, worst      {1e3 * worst:.2f} ms ({name})",
        ]
        if self.absent:
            out.append(f"not on this board        {_listed(self.absent)}")
        if self.results is None or self.compile_seconds is None:
            return out
        cubins = sum(bool(r.cubins) for r in self.results)
        spilling = [r.name for r in self.results if r.spills and r.spills[0]]
        checked = [passed for r in self.results for passed in r.verified]
        wrong = [f"{r.name}, rank {n}" for r in self.results for n, ok in enumerate(r.verified, 1) if not ok]
        needless = [f"{r.name}, {text}" for r in self.results for text in r.needless]
        return [
            *out,
            f"ten or more candidates   {sum(r.programs >= 10 for r in self.results)} of {count}",
            f"ten kernels              {sum(r.kernels >= 10 for r in self.results)} of {count}",
            f"operators with a cubin   {cubins} of {count}",
            f"cubins                   {sum(r.cubins for r in self.results)}",
            f"cubins that spill        {sum(bool(s) for r in self.results for s in r.spills)}",
            f"rank 1 spills            {_listed(spilling)}",
            f"kernels verified         {sum(checked)} of {len(checked)}",
            f"wrong or not run         {_listed(wrong)}",
            f"order nothing            {_listed(needless)}",
            f"compilation              {self.compile_seconds:.1f} s",
        ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def operator_result(compiled: CompiledOperator) -> OperatorResult:
    """The figures of one compiled operator."""
    built = [kernel.built for kernel in compiled.kernels]
    checks = [kernel.verification for kernel in built if kernel.verification is not None]
    return OperatorResult(
        name=compiled.expr.name,
        programs=len(compiled.programs.direct),
        kernels=len(built),
        cubins=sum(all(built.binary is not None for built in kernel.built.parts) for kernel in compiled.kernels),
        spills=tuple(kernel.spill_bytes for kernel in built if kernel.spill_bytes is not None),
        verified=tuple(check.passed for check in checks),
        needless=tuple(f"rank {rank}, {text}" for rank, check in enumerate(checks, 1) for text in check.needless),
    )


def on_board(forms: Mapping[str, KernelForm], device: DeviceSpec) -> tuple[dict[str, KernelForm], list[str]]:
    """The operators that a device has element types for, and the names of the others."""
    supported = {}
    for name, form in forms.items():
        with suppress(InputError):
            PlacedForm(form, device).check()
            supported[name] = form
    return supported, [name for name in forms if name not in supported]


def compile_suite(
    expressions: Sequence[TensorExpr], device: DeviceSpec, *, top_k: int, verify: int, jobs: int
) -> tuple[list[OperatorResult], float]:
    """Build every operator, writing nothing; the results and the wall time."""
    start = time.perf_counter()
    with worker_pool(jobs) as pool:
        compiled = compile_operators(expressions, device, top_k=top_k, verify=verify, pool=pool)
        results = [operator_result(operator) for operator in compiled]
    return results, time.perf_counter() - start


@click.command()
@click.option("--device", "device_name", required=True, metavar="NAME|FILE", help="A board or a spec file.")
@click.option("--suite", type=click.Choice(suite_names()), default="roller119", show_default=True)
@click.option("--top-k", type=click.IntRange(1, 100), default=10, show_default=True, help="Kernels per operator.")
@click.option(
    "--verify", type=click.IntRange(0, 100), default=1, show_default=True, help="Kernels verified per operator."
)
@click.option("--jobs", type=click.IntRange(1, 256), default=None, help="Processes that compile.  [default: all cores]")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="Timed constructions each.")
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True, help="Build the kernels too.")
def main(device_name: str, suite: str, top_k: int, verify: int, jobs: int | None, rounds: int, compiled: bool) -> None:
    """Construct and compile a suite; print what came out and how long it took."""
    try:
        device = load_device(device_name)
        if compiled:
            expressions = load_operators(suite_path(suite))
        # Construction first, while no build process competes for the cores.
        forms, absent = on_board({expr.name: kernel_form(expr) for expr in expressions}, device)
        expressions = [expr for expr in expressions if expr.name in forms]
        times = construction_times(forms, device, top_k=top_k, rounds=rounds)
        results = seconds = None
        if compiled:
            results, seconds = compile_suite(
                expressions, device, top_k=top_k, verify=verify, jobs=jobs or os.cpu_count() or 1
            )
    except InputError as error:
        raise click.ClickException(str(error)) from error
    for line in SuiteReport(
        suite=suite, device=device.name, times=times, results=results, compile_seconds=seconds, absent=absent
    ).lines():
        click.echo(line)


if __name__ == "__main__":
    main()
