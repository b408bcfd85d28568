"""Exhaustive search for tile schedules by closed forms (thesis 5.4.4 and 5.4.5).

Roller grows a few aligned tiles; here all multi-level tiles of an operator are enumerated, divisors and odd sizes among
them, pruned layer by layer by the efficient-configuration condition, and what remains is ranked by RATIONAL. Nothing
depends on a clock or on chance: the same operator and device give the same schedules in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import MMA_STAGES
from sokoban.kernel.placed import PlacedForm
from sokoban.model.estimates import Estimate
from sokoban.model.rational import estimate
from sokoban.schedule.bulk_copies import bulk_schedules
from sokoban.schedule.pipelines import fetched_ahead, with_layouts
from sokoban.schedule.table import Bools, Floats, Ints, ScheduleTable, join
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import with_fall_back
from sokoban.search.bands import in_bands
from sokoban.search.columns import UNROLL, schedule_at, shared_table, tile_table
from sokoban.search.padding import bank_padding
from sokoban.search.screen import block_seconds, efficient, schedule_seconds
from sokoban.search.space import Family, Tiles, axis_sizes, block_tiles, can_launch, cartesian, step_tiles, thread_tiles

#: How far from the best of its layer a tile may be: the outer layers, of which less is known, are held less tightly.
BLOCK_EPSILON = 3.0
THREAD_EPSILON = 1.5
STEP_EPSILON = 1.0

#: Tiles kept per family at each layer, and rows that RATIONAL scores per family.
MOST_BLOCKS = 1500
MOST_THREAD_TILES = 4000
SCORED_PER_FAMILY = 6000

#: Rows scored at a time: what a chunk holds stays in the cache, and memory stays bounded.
CHUNK = 2048

#: Best schedules whose variants are scored too.
REFINED = 96

#: Threads that may share a reduction.
SHARING = (4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best schedules of one operator on one device.

    Attributes:
        placed: the operator on the device.
        schedules: best first by predicted time, no two with the same tiles.
        estimates: RATIONAL's, one per schedule.
        enumerated: tiles and schedules that closed forms looked at.
        scored: schedules that RATIONAL estimated.
        seconds: duration of the search.
    """

    placed: PlacedForm
    schedules: tuple[TileSchedule, ...]
    estimates: tuple[Estimate, ...]
    enumerated: int
    scored: int
    seconds: float

    @property
    def form(self) -> KernelForm:
        """The operator."""
        return self.placed.form

    @property
    def device(self) -> DeviceSpec:
        """The device that it was searched for."""
        return self.placed.device


def search(form: KernelForm, device: DeviceSpec, top_k: int = 10) -> SearchResult:
    """The ``top_k`` best tile schedules of an operator.

    Raises:
        InputError: no schedule fits the device, or it cannot multiply the operator's element types.
    """
    placed = PlacedForm(form, device)
    placed.check()
    start = time.perf_counter()
    enumerated = 0
    tables = []
    for table, enumerated_tiles in _tables(placed):
        enumerated += enumerated_tiles
        if table.count:
            tables.append(table)
    if not tables:
        raise _nothing_fits(placed)
    scored = _scored(join(tables), placed)
    count = scored.count
    variants = _variants(scored.refined, placed)
    if variants.count:
        scored_variants = _scored(variants, placed)
        count += scored_variants.count
        scored = scored.best(REFINED).joined(scored_variants)
    pipelines = fetched_ahead(scored.refined, placed)
    if pipelines:
        scored_pipelines = _scored(join(pipelines), placed)
        count += scored_pipelines.count
        scored = scored.joined(scored_pipelines)
    chosen = _distinct_best(scored, top_k)
    if not chosen.count:
        raise _nothing_fits(placed)
    raster, predictions = in_bands(chosen, np.arange(chosen.count), estimate(chosen, placed), placed)
    chosen = chosen.with_raster(raster)
    ranked = np.argsort(predictions.seconds, kind="stable").tolist()
    schedules = tuple(schedule_at(chosen, row) for row in ranked)
    return SearchResult(
        placed=placed,
        schedules=schedules,
        estimates=tuple(predictions.rows(ranked)),
        enumerated=enumerated,
        scored=count,
        seconds=time.perf_counter() - start,
    )


def _nothing_fits(placed: PlacedForm) -> InputError:
    """The error of an operator of which no schedule can run."""
    problem = f"no tile fits the memory of {placed.device.name}"
    return InputError(placed.form.expr.name, problem, "use a smaller operator")


def _tables(placed: PlacedForm) -> Iterator[tuple[ScheduleTable, int]]:
    """The schedules of every family worth scoring, and how many tiles were looked at."""
    form = placed.form
    if form.reduction is not None and not form.needs_matrix:
        table = _shared_reductions(placed)
        yield table, table.count
    if form.is_tile:
        for family in families(placed):
            yield _screened(placed, family)
        groups = list(bulk_schedules(placed))
        if groups:
            yield ScheduleTable.of(form, groups), len(groups)


def families(placed: PlacedForm) -> tuple[Family, ...]:
    """The structures that a ``tile`` may have: everything staged, nothing staged, matrix instructions."""
    form = placed.form
    staged = tuple(dict.fromkeys(load.tensor for load in form.body_loads))
    if form.reduction is None:
        turned = _turned(form)
        direct = Family("element-wise", whole_reduction=True)
        return (direct, Family("transposed", turned, whole_reduction=True)) if turned else (direct,)
    structures = [Family("direct", whole_reduction=True)]
    if all(load.indices for load in form.body_loads) and not form.scattered_loads:
        structures.insert(0, Family("staged", staged))
    if placed.product is not None:
        roles, instruction = placed.product
        structures.insert(0, Family("matrix", staged, roles=roles, instruction=instruction))
    return tuple(structures[:1] if form.needs_matrix else structures)


def _turned(form: KernelForm) -> tuple[str, ...]:
    """Tensors that are read along another axis than the output is written along."""
    last = form.final.axes[-1] if form.final.axes else ""
    return tuple(
        load.tensor
        for load in form.body_loads
        if load.indices
        and load not in form.scattered_loads
        and not load.indices[-1].coefficient(last)
        and any(index.coefficient(last) for index in load.indices)
    )


def _screened(placed: PlacedForm, family: Family) -> tuple[ScheduleTable, int]:
    """The schedules of a family that pass every layer's condition: blocks, then thread tiles, then steps; and how many
    tiles were looked at."""
    form = placed.form
    matrix = family.roles is not None
    blocks = block_tiles(placed, family)
    enumerated = len(blocks)
    blocks = blocks[efficient(*block_seconds(placed, blocks, matrix), BLOCK_EPSILON, MOST_BLOCKS)]
    rows, register = thread_tiles(placed, family, blocks)
    steps = step_tiles(form, family)
    shortest = steps[np.full(len(rows), np.argmin(steps.prod(axis=1)))]
    tiles = Tiles(blocks[rows], register, shortest)
    enumerated += tiles.count
    positions = efficient(
        *schedule_seconds(tile_table(form, family, tiles), placed, any_step=True), THREAD_EPSILON, MOST_THREAD_TILES
    )
    tiles = tiles.candidates(positions).with_each(steps)
    enumerated += tiles.count
    seconds, footprint = _screened_seconds(placed, family, tiles)
    positions = efficient(seconds, footprint, STEP_EPSILON, SCORED_PER_FAMILY)
    tiles = tiles.candidates(positions[np.isfinite(seconds[positions])])
    return tile_table(form, family, tiles), enumerated


def _screened_seconds(placed: PlacedForm, family: Family, tiles: Tiles) -> tuple[Floats, Floats]:
    """Screened times and footprints of schedules, chunk by chunk; see :func:`schedule_seconds`."""
    times: list[Floats] = [np.zeros(0)]
    footprints: list[Floats] = [np.zeros(0)]
    for start in range(0, tiles.count, 8 * CHUNK):
        chunk = tiles.candidates(slice(start, start + 8 * CHUNK))
        seconds, footprint = schedule_seconds(tile_table(placed.form, family, chunk), placed)
        times.append(seconds)
        footprints.append(footprint)
    return np.concatenate(times), np.concatenate(footprints)


def _shared_reductions(placed: PlacedForm) -> ScheduleTable:
    """Reductions shared by the threads of a block, one output or row per group of them: few enough to score all.

    Blocks are whole warps; warps stand along what is contiguous in memory, the reduction or the outputs.
    """
    form, device = placed.form, placed.device
    columns = math.prod(form.sizes[axis] for axis in form.reduced)
    most_threads, lanes = device.limits.threads_per_block, device.warp_lanes
    menus = [axis_sizes(form.sizes[axis], 256, 40) for axis in form.spatial]
    # Side by side along the last axes; the outer ones one at a time.
    menus = [np.ones(1, dtype=np.int64)] * (len(menus) - 2) + menus[-2:] if len(menus) > 2 else menus
    block = cartesian(menus)
    sharing = np.array([n for n in SHARING if n <= max(lanes, 2 * columns)], dtype=np.int64)
    threads = np.tile(sharing, len(block))
    block = np.repeat(block, len(sharing), axis=0)
    block_threads = threads * block.prod(axis=1)
    fits = (block_threads <= most_threads) & (block_threads % lanes == 0) & can_launch(placed, block)
    if form.reduces_contiguously:
        fits &= threads >= min(lanes, int(sharing[-1]))
    return shared_table(form, block[fits], threads[fits])


@dataclass(frozen=True, eq=False)
class _Scored:
    """Schedules with RATIONAL's times in seconds; infinite where a schedule cannot run."""

    table: ScheduleTable
    seconds: Floats

    @property
    def count(self) -> int:
        """Schedules."""
        return self.table.count

    @cached_property
    def order(self) -> Ints:
        """Rows, best first; of equal times the first."""
        return np.argsort(self.seconds, kind="stable")

    def best(self, count: int) -> _Scored:
        """The best schedules, best first."""
        return _Scored(self.table.candidates(self.order[:count]), self.seconds[self.order[:count]])

    @property
    def refined(self) -> ScheduleTable:
        """Those of the best that can run."""
        best = self.best(REFINED)
        return best.table.candidates(np.flatnonzero(np.isfinite(best.seconds)))

    def joined(self, other: _Scored) -> _Scored:
        """These schedules and others behind them."""
        return _Scored(join([self.table, other.table]), np.concatenate([self.seconds, other.seconds]))


def _scored(table: ScheduleTable, placed: PlacedForm) -> _Scored:
    """RATIONAL's time of every row, after the storage padding that its bank conflicts ask for."""
    parts, seconds = [], []
    for start in range(0, table.count, CHUNK):
        part = table.candidates(slice(start, start + CHUNK))
        padded = part.with_padding(bank_padding(part, placed)) if part.form.is_tile else part
        seconds.append(estimate(padded, placed).seconds)
        parts.append(padded)
    return _Scored(join(parts), np.concatenate(seconds))


def _variants(table: ScheduleTable, placed: PlacedForm) -> ScheduleTable:
    """Programs next to the best: neighbours of those by multiply-adds, longer pipelines of those by ``mma.sync``."""
    return join([_neighbours(table, placed), *_longer_pipelines(table)])


def _neighbours(table: ScheduleTable, placed: PlacedForm) -> ScheduleTable:
    """Neighbours of schedules by multiply-adds: blocks half or twice as large along an axis, elements adjacent or
    strided, operands read in place."""
    form = table.form
    scalar_rows = np.flatnonzero(~table.warp_tile & (table.reduce_threads == 1)) if form.is_tile else np.arange(0)
    table = table.candidates(scalar_rows)
    if not table.count:
        return table
    parts = [_threaded(table, adjacent) for adjacent in _adjacent_choices(form)]
    parts += [part for axis in form.spatial if form.sizes[axis] > 1 for part in _resized(table, axis, placed)]
    names = list(table.cached)
    if form.reduction is not None and len(names) > 1:
        for name in names:
            cached = {**table.cached, name: np.zeros(table.count, dtype=bool)}
            changed = np.flatnonzero(table.cached[name] & np.logical_or.reduce(list(cached.values())))
            parts += [_in_place(replace(part, cached=cached)).candidates(changed) for part in [table, *parts[:2]]]
    return _without_repeats(join(parts))


def _in_place(table: ScheduleTable) -> ScheduleTable:
    """Schedules some of whose operands are read in place: nothing is turned or unrolled as where all are staged."""
    return with_layouts(replace(table, unroll=np.full(table.count, UNROLL)), np.zeros(table.count, dtype=bool))


def _longer_pipelines(table: ScheduleTable) -> list[ScheduleTable]:
    """The schedules by ``mma.sync`` with more stages, a table per number of stages."""
    pipelined = table.candidates(np.flatnonzero(table.mma & ~table.wgmma))
    return [replace(pipelined, stages=np.full(pipelined.count, stages)) for stages in MMA_STAGES[1:]]


def _adjacent_choices(form: KernelForm) -> list[tuple[int, ...]]:
    """Adjacent elements to try along the last axes, the last axis first: all strided, pairs, fours, all adjacent."""
    wide = sum(form.sizes[axis] > 1 for axis in form.spatial)
    choices = (1, 2, 4, 16)
    return [(last, other) for last in choices for other in choices] if wide > 1 else [(last,) for last in choices]


def _threaded(table: ScheduleTable, adjacent: tuple[int, ...]) -> ScheduleTable:
    """The schedules with ``adjacent`` elements side by side along the last axes, as far as their tiles allow."""
    thread, vthreads = dict(table.thread), dict(table.vthreads)
    axes = [axis for axis in reversed(table.form.spatial) if table.form.sizes[axis] > 1]
    for position, axis in enumerate(axes):
        register = table.register_tile[axis]
        count = adjacent[min(position, len(adjacent) - 1)]
        thread[axis] = register if count >= 16 else np.gcd(register, count)
        vthreads[axis] = register // thread[axis]
    return replace(table, thread=thread, vthreads=vthreads)


def _resized(table: ScheduleTable, axis: str, placed: PlacedForm) -> list[ScheduleTable]:
    """The schedules whose blocks can be halved along ``axis``, and those whose blocks can be doubled."""
    block = table.block[axis]
    smaller = np.flatnonzero(block % (2 * table.register_tile[axis]) == 0)
    fits = (2 * table.threads_per_block <= placed.device.limits.threads_per_block) & (block < table.form.sizes[axis])
    larger = np.flatnonzero(fits)
    halved, doubled = {**table.block, axis: np.maximum(1, block // 2)}, {**table.block, axis: block * 2}
    launched = can_launch(placed, np.stack(list(halved.values()), axis=1))
    smaller = smaller[launched[smaller]]
    return [replace(table, block=halved).candidates(smaller), replace(table, block=doubled).candidates(larger)]


def _keys(table: ScheduleTable, *, tiles_only: bool) -> Ints:
    """Integers, shape (schedules, keys): schedules with equal rows are equal; with ``tiles_only`` their tiles are, and
    the layers that hold these."""
    columns: list[Ints | Bools] = [*table.block.values(), *table.register_tile.values()]
    # A body without loads stages nothing.
    staged = np.logical_or.reduce([np.zeros(table.count, dtype=bool), *table.cached.values()])
    columns += [table.reduce_threads, table.warp_tile, table.wgmma, staged]
    if not tiles_only:
        columns += [*table.thread.values(), *table.step.values(), *table.cached.values(), table.stages]
        columns += [table.asynchronous, table.raster, table.cluster, table.launched, table.kept_columns]
    return np.stack([np.asarray(column, dtype=np.int64) for column in columns], axis=1)


def _without_repeats(table: ScheduleTable) -> ScheduleTable:
    """Every schedule once, the first of each."""
    _, first = np.unique(_keys(table, tiles_only=False), axis=0, return_index=True)
    return table.candidates(np.sort(first))


def _distinct_best(scored: _Scored, top_k: int) -> ScheduleTable:
    """The ``top_k`` best schedules, one for each set of tiles: the others differ in details of one program."""
    order = scored.order[np.isfinite(scored.seconds[scored.order])]
    _, first = np.unique(_keys(scored.table, tiles_only=True)[order], axis=0, return_index=True)
    ranked = order[np.sort(first)].tolist()
    chosen = with_fall_back(ranked, top_k, scored.table.instruction_at)[:top_k]
    return scored.table.candidates(np.array(chosen, dtype=np.int64))
