"""Kernels of an operator one of whose sizes is known at launch, a few of them, and which is for which size.

Candidates are the best programs of many sizes. Each is priced by RATIONAL at all sizes of a grid, as it would run
there: with its tiles, however few of the last one's rows exist. A small set is chosen that has for every size a kernel
within :data:`NEAR` of the best of all; boundaries are then looked for in small steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from codegen.bundle.records import SizeRange
from codegen.verify.chain import Step
from codegen.verify.sizes import SizesCheck, sizes_to_run
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.algorithms import ALGORITHMS, ChainProgram
from roller.algorithms.chain import Split
from roller.construct.construct import construct
from roller.construct.program import Program, ProgramPart, RProgram
from roller.programs import Programs, finders, form_on
from roller.size_grids import fine_sizes, size_grid
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.expression import LaunchSize, TensorExpr
from sokoban.language.launch_size import at_size
from sokoban.model.estimates import Estimate
from sokoban.model.rational import estimate_schedules
from sokoban.schedule.cutting import cut_down, resize
from sokoban.schedule.tile import TileSchedule
from sokoban.search.search import SearchResult, search

#: How much longer than the best candidate of a size the kernel that is launched for it may be expected to take.
LONGEST = 1.1

#: How much slower a kernel may be than another of those chosen before that one takes its place: every boundary fewer is
#: a branch fewer.
STAYS = 1.01

#: How near the best candidate one of those chosen has to be at every size, as long as so many kernels are enough for
#: that; the last takes as many as it needs, and leaves room for a kernel that stays.
NEAR = ((1.05, 6), (1.07, 8), (1.08, 12), (1.085, 16), (LONGEST / STAYS, np.inf))

#: From one size to the next: of those that are searched for, and of those that candidates are priced at.
SEARCHED_RATIO, PRICED_RATIO = 1.5, 1.12

#: Sizes whose programs are constructed: these numbers by all powers of two, since the tiles that divide a size are most
#: often the best for it.
FOUND_FACTORS = (1, 3, 5, 7, 9, 11, 13, 25)

#: Sizes, in multiples, up to which programs for every one of them are candidates, and for one less than those above.
EACH_FOUND, UNEVEN_FOUND = 192, 512

#: Programs of one kernel that are candidates, by size; and of several.
PROGRAMS, CHAINS = 4, 3

#: Chains are priced at sizes up to so many times the one that they were found for: slices are for few blocks.
CHAIN_REACH = 4

#: Tiles of every kernel at whose ends boundaries are looked for, too.
TILE_ENDS = 24

#: Sizes up to which the rule is held against the best candidate at each of :data:`roller.size_grids.STEPS`.
ALL_LOOKED_AT = 256

#: Sizes of a grid from which on others are added only where the kernel would take longer than :data:`LONGEST`.
FINE_GRID = 400

#: What looks for programs of a form by enumeration, if anything does; the result may be worked out elsewhere.
Searches = Callable[[KernelForm], Callable[[], SearchResult]]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A program that may be launched for several sizes.

    Attributes:
        program: as it was found, for the size ``found_at``.
        only: the one size that it is for, which it has as a number; None for all sizes.
    """

    program: Program
    found_at: int
    only: int | None = None

    @property
    def most(self) -> float:
        """The largest size that it is priced at."""
        if self.only is not None:
            return self.only
        return CHAIN_REACH * self.found_at if len(self.program.parts) > 1 else np.inf

    def on(self, form: KernelForm, device: DeviceSpec, estimate: Estimate | None = None) -> Program:
        """The program for the operator of another size; ``estimate`` is that of its only kernel where it is known."""
        if isinstance(self.program, ChainProgram):
            pairs = zip(self.program.split.problems(form), self.program.parts, strict=True)
            parts = tuple(_part(cast(KernelForm, problem), part, device) for problem, part in pairs)
            return replace(self.program, form=form, parts=parts)
        assert isinstance(self.program, RProgram)
        estimate = estimate or estimate_schedules(form, device, [self.program.schedule]).row(0)
        return replace(self.program, form=form, estimate=estimate)


def _part(problem: KernelForm, part: ProgramPart, device: DeviceSpec) -> ProgramPart:
    estimate = estimate_schedules(problem, device, [cast(TileSchedule, part.schedule)]).row(0)
    return replace(part, problem=problem, estimate=estimate)


@dataclass(frozen=True)
class Choice:
    """A kernel that is launched for some sizes.

    Attributes:
        candidate: the kernel.
        priced: its program for the largest of these sizes, as it is priced.
        written: its program as it is written out: for a size that no tile divides, known at launch.
    """

    candidate: Candidate
    priced: Program
    written: Program
    last: int

    def check(self, size: LaunchSize) -> SizesCheck | None:
        """The kernel on a small problem, to be run for several sizes; None where it is for one size, as any other
        program."""
        if self.candidate.only is not None:
            return None
        program = self.written
        schedules = [cast(TileSchedule, part.schedule) for part in program.parts]
        tolerance = None
        if isinstance(program, ChainProgram):
            small, split = program.split.cut_down(program.form, schedules)
            small = _reaching(small, size)
            problems = [cast(KernelForm, problem).launched(size.axis) for problem in split.problems(small)]
            tolerance = split.tolerance(small)
        else:
            small = _reaching(cut_down(program.form, schedules[0]), size)
            problems = [small.launched(size.axis)]
        steps, tiles = [], []
        for problem, schedule in zip(problems, schedules, strict=True):
            launch = problem.launch_axis
            assert launch is not None
            # Blocks that have several tiles, however few are left.
            steps.append(Step(problem, replace(schedule, launched=schedule.launched and schedule.cluster)))
            tiles.append(-(-schedule.block_of[launch.name] // launch.elements))
        most = small.sizes[small.launched(size.axis).launch_axis.name]  # type: ignore[union-attr]
        most //= small.launched(size.axis).launch_axis.elements  # type: ignore[union-attr]
        sizes = sizes_to_run(tiles, size.multiple, most)
        return SizesCheck(small.launched(size.axis), tuple(steps), size.axis, size.multiple, sizes, tolerance)


def _reaching(form: KernelForm, size: LaunchSize) -> KernelForm:
    """A small operator whose launch axis no tile divides."""
    launch = form.launched(size.axis).launch_axis
    assert launch is not None
    rows = size.reach(-(-form.sizes[launch.name] // launch.elements))
    return resize(form, {**form.sizes, launch.name: rows * launch.elements})


@dataclass(frozen=True)
class SizeRule:
    """Kernels, and the sizes that each is launched for.

    Attributes:
        choices: the kernels by rank, the one for the smallest sizes first.
        ranges: of sizes, from the smallest on.
    """

    choices: tuple[Choice, ...]
    ranges: tuple[SizeRange, ...]

    def range_of(self, size: int) -> SizeRange:
        """The range that a size lies in."""
        return next(each for each in self.ranges if each.first <= size <= each.last)

    def price(self, size: int, prices: Mapping[Candidate, float]) -> float:
        """Expected seconds of the kernel for a size, by those of all candidates."""
        return prices[self.choices[self.range_of(size).rank - 1].candidate]


@dataclass
class SizedPrograms:
    """Candidates for the kernels of an operator, and their prices.

    Attributes:
        expr: the operator, one of whose sizes is known at launch.
        device: where it runs.
        candidates: all kernels that compete.
        last: the programs of the largest size.
        refused: those that turned out wrong, or cannot be built.
        factors: how much longer than priced a candidate takes as it was compiled.
    """

    expr: TensorExpr
    device: DeviceSpec
    candidates: tuple[Candidate, ...]
    last: Programs
    refused: set[Candidate] = field(default_factory=set)
    factors: dict[Candidate, float] = field(default_factory=dict)

    @staticmethod
    def of(
        expr: TensorExpr,
        device: DeviceSpec,
        method: str = "both",
        algorithms: Collection[str] = ALGORITHMS,
        searches: Searches | None = None,
    ) -> SizedPrograms:
        """Candidates of an operator on a device.

        Args:
            expr: the operator, one of whose sizes is known at launch.
            device: where it runs.
            method: who looks for programs, one of :data:`roller.programs.METHODS`.
            algorithms: which kinds of programs compete, some of :data:`roller.algorithms.ALGORITHMS`.
            searches: begins a search; in this process by default.

        Raises:
            InputError: kernels of the operator, or on the device, have all sizes as numbers.
        """
        SizedPrograms.check(expr, device)
        size = _size_of(expr)
        constructs, needs_search = finders(device, method)
        begin = searches or _search_here(device)
        fixed = [1] if size.multiple == 1 else []
        forms = {each: kernel_form(at_size(expr, each)) for each in sorted({*fixed, *_found_sizes(size)})}
        coarse = {*fixed, *size_grid(size, SEARCHED_RATIO)} if needs_search else set()
        searched = {each: begin(form) for each, form in forms.items() if each in coarse or not constructs}
        candidates = []
        for each, form in forms.items():
            programs = Programs.of(
                construct(form, device, PROGRAMS) if constructs else None,
                searched[each]() if each in searched else None,
                top_k=PROGRAMS, algorithms=algorithms, method=method,
            )  # fmt: skip
            chosen: list[Program] = [*programs.direct[:PROGRAMS]] if "direct" in algorithms else []
            chosen += programs.chains[:CHAINS]
            candidates += [Candidate(program, each, each if each in fixed else None) for program in chosen]
        return SizedPrograms(expr, device, tuple(_each_once(candidates)), programs)

    @staticmethod
    def check(expr: TensorExpr, device: DeviceSpec) -> None:
        """Raises InputError where kernels of an operator, or on a device, have all sizes as numbers."""
        size = _size_of(expr)
        form = form_on(at_size(expr, _at_least_two(size, size.most)), device)
        if form.is_composed:
            kernels = "a kernel that goes along an axis" if form.is_line else "several kernels"
            raise InputError(expr.name, f"takes {kernels}, whose sizes are all numbers", f"give {size.axis} one")
        if device.code_generator not in ("cuda", "cuda-source"):
            problem = f"kernels of {device.name} have no size that is known at launch"
            raise InputError(expr.name, problem, f"give {size.axis} a number, or compile for a GPU of NVIDIA's")

    @property
    def size(self) -> LaunchSize:
        """The size that is known at launch."""
        return _size_of(self.expr)

    @cached_property
    def _known(self) -> dict[tuple[int, int], float]:
        return {}

    @cached_property
    def _forms(self) -> dict[int, KernelForm]:
        return {}

    def form_at(self, size: int) -> KernelForm:
        """The operator of a size, of two elements at least: with one its axis would be none."""
        size = _at_least_two(self.size, size)
        if size not in self._forms:
            self._forms[size] = kernel_form(at_size(self.expr, size))
        return self._forms[size]

    def prices(self, size: int, positions: Sequence[int] | None = None) -> NDArray[np.float64]:
        """Expected seconds of candidates for a size, all of them by default; infinite where one is for others or was
        refused."""
        wanted = range(len(self.candidates)) if positions is None else positions
        missing = [position for position in wanted if (size, position) not in self._known]
        if missing:
            self._known.update({(size, position): seconds for position, seconds in self._priced(size, missing)})
        candidates = [self.candidates[position] for position in wanted]
        factors = [np.inf if each in self.refused else self.factors.get(each, 1.0) for each in candidates]
        return np.array([self._known[size, position] for position in wanted]) * np.array(factors)

    def _priced(self, size: int, positions: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Positions of candidates, and what they take for a size; those of one structure are priced together."""
        form = self.form_at(size)
        together: dict[object, list[int]] = {}
        for position in positions:
            candidate, seconds = self.candidates[position], np.inf
            if candidate.only is not None:
                yield position, candidate.program.estimate.seconds if candidate.only == size else seconds
            elif size > candidate.most or _structure(candidate.program.form) != _structure(form):
                yield position, seconds
            else:
                together.setdefault(getattr(candidate.program, "split", None), []).append(position)
        for split, group in together.items():
            problems = (form,) if split is None else cast(Split[Any], split).problems(form)
            kernels = [self.candidates[position].program.parts for position in group]
            total = np.zeros(len(group))
            for number, problem in enumerate(problems):
                schedules = [cast(TileSchedule, parts[number].schedule) for parts in kernels]
                total += estimate_schedules(cast(KernelForm, problem), self.device, schedules).seconds
            yield from zip(group, total.tolist(), strict=True)

    # ---- the rule

    def rule(self) -> SizeRule:
        """The smallest set of kernels with a near one for every size, and the boundaries between them.

        Raises:
            InputError: no candidate is left for some size.
        """
        grid = size_grid(self.size, PRICED_RATIO)
        while True:
            chosen = self._chosen(grid)
            rule = self._ranged(chosen)
            # Between the sizes of the grid those are looked at where the rule has its boundaries, those at which its
            # kernels begin another tile, and all small ones.
            ends = {end for each in rule.ranges for end in (each.first, each.last)} | self._jumps(rule)
            ends |= {each for each in fine_sizes(self.size) if each <= ALL_LOOKED_AT}
            # On a fine grid only what breaks the promise is worth another round.
            bar = NEAR[0][0] * STAYS if len(grid) <= FINE_GRID else LONGEST
            missed = [end for end in ends - set(grid) if self._is_missed(rule, end, bar)]
            if not missed:
                return rule
            grid = sorted({*grid, *missed})

    def _is_missed(self, rule: SizeRule, size: int, bar: float) -> bool:
        prices = self.prices(size)
        by_candidate = dict(zip(self.candidates, prices.tolist(), strict=True))
        return rule.price(size, by_candidate) > bar * float(prices.min())

    def _chosen(self, grid: Sequence[int]) -> list[int]:
        """Positions of the candidates that are near the best at every size of a grid, as few as are found."""
        prices = np.stack([self.prices(size) for size in grid], axis=1)
        best = prices.min(axis=0)
        if not np.isfinite(best).all():
            size = grid[int(np.flatnonzero(~np.isfinite(best))[0])]
            raise InputError(self.expr.name, f"has no kernel for {self.size.axis} = {size}", "give it a number")
        for near, most in NEAR:
            cover = _cover(prices <= near * best, prices / best)
            if len(cover) <= most:
                break
        return cover

    def _ranged(self, chosen: Sequence[int]) -> SizeRule:
        """Boundaries between chosen candidates: a kernel stays as long as it is near the best of them."""
        tile_ends = {end for position in chosen for end in self._tile_ends(self.candidates[position])}
        sizes = sorted({*fine_sizes(self.size), *tile_ends})
        prices = np.stack([self.prices(size, chosen) for size in sizes], axis=1)
        near = prices <= STAYS * prices.min(axis=0)
        picked: list[int] = []
        for column in range(len(sizes)):
            if picked and near[picked[-1], column]:
                picked.append(picked[-1])
            else:
                # The one that stays longest.
                picked.append(max(np.flatnonzero(near[:, column]).tolist(), key=lambda row: _run(near[row, column:])))
        order = list(dict.fromkeys(picked))
        starts = [column for column in range(len(sizes)) if not column or picked[column] != picked[column - 1]]
        ends = [*(start - 1 for start in starts[1:]), len(sizes) - 1]
        ranges = tuple(
            SizeRange(
                first=sizes[start - 1] + 1 if start else 1,
                last=sizes[end],
                rank=order.index(picked[end]) + 1,
                seconds=float(prices[picked[end], end]),
                best_seconds=float(self.prices(sizes[end]).min()),
            )
            for start, end in zip(starts, ends, strict=True)
        )
        last = {row: sizes[max(column for column, each in enumerate(picked) if each == row)] for row in order}
        return SizeRule(tuple(self._choice(self.candidates[chosen[row]], last[row]) for row in order), ranges)

    def _tile_ends(self, candidate: Candidate) -> list[int]:
        """Sizes at which a candidate's first tiles end, where its time jumps."""
        size, form = self.size, candidate.program.form.launched(self.size.axis)
        launch = form.launch_axis
        assert launch is not None
        tile = dict(cast(TileSchedule, candidate.program.main.schedule).block).get(launch.name, 1)
        ends = {tile * count // launch.elements // size.multiple * size.multiple for count in range(1, TILE_ENDS + 1)}
        return sorted(end for end in ends if 0 < end <= size.most)

    def _jumps(self, rule: SizeRule) -> set[int]:
        """Sizes at which the kernel that is launched begins another tile, and loses most to smaller ones."""
        begun = {
            (end + self.size.multiple, rank)
            for rank, choice in enumerate(rule.choices, start=1)
            for end in self._tile_ends(choice.candidate)
        }
        return {size for size, rank in begun if size <= self.size.most and rule.range_of(size).rank == rank}

    def _choice(self, candidate: Candidate, last: int) -> Choice:
        if candidate.only is not None:
            return Choice(candidate, candidate.program, candidate.program, last)
        priced = candidate.on(self.form_at(last), self.device)
        form = kernel_form(at_size(self.expr, self.size.reach(last)))
        return Choice(candidate, priced, _launched(candidate.on(form, self.device), self.size.axis), last)


def _launched(program: Program, axis: str) -> Program:
    """A program whose kernels take the size of an axis at launch."""
    if isinstance(program, ChainProgram):
        parts = [replace(part, problem=cast(KernelForm, part.problem).launched(axis)) for part in program.parts]
        return replace(program, parts=tuple(parts))
    assert isinstance(program, RProgram)
    return replace(program, form=program.form.launched(axis))


def _size_of(expr: TensorExpr) -> LaunchSize:
    assert expr.launch_size is not None
    return expr.launch_size


def _at_least_two(size: LaunchSize, number: int) -> int:
    return max(number, size.multiple, 2)


def _search_here(device: DeviceSpec) -> Searches:
    def begin(form: KernelForm) -> Callable[[], SearchResult]:
        return lambda: search(form, device, PROGRAMS)

    return begin


def _structure(form: KernelForm) -> tuple[object, ...]:
    """What forms of an operator have in common where schedules of one are schedules of the other."""
    return form.kind, form.final.axes, form.reduced, form.fused


def _each_once(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Every schedule once, as it was found first."""
    first: dict[object, Candidate] = {}
    for candidate in candidates:
        program = candidate.program
        key = (program.composition, *(part.schedule for part in program.parts), candidate.only)
        first.setdefault(key, candidate)
    return list(first.values())


def _cover(near: NDArray[np.bool_], ratios: NDArray[np.float64]) -> list[int]:
    """Rows that together are near in every column, as few as a greedy choice finds; of equals the nearer one."""
    chosen: list[int] = []
    left = np.ones(near.shape[1], np.bool_)
    while left.any():
        counts = (near & left).sum(axis=1)
        nearness = np.where(near & left, np.minimum(ratios, 10.0), 0.0).sum(axis=1) / np.maximum(counts, 1)
        best = int(np.lexsort((nearness, -counts))[0])
        chosen.append(best)
        left &= ~near[best]
    while (fewer := _one_fewer(near, chosen)) is not None:
        chosen = fewer
    return chosen


def _one_fewer(near: NDArray[np.bool_], chosen: Sequence[int]) -> list[int] | None:
    """A cover with one row in place of two others, or of one; None where there is none."""
    for first, second in combinations_with_replacement(chosen, 2):
        others = [row for row in chosen if row not in (first, second)]
        needed = ~near[others].any(axis=0)
        if not needed.any():
            return others
        instead = np.flatnonzero(near[:, needed].all(axis=1)).tolist() if first != second else []
        if instead:
            return [*others, instead[0]]
    return None


def _found_sizes(size: LaunchSize) -> set[int]:
    """Sizes whose programs are candidates, all of two elements at least."""
    factors = {factor << power for factor in FOUND_FACTORS for power in range(size.most.bit_length())}
    # A size that no tile divides has tiles of its own proposed, which may serve the one behind it, too.
    factors |= {factor - 1 for factor in factors if factor <= UNEVEN_FOUND} | set(range(1, EACH_FOUND + 1))
    sizes = {count * size.multiple for count in factors if 0 < count * size.multiple <= size.most}
    return {each for each in (*sizes, *size_grid(size, SEARCHED_RATIO)) if each > 1}


def _run(near: NDArray[np.bool_]) -> int:
    """Columns from the first on in which a row is near."""
    return int(near.argmin()) if not near.all() else len(near)
