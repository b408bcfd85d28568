"""Many schedules of one operator as NumPy columns: a candidate is a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import WGMMA, is_mma
from sokoban.kernel.regions import data_dimension, storage_order
from sokoban.language.expression import Load
from sokoban.schedule.tile import TileSchedule

Ints = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]


def one(values: object) -> float:
    """The entry of an array that has one."""
    return float(np.ravel(np.asarray(values))[0])


def shares_rows(table: ScheduleTable) -> Bools:
    """Schedules whose threads share the columns of a row."""
    return np.full(table.count, True) if table.form.kind == "rows" else table.reduce_threads > 1


@dataclass(frozen=True, eq=False, kw_only=True)
class ScheduleTable:
    """Columns of ``count`` schedules of one operator; every array has one entry per schedule.

    Attributes:
        block, thread, vthreads: elements or counts by spatial axis, as in :class:`TileSchedule`.
        step: elements by reduction axis.
        reduce_threads: threads along the reduction, all axes together.
        cached: whether a tensor is staged in shared memory, by tensor.
        padding: storage padding of staged tiles in elements, by tensor.
        warp_tile: threads of a warp share one tile (matrix instructions): ``thread`` is then per warp.
        vector: elements per access of a tensor's fetch (or of the output's stores), by tensor; 0, and a tensor that is
            missing, stand for the widest legal access.
        unroll: largest number of inner-loop iterations that the code generator unrolls; 0 leaves all of it to the
            compiler.
        inner_thread, inner_step: the parts of ``thread`` and ``step`` in the innermost loops, by axis; a missing axis
            is all of ``thread`` or of ``step``. The loops of a thread are, outermost first: what is left of the step,
            what is left of the thread's elements, ``inner_step``, ``inner_thread``, the virtual threads.
        stages: buffers of the staged tiles; 1 everywhere where it is left out.
        turned: whether a staged tile is stored turned, by tensor; a missing tensor is not.
        mma: of the schedules with ``warp_tile``, those by ``mma.sync`` or ``wgmma`` rather than ``wmma``; none where it
            is left out.
        wgmma: of those, the ones by warp groups; likewise.
        asynchronous: pipelines of multiply-adds that copy past the registers; none where it is left out.
        raster: blocks beside each other in a band of launch order; 0 (no bands) everywhere where it is left out.
    """

    form: KernelForm
    block: Mapping[str, Ints]
    thread: Mapping[str, Ints]
    vthreads: Mapping[str, Ints]
    step: Mapping[str, Ints]
    reduce_threads: Ints
    cached: Mapping[str, Bools]
    padding: Mapping[str, Ints]
    warp_tile: Bools
    vector: Mapping[str, Ints]
    unroll: Ints
    inner_thread: Mapping[str, Ints] = field(default_factory=dict)
    inner_step: Mapping[str, Ints] = field(default_factory=dict)
    stages: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    turned: Mapping[str, Bools] = field(default_factory=dict)
    mma: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    wgmma: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    asynchronous: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    raster: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if len(self.stages) != self.count:
            object.__setattr__(self, "stages", self.ones)
        for name in ("mma", "wgmma", "asynchronous"):
            if len(getattr(self, name)) != self.count:
                object.__setattr__(self, name, np.zeros(self.count, dtype=np.bool_))
        if len(self.raster) != self.count:
            object.__setattr__(self, "raster", self.zeros)

    @staticmethod
    def of(form: KernelForm, schedules: Sequence[TileSchedule]) -> ScheduleTable:
        """The table of some schedules; their axes must be those of ``form``, in its order."""
        spatial, reduced = form.spatial, form.reduced

        def column(values: list[int]) -> Ints:
            return np.array(values, dtype=np.int64)

        tensors, output = dict.fromkeys(load.tensor for load in form.body_loads), form.expr.output.name
        padding = [s.padding_of if s.padding else {} for s in schedules]
        vector = [s.vector_of if s.vector else {} for s in schedules]
        block = np.array([[size for _, size in s.block] for s in schedules], dtype=np.int64)
        thread = np.array([[size for _, size in s.thread] for s in schedules], dtype=np.int64)
        ones = (1,) * len(spatial)
        vthreads = np.array([[n for _, n in s.vthreads] or ones for s in schedules], dtype=np.int64)
        # Without a step a reduction axis is walked at once.
        none = tuple(form.sizes[axis] for axis in reduced)
        step = np.array([[size for _, size in s.step] or none for s in schedules], dtype=np.int64)
        return ScheduleTable(
            form=form,
            block=dict(zip(spatial, block.T, strict=True)),
            thread=dict(zip(spatial, thread.T, strict=True)),
            vthreads=dict(zip(spatial, vthreads.T, strict=True)),
            step=dict(zip(reduced, step.T, strict=True)) if reduced else {},
            reduce_threads=column(
                [math.prod([n for _, n in s.reduce_threads]) if s.reduce_threads else 1 for s in schedules]
            ),
            cached={tensor: np.array([tensor in s.cached for s in schedules]) for tensor in tensors},
            padding={tensor: column([given.get(tensor, 0) for given in padding]) for tensor in tensors},
            warp_tile=np.array([s.instruction != "fma" for s in schedules]),
            vector={tensor: column([given.get(tensor, 0) for given in vector]) for tensor in (*tensors, output)},
            unroll=column([s.unroll for s in schedules]),
            stages=column([s.stages for s in schedules]),
            turned={tensor: np.array([tensor in s.turned for s in schedules]) for tensor in tensors},
            mma=np.array([is_mma(s.instruction) or s.instruction == WGMMA for s in schedules]),
            wgmma=np.array([s.instruction == WGMMA for s in schedules]),
            asynchronous=np.array([s.asynchronous for s in schedules]),
            raster=column([s.raster for s in schedules]),
        )

    def with_padding(self, padding: Mapping[str, Ints]) -> ScheduleTable:
        """The same schedules with other storage padding; what was derived of the rest stays known."""
        other = object.__new__(ScheduleTable)
        other.__dict__.update(self.__dict__, padding=padding)
        return other

    def with_raster(self, raster: Ints) -> ScheduleTable:
        """The same schedules in bands of other widths; what was derived of the rest stays known."""
        other = object.__new__(ScheduleTable)
        other.__dict__.update(self.__dict__, raster=raster)
        return other

    def rows(self, which: slice | Ints) -> ScheduleTable:
        """Some rows, in the order given."""
        return _from_columns([self], lambda columns: columns[0][which])

    @cached_property
    def count(self) -> int:
        return len(self.reduce_threads)

    @cached_property
    def ones(self) -> Ints:
        """A one per schedule, not to be written to."""
        return np.ones(self.count, dtype=np.int64)

    @cached_property
    def zeros(self) -> Ints:
        """A zero per schedule, not to be written to."""
        return np.zeros(self.count, dtype=np.int64)

    @cached_property
    def has_stages(self) -> bool:
        """Whether any schedule fetches ahead."""
        return bool((self.stages > 1).any())

    @cached_property
    def has_asynchronous(self) -> bool:
        """Whether any schedule of multiply-adds copies past the registers."""
        return bool(self.asynchronous.any())

    @cached_property
    def register_tile(self) -> Mapping[str, Ints]:
        return {axis: self.thread[axis] * self.vthreads[axis] for axis in self.block}

    @cached_property
    def threads(self) -> Mapping[str, Ints]:
        return {axis: self.block[axis] // self.register_tile[axis] for axis in self.block}

    @cached_property
    def threads_per_block(self) -> Ints:
        total = product(self.threads.values(), self.count) * self.reduce_threads
        return np.where(self.warp_tile, total * 32, total) if self.has_warp_tiles else total

    @cached_property
    def _warps(self) -> dict[int, Ints]:
        return {}

    def warps(self, lanes: int) -> Ints:
        """Warps of ``lanes`` threads per block."""
        known = self._warps.get(lanes)
        if known is None:
            known = self._warps[lanes] = -(-self.threads_per_block // lanes)
        return known

    @cached_property
    def has_warp_tiles(self) -> bool:
        """Whether any schedule uses matrix instructions."""
        return bool(self.warp_tile.any())

    @cached_property
    def reduced_points(self) -> Ints:
        """Points along the reduction per output of a block, whole steps."""
        return product([self.step_counts[axis] * self.step[axis] for axis in self.step], self.count)

    @cached_property
    def grid(self) -> Mapping[str, Ints]:
        """Blocks along each spatial axis."""
        return {axis: -(-self.form.sizes[axis] // block) for axis, block in self.block.items()}

    @cached_property
    def block_count(self) -> Ints:
        return product(self.grid.values(), self.count)

    @cached_property
    def step_counts(self) -> Mapping[str, Ints]:
        return {axis: -(-self.form.sizes[axis] // step) for axis, step in self.step.items()}

    @cached_property
    def step_count(self) -> Ints:
        """Steps of a block along all reduction axes together."""
        return product(self.step_counts.values(), self.count)

    @cached_property
    def step_points(self) -> Ints:
        """Points of the reduction that a block handles during a step."""
        return product(self.step.values(), self.count)

    @cached_property
    def thread_points(self) -> Floats:
        """Points of the reduction that one thread handles during a step."""
        return np.ceil(self.step_points / self.reduce_threads)

    @cached_property
    def accumulators(self) -> Ints:
        """Output elements per thread (per warp for matrix instructions)."""
        return product(self.register_tile.values(), self.count)

    @cached_property
    def lane_coordinates(self) -> dict[int, dict[str, Ints]]:
        """Remembered by :mod:`sokoban.model.gpu.banks`: warp size -> first element of every lane, by axis."""
        return {}

    @cached_property
    def lane_parts(self) -> dict[tuple[Load, int], tuple[Ints, Ints]]:
        """Remembered by :func:`sokoban.model.gpu.banks.lane_parts`."""
        return {}

    @cached_property
    def lane_addresses(self) -> dict[tuple[Load, int], Ints]:
        """Remembered by :func:`sokoban.model.gpu.banks.tensor_lane_addresses`."""
        return {}

    @cached_property
    def _extents(self) -> dict[Load, tuple[Ints, ...]]:
        return {}

    def extents(self, load: Load) -> tuple[Ints, ...]:
        """Extents of the data tile of ``load`` for one step of one block, without storage padding."""
        known = self._extents.get(load)
        if known is None:
            known = tuple(data_dimension(index).extent(self.block_tile) for index in load.indices)
            self._extents[load] = known
        return known

    def by_order(
        self, load: Load, of: Callable[[tuple[int, ...]], tuple[Any, ...]], lanes: bool = False
    ) -> tuple[Any, ...]:
        """``of(order)`` for the order in which each schedule's tile of ``load`` is stored: arrays whose last axis has
        the schedules, or the first one with ``lanes`` behind it."""
        common, (order, other, turned) = self._orders(load)
        if common is not None:
            return of(common)
        pairs = zip(of(other), of(order), strict=True)
        return tuple(np.where(turned[:, None] if lanes else turned, a, b) for a, b in pairs)

    def _orders(self, load: Load) -> tuple[tuple[int, ...] | None, tuple[Any, ...]]:
        """The order in which all tiles of ``load`` are stored, if there is one; both orders and who is turned."""
        known = self._known_orders.get(load)
        if known is None:
            order, turned = tuple(range(len(load.indices))), self.turned.get(load.tensor)
            common: tuple[int, ...] | None = order
            other = order
            if turned is not None and turned.any():
                walked = [axis for axis in self.form.spatial if self.form.sizes[axis] > 1]
                other = storage_order(load, walked, self.form.batch_axes)
                common = other if other == order or turned.all() else None
            known = self._known_orders[load] = common, (order, other, turned)
        return known

    @cached_property
    def _known_orders(self) -> dict[Load, tuple[tuple[int, ...] | None, tuple[Any, ...]]]:
        return {}

    @cached_property
    def _stored_rows(self) -> dict[Load, Ints]:
        return {}

    def stored_row(self, load: Load) -> Ints:
        """Elements of a row of the data tile of ``load`` as it is stored, without padding."""
        known = self._stored_rows.get(load)
        if known is None:
            extents = self.extents(load)
            known = self.by_order(load, lambda order: (extents[order[-1]] + self.zeros,))[0]
            self._stored_rows[load] = known
        return known

    def is_turned(self, load: Load) -> Bools | None:
        """Whether the tile of ``load`` is stored turned, by schedule; None where none is."""
        common, (order, other, turned) = self._orders(load)
        return None if common == order else np.ones(self.count, dtype=bool) if common == other else turned

    @cached_property
    def operand_elements(self) -> Mapping[Load, Ints]:
        """Elements of each body load that a thread reads per point of the inner reduction loop."""
        tile: dict[str, Any] = {**self.register_tile, **dict.fromkeys(self.step, 1)}
        return {
            load: product([data_dimension(index).extent(tile) for index in load.indices], self.count)
            for load in self.form.body_loads
        }

    @cached_property
    def operand_width(self) -> Mapping[Load, Ints]:
        """How many of the elements a thread reads of each body load are adjacent, up to four."""
        return {load: self._width(load) for load in self.form.body_loads}

    def _width(self, load: Load) -> Ints:
        def along(order: tuple[int, ...]) -> tuple[Ints]:
            width = self.ones
            for axis, coefficient in data_dimension(load.indices[order[-1]]).terms if order else ():
                if axis in self.thread and coefficient == 1:
                    width = np.gcd(self.thread[axis], 4)
            return (width,)

        found: Ints = self.by_order(load, along)[0]
        return found

    @cached_property
    def block_tile(self) -> Mapping[str, Ints]:
        """The tile of all axes that one step of one block covers; the columns of a ``rows`` kernel in full."""
        tile = {**self.block, **self.step}
        for axis in self.form.columns:
            tile[axis] = np.full(self.count, self.form.sizes[axis], dtype=np.int64)
        return tile


def join(tables: Sequence[ScheduleTable]) -> ScheduleTable:
    """The rows of several tables of one operator, one table after the other."""
    return _from_columns(tables, np.concatenate)


def _from_columns(tables: Sequence[ScheduleTable], make: Callable[[list[Any]], Any]) -> ScheduleTable:
    """A table whose every column is made of the same column of ``tables``."""
    first, made = tables[0], {}
    for each in fields(ScheduleTable):
        value = getattr(first, each.name)
        if isinstance(value, np.ndarray):
            made[each.name] = make([getattr(table, each.name) for table in tables])
        elif isinstance(value, Mapping):
            made[each.name] = {name: make([getattr(table, each.name)[name] for table in tables]) for name in value}
    return replace(first, **made)


def product(columns: Iterable[Ints], count: int) -> Ints:
    """Row-wise product of some columns; ones where there are none."""
    total: Ints | None = None
    for column in columns:
        total = column if total is None else total * column
    if total is None:
        return np.ones(count, dtype=np.int64)
    # A column that is the same for every row may be a single number.
    return total if getattr(total, "shape", ()) == (count,) else np.broadcast_to(total, (count,))
