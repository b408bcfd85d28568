"""The programs of an operator: constructed by Roller, found by Sokoban's search, or the best of both.

Construction explains itself and takes milliseconds; the search also reaches what the alignment rules leave out, which
small and irregular operators need (thesis 6.6). Both are ranked by RATIONAL, so their programs can be compared, also
with those of several kernels that :mod:`roller.algorithms` composes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.algorithms import (
    ALGORITHMS,
    DIRECT,
    ChainProgram,
    Considered,
    algorithms_of,
    composed_programs,
)
from roller.construct.construct import construct
from roller.construct.program import Construction, Program, ProgramPart, Reason, RProgram
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.stages import operator_form
from sokoban.language.expression import TensorExpr
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

_P = TypeVar("_P", bound=Program)


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The programs of one operator on one device, and where each came from.

    Attributes:
        placed: the operator on the device.
        direct: programs of one kernel, best first by predicted time, each schedule once.
        construction: what Roller constructed; None where the search looked alone.
        search: what Sokoban's search found; None where construction looked alone.
        considered: what became of the algorithms that compose several kernels; empty where none was asked for.
        algorithm_seconds: the time that this took.
    """

    placed: PlacedForm
    direct: tuple[RProgram, ...]
    construction: Construction | None = None
    search: SearchResult | None = None
    considered: tuple[Considered, ...] = ()
    algorithm_seconds: float = 0.0

    @staticmethod
    def of(
        construction: Construction | None,
        searched: SearchResult | None = None,
        *,
        top_k: int,
        algorithms: Collection[str] = (DIRECT,),
        method: str = "both",
    ) -> Programs:
        """Programs of construction and search, the ``top_k`` best of both, and those of ``algorithms``;
        ``method`` says who looks for programs of the kernels of a sequence.

        Of equal times constructed programs come before searched ones. At least one of the two has to have looked.
        """
        proposals = construction or searched
        assert proposals is not None
        direct = _united(construction, searched, top_k)
        start = time.perf_counter()
        considered: tuple[Considered, ...] = ()
        if proposals.placed.form.is_composed:
            considered = _composed(proposals.placed, top_k, method, algorithms)
        elif direct and not set(algorithms) <= {DIRECT}:
            considered = algorithms_of(proposals.placed, direct[0], algorithms)
        return Programs(
            placed=proposals.placed,
            direct=direct,
            construction=construction,
            search=searched,
            considered=considered,
            algorithm_seconds=time.perf_counter() - start if considered else 0.0,
        )

    @property
    def form(self) -> KernelForm:
        """The operator."""
        return self.placed.form

    @property
    def device(self) -> DeviceSpec:
        """Where it runs."""
        return self.placed.device

    @property
    def chains(self) -> tuple[ChainProgram, ...]:
        """Programs of several kernels, best first by predicted time."""
        chains = [program for considered in self.considered for program in considered.programs]
        return tuple(sorted(chains, key=lambda program: program.estimate.seconds))

    @property
    def construct_seconds(self) -> float:
        """The time that construction took; 0 where it did not look."""
        return 0.0 if self.construction is None else self.construction.seconds

    @property
    def constructed_count(self) -> int:
        """Number of candidates that construction scored."""
        return 0 if self.construction is None else self.construction.considered

    @property
    def search_seconds(self) -> float:
        """The time that the search took; 0 where it did not look."""
        return 0.0 if self.search is None else self.search.seconds

    @property
    def searched_count(self) -> int:
        """Number of schedules that the search scored."""
        return 0 if self.search is None else self.search.scored

    def ranked(self, top_k: int, algorithms: Collection[str] = ALGORITHMS, spares: int = 0) -> list[Program]:
        """The ``top_k`` best programs of all kinds, best first, and up to ``spares`` more; of equal times those of one
        kernel come first.

        Chains take half of the ``top_k`` places at most, so that whoever measures has programs of both kinds; so do
        fused pairs among sequences. Without ``direct`` among ``algorithms`` there are chains alone; of attention there
        is nothing else.

        Raises:
            InputError: none of the algorithms applies, and programs of one kernel were not asked for.
        """
        chains = self.chains
        if self.form.is_composed:
            sequences, *fused = (each.programs for each in self.considered)
            composed: list[Program] = [*sequences, *(each for some in fused for each in some[: max(1, top_k // 2)])]
            first = _best(composed, top_k)[:top_k]
            # Fused pairs hold so much in registers that the first of them may spill: others stand in for it.
            return [*first, *[each for each in chains if each not in first][:spares]]
        if DIRECT not in algorithms:
            if not chains:
                reasons = "; ".join(f"{each.algorithm}: {each.declined}" for each in self.considered)
                problem = f"none applies to {self.form.expr.name} ({reasons})"
                raise InputError("--algorithms", problem, "add direct")
            return list(chains[: top_k + spares])
        programs: list[Program] = [*self.direct, *chains[: max(1, top_k // 2)]]
        return _best(programs, top_k)[: top_k + spares]


def form_on(expr: TensorExpr, device: DeviceSpec) -> KernelForm:
    """An operator in the form in which a device has kernels for it: attention and its gradients are written out, as
    products with a softmax between them, where they have none of their own.

    Raises:
        InputError: a statement alone is no kernel.
    """
    form = operator_form(expr)
    if not form.is_attention:
        return form
    from roller.algorithms.flash import check_attention

    try:
        check_attention(form, device)
    except InputError:
        return operator_form(expr, with_attention=False)
    return form


def find_programs(
    form: KernelForm,
    device: DeviceSpec,
    top_k: int = 10,
    method: str = "both",
    algorithms: Collection[str] = ALGORITHMS,
) -> Programs:
    """The ``top_k`` best programs of an operator by one of :data:`METHODS`, and what ``algorithms`` make of it;
    :meth:`Programs.ranked` puts both into one order.

    Raises:
        InputError: the device has no layer that holds even the smallest tile, or there is no such method.
    """
    constructs, searches = finders(device, method)
    construction = construct(form, device, top_k) if constructs or form.is_composed else None
    searched = search(form, device, top_k) if searches and not form.is_composed else None
    return Programs.of(construction, searched, top_k=top_k, algorithms=algorithms, method=method)


def _composed(placed: PlacedForm, top_k: int, method: str, algorithms: Collection[str]) -> tuple[Considered, ...]:
    """Outcome for an operator that no schedule of tiles computes."""
    if not placed.form.stages:
        return (composed_programs(placed, top_k, algorithms),)
    from roller.algorithms import pair, sequence

    stages = [_stage_parts(stage, placed.device, top_k, method) for stage in placed.form.stages]
    return sequence.combined(placed.form, stages, top_k), pair.consider(placed, top_k)


def _stage_parts(stage: KernelForm, device: DeviceSpec, top_k: int, method: str) -> list[ProgramPart]:
    """The ``top_k`` best kernels of a stage of a sequence."""
    programs = find_programs(stage, device, top_k, method, (DIRECT,))
    return [program.main for program in (programs.direct or programs.chains)]


def finders(device: DeviceSpec, method: str) -> tuple[bool, bool]:
    """Truth of construction and of search looking for programs of a device by one of :data:`METHODS`.

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


def schedule_key(schedule: TileSchedule, form: KernelForm) -> tuple[Any, ...]:
    """A key that is equal for schedules that give the same kernel, however their defaults are written."""
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
        schedule.cluster,
        schedule.launched,
        schedule.kept_columns,
    )


def finder_of(policy: str) -> str:
    """Who found a program of one kernel: ``"search"`` or ``"construction"``."""
    return "search" if policy == SEARCH_POLICY else "construction"


def _united(construction: Construction | None, searched: SearchResult | None, top_k: int) -> tuple[RProgram, ...]:
    """Constructed and searched programs, best first, each schedule once; of equal times construction's come first."""
    constructed = () if construction is None else construction.programs
    if searched is None:
        return constructed
    programs = _searched_programs(searched)
    if construction is None:
        return programs
    constructed_keys = {schedule_key(program.schedule, construction.form) for program in constructed}
    others = [
        program for program in programs if schedule_key(program.schedule, construction.form) not in constructed_keys
    ]
    return tuple(_best([*constructed, *others], top_k)[:top_k])


def _best(programs: Sequence[_P], top_k: int) -> list[_P]:
    """All programs by predicted time, of equal times in the order given, with a fall-back among the first ``top_k``."""
    ordered = sorted(programs, key=lambda program: program.estimate.seconds)
    return with_fall_back(ordered, top_k, lambda program: program.instruction)


def _searched_programs(result: SearchResult) -> tuple[RProgram, ...]:
    """Schedules of the search as programs, with the numbers of the search as their reasons."""
    looked = f"{result.enumerated} tiles enumerated, {result.scored} schedules left by closed forms and scored"
    return tuple(
        RProgram(
            form=result.form,
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
