"""Split-K: a reduction cut into slices that different blocks sum, and a second kernel that adds the slices.

``C[m,n] = sum(k, A[m,k] * B[k,n])`` with ``S`` slices of ``R`` elements each is the chain::

    P[s,m,n] = sum(r, A[m, s*R + r] * B[s*R + r, n])
    C[m,n]   = sum(s, P[s,m,n])

Where few outputs leave units idle and the reduction is long, ``S`` times as many blocks fill them, for the price of
writing and reading ``P`` and of a second launch. Both kernels are ordinary operators. Where ``S * R`` is the whole
axis the first reads views of the tensors, ``A[m,s,r]``, and everything holds that holds of a batched product, matrix
instructions included; otherwise its reads of the last slice are padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hal.spec.device import DeviceSpec
from roller.algorithms.chain import ChainProgram, Considered
from roller.algorithms.slices import Slices, factors_of, place_of
from roller.construct.construct import construct, has_reuse
from roller.construct.program import ProgramPart, RProgram
from roller.construct.rtile import TileSpace
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import product_factors
from sokoban.kernel.placed import PlacedForm
from sokoban.model.estimates import Estimate
from sokoban.model.rational import estimate_schedules
from sokoban.schedule.tile import TileSchedule

#: The name of the algorithm.
NAME = "split-k"

#: Fewest points of the reduction in a slice: with fewer a block does little more than write its partial sums.
LEAST_POINTS = 64

#: More waves of blocks than this leave units idle for too short a time to be worth a second launch.
MOST_WAVES = 2

#: An operator nearer to its bound than this has less to gain than what partial sums cost.
NEAR_BOUND = 1.1

#: Outputs of a block whose slices are counted for: small and large tiles where outputs share data, else a block or a
#: thread per output.
SHARED_AREAS = (1024, 4096, 16384)
UNSHARED_AREAS = (1, 256)

#: Blocks per unit that the slices are to give.
BLOCKS_PER_UNIT = (1, 2, 4)

#: Counts of slices that are priced, at most, each this many times another at least.
MOST_COUNTS = 6
COUNT_RATIO = 1.3

#: A whole number of slices is preferred to one that leaves the last slice short, if it is this near to it; where matrix
#: instructions multiply, which take no padded slice, it may be further off.
SNAP = 1.25
MATRIX_SNAP = 2.0

#: A slice that does not divide its axis is a multiple of this: rows keep their alignment.
ALIGNED = 16

#: Schedules of one count of slices that are priced for all others.
PILOTS = 16


# Where it applies


def consider(placed: PlacedForm, direct: RProgram) -> Considered:
    """The operator in slices, priced, or why that cannot gain anything over its best program of one kernel."""
    form, device = placed.form, placed.device
    declined = _declined(placed, direct)
    axis = None if declined else _axis(form)
    if axis is None:
        return Considered(NAME, declined=declined or "no axis of the reduction is one dimension of all that it indexes")
    counts = counts_of(placed, axis)
    if not counts:
        return Considered(NAME, declined=f"{axis} cannot be cut into slices that are worth it")
    return Considered(NAME, tuple(priced(form, device, counts)))


def _declined(placed: PlacedForm, direct: RProgram) -> str:
    form, device = placed.form, placed.device
    if not form.is_tile or form.reduction is None:
        return "there is no reduction to cut" if form.reduction is None else "rows are reduced more than once"
    estimate = direct.estimate
    blocks = direct.schedule.grid_blocks(form.sizes)
    if estimate.wave_count > MOST_WAVES:
        running = estimate.blocks_per_unit * device.unit_count
        return f"its {blocks} blocks fill the {device.unit_count} {device.unit_name}s {blocks / running:.1f} times over"
    if estimate.seconds <= NEAR_BOUND * placed.least_seconds + 2 * device.launch_overhead_seconds:
        return "one kernel is as near to its bound as two launches could come"
    return ""


def _axis(form: KernelForm) -> str | None:
    """The longest reduction axis that can be cut; None where none can. A depth that has scales is a block already."""
    able = [axis for axis in form.reduced if can_cut(form, axis) and not (form.scale_loads and axis == _depth(form))]
    return max(able, key=lambda axis: form.sizes[axis], default=None)


def _depth(form: KernelForm) -> str | None:
    return None if form.roles is None else form.roles.k


def can_cut(form: KernelForm, axis: str) -> bool:
    """Every index that uses the axis is the axis itself over a whole dimension, the same one in all reads of a
    tensor."""
    tensors = form.expr.tensor_by_name
    for load in factors_of(form):
        places = [place for place, index in enumerate(load.indices) if index.coefficient(axis)]
        if places not in ([], [place_of(form, load.tensor, axis)]):
            return False
        for place in places:
            if not load.indices[place].is_plain_axis or tensors[load.tensor].shape[place] != form.sizes[axis]:
                return False
    reads = [load for load in factors_of(form) if any(index.coefficient(axis) for index in load.indices)]
    # A tensor that is read along the axis and also across it has no single view.
    is_one_dimension = all(
        load in reads or load.tensor not in {read.tensor for read in reads} for load in factors_of(form)
    )
    return bool(reads) and is_one_dimension


def _can_pad(form: KernelForm, axis: str) -> bool:
    """Zeros beyond the end of the axis change nothing: a sum of products, a factor of which is read along the axis."""
    assert form.reduction is not None
    factors = product_factors(form.body)
    return (
        form.reduction.function == "sum"
        and factors is not None
        and not any(load.pad for load in factors)
        and any(index.coefficient(axis) for load in factors for index in load.indices)
    )


# How many slices


def counts_of(placed: PlacedForm, axis: str, snap: float = SNAP) -> list[Slices]:
    """Slices that give every unit one block or a few, for small tiles and for large ones, few slices first; ``snap`` is
    how far a whole number of them may be from that."""
    form, device = placed.form, placed.device
    statement = form.reductions[0]
    size = form.sizes[axis]
    outputs = math.prod(form.sizes[each] for each in statement.axes)
    other = math.prod(form.sizes[each] for each in form.reduced) // size
    most = size * other // LEAST_POINTS
    areas = SHARED_AREAS if has_reuse(TileSpace.of(form)) else UNSHARED_AREAS
    wanted = sorted(device.unit_count * blocks * area / outputs for area in areas for blocks in BLOCKS_PER_UNIT)
    matrix = placed.product is not None
    slices_by_count: dict[int, Slices] = {}
    for count in _thinned(max(2, min(round(want), size, most)) for want in wanted):
        for slices in _near(form, axis, count, MATRIX_SNAP if matrix else snap):
            if 2 <= slices.count <= most and slices.length >= 2:
                slices_by_count.setdefault(slices.count, slices)
    even_slices = [slices for slices in slices_by_count.values() if slices.divides(form)]
    return even_slices if (matrix and even_slices) or form.needs_matrix else list(slices_by_count.values())


def _thinned(counts: Iterable[int]) -> list[int]:
    """At most :data:`MOST_COUNTS` counts, each :data:`COUNT_RATIO` times the one before or more, the smallest among
    them.

    >>> _thinned([2, 3, 4, 5, 40])
    [2, 3, 4, 40]
    """
    ordered = sorted(set(counts))
    chosen: list[int] = []
    for count in ordered:
        if not chosen or count >= COUNT_RATIO * chosen[-1]:
            chosen.append(count)
    while len(chosen) > MOST_COUNTS:
        ratios = [chosen[i + 1] / chosen[i - 1] for i in range(1, len(chosen) - 1)]
        del chosen[1 + ratios.index(min(ratios))]
    return chosen


def _near(form: KernelForm, axis: str, count: int, snap: float) -> Iterator[Slices]:
    """The nearest whole cut within a factor of ``snap``; where none is near, slices of which the last is short."""
    size = form.sizes[axis]
    best = nearest_divisor(size, count, snap)
    if best is not None:
        yield Slices(axis, best, size // best)
    elif _can_pad(form, axis):
        length = -(-size // count)
        length = -(-length // ALIGNED) * ALIGNED if length > 2 * ALIGNED else length
        yield Slices(axis, -(-size // length), length)


def nearest_divisor(number: int, wanted: float, snap: float) -> int | None:
    """The divisor of a number that is nearest to a wanted one by ratio; None where none is within a factor of ``snap``.

    >>> nearest_divisor(96, 7.5, 1.25), nearest_divisor(97, 7.5, 1.25)
    (8, None)
    """
    near = [d for d in _divisors(number) if wanted / snap <= d <= wanted * snap]
    return min(near, key=lambda d: abs(math.log(d / wanted)), default=None)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


# What they take


def priced(form: KernelForm, device: DeviceSpec, counts: Sequence[Slices]) -> list[ChainProgram]:
    """A program for every count of slices, best first.

    One of them is constructed in full; its schedules are then priced for the others, whose tiles are the same problem
    over another number of slices. The best of all is constructed, too.
    """
    pilot = counts[len(counts) // 2]
    summed, added = pilot.problems(form)
    pilots = construct(summed, device, PILOTS).programs
    adders = construct(added, device, PILOTS).programs
    programs = {pilot: _program(form, pilot, (summed, added), (pilots[0], adders[0]))}
    for slices in counts:
        if slices != pilot:
            problems = slices.problems(form)
            if [_axes(problem) for problem in problems] != [_axes(summed), _axes(added)]:
                continue  # A slice of one element has an axis less, which no schedule of the pilot fits.
            priced = _repriced(problems[0], device, pilots), _repriced(problems[1], device, adders)
            programs[slices] = _program(form, slices, problems, priced)
    best = min(programs, key=lambda slices: programs[slices].estimate.seconds)
    if best != pilot:
        problems = best.problems(form)
        first, second = (construct(problem, device, 1).programs[0] for problem in problems)
        programs[best] = _better(programs[best], _program(form, best, problems, (first, second)))
    return sorted(programs.values(), key=lambda program: program.estimate.seconds)


def _axes(form: KernelForm) -> tuple[str, ...]:
    """Axes of a kernel, by which its schedules are written."""
    return tuple(axis.name for axis in form.expr.axes)


@dataclass(frozen=True)
class _Priced:
    """A schedule made for another problem, with what it takes for this one."""

    schedule: TileSchedule
    estimate: Estimate
    policy: str


def _repriced(form: KernelForm, device: DeviceSpec, programs: Sequence[RProgram]) -> _Priced:
    table = estimate_schedules(form, device, [program.schedule for program in programs])
    best = int(table.seconds.argmin())
    return _Priced(programs[best].schedule, table.row(best), programs[best].policy)


def _better(first: ChainProgram, second: ChainProgram) -> ChainProgram:
    return first if first.estimate.seconds <= second.estimate.seconds else second


def _program(
    form: KernelForm,
    slices: Slices,
    problems: tuple[KernelForm, KernelForm],
    kernels: tuple[RProgram | _Priced, RProgram | _Priced],
) -> ChainProgram:
    assert form.reduction is not None
    labels = (f"{_DOING[form.reduction.function]} each of {slices.text}", "puts the slices together")
    parts = tuple(
        ProgramPart(label, problem, kernel.schedule, kernel.estimate, kernel.policy)
        for label, problem, kernel in zip(labels, problems, kernels, strict=True)
    )
    return ChainProgram(NAME, slices.text, form, slices, parts)


#: Reduction -> what a kernel does with a slice, in words.
_DOING: Mapping[str, str] = {
    "sum": "sums", "prod": "multiplies", "max": "takes the maximum of", "min": "takes the minimum of"
}  # fmt: skip
