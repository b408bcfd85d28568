"""Roller's construction: propose aligned programs, score them all at once, keep the best (thesis 6.3.2).

Proposals come from :mod:`roller.construct.scale_up` where outputs share data and from :mod:`roller.construct.flat`
where they do not. The thesis takes the first K programs that the greedy walk finds; here every tile on the way that
could be a program is a candidate, and RATIONAL's estimate of all of them together decides, because a walk by data reuse
sees neither occupancy nor waves nor bank conflicts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.construct.cpu import VectorTiles
from roller.construct.flat import Flat
from roller.construct.performance import Costs
from roller.construct.program import Candidate, Construction, RProgram
from roller.construct.rtile import RTile, TileSpace
from roller.construct.scale_up import ScaleUp
from roller.construct.warp_groups import warp_group_candidates
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.matrix import check_float8, device_product, needs_matrix
from sokoban.model.bounds import arithmetic_rate, compulsory_bytes
from sokoban.model.rational import estimate
from sokoban.schedule.pipelines import BODY_STATEMENTS, fully_staged, pipeline_variants, turned_tensors, with_layouts
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import with_fall_back
from sokoban.search.bands import in_bands
from sokoban.search.padding import bank_padding

if TYPE_CHECKING:
    pass


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
    check_float8(form, device)
    start = time.perf_counter()
    proposals = Proposals(form, device)
    ranking = _Ranking(proposals, top_k)
    epsilon = EPSILON_STEPS[0]
    for epsilon in EPSILON_STEPS:
        ranking.add(proposals.within(epsilon))
        if ranking.considered >= min(top_k, ENOUGH) and len(ranking.best()) >= min(top_k, ENOUGH):
            break
    programs = ranking.best()
    if programs and epsilon < IRREGULAR_EPSILON and _wants_padding(form, device, programs[0].estimate.seconds):
        epsilon = IRREGULAR_EPSILON
        ranking.add(proposals.within(epsilon))
        programs = ranking.best()
    if not programs:
        raise InputError(form.expr.name, f"no tile fits the memory of {device.name}", "use a smaller operator")
    return Construction(
        form=form,
        device=device,
        programs=programs,
        considered=ranking.considered,
        epsilon=epsilon,
        seconds=time.perf_counter() - start,
    )


def _wants_padding(form: KernelForm, device: DeviceSpec, seconds: float) -> bool:
    """Whether an irregular shape is the likely reason for a best program of ``seconds``."""
    if not form.reduced or form.kind == "rows" or not any(form.sizes[axis] % ALIGNED for axis in form.spatial):
        return False
    rate, _ = arithmetic_rate(form, device)
    bound = max(form.flops / rate, compulsory_bytes(form) / device.dram.bandwidth_bytes_per_second)
    return seconds > FAR_FROM_BOUND * bound + device.launch_overhead_seconds


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
            new = self._scored(self._unscored)
            self._unscored = []
            together = [*self._best, *new]
            if self._best:
                together.sort(key=lambda program: program.estimate.seconds)
            self._best = tuple(with_fall_back(together, self.top_k, _instruction)[: self.top_k])
        return self._best

    def _scored(self, candidates: list[Candidate]) -> list[RProgram]:
        """The best of some candidates."""
        space, device = self.proposals.space, self.proposals.device
        plain = ScheduleTable.of(space.form, [candidate.schedule for candidate in candidates])
        # What a cache holds is not for the program to lay out or to fetch ahead.
        staged = fully_staged(plain) & (not device.shared.is_cache)
        # Every tile with its steps fetched one by one and, where all is staged, ahead.
        pipelined = np.flatnonzero(staged & (plain.step_count > 1))
        variants = pipeline_variants(space.form, device, (CONSTRUCTED_STAGES,))
        rows = np.concatenate([np.arange(plain.count), *(pipelined for _ in variants)])
        table = plain
        if staged.any():
            stages = np.concatenate([plain.stages, *(np.full(len(pipelined), n) for n, _ in variants)])
            past = np.concatenate([plain.asynchronous, *(np.full(len(pipelined), past) for _, past in variants)])
            table = with_layouts(plain.candidates(rows), staged[rows], stages, past)
        padding = bank_padding(table, device)
        estimates = estimate(table.with_padding(padding), device)
        order = np.argsort(estimates.seconds, kind="stable")
        order = order[np.isfinite(estimates.seconds[order])]
        _, first = np.unique(rows[order], return_index=True)
        kept = order[np.sort(first)].tolist()
        kept = with_fall_back(kept, self.top_k, lambda place: candidates[int(rows[place])].schedule.instruction)
        chosen = np.array(kept[: self.top_k], dtype=np.int64)
        raster, predictions = in_bands(table.with_padding(padding), chosen, estimates, device)
        ranked = np.argsort(predictions.seconds, kind="stable").tolist()
        pads = [(name, column.tolist()) for name, column in padding.items()]
        turned = turned_tensors(space.form) if staged.any() else ()
        programs = []
        for place, prediction in zip(ranked, predictions.rows(ranked), strict=True):
            position = int(chosen[place])
            row, band = int(rows[position]), int(raster[place])
            candidate = candidates[row]
            own = tuple([(name, amounts[position]) for name, amounts in pads if amounts[position]])
            schedule = candidate.schedule
            if staged[row]:
                pipeline = int(stages[position]), bool(past[position])
                schedule = schedule.laid_out(own, turned, BODY_STATEMENTS, *pipeline, band)
            elif own or band:
                schedule = schedule.with_(padding=own or schedule.padding, raster=band)
            programs.append(
                RProgram(
                    schedule=schedule,
                    estimate=prediction,
                    register_tile=None if candidate.register_shape is None else RTile(space, candidate.register_shape),
                    shared_tile=None if candidate.shared_shape is None else RTile(space, candidate.shared_shape),
                    policy=candidate.policy,
                    epsilon=candidate.epsilon,
                    reasons=candidate.reasons,
                )
            )
        return programs


def _instruction(program: RProgram) -> Instruction:
    return program.schedule.instruction


class Proposals:
    """What construction proposes for one operator on one device. What tiles cost is computed once for all epsilons."""

    def __init__(self, form: KernelForm, device: DeviceSpec) -> None:
        self.form, self.device, self.space = form, device, TileSpace.of(form)
        self._reuse = has_reuse(self.space)
        self._costs: dict[tuple[int, ...], Costs] = {}

    def within(self, epsilon: float) -> Iterator[Candidate]:
        """Candidates that waste at most ``epsilon`` by padding."""
        return _PROPOSERS[self.device.teu.lane](self, epsilon)

    def of_vectors(self, epsilon: float) -> Iterator[Candidate]:
        """Candidates for lanes that are elements of vectors. Nothing is padded: what tiles leave over has tiles of its
        own, so that a larger epsilon adds none."""
        if epsilon == EPSILON_STEPS[0]:
            yield from VectorTiles(self.space, self.device, epsilon).candidates()

    def of_threads(self, epsilon: float) -> Iterator[Candidate]:
        """Candidates for lanes that are threads: scaled up where outputs share data, flat where they do not or not
        much."""
        form, device, space, reuse = self.form, self.device, self.space, self._reuse
        flat = Flat(space, device, epsilon)
        if form.kind == "rows":
            yield from flat.rows()
            return
        if form.reduction is None:
            yield from flat.pointwise()
            return
        if reuse:
            if device_product(form, device) is not None:
                yield from ScaleUp(space, device, epsilon, self._costs, matrix=True).candidates()
            if needs_matrix(form):
                return
            yield from warp_group_candidates(space, device, epsilon)
            yield from ScaleUp(space, device, epsilon, self._costs).candidates()
        else:
            yield from flat.staged_reduction()
        if not reuse or math.prod(form.sizes[axis] for axis in form.reduced) <= SHORT_REDUCTION:
            yield from flat.direct()
        outputs = math.prod(form.sizes[axis] for axis in form.spatial)
        if not reuse or outputs < device.unit_count * device.limits.threads_per_unit:
            yield from flat.rows()


#: Who proposes programs, by what the lanes of a device are.
_PROPOSERS = {"thread": Proposals.of_threads, "element": Proposals.of_vectors}


def has_reuse(space: TileSpace) -> bool:
    """Some operand is read for several outputs: it lacks a spatial axis, or its windows overlap."""
    spatial = [i for i in range(space.spatial_count) if space.sizes[i] > 1]
    for access in space.inputs:
        used = {axis for terms in access.dimensions for axis, _ in terms}
        if any(axis not in used for axis in spatial):
            return True
        if any(sum(space.sizes[axis] > 1 for axis, _ in terms) > 1 for terms in access.dimensions):
            return True
    return False
