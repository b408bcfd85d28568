"""Roller's construction: propose aligned programs, score them all at once, keep the best (thesis 6.3.2).

Proposals come from :mod:`roller.scale_up` where outputs share data and from :mod:`roller.flat` where they do not. The
thesis takes the first K programs that the greedy walk finds; here every tile on the way that could be a program is a
candidate, and RATIONAL's estimate of all of them together decides, because a walk by data reuse sees neither
occupancy nor waves nor bank conflicts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hal import DeviceSpec, InputError
from roller.alignment import BankRule
from roller.candidate import Candidate, Reason
from roller.flat import Flat
from roller.rtile import RTile, TileSpace
from roller.scale_up import ScaleUp
from sokoban import Estimate, KernelForm, ScheduleTable, TileSchedule, data_dimension, estimate
from sokoban.banks import busiest_bank, lane_words
from sokoban.matrix import matrix_roles
from sokoban.table import Ints

#: Waste that tensor padding may cause, raised until there are enough programs (6.3.2, "irregular tensor shapes").
EPSILON_STEPS = (0.1, 0.25, 0.4, 1.0, 4.0, 64.0)

#: Programs that are enough even if more were asked for: a larger epsilon would only add padding.
ENOUGH = 20

#: Points of a reduction up to which doing without shared memory is worth proposing: windows, not inner products.
SHORT_REDUCTION = 128


@dataclass(frozen=True)
class RProgram:
    """One constructed program: a schedule, the tiles it came from, what it is expected to take, and why it is so."""

    schedule: TileSchedule
    estimate: Estimate
    register_tile: RTile | None
    shared_tile: RTile | None
    policy: str
    epsilon: float
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Construction:
    """The ranked programs of one operator on one device.

    Attributes:
        programs: best first by predicted time, all different.
        considered: how many candidates were scored.
        epsilon: the largest tensor padding that had to be allowed.
        seconds: time the construction took.
    """

    form: KernelForm
    device: DeviceSpec
    programs: tuple[RProgram, ...]
    considered: int
    epsilon: float
    seconds: float


def construct(form: KernelForm, device: DeviceSpec, top_k: int = 10) -> Construction:
    """Construct the ``top_k`` best programs of an operator.

    Raises:
        InputError: the device has no layer that holds even the smallest tile.
    """
    start = time.perf_counter()
    candidates: dict[TileSchedule, Candidate] = {}
    programs: tuple[RProgram, ...] = ()
    epsilon = EPSILON_STEPS[0]
    for epsilon in EPSILON_STEPS:
        known = len(candidates)
        for candidate in propose(form, device, epsilon):
            candidates.setdefault(candidate.schedule, candidate)
        if len(candidates) > known and len(candidates) >= min(top_k, ENOUGH):
            programs = _rank(form, device, list(candidates.values()), top_k)
            if len(programs) >= min(top_k, ENOUGH):
                break
    if not programs:
        programs = _rank(form, device, list(candidates.values()), top_k)
    if not programs:
        raise InputError(form.expr.name, f"no tile fits the memory of {device.name}", "use a smaller operator")
    return Construction(form, device, programs, len(candidates), epsilon, time.perf_counter() - start)


def _rank(form: KernelForm, device: DeviceSpec, candidates: list[Candidate], top_k: int) -> tuple[RProgram, ...]:
    """Best first by predicted time; equal times keep the order in which construction proposed them."""
    if not candidates:
        return ()
    schedules = [candidate.schedule for candidate in candidates]
    unpadded = ScheduleTable.of(form, schedules)
    padding = _bank_padding(unpadded, device)
    table = estimate(unpadded.with_padding(padding), device)
    space = TileSpace.of(form)
    order = np.argsort(table.seconds, kind="stable")[:top_k]
    best = order[np.isfinite(table.seconds[order])].tolist()
    programs = []
    for position, prediction in zip(best, table.rows(best), strict=True):
        candidate = candidates[position]
        pads = tuple((name, int(column[position])) for name, column in padding.items() if column[position])
        programs.append(
            RProgram(
                replace(candidate.schedule, padding=pads) if pads else candidate.schedule,
                prediction,
                None if candidate.register_shape is None else RTile(space, candidate.register_shape),
                None if candidate.shared_shape is None else RTile(space, candidate.shared_shape),
                candidate.policy,
                candidate.epsilon,
                candidate.reasons,
            )
        )
    return tuple(programs)


def _bank_padding(table: ScheduleTable, device: DeviceSpec) -> dict[str, Ints]:
    """Storage padding in elements for every staged tile, by tensor: none where no read conflicts, else one vector,
    else an odd row, else the printed formula.

    The formula of 6.3.1 always pads to a fixed residue, up to doubling narrow rows; where the addresses of a warp
    show no conflict without it, or with the smallest padding that keeps vector accesses aligned, that is better.
    """
    banks = device.shared.bank_count or 32
    rule = BankRule(banks, device.shared.bank_width_bytes or 4)
    padding = dict(table.padding)
    zeros = np.zeros(table.count, dtype=np.int64)
    one_point: dict[str, Ints] = {**table.register_tile, **dict.fromkeys(table.step, zeros + 1)}
    for load in table.form.body_loads:
        wanted = table.cached[load.tensor] & ~table.warp_tile
        if not load.indices or not wanted.any():
            continue
        element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
        rows = table.extents(load)[-1] + zeros
        pads = np.stack([zeros, zeros + max(1, 16 // element_bytes), 1 - rows % 2])
        passes = busiest_bank(lane_words(table, load, device, pads), banks)
        chosen = pads[passes.argmin(axis=0), np.arange(table.count)]
        still = wanted & (passes.min(axis=0) > 1)
        if still.any():
            reads = data_dimension(load.indices[-1]).extent(one_point) + zeros
            formula = np.array(
                [rule.padding(n, r, element_bytes) for n, r in zip(rows.tolist(), reads.tolist(), strict=True)]
            )
            better = busiest_bank(lane_words(table, load, device, formula), banks) < passes.min(axis=0)
            chosen = np.where(still & better, formula, chosen)
        padding[load.tensor] = np.where(wanted, chosen, padding[load.tensor])
    return padding


def propose(form: KernelForm, device: DeviceSpec, epsilon: float) -> Iterator[Candidate]:
    """Candidates of one operator: scaled up where outputs share data, flat where they do not or not much."""
    space = TileSpace.of(form)
    flat = Flat(space, device, epsilon)
    if form.kind == "rows":
        yield from flat.rows()
        return
    if form.reduction is None:
        yield from flat.pointwise()
        return
    reuse = has_reuse(space)
    if reuse:
        roles = matrix_roles(form) if device.matrix_instruction(_input_dtype(form)) else None
        if roles is not None:
            yield from ScaleUp(space, device, epsilon, roles).candidates()
        yield from ScaleUp(space, device, epsilon, None).candidates()
    else:
        yield from flat.staged_reduction()
    if not reuse or math.prod(form.sizes[axis] for axis in form.reduced) <= SHORT_REDUCTION:
        yield from flat.direct()
    outputs = math.prod(form.sizes[axis] for axis in form.spatial)
    if not reuse or outputs < device.unit_count * device.limits.threads_per_unit:
        yield from flat.rows()


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


def _input_dtype(form: KernelForm) -> str:
    return form.expr.tensor_by_name[form.body_loads[0].tensor].dtype
