"""Roller's construction: propose aligned programs, score them all at once, keep the best (thesis 6.3.2).

Proposals come from :mod:`roller.construct.scale_up` where outputs share data and from :mod:`roller.construct.flat`
where they do not. The thesis takes the first K programs that the greedy walk finds; here every tile on the way that
could be a program is a candidate, and RATIONAL's estimate of all of them together decides, because a walk by data reuse
sees neither occupancy nor waves nor bank conflicts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from hal.support.records import quick
from roller.construct.cpu import CpuScaleUp
from roller.construct.flat import Flat
from roller.construct.performance import Costs
from roller.construct.program import Candidate, Construction, RProgram
from roller.construct.rtile import RTile, TileSpace
from roller.construct.scale_up import ScaleUp
from roller.construct.warp_groups import warp_group_candidates
from roller.construct.warp_tiles import warp_tile_candidates
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.model.estimates import Estimate, EstimateTable
from sokoban.model.rational import estimate
from sokoban.schedule.pipelines import BODY_STATEMENTS, pipeline_variants, stages_operands, turned_tensors
from sokoban.schedule.table import Ints, Lines, ScheduleTable
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import with_fall_back
from sokoban.search.bands import in_bands
from sokoban.search.padding import bank_padding

#: Waste that tensor padding may cause, raised until there are enough programs (6.3.2, "irregular tensor shapes").
EPSILON_STEPS = (0.1, 0.25, 0.4, 1.0, 4.0, 64.0)

#: Waste tried as well for irregular shapes, those with an axis that is no multiple of :data:`ALIGNED`, where the best
#: program takes longer than the operator's bound by more than :data:`FAR_FROM_BOUND`: seven columns are then worth
#: padding to eight although tiles of seven exist.
IRREGULAR_EPSILON = 0.4
ALIGNED = 8
FAR_FROM_BOUND = 1.4

#: Buffers that construction gives a pipeline of asynchronous copies; search tries others too.
CONSTRUCTED_STAGES = 3

#: Programs that are enough even if more were asked for: a larger epsilon would only add padding.
ENOUGH = 20

#: Points of a reduction up to which doing without shared memory is worth proposing: windows, not inner products.
SHORT_REDUCTION = 128


def construct(form: KernelForm, device: DeviceSpec, top_k: int = 10) -> Construction:
    """Construct the ``top_k`` best programs of an operator.

    Raises:
        InputError: the device has no layer that holds even the smallest tile, or it cannot multiply the operator's
            element types.
    """
    placed = PlacedForm(form, device)
    if form.is_composed:
        # Its programs are those of roller.algorithms.composed_programs, whatever became of one kernel of tiles.
        return Construction(placed=placed, programs=(), considered=0, epsilon=0.0, seconds=0.0)
    placed.check()
    start = time.perf_counter()
    proposals = Proposals(placed)
    ranking = _Ranking(proposals, top_k)
    epsilon = EPSILON_STEPS[0]
    for epsilon in EPSILON_STEPS:
        ranking.add(proposals.within(epsilon))
        if ranking.considered >= min(top_k, ENOUGH) and len(ranking.best()) >= min(top_k, ENOUGH):
            break
    programs = ranking.best()
    if programs and epsilon < IRREGULAR_EPSILON and _wants_padding(placed, programs[0].estimate.seconds):
        epsilon = IRREGULAR_EPSILON
        ranking.add(proposals.within(epsilon))
        programs = ranking.best()
    if not programs:
        raise InputError(form.expr.name, f"no tile fits the memory of {device.name}", "use a smaller operator")
    return Construction(
        placed=placed,
        programs=programs,
        considered=ranking.considered,
        epsilon=epsilon,
        seconds=time.perf_counter() - start,
    )


def _wants_padding(placed: PlacedForm, seconds: float) -> bool:
    """True if an irregular shape is the likely reason for a best program of ``seconds``."""
    form = placed.form
    if not form.reduced or form.is_rows or not any(form.sizes[axis] % ALIGNED for axis in form.spatial):
        return False
    return seconds > FAR_FROM_BOUND * placed.least_seconds + placed.device.launch_overhead_seconds


class _Ranking:
    """The best of the candidates so far. What was scored once is not scored again when others come."""

    def __init__(self, proposals: Proposals, top_k: int) -> None:
        self.proposals, self.top_k = proposals, top_k
        self._known: dict[TileSchedule, Candidate] = {}
        self._unscored: list[Candidate] = []
        self._best: tuple[RProgram, ...] = ()

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Candidates to rank besides; of those with the same schedule the first counts."""
        for candidate in candidates:
            if self._known.setdefault(candidate.schedule, candidate) is candidate:
                self._unscored.append(candidate)

    @property
    def considered(self) -> int:
        return len(self._known)

    def best(self) -> tuple[RProgram, ...]:
        """Best first by predicted time; equal times keep the order in which construction proposed them."""
        if self._unscored:
            scored = self._scored(self._unscored)
            self._unscored = []
            together = [*self._best, *scored]
            if self._best:
                together.sort(key=lambda program: program.estimate.seconds)
            self._best = tuple(with_fall_back(together, self.top_k, lambda program: program.instruction)[: self.top_k])
        return self._best

    def _scored(self, candidates: list[Candidate]) -> list[RProgram]:
        """The best of some candidates."""
        space, placed = self.proposals.space, self.proposals.placed
        variants = _Variants.of(placed, [candidate.schedule for candidate in candidates])
        estimates = estimate(variants.padded, placed)
        chosen = self._chosen(candidates, variants.candidate, estimates)
        bands, predictions = in_bands(variants.padded, np.array(chosen, dtype=np.int64), estimates, placed)
        ranked = np.argsort(predictions.seconds, kind="stable").tolist()
        return [
            _program(
                space,
                candidates[variants.candidate[chosen[place]]],
                variants.schedule(chosen[place], int(bands[place])),
                prediction,
            )
            for place, prediction in zip(ranked, predictions.rows(ranked), strict=True)
        ]

    def _chosen(
        self, candidates: Sequence[Candidate], candidate_of: Sequence[int], estimates: EstimateTable
    ) -> list[int]:
        """Rows of the best variants, one of each candidate and ``top_k`` at most, best first."""
        seconds: list[float] = estimates.seconds.tolist()
        best: dict[int, int] = {}
        for row in sorted(range(len(seconds)), key=seconds.__getitem__):
            if seconds[row] < math.inf:
                best.setdefault(candidate_of[row], row)
        rows = list(best.values())
        return with_fall_back(rows, self.top_k, lambda row: candidates[candidate_of[row]].schedule.instruction)[
            : self.top_k
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Variants:
    """Every schedule with its steps fetched one by one and, where all its operands are staged, ahead.

    Attributes:
        schedules: as candidates propose them.
        candidate: row -> the position of its schedule.
        is_staged: position of a schedule -> whether all its operands are staged, so that it is laid out here.
        table: the rows before padding against bank conflicts.
        padding: tensor -> elements that each row adds to the innermost dimension of its staged tile.
        turned: staged tensors that are stored with another dimension innermost where a row is laid out here.
    """

    schedules: Sequence[TileSchedule]
    candidate: Sequence[int]
    is_staged: Sequence[bool]
    table: ScheduleTable
    padding: Mapping[str, Ints]
    turned: tuple[str, ...]

    @staticmethod
    def of(placed: PlacedForm, schedules: Sequence[TileSchedule]) -> _Variants:
        """The variants of ``schedules`` that the device has."""
        lines = Lines(placed.form)
        matrix = lines.of(schedules)
        # What a cache holds is not for the program to lay out or to fetch ahead.
        lays_out = stages_operands(placed.form) and not placed.device.shared.is_cache
        staged = lines.fully_staged(matrix) & lays_out
        candidate, turned = np.arange(len(schedules)), tuple[str, ...]()
        if staged.any():
            turned = turned_tensors(placed.form)
            matrix[lines.unroll, staged] = BODY_STATEMENTS
            for tensor in turned:
                matrix[lines.turned(tensor), staged] = 1
            ahead = np.flatnonzero(staged & lines.has_steps(matrix))
            variants = [matrix]
            for stages, past in pipeline_variants(placed, (CONSTRUCTED_STAGES,)):
                fetched = matrix[:, ahead]
                fetched[lines.stages], fetched[lines.asynchronous] = stages, past
                variants.append(fetched)
            matrix = np.concatenate(variants, axis=1)
            candidate = np.concatenate([candidate, *[ahead] * (len(variants) - 1)])
        table = lines.table(matrix, schedules, candidate)
        return _Variants(
            schedules=schedules,
            candidate=candidate.tolist(),
            is_staged=staged.tolist(),
            table=table,
            padding=bank_padding(table, placed),
            turned=turned,
        )

    @cached_property
    def padded(self) -> ScheduleTable:
        """The rows as they are estimated."""
        return self.table.with_padding(self.padding)

    @cached_property
    def _amounts(self) -> Mapping[str, list[int]]:
        """The padding as Python's integers."""
        return {name: amounts.tolist() for name, amounts in self.padding.items()}

    def schedule(self, row: int, band: int) -> TileSchedule:
        """A row, launched in bands of ``band`` blocks, as a schedule."""
        schedule = self.schedules[self.candidate[row]]
        padding = tuple([(name, amounts[row]) for name, amounts in self._amounts.items() if amounts[row]])
        if self.is_staged[self.candidate[row]]:
            pipeline = int(self.table.stages[row]), bool(self.table.asynchronous[row])
            return schedule.laid_out(padding, self.turned, BODY_STATEMENTS, *pipeline, band)
        if padding or band:
            return schedule.with_(padding=padding or schedule.padding, raster=band)
        return schedule


def _program(space: TileSpace, candidate: Candidate, schedule: TileSchedule, prediction: Estimate) -> RProgram:
    """A candidate as it was scored: its tiles in a schedule with padding, pipeline and bands."""
    register_shape, block_shape = candidate.tiles or (None, None)
    return quick(
        RProgram,
        form=space.form,
        schedule=schedule,
        estimate=prediction,
        register_tile=None if register_shape is None else quick(RTile, space=space, shape=register_shape),
        shared_tile=None if block_shape is None else quick(RTile, space=space, shape=block_shape),
        policy=candidate.policy,
        epsilon=candidate.epsilon,
        reasons=candidate.reasons,
    )


class Proposals:
    """Proposals of construction for one operator on one device. What tiles cost is computed once for all epsilons."""

    def __init__(self, placed: PlacedForm) -> None:
        self.placed, self.space = placed, TileSpace.of(placed.form)
        self._reuse = has_reuse(self.space)
        self._costs: dict[tuple[int, ...], Costs] = {}

    def within(self, epsilon: float) -> Iterator[Candidate]:
        """Candidates that waste at most ``epsilon`` by padding."""
        return _PROPOSERS[self.placed.device.teu.lane](self, epsilon)

    def for_cpu(self, epsilon: float) -> Iterator[Candidate]:
        """Candidates for lanes that are elements of vectors. Nothing is padded: what tiles leave over has tiles of its
        own, so that a larger epsilon adds none."""
        if epsilon == EPSILON_STEPS[0]:
            yield from CpuScaleUp(self.space, self.placed, epsilon).candidates()

    def for_gpu(self, epsilon: float) -> Iterator[Candidate]:
        """Candidates for lanes that are threads: scaled up where outputs share data, flat where they do not or not
        much."""
        placed, space, reuse = self.placed, self.space, self._reuse
        form, device = placed.form, placed.device
        flat = Flat(space, device, epsilon)
        if form.is_rows:
            yield from flat.rows()
            return
        if form.reduction is None:
            yield from flat.pointwise()
            return
        if form.scattered_loads:
            if placed.product is not None:
                yield from ScaleUp(space, placed, epsilon, self._costs, matrix=True).candidates()
                yield from warp_tile_candidates(space, placed, epsilon)
            yield from warp_group_candidates(space, placed, epsilon)
            if form.needs_matrix:
                return
            yield from flat.direct()
            yield from flat.rows()
            return
        if reuse:
            if placed.product is not None:
                yield from ScaleUp(space, placed, epsilon, self._costs, matrix=True).candidates()
                yield from warp_tile_candidates(space, placed, epsilon)
            yield from warp_group_candidates(space, placed, epsilon)
            if form.needs_matrix:
                return
            yield from ScaleUp(space, placed, epsilon, self._costs).candidates()
        else:
            yield from flat.staged_reduction()
        if not reuse or math.prod(form.sizes[axis] for axis in form.reduced) <= SHORT_REDUCTION:
            yield from flat.direct()
        outputs = math.prod(form.sizes[axis] for axis in form.spatial)
        if not reuse or outputs < device.unit_count * device.limits.threads_per_unit:
            yield from flat.rows()


#: Who proposes programs, by what the lanes of a device are.
_PROPOSERS = {"thread": Proposals.for_gpu, "element": Proposals.for_cpu}


def has_reuse(space: TileSpace) -> bool:
    """Some operand is read for several outputs: it lacks a spatial axis, or its windows overlap."""
    spatial = [i for i in range(space.spatial_count) if space.sizes[i] > 1]
    for access in space.inputs:
        used = {axis for terms in access.dimensions for axis, _ in terms}
        if not used.issuperset(spatial):
            return True
        if any([sum([space.sizes[axis] > 1 for axis, _ in terms]) > 1 for _, terms in access.windows]):
            return True
    return False
