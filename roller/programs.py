"""The programs of an operator: constructed by Roller, found by Sokoban's search, or the best of both.

Construction explains itself and takes milliseconds; the search also reaches what the alignment rules leave out, which
small and irregular operators need (thesis 6.6). Both are ranked by RATIONAL, so their programs can be compared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hal import DeviceSpec, InputError
from roller.candidate import Reason
from roller.construct import Construction, RProgram, construct
from sokoban import KernelForm, TileSchedule
from sokoban.search import SearchResult, search
from sokoban.search_space import MOST_PADDING

#: Who may look for programs.
METHODS = ("roller", "sokoban", "both")

#: The policy of programs that the search found.
SEARCH_POLICY = "search"


def find_programs(form: KernelForm, device: DeviceSpec, top_k: int = 10, method: str = "both") -> Construction:
    """The ``top_k`` best programs of an operator by one of :data:`METHODS`.

    Raises:
        InputError: the device has no layer that holds even the smallest tile, or there is no such method.
    """
    if method not in METHODS:
        raise InputError("method", f"there is no {method!r}", f"use one of {', '.join(METHODS)}")
    if method == "sokoban":
        return searched(search(form, device, top_k))
    constructed = construct(form, device, top_k)
    return constructed if method == "roller" else united(constructed, search(form, device, top_k), top_k)


def searched(result: SearchResult) -> Construction:
    """The programs of a search alone."""
    return Construction(
        result.form, result.device, _programs(result), 0, MOST_PADDING, 0.0, result.scored, result.seconds
    )


def united(constructed: Construction, result: SearchResult, top_k: int) -> Construction:
    """Constructed and searched programs, best first, each schedule once; of equal times construction's come first."""
    known = {schedule_key(program.schedule, constructed.form) for program in constructed.programs}
    new = [p for p in _programs(result) if schedule_key(p.schedule, constructed.form) not in known]
    programs = sorted([*constructed.programs, *new], key=lambda program: program.estimate.seconds)[:top_k]
    return replace(constructed, programs=tuple(programs), searched=result.scored, search_seconds=result.seconds)


def schedule_key(schedule: TileSchedule, form: KernelForm) -> tuple[Any, ...]:
    """Equal for schedules that give the same kernel, however their defaults are written."""
    steps = {**{axis: form.sizes[axis] for axis in form.reduced}, **schedule.step_of}
    shared = {axis: count for axis, count in schedule.reduce_threads if count > 1}
    return (
        schedule.block,
        schedule.thread,
        tuple(schedule.vthreads_of.items()),
        tuple(steps.items()),
        tuple(shared.items()),
        frozenset(schedule.cached),
        frozenset((name, amount) for name, amount in schedule.padding if amount),
        schedule.unroll,
        schedule.instruction,
        schedule.stages,
        frozenset(schedule.turned),
    )


def _programs(result: SearchResult) -> tuple[RProgram, ...]:
    looked = f"{result.enumerated} tiles enumerated, {result.scored} schedules left by closed forms and scored"
    return tuple(
        RProgram(
            schedule, estimate, None, None, SEARCH_POLICY, MOST_PADDING, (Reason("search", looked, f"its rank {rank}"),)
        )
        for rank, (schedule, estimate) in enumerate(zip(result.schedules, result.estimates, strict=True), start=1)
    )
