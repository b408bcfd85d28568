"""Explanation of chains: their parts, and why they were chosen or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from roller.algorithms.chain import Considered
from roller.construct.program import Program
from roller.explain.kinds import KINDS
from roller.programs import Programs
from roller.text.quantities import clipped, si_text, time_text, wrapped

_MEANING = {
    "winograd": "transforms before and after save multiplications; what they make passes through memory",
    "sequence": "kernels one after the other: what one makes passes through memory to the next, each as if alone",
    "split-k": "other blocks sum other slices of the reduction, so that no unit idles; a second kernel adds the slices",
    "flat-image": "the image is copied with its padding written out, so that one product reads it moved by every tap",
    "split-line": "other blocks have other parts of a line, so that no unit idles; what parts come to is found before",
    "split-rows": "other blocks reduce other slices of a row, so that no unit idles; rows are read for every reduction",
}


def chain_page(programs: Programs, program: Program, rank: int) -> Iterator[str]:
    """Steps to a chain, its kernels, and its time next to that of the best program of one kernel."""
    first = program.parts[0]
    kind = KINDS.get(type(first.problem))
    if kind is not None and kind.origin is not None:
        yield f"How rank {rank} was constructed: {program.policy}"
        yield from kind.origin(first.problem, first.schedule)
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
            yield f"One kernel of two products, against {time_text(seconds)} of the best sequence"
            yield from _considered(replace(fused, programs=fused.programs[:3]), seconds)
        return
    direct = programs.direct[0].estimate
    launch = time_text(programs.device.launch_overhead_seconds)
    best = time_text(direct.seconds)
    yield f"Algorithms of several kernels, against {best} of the best single one; a launch is {launch}"
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
