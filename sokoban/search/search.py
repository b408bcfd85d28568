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

import numpy as np

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import MMA_STAGES
from sokoban.kernel.placed import PlacedForm
from sokoban.model.estimates import Estimate
from sokoban.model.rational import estimate
from sokoban.schedule.pipelines import fetched_ahead, with_layouts
from sokoban.schedule.table import Bools, Floats, Ints, ScheduleTable, join
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import warp_group_schedules, with_fall_back
from sokoban.search.bands import in_bands
from sokoban.search.columns import UNROLL, adjacent, schedule_at, shared_table, tile_table
from sokoban.search.padding import bank_padding
from sokoban.search.screen import block_seconds, efficient, schedule_seconds
from sokoban.search.space import Family, axis_sizes, block_tiles, can_launch, cartesian, step_tiles, thread_tiles

#: How far from the best of its layer a tile may be: the outer layers, of which less is known, are held less tightly.
BLOCK_EPSILON = 3.0
THREAD_EPSILON = 1.5
STEP_EPSILON = 1.0

#: Tiles kept per family at each layer, and rows that RATIONAL scores per family.
BLOCKS_KEPT = 1500
THREADS_KEPT = 4000
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
        schedules: best first by predicted time, no two with the same tiles.
        estimates: RATIONAL's, one per schedule.
        enumerated: tiles and schedules that closed forms looked at.
        scored: schedules that RATIONAL estimated.
        seconds: time the search took.
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
    for table, looked_at in _tables(placed):
        enumerated += looked_at
        if table.count:
            tables.append(table)
    if not tables:
        raise _nothing_fits(placed)
    scored, seconds = _score(join(tables), placed)
    count = scored.count
    best = np.argsort(seconds, kind="stable")[:REFINED]
    running = scored.candidates(best[np.isfinite(seconds[best])])
    variants = join([_variants(running, placed), *_longer_pipelines(running)])
    if variants.count:
        more, more_seconds = _score(variants, placed)
        count += more.count
        scored, seconds = join([scored.candidates(best), more]), np.concatenate([seconds[best], more_seconds])
    best = np.argsort(seconds, kind="stable")[:REFINED]
    ahead = fetched_ahead(scored.candidates(best[np.isfinite(seconds[best])]), placed)
    if ahead:
        more, more_seconds = _score(join(ahead), placed)
        count += more.count
        scored, seconds = join([scored, more]), np.concatenate([seconds, more_seconds])
    chosen = _distinct_best(scored, seconds, top_k)
    if not len(chosen):
        raise _nothing_fits(placed)
    final = scored.candidates(chosen)
    raster, predictions = in_bands(final, np.arange(final.count), estimate(final, placed), placed)
    final = final.with_raster(raster)
    ranked = np.argsort(predictions.seconds, kind="stable").tolist()
    schedules = tuple(schedule_at(final, row) for row in ranked)
    return SearchResult(
        placed=placed,
        schedules=schedules,
        estimates=tuple(predictions.rows(ranked)),
        enumerated=enumerated,
        scored=count,
        seconds=time.perf_counter() - start,
    )


def _nothing_fits(placed: PlacedForm) -> InputError:
    problem = f"no tile fits the memory of {placed.device.name}"
    return InputError(placed.form.expr.name, problem, "use a smaller operator")


def _tables(placed: PlacedForm) -> Iterator[tuple[ScheduleTable, int]]:
    """The schedules of every family worth scoring, and how many tiles were looked at."""
    form = placed.form
    if form.reduction is not None and not form.needs_matrix:
        table = _shared_reductions(placed)
        yield table, table.count
    if form.kind == "tile":
        for family in families(placed):
            yield _screened(placed, family)
        groups = list(warp_group_schedules(placed))
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
    found = [Family("direct", whole_reduction=True)]
    if all(load.indices for load in form.body_loads):
        found.insert(0, Family("staged", staged))
    if placed.product is not None:
        roles, instruction = placed.product
        found.insert(0, Family("matrix", staged, roles=roles, instruction=instruction))
    return tuple(found[:1] if form.needs_matrix else found)


def _turned(form: KernelForm) -> tuple[str, ...]:
    """Tensors that are read along another axis than the output is written along."""
    last = form.final.axes[-1] if form.final.axes else ""
    return tuple(
        load.tensor
        for load in form.body_loads
        if load.indices
        and not load.indices[-1].coefficient(last)
        and any(index.coefficient(last) for index in load.indices)
    )


def _screened(placed: PlacedForm, family: Family) -> tuple[ScheduleTable, int]:
    """The schedules of a family that pass every layer's condition: blocks, then thread tiles, then steps."""
    form = placed.form
    matrix = family.roles is not None
    blocks = block_tiles(placed, family)
    looked_at = len(blocks)
    blocks = blocks[efficient(*block_seconds(placed, blocks, matrix), BLOCK_EPSILON, BLOCKS_KEPT)]
    rows, register = thread_tiles(placed, family, blocks)
    block, steps = blocks[rows], step_tiles(form, family)
    looked_at += len(block)
    shortest = steps[np.full(len(block), np.argmin(steps.prod(axis=1)))]
    table = tile_table(form, family, block, register, adjacent(form, family, register), shortest)
    kept = efficient(*schedule_seconds(table, placed, any_step=True), THREAD_EPSILON, THREADS_KEPT)
    block, register = np.repeat(block[kept], len(steps), axis=0), np.repeat(register[kept], len(steps), axis=0)
    step = np.tile(steps, (len(kept), 1))
    looked_at += len(block)
    seconds, footprint = _in_chunks(placed, family, block, register, step)
    kept = efficient(seconds, footprint, STEP_EPSILON, SCORED_PER_FAMILY)
    kept = kept[np.isfinite(seconds[kept])]
    block, register, step = block[kept], register[kept], step[kept]
    return tile_table(form, family, block, register, adjacent(form, family, register), step), looked_at


def _in_chunks(placed: PlacedForm, family: Family, block: Ints, register: Ints, step: Ints) -> tuple[Floats, Floats]:
    """Screened times and footprints, a chunk of rows after the other."""
    times: list[Floats] = [np.zeros(0)]
    footprints: list[Floats] = [np.zeros(0)]
    for start in range(0, len(block), 8 * CHUNK):
        part = slice(start, start + 8 * CHUNK)
        inner = adjacent(placed.form, family, register[part])
        table = tile_table(placed.form, family, block[part], register[part], inner, step[part])
        seconds, footprint = schedule_seconds(table, placed)
        times.append(seconds)
        footprints.append(footprint)
    return np.concatenate(times), np.concatenate(footprints)


def _shared_reductions(placed: PlacedForm) -> ScheduleTable:
    """Reductions shared by the threads of a block, one output or row per group of them: few enough to score all.

    Blocks are whole warps; warps stand along what is contiguous in memory, the reduction or the outputs.
    """
    form, device = placed.form, placed.device
    columns = math.prod(form.sizes[axis] for axis in form.reduced)
    limit, lanes = device.limits.threads_per_block, device.warp_lanes
    menus = [axis_sizes(form.sizes[axis], 256, 40) for axis in form.spatial]
    # Side by side along the last axes; the outer ones one at a time.
    menus = [np.ones(1, dtype=np.int64)] * (len(menus) - 2) + menus[-2:] if len(menus) > 2 else menus
    block = cartesian(menus)
    sharing = np.array([n for n in SHARING if n <= max(lanes, 2 * columns)], dtype=np.int64)
    threads = np.tile(sharing, len(block))
    block = np.repeat(block, len(sharing), axis=0)
    total = threads * block.prod(axis=1)
    fits = (total <= limit) & (total % lanes == 0) & can_launch(placed, block)
    if form.reduces_contiguously:
        fits &= threads >= min(lanes, int(sharing[-1]))
    return shared_table(form, block[fits], threads[fits])


def _score(table: ScheduleTable, placed: PlacedForm) -> tuple[ScheduleTable, Floats]:
    """RATIONAL's time of every row, after the storage padding that its bank conflicts ask for."""
    parts, seconds = [], []
    for start in range(0, table.count, CHUNK):
        part = table.candidates(slice(start, start + CHUNK))
        padded = part.with_padding(bank_padding(part, placed.device)) if part.form.kind == "tile" else part
        seconds.append(estimate(padded, placed).seconds)
        parts.append(padded)
    return join(parts), np.concatenate(seconds)


def _variants(table: ScheduleTable, placed: PlacedForm) -> ScheduleTable:
    """Programs beside the best: blocks half or twice as large along an axis, elements adjacent or strided, operands
    read in place."""
    form = table.form
    plain = np.flatnonzero(~table.warp_tile & (table.reduce_threads == 1)) if form.kind == "tile" else np.arange(0)
    table = table.candidates(plain)
    if not table.count:
        return table
    found = [_threaded(table, wanted) for wanted in _inner_choices(form)]
    found += [part for axis in form.spatial if form.sizes[axis] > 1 for part in _resized(table, axis, placed)]
    names = list(table.cached)
    if form.reduction is not None and len(names) > 1:
        for name in names:
            cached = {**table.cached, name: np.zeros(table.count, dtype=bool)}
            some = np.flatnonzero(table.cached[name] & np.logical_or.reduce(list(cached.values())))
            found += [_in_place(replace(other, cached=cached)).candidates(some) for other in [table, *found[:2]]]
    return _without_repeats(join(found))


def _in_place(table: ScheduleTable) -> ScheduleTable:
    """The rows as they are where some operand is read in place: nothing turned."""
    return with_layouts(replace(table, unroll=np.full(table.count, UNROLL)), np.zeros(table.count, dtype=bool))


def _longer_pipelines(table: ScheduleTable) -> list[ScheduleTable]:
    """The rows by ``mma.sync``, with more stages."""
    pipelined = table.candidates(np.flatnonzero(table.mma & ~table.wgmma))
    return [replace(pipelined, stages=np.full(pipelined.count, stages)) for stages in MMA_STAGES[1:]]


def _inner_choices(form: KernelForm) -> list[tuple[int, ...]]:
    """Adjacent elements wanted per axis, by axis from the last: all strided, pairs, fours, all adjacent."""
    wide = sum(form.sizes[axis] > 1 for axis in form.spatial)
    choices = (1, 2, 4, 16)
    return [(last, other) for last in choices for other in choices] if wide > 1 else [(last,) for last in choices]


def _threaded(table: ScheduleTable, wanted: tuple[int, ...]) -> ScheduleTable:
    """The rows with ``wanted`` adjacent elements per thread on the last axes, as far as their tiles allow."""
    thread, vthreads = dict(table.thread), dict(table.vthreads)
    axes = [axis for axis in reversed(table.form.spatial) if table.form.sizes[axis] > 1]
    for position, axis in enumerate(axes):
        own = table.register_tile[axis]
        share = wanted[min(position, len(wanted) - 1)]
        thread[axis] = own if share >= 16 else np.gcd(own, share)
        vthreads[axis] = own // thread[axis]
    return replace(table, thread=thread, vthreads=vthreads)


def _resized(table: ScheduleTable, axis: str, placed: PlacedForm) -> list[ScheduleTable]:
    """The rows whose blocks can be halved along ``axis``, and those that can be doubled."""
    block, own = table.block[axis], table.register_tile[axis]
    smaller = np.flatnonzero(block % (2 * own) == 0)
    fits = (2 * table.threads_per_block <= placed.device.limits.threads_per_block) & (block < table.form.sizes[axis])
    larger = np.flatnonzero(fits)
    halved, doubled = {**table.block, axis: np.maximum(1, block // 2)}, {**table.block, axis: block * 2}
    launched = can_launch(placed, np.stack(list(halved.values()), axis=1))
    smaller = smaller[launched[smaller]]
    return [replace(table, block=halved).candidates(smaller), replace(table, block=doubled).candidates(larger)]


def _keys(table: ScheduleTable, *, tiles_only: bool) -> Ints:
    """One row of integers per schedule; equal rows are equal schedules, or equal tiles held in the same layers."""
    columns: list[Ints | Bools] = [*table.block.values(), *table.register_tile.values()]
    # A body without loads stages nothing.
    staged = np.logical_or.reduce([np.zeros(table.count, dtype=bool), *table.cached.values()])
    columns += [table.reduce_threads, table.warp_tile, table.wgmma, staged]
    if not tiles_only:
        columns += [*table.thread.values(), *table.step.values(), *table.cached.values(), table.stages]
        columns += [table.asynchronous, table.raster]
    return np.stack([np.asarray(column, dtype=np.int64) for column in columns], axis=1)


def _without_repeats(table: ScheduleTable) -> ScheduleTable:
    """Every schedule once, the first of each."""
    _, first = np.unique(_keys(table, tiles_only=False), axis=0, return_index=True)
    return table.candidates(np.sort(first))


def _distinct_best(table: ScheduleTable, seconds: Floats, top_k: int) -> Ints:
    """Rows of the ``top_k`` best schedules, one for each set of tiles: the others differ in details of one program."""
    order = np.argsort(seconds, kind="stable")
    order = order[np.isfinite(seconds[order])]
    _, first = np.unique(_keys(table, tiles_only=True)[order], axis=0, return_index=True)
    ranked = order[np.sort(first)].tolist()
    return np.array(with_fall_back(ranked, top_k, table.instruction_at)[:top_k], dtype=np.int64)
