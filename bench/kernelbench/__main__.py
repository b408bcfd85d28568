"""KernelBench's problems in our language: how many are said, how long kernels of ours take, and whether they are right.

    python -m bench.kernelbench [FILE_OR_FOLDER] --device h100-sxm-80gb [--prove] [--level level1]

reads rows of measured problems (``problems.jsonl``) or the folder ``KernelBench`` of a user's own copy, whose files it
runs on tensors without data; without either, the twins: problems of our own after the titles that have no such row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from bench.accuracy.steps.kernelbench import Problem as Measured
from bench.accuracy.steps.kernelbench import capture_of, evaluate
from bench.kernelbench.calls import read_folder, read_rows, read_twins
from bench.kernelbench.groups import Operators, operators_of
from bench.kernelbench.problem import Problem
from codegen.compile.build import verify_chain, verify_schedule
from codegen.target import Target
from codegen.verify.result import Verification
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.construct.program import Program
from roller.programs import find_programs, form_on
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import TensorExpr


@dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of a problem.

    Attributes:
        operators: the problem in the language.
        seconds: predicted of our kernels, one after the other.
        roofline: seconds in which every operator does its arithmetic, or moves its tensors once.
        library: predicted of PyTorch's eager calls.
        proofs: of every operator's best program; empty where nothing was to be proved.
        refused: why an operator has no kernel; empty where all have.
    """

    operators: Operators
    seconds: float = math.nan
    roofline: float = math.nan
    library: float = math.nan
    proofs: tuple[Verification, ...] = ()
    refused: str = ""

    @property
    def verdict(self) -> str:
        """Outcome in a word or a reason."""
        if self.operators.reason or self.refused:
            return self.operators.reason or self.refused
        wrong = [proof for proof in self.proofs if not proof.passed]
        if wrong:
            return f"WRONG: {wrong[0].reason}"
        return "proved" if self.proofs else "said"


def judged(operators: Operators, device: DeviceSpec, *, proves: bool) -> Result:
    """A problem on a board."""
    if operators.reason:
        return Result(operators=operators)
    seconds = roofline = 0.0
    proofs = []
    for expr, launches in zip(operators.expressions, operators.launches, strict=True):
        try:
            program = _best(expr, device)
        except InputError as error:
            return Result(operators=operators, refused=str(error))
        seconds += launches * program.estimate.seconds
        roofline += launches * _roofline(program, device)
        if proves:
            proofs.append(_proved(program, Target.of(device)))
    problem = operators.problem
    measured = Measured(
        name=problem.name, board=device.name, eager=1.0, compiled=1.0, capture=capture_of(problem.name, problem.listed)
    )
    library = evaluate([measured])[0].eager
    return Result(
        operators=operators, seconds=seconds, roofline=roofline, library=library, proofs=tuple(proofs)
    )  # fmt: skip


def _roofline(program: Program, device: DeviceSpec) -> float:
    """Seconds of arithmetic by the fastest instructions that may be used, or of all tensors through DRAM."""
    placed = PlacedForm(program.form, device)
    rounded = device.matrix_instruction("tfloat32") if program.form.source.allow_tf32 else None
    flops = max(placed.rate.flops, 0.0 if rounded is None else rounded.sustained_flops)
    return max(program.form.flops / flops, placed.compulsory_seconds)


def _best(expr: TensorExpr, device: DeviceSpec) -> Program:
    return find_programs(form_on(expr, device), device, 4, "roller").ranked(4)[0]


def _proved(program: Program, target: Target) -> Verification:
    """A run of the kernels in the emulator, on the operator cut down."""
    check = program.check()
    if check is not None:
        return verify_chain(check, target, "emulator", (0,))
    return verify_schedule(program.form, program.main.tiles, target, "emulator", (0,))


HEADER = f"{'problem':58} {'pred. ms':>9} {'roof':>6} {'model':>6} {'eager':>6}  verdict"


def line_of(result: Result) -> str:
    """A problem: its predicted time, that over the roofline, and over it the library's model and PyTorch's time."""
    problem, times = result.operators.problem, ""
    if not math.isnan(result.seconds):
        ratios = [result.seconds / result.roofline, result.library / result.seconds]
        eager = f"{problem.eager_ms / result.seconds / 1e3:6.2f}" if problem.eager_ms else "     -"
        times = f"{result.seconds * 1e3:9.3f} {ratios[0]:6.2f} {ratios[1]:6.2f} {eager}"
    return f"{problem.name[:58]:58} {times:30}  {result.verdict}"


def summary(results: list[Result], unread: list[tuple[str, str]]) -> Iterator[str]:
    """Lines on each level: how much is said and proved, and how times compare."""
    levels = sorted({result.operators.problem.name.partition("/")[0] for result in results})
    for level in levels:
        mine = [each for each in results if each.operators.problem.name.startswith(f"{level}/")]
        count = len(mine) + sum(name.startswith(f"{level}/") for name, _ in unread)
        said = [each for each in mine if not math.isnan(each.seconds)]
        proved = sum(each.verdict == "proved" for each in said)
        ratios = {
            "over the roofline": [each.seconds / each.roofline for each in said],
            "library's model over ours": [each.library / each.seconds for each in said],
            "measured eager over ours": [
                each.operators.problem.eager_ms / each.seconds / 1e3 for each in said if each.operators.problem.eager_ms
            ],
        }
        middle = ", ".join(f"{name} {np.median(values):.2f}" for name, values in ratios.items() if values)
        yield f"{level}: {len(said)} of {count} said, {proved} proved; medians: {middle or '-'}"


def _problems(source: Path | None, device: DeviceSpec, levels: Sequence[str]) -> Iterable[Problem | tuple[str, str]]:
    """Problems of a source, or the name of one and why it could not be called."""
    if source is None:
        return read_twins(levels)
    return read_folder(source, levels) if source.is_dir() else read_rows(source, device.name, levels)


@click.command()
@click.argument("source", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--device", "device_name", default="h100-sxm-80gb", show_default=True, help="The board.")
@click.option("--level", "levels", multiple=True, default=("level1", "level2"), show_default=True, help="Levels.")
@click.option("--prove", is_flag=True, help="Run every operator's kernels in the emulator, cut down.")
@click.option("--problem", default="", help="Problems whose names have this alone.")
def main(source: Path | None, device_name: str, levels: tuple[str, ...], prove: bool, problem: str) -> None:
    """Judge SOURCE, a file of problems' rows or a copy's folder; by default the twins."""
    try:
        device = load_device(device_name)
        read = _problems(source, device, levels)
        results, unread = [], []
        click.echo(HEADER)
        for each in read:
            if isinstance(each, tuple):
                unread.append(each)
                click.echo(f"{each[0][:58]:58} {'':30}  {each[1]}")
            elif problem in each.name:
                results.append(judged(operators_of(each), device, proves=prove))
                click.echo(line_of(results[-1]))
        if not results and not unread:
            raise InputError(
                str(source or "twins"), f"no problems of {', '.join(levels)} on {device.name}", "name another board"
            )
    except InputError as error:
        click.echo(str(error), err=True)
        raise SystemExit(2) from None
    for line in summary(results, unread):
        click.echo(line)


if __name__ == "__main__":
    main()
