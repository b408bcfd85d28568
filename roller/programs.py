"""The programs of an operator: constructed by Roller, found by Sokoban's search, or the best of both.

Construction explains itself and takes milliseconds; the search also reaches what the alignment rules leave out, which
small and irregular operators need (thesis 6.6). Both are ranked by RATIONAL, so their programs can be compared, also
with those of several kernels that :mod:`roller.algorithms` composes.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.algorithms import ALGORITHMS, DIRECT, ChainProgram, algorithms_of
from roller.construct.construct import construct
from roller.construct.program import Construction, Reason, RProgram
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import with_fall_back
from sokoban.search.search import SearchResult, search
from sokoban.search.space import MOST_PADDING

#: Who may look for programs.
METHODS = ("roller", "sokoban", "both")

#: What lanes are on devices whose tiles the search enumerates.
SEARCHED_LANES = ("thread",)

#: The policy of programs that the search found.
SEARCH_POLICY = "search"

#: A program of one kernel or of several.
Program = RProgram | ChainProgram


def find_programs(
    form: KernelForm,
    device: DeviceSpec,
    top_k: int = 10,
    method: str = "both",
    algorithms: Collection[str] = ALGORITHMS,
) -> Construction:
    """The ``top_k`` best programs of an operator by one of :data:`METHODS`, and what ``algorithms`` make of it;
    :func:`ranked` puts both into one order.

    Raises:
        InputError: the device has no layer that holds even the smallest tile, or there is no such method.
    """
    constructs, searches = finders(device, method)
    if not constructs:
        return with_algorithms(searched(search(form, device, top_k)), algorithms)
    constructed = construct(form, device, top_k)
    if searches:
        constructed = united(constructed, search(form, device, top_k), top_k)
    return with_algorithms(constructed, algorithms)


def finders(device: DeviceSpec, method: str) -> tuple[bool, bool]:
    """Whether construction and whether search look for programs of a device by one of :data:`METHODS`.

    Raises:
        InputError: there is no such method, or it is the search alone, which does not know the device's lanes.
    """
    if method not in METHODS:
        raise InputError("method", f"there is no {method!r}", f"use one of {', '.join(METHODS)}")
    searchable = device.teu.lane in SEARCHED_LANES
    if method == "sokoban" and not searchable:
        problem = f"is for lanes that are threads; those of {device.name} are elements of vectors"
        raise InputError("--search sokoban", problem, "leave it out")
    return method != "sokoban", method != "roller" and searchable


def with_algorithms(construction: Construction, algorithms: Collection[str]) -> Construction:
    """The construction with what ``algorithms`` make of its operator beside its programs of one kernel."""
    if not construction.programs or set(algorithms) <= {DIRECT}:
        return construction
    start = time.perf_counter()
    found = algorithms_of(construction.form, construction.device, construction.programs[0], algorithms)
    return replace(construction, algorithms=found, algorithm_seconds=time.perf_counter() - start)


def ranked(
    construction: Construction, top_k: int, algorithms: Collection[str] = ALGORITHMS, spares: int = 0
) -> list[Program]:
    """The ``top_k`` best programs of all kinds, best first, and up to ``spares`` more; of equal times those of one
    kernel come first.

    Chains take half of the ``top_k`` places at most, so that whoever measures has programs of both kinds. Without
    ``direct`` among ``algorithms`` there are chains alone.

    Raises:
        InputError: none of the algorithms applies, and programs of one kernel were not asked for.
    """
    chains = sorted(
        (program for considered in construction.algorithms for program in considered.programs),
        key=lambda program: program.estimate.seconds,
    )
    if DIRECT not in algorithms:
        if not chains:
            reasons = "; ".join(f"{one.algorithm}: {one.declined}" for one in construction.algorithms)
            raise InputError("--algorithms", f"none applies to {construction.form.expr.name} ({reasons})", "add direct")
        return list(chains[: top_k + spares])
    programs: list[Program] = [*construction.programs, *chains[: max(1, top_k // 2)]]
    programs.sort(key=lambda program: program.estimate.seconds)
    return with_fall_back(programs, top_k, _instruction)[: top_k + spares]


def _instruction(program: Program) -> Instruction | None:
    """What computes a program; None where several kernels do."""
    return program.schedule.instruction if isinstance(program, RProgram) else None


def searched(result: SearchResult) -> Construction:
    """The programs of a search alone."""
    return Construction(
        form=result.form,
        device=result.device,
        programs=_programs(result),
        considered=0,
        epsilon=MOST_PADDING,
        seconds=0.0,
        searched=result.scored,
        search_seconds=result.seconds,
    )


def united(constructed: Construction, result: SearchResult, top_k: int) -> Construction:
    """Constructed and searched programs, best first, each schedule once; of equal times construction's come first."""
    known = {schedule_key(program.schedule, constructed.form) for program in constructed.programs}
    new = [p for p in _programs(result) if schedule_key(p.schedule, constructed.form) not in known]
    programs = sorted([*constructed.programs, *new], key=lambda program: program.estimate.seconds)
    programs = with_fall_back(programs, top_k, _instruction)[:top_k]
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
        schedule.asynchronous,
        schedule.raster,
    )


def _programs(result: SearchResult) -> tuple[RProgram, ...]:
    looked = f"{result.enumerated} tiles enumerated, {result.scored} schedules left by closed forms and scored"
    return tuple(
        RProgram(
            schedule=schedule,
            estimate=estimate,
            register_tile=None,
            shared_tile=None,
            policy=SEARCH_POLICY,
            epsilon=MOST_PADDING,
            reasons=(Reason("search", looked, f"its rank {rank}"),),
        )
        for rank, (schedule, estimate) in enumerate(zip(result.schedules, result.estimates, strict=True), start=1)
    )
