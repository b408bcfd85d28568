"""Explanation of chains: their parts, and why they were chosen or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from hal.spec.device import DeviceSpec
from roller.algorithms.chain import Considered
from roller.construct.program import Program, ProgramPart
from roller.explain.attention import flash_page
from roller.explain.attention_gradient import gradient_page
from roller.explain.pace import stage_bars
from roller.explain.pair import pair_page
from roller.programs import Programs
from roller.text.quantities import clipped, count_text, si_text, time_text, wrapped
from sokoban.kernel.form import KernelForm
from sokoban.kernel.patches import PatchTransform
from sokoban.kernel.problem import Problem
from sokoban.language.expression import statement_text
from sokoban.schedule.patches import PatchSchedule

_MEANING = {
    "winograd": "transforms before and after save multiplications; what they make passes through memory",
    "sequence": "kernels one after the other: what one makes passes through memory to the next, each as if alone",
    "split-k": "other blocks sum other slices of the reduction, so that no unit idles; a second kernel adds the slices",
    "flat-image": "the image is copied with its padding written out, so that one product reads it moved by every tap",
    "split-rows": "other blocks reduce other slices of a row, so that no unit idles; rows are read for every reduction",
}

#: Pages of what is no chain in this sense, by the kind of its form or by its algorithm.
_PAGES: Mapping[str, Callable[[Programs, Program, int], Iterator[str]]] = {
    "attention": flash_page,
    "attention_gradient": gradient_page,
    "fused pair": pair_page,
}


def chain_page(programs: Programs, program: Program, rank: int) -> Iterator[str]:
    """Steps to a chain, its kernels, and its time next to that of the best program of one kernel."""
    page = _PAGES.get(program.form.kind, _PAGES.get(program.algorithm))
    if page is not None:
        yield from page(programs, program, rank)
        return
    yield f"How rank {rank} was composed: {program.policy}"
    yield from wrapped(_MEANING[program.algorithm])
    for number, part in enumerate(program.parts, start=1):
        seconds = part.estimate.seconds
        bound = part.estimate.bound.replace("_", " ")
        yield clipped(f"  {number}. {time_text(seconds):>8}  {part.label}, bound by {bound}")
    for tensor in program.workspace:
        yield f"  {si_text(tensor.size_bytes, 'B')} of workspace between them: {tensor.name}"
    if programs.direct:
        yield from wrapped(_verdict(programs, program.estimate.seconds))


def considered_lines(programs: Programs) -> Iterator[str]:
    """Every algorithm against the best program of one kernel: its times, or why it was not tried; for a sequence,
    the outcome of one kernel."""
    if not programs.direct:
        for sequence, fused in zip(programs.considered[:-1], programs.considered[1:], strict=True):
            seconds = sequence.programs[0].estimate.seconds
            yield f"One kernel of two products, beside {time_text(seconds)} of the best sequence"
            yield from _considered(replace(fused, programs=fused.programs[:3]), seconds)
        return
    direct = programs.direct[0].estimate
    launch = time_text(programs.device.launch_overhead_seconds)
    best = time_text(direct.seconds)
    yield f"Algorithms of several kernels, beside {best} of the best single one; a launch is {launch}"
    for considered in programs.considered:
        yield from _considered(considered, direct.seconds)


def _considered(considered: Considered, direct: float) -> Iterator[str]:
    if considered.declined:
        yield from wrapped(f"{considered.algorithm}: not tried, as {considered.declined}")
    for program in considered.programs:
        seconds = program.estimate.seconds
        parts = " + ".join(time_text(part.estimate.seconds) for part in program.parts)
        yield clipped(f"  {time_text(seconds):>8}  {100 * (seconds / direct - 1):+7.1f}%  {program.policy}: {parts}")


def _verdict(programs: Programs, seconds: float) -> str:
    direct = programs.direct[0].estimate.seconds
    faster = f"{direct / seconds:.2f} times as fast" if seconds < direct else f"{seconds / direct:.2f} times as long"
    return f"in all {time_text(seconds)}, {faster} as the best single kernel's {time_text(direct)}"


def patch_lines(transform: PatchTransform, part: ProgramPart, device: DeviceSpec) -> Iterator[str]:
    """A patch transform: its threads, what they hold and do, its stages."""
    estimate, schedule = part.estimate, part.schedule
    assert isinstance(schedule, PatchSchedule)
    yield (
        f"  {count_text(schedule.blocks(transform), 'block')} of {count_text(schedule.threads, 'thread')}, "
        f"{estimate.blocks_per_unit} at a time on a unit; a thread holds {transform.patch}x{transform.patch} numbers, "
        f"about {estimate.registers} registers"
    )
    width = transform.store_width
    stores = f"in pieces of {width}" if width > 1 else "one by one"
    yield (
        f"  it makes {transform.transformed}x{transform.transformed} of them by {transform.multiply_adds} "
        f"multiply-adds and stores those {stores}"
    )
    yield f"Predicted {time_text(estimate.seconds)}, {time_text(device.launch_overhead_seconds)} of it the launch"
    yield from stage_bars(estimate)


def problem_text(problem: Problem) -> str:
    """Computation of a kernel of a chain, as the expression language writes it."""
    if not isinstance(problem, KernelForm):
        return problem.statement_text()
    return "; ".join(statement_text(statement) for statement in problem.source.statements)
