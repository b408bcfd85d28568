"""Many schedules of one operator as NumPy columns, one entry per candidate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.support.records import quick
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.regions import data_dimension, storage_order
from sokoban.language.expression import Load
from sokoban.schedule.tile import COPYING_THREADS, Sizes, TileSchedule

Ints = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]


#: Instructions in the order of their numbers in a table.
INSTRUCTIONS = tuple(Instruction)
#: Number of every instruction in a table.
INSTRUCTION_NUMBER: Mapping[Instruction, int] = {each: number for number, each in enumerate(INSTRUCTIONS)}
_FMA = INSTRUCTION_NUMBER[Instruction.FMA]
_IS_MATRIX = np.array([each.is_matrix for each in INSTRUCTIONS])
_IS_SWIZZLED = np.array([each.is_swizzled for each in INSTRUCTIONS])

#: The size of a pair of axis and size.
_SIZE = itemgetter(1)

#: Columns of a table that belong to no axis and no tensor, but for bands.
_SINGLE = ("reduce_threads", "unroll", "stages", "asynchronous", "instruction", "cluster", "launched", "kept_columns")


def instruction_numbers(instructions: Iterable[Instruction]) -> Ints:
    """The column of a table for some instructions.

    >>> instruction_numbers([Instruction.FMA, Instruction.WGMMA]).tolist()
    [0, 5]
    """
    return np.array([INSTRUCTION_NUMBER[each] for each in instructions], dtype=np.int64)


def one(values: object) -> float:
    """The entry of an array that has a single one.

    >>> one(np.array([[2.5]]))
    2.5
    """
    return float(np.ravel(np.asarray(values))[0])


def shares_rows(table: ScheduleTable) -> Bools:
    """Schedules whose threads share the columns of a row."""
    return np.full(table.count, True) if table.form.is_rows else table.reduce_threads > 1


@dataclass(frozen=True, eq=False, kw_only=True)
class ScheduleTable:
    """Columns of ``count`` schedules of one operator; every array has one entry per schedule.

    Attributes:
        form: the operator.
        block: elements per block, by spatial axis.
        thread: adjacent elements per thread, by spatial axis.
        vthreads: strided copies per thread, by spatial axis.
        step: elements per step, by reduction axis.
        reduce_threads: threads along the reduction, all axes together.
        cached: whether a tensor is staged in shared memory, by tensor.
        padding: storage padding of staged tiles in elements, by tensor.
        vector: elements per access of a tensor's fetch (or of the output's stores), by tensor; 0, and a tensor that is
            missing, stand for the widest legal access.
        unroll: largest number of inner-loop iterations that the code generator unrolls; 0 leaves all of it to the
            compiler.
        inner_thread: the part of ``thread`` in the innermost loops, by axis; all of it for a missing axis.
        inner_step: the part of ``step`` in the innermost loops, by axis; all of it for a missing axis. The loops of a
            thread are, outermost first: over parts of the step, over parts of the thread's elements, ``inner_step``,
            ``inner_thread``, the virtual threads.
        stages: buffers of the staged tiles; 1 everywhere where it is left out.
        turned: whether a staged tile is stored turned, by tensor; a missing tensor is not.
        instruction: number of what computes the tiles, of :data:`INSTRUCTIONS`; multiply-adds everywhere where it is
            left out. With matrix instructions ``thread`` is per warp.
        asynchronous: pipelines of multiply-adds that copy past the registers; none where it is left out.
        raster: adjacent blocks of a band of launch order; 0 (no bands) everywhere where it is left out.
        cluster: blocks that have a tile in common copied by one read, 0 where threads copy; 0 everywhere where it is
            left out.
        launched: blocks of a launch that compute one tile after another; 0 (one tile each) everywhere where it is left
            out.
        kept_columns: columns of a row that its threads keep in shared memory; 0 everywhere where it is left out.
        reads: widest read of an operand in elements, by tensor, as kernels of others spell it out; 0, and a missing
            tensor, leave it to the compiler.
        pieces: adjacent elements that a thread copies of a staged tile, by accesses of ``vector``, by tensor; 0, and a
            missing tensor, stand for one access.
        waits: times that a thread waits for its copies of a step, by tensor, as loops of kernels of others make it; 0,
            and a missing tensor, leave it to the compiler.
        branches: whether guarded copies of a tensor are branches, whose loads hardly overlap, by tensor, as in kernels
            of others whose steps are written out; a missing tensor's are in a single step.
        address: integer instructions of every read in place for its address or guard, by tensor, where kernels of
            others need some; 0, and a missing tensor, stand for constants within the read itself.
    """

    form: KernelForm
    block: Mapping[str, Ints]
    thread: Mapping[str, Ints]
    vthreads: Mapping[str, Ints]
    step: Mapping[str, Ints]
    reduce_threads: Ints
    cached: Mapping[str, Bools]
    padding: Mapping[str, Ints]
    vector: Mapping[str, Ints]
    unroll: Ints
    inner_thread: Mapping[str, Ints] = field(default_factory=dict)
    inner_step: Mapping[str, Ints] = field(default_factory=dict)
    stages: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    turned: Mapping[str, Bools] = field(default_factory=dict)
    instruction: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    asynchronous: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    raster: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    cluster: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    launched: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    kept_columns: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    reads: Mapping[str, Ints] = field(default_factory=dict)
    pieces: Mapping[str, Ints] = field(default_factory=dict)
    waits: Mapping[str, Ints] = field(default_factory=dict)
    branches: Mapping[str, Bools] = field(default_factory=dict)
    address: Mapping[str, Ints] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.stages) != self.count:
            object.__setattr__(self, "stages", self.ones)
        if len(self.asynchronous) != self.count:
            object.__setattr__(self, "asynchronous", np.zeros(self.count, dtype=np.bool_))
        for name in ("instruction", "raster", "cluster", "launched", "kept_columns"):
            if len(getattr(self, name)) != self.count:
                object.__setattr__(self, name, self.zeros)

    @staticmethod
    def of(form: KernelForm, schedules: Sequence[TileSchedule]) -> ScheduleTable:
        """The table of some schedules; their axes must be those of ``form``, in its order."""
        lines = Lines(form)
        return lines.table(lines.of(schedules), schedules)

    @staticmethod
    def of_lines(
        form: KernelForm, tensors: tuple[str, ...], lines: Ints, padding: Mapping[str, Ints], raster: Ints
    ) -> ScheduleTable:
        """The table of some :attr:`lines`, with the other columns that a schedule may have."""
        rows = iter(lines)
        flags = 3 * len(form.spatial) + len(form.reduced) + len(_SINGLE)
        columns: dict[str, Any] = {
            "block": dict(zip(form.spatial, rows, strict=False)),
            "thread": dict(zip(form.spatial, rows, strict=False)),
            "vthreads": dict(zip(form.spatial, rows, strict=False)),
            "step": dict(zip(form.reduced, rows, strict=False)),
            **dict(zip(_SINGLE, rows, strict=False)),
        }
        columns["asynchronous"] = columns["asynchronous"] != 0
        are_listed = iter(lines[flags : flags + 2 * len(tensors)] != 0)
        return quick(
            ScheduleTable,
            form=form,
            lines=lines,
            cached=dict(zip(tensors, are_listed, strict=False)),
            turned=dict(zip(tensors, are_listed, strict=False)),
            vector=dict(zip((*tensors, form.expr.output.name), lines[flags + 2 * len(tensors) :], strict=True)),
            padding=padding,
            raster=raster,
            inner_thread={},
            inner_step={},
            reads={},
            pieces={},
            waits={},
            branches={},
            address={},
            **columns,
        )

    @cached_property
    def lines(self) -> Ints:
        """The columns as one matrix, in which compiled code reads them: by axis those of ``block``, ``thread``,
        ``vthreads`` and ``step``, then :data:`_SINGLE`, and by tensor those of ``cached``, ``turned`` and ``vector``,
        the output's behind them.

        Storage padding and bands are not among them, which change while the rest stays, nor are loops cut twice and
        widths that kernels of others spell out.
        """
        tensors, nothing = tuple(self.cached), self.zeros
        lines: list[Any] = [line for by in (self.block, self.thread, self.vthreads, self.step) for line in by.values()]
        lines += [getattr(self, name) for name in _SINGLE]
        lines += self.cached.values()
        lines += [self.turned.get(name, nothing) for name in tensors]
        lines += [self.vector.get(name, nothing) for name in (*tensors, self.form.expr.output.name)]
        return np.array(lines, dtype=np.int64).reshape(len(lines), self.count)

    def with_padding(self, padding: Mapping[str, Ints]) -> ScheduleTable:
        """The schedules with other storage padding; what was derived from the other columns stays known."""
        padded = object.__new__(ScheduleTable)
        padded.__dict__.update(self.__dict__, padding=padding)
        return padded

    def with_raster(self, raster: Ints) -> ScheduleTable:
        """The schedules in bands of other widths; what was derived from the other columns stays known."""
        banded = object.__new__(ScheduleTable)
        banded.__dict__.update(self.__dict__, raster=raster)
        return banded

    def with_layout(
        self, turned: Mapping[str, Bools], unroll: Ints, stages: Ints, asynchronous: Bools
    ) -> ScheduleTable:
        """The schedules with other tiles turned, bodies unrolled and steps fetched ahead; their loops not cut twice."""
        lines, single = self.lines.copy(), 3 * len(self.block) + len(self.step)
        for name, column in (("unroll", unroll), ("stages", stages), ("asynchronous", asynchronous)):
            lines[single + _SINGLE.index(name)] = column
        for number, tensor in enumerate(self.cached, single + len(_SINGLE) + len(self.cached)):
            lines[number] = turned[tensor]
        return ScheduleTable.of_lines(self.form, tuple(self.cached), lines, self.padding, self.raster)

    def candidates(self, which: slice | Ints) -> ScheduleTable:
        """The schedules at some positions, in the order given."""
        lines = self.__dict__.get("lines")
        if lines is not None:
            padding = {tensor: amounts[which] for tensor, amounts in self.padding.items()}
            chosen_lines = np.ascontiguousarray(lines[:, which])
            return ScheduleTable.of_lines(self.form, tuple(self.cached), chosen_lines, padding, self.raster[which])
        chosen: dict[str, Any] = {"form": self.form}
        for name in _COLUMNS:
            column = self.__dict__[name]
            if isinstance(column, np.ndarray):
                chosen[name] = column[which]
            else:
                chosen[name] = {key: values[which] for key, values in column.items()}
        return quick(ScheduleTable, **chosen)

    @cached_property
    def count(self) -> int:
        """Schedules of the table."""
        return len(self.reduce_threads)

    @cached_property
    def ones(self) -> Ints:
        """A one per schedule, not to be written to."""
        return np.ones(self.count, dtype=np.int64)

    @cached_property
    def zeros(self) -> Ints:
        """A zero per schedule, not to be written to."""
        return np.zeros(self.count, dtype=np.int64)

    @property
    def spells_out(self) -> bool:
        """True if schedules cut loops twice or say how a thread reads: what compiled code does not know."""
        spelled = (self.inner_thread, self.inner_step, self.reads, self.pieces, self.waits, self.branches, self.address)
        return any(spelled)

    def instruction_at(self, position: int) -> Instruction:
        """Instruction that computes the tiles of one schedule."""
        return INSTRUCTIONS[self.instruction[position]]

    @cached_property
    def warp_tile(self) -> Bools:
        """Schedules whose tiles belong to warps: those by matrix instructions."""
        return _IS_MATRIX[self.instruction]

    @cached_property
    def mma(self) -> Bools:
        """Schedules by ``mma.sync`` or ``wgmma``: their operands are copied past the registers."""
        return _IS_SWIZZLED[self.instruction]

    @cached_property
    def wgmma(self) -> Bools:
        """Schedules by warp groups."""
        return self.instruction == INSTRUCTION_NUMBER[Instruction.WGMMA]

    @cached_property
    def bulk(self) -> Bools:
        """Schedules whose tiles are copied in bulk."""
        return self.cluster > 0

    @cached_property
    def has_stages(self) -> bool:
        """True if any schedule fetches ahead."""
        return bool((self.stages > 1).any())

    @cached_property
    def has_asynchronous(self) -> bool:
        """True if any schedule of multiply-adds copies past the registers."""
        return bool(self.asynchronous.any())

    @cached_property
    def register_tile(self) -> Mapping[str, Ints]:
        """Elements of the output that a thread accumulates (a warp for matrix instructions), by spatial axis."""
        return {axis: self.thread[axis] * self.vthreads[axis] for axis in self.block}

    @cached_property
    def threads(self) -> Mapping[str, Ints]:
        """Threads along each spatial axis; warps for matrix instructions."""
        return {axis: self.block[axis] // self.register_tile[axis] for axis in self.block}

    @cached_property
    def threads_per_block(self) -> Ints:
        """Threads of a block, 32 for every tile of a warp."""
        owners = product(self.threads.values(), self.count) * self.reduce_threads
        if not self.has_warp_tiles:
            return owners
        return np.where(self.warp_tile, owners * 32 + np.where(self.bulk, COPYING_THREADS, 0), owners)

    @cached_property
    def _warps(self) -> dict[int, Ints]:
        return {}

    def warps(self, lanes: int) -> Ints:
        """Warps of ``lanes`` threads per block."""
        memo = self._warps.get(lanes)
        if memo is None:
            memo = self._warps[lanes] = -(-self.threads_per_block // lanes)
        return memo

    @cached_property
    def has_warp_tiles(self) -> bool:
        """True if any schedule uses matrix instructions."""
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
        """Blocks of the launch."""
        return product(self.grid.values(), self.count)

    @cached_property
    def step_counts(self) -> Mapping[str, Ints]:
        """Steps along each reduction axis."""
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
        memo = self._extents.get(load)
        if memo is None:
            memo = tuple(data_dimension(index).extent(self.block_tile) for index in load.indices)
            self._extents[load] = memo
        return memo

    def by_order(
        self, load: Load, of: Callable[[tuple[int, ...]], tuple[Any, ...]], lanes: bool = False
    ) -> tuple[Any, ...]:
        """``of(order)`` for the order of dimensions in which each schedule stores its tile of ``load``.

        ``of`` gives arrays whose last axis has the schedules; with ``lanes`` their first one has, the lanes behind it.
        """
        common, (order, other, turned) = self._orders(load)
        if common is not None:
            return of(common)
        pairs = zip(of(other), of(order), strict=True)
        return tuple(np.where(turned[:, None] if lanes else turned, a, b) for a, b in pairs)

    def _orders(self, load: Load) -> tuple[tuple[int, ...] | None, tuple[Any, ...]]:
        """The order in which all tiles of ``load`` are stored, None where they differ; then the tensor's own order, the
        turned one, and which schedules turn it (None where none says so)."""
        memo = self._orders_by_load.get(load)
        if memo is None:
            order, turned = tuple(range(len(load.indices))), self.turned.get(load.tensor)
            common: tuple[int, ...] | None = order
            other = order
            if turned is not None and turned.any():
                other = storage_order(load, self.form.walked, self.form.batch_axes)
                common = other if other == order or turned.all() else None
            memo = self._orders_by_load[load] = common, (order, other, turned)
        return memo

    @cached_property
    def _orders_by_load(self) -> dict[Load, tuple[tuple[int, ...] | None, tuple[Any, ...]]]:
        return {}

    @cached_property
    def _stored_rows(self) -> dict[Load, Ints]:
        return {}

    def stored_row(self, load: Load) -> Ints:
        """Elements of a row of the data tile of ``load`` as it is stored, without padding."""
        memo = self._stored_rows.get(load)
        if memo is None:
            extents = self.extents(load)
            memo = self.by_order(load, lambda order: (extents[order[-1]] + self.zeros,))[0]
            self._stored_rows[load] = memo
        return memo

    def is_turned(self, load: Load) -> Bools | None:
        """Truth of the tile of ``load`` being stored turned, by schedule; None where none is."""
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
        """Number of adjacent elements, up to four, among those a thread reads of each body load."""
        return {load: self._width(load) for load in self.form.body_loads}

    def _width(self, load: Load) -> Ints:
        def along(order: tuple[int, ...]) -> tuple[Ints]:
            width = self.ones
            for axis, coefficient in data_dimension(load.indices[order[-1]]).terms if order else ():
                if axis in self.thread and coefficient == 1:
                    width = np.gcd(self.thread[axis], 4)
            return (width,)

        widths: Ints = self.by_order(load, along)[0]
        return widths

    @cached_property
    def block_tile(self) -> Mapping[str, Ints]:
        """The tile of all axes that one step of one block covers; the columns of a ``rows`` kernel in full."""
        tile = {**self.block, **self.step}
        for axis in self.form.columns:
            tile[axis] = np.full(self.count, self.form.sizes[axis], dtype=np.int64)
        return tile


class Lines:
    """:attr:`ScheduleTable.lines` of schedules of one operator, to be changed before they become a table.

    Attributes:
        tensors: those that a schedule may stage.
        unroll, stages, asynchronous: numbers of these lines.
    """

    def __init__(self, form: KernelForm) -> None:
        self.form = form
        self.tensors = tuple(dict.fromkeys([load.tensor for load in form.body_loads]))
        self._ones = tuple([(axis, 1) for axis in form.spatial])
        # Without a step a reduction axis is walked at once.
        self._whole = tuple([(axis, form.sizes[axis]) for axis in form.reduced])
        step, single, tensors = 3 * len(self._ones), 3 * len(self._ones) + len(self._whole), len(self.tensors)
        self._step = slice(step, single)
        self._reduce_threads, self.unroll, self.stages, self.asynchronous, self._instruction = range(single, single + 5)
        self._cached = slice(single + len(_SINGLE), single + len(_SINGLE) + tensors)
        self._width = self._cached.stop + 2 * tensors + 1

    def of(self, schedules: Sequence[TileSchedule]) -> Ints:
        """The lines of some schedules; their axes must be those of the operator, in its order."""
        # What is said of tensors is the same for most schedules.
        by_tensor: dict[tuple[Any, ...], list[int]] = {}
        numbers: list[int] = []
        for s in schedules:
            numbers += map(_SIZE, chain(s.block, s.thread, s.vthreads or self._ones, s.step or self._whole))
            threads = math.prod([count for _, count in s.reduce_threads]) if s.reduce_threads else 1
            instruction = INSTRUCTION_NUMBER[s.instruction]
            numbers += (threads, s.unroll, s.stages, s.asynchronous, instruction, s.cluster, s.launched, s.kept_columns)
            of_tensors = s.cached, s.turned, s.vector
            if of_tensors not in by_tensor:
                by_tensor[of_tensors] = self._of_tensors(*of_tensors)
            numbers += by_tensor[of_tensors]
        matrix = np.fromiter(numbers, np.int64, len(numbers)).reshape(len(schedules), self._width)
        return np.ascontiguousarray(matrix.T)

    def _of_tensors(self, cached: tuple[str, ...], turned: tuple[str, ...], vector: Sizes) -> list[int]:
        given = dict(vector)
        listed = [name in names for names in (cached, turned) for name in self.tensors]
        return listed + [given.get(name, 0) for name in (*self.tensors, self.form.expr.output.name)]

    def fully_staged(self, lines: Ints) -> Bools:
        """Schedules whose multiply-adds, of threads that work alone, read all tensors from shared memory."""
        staged = (lines[self._instruction] == _FMA) & (lines[self._reduce_threads] == 1)
        for cached in lines[self._cached]:
            staged &= cached != 0
        return staged

    def has_steps(self, lines: Ints) -> Bools:
        """Schedules whose blocks walk the reduction in several steps."""
        several = np.zeros(lines.shape[1], dtype=np.bool_)
        for step, (_, size) in zip(lines[self._step], self._whole, strict=True):
            several |= step < size
        return several

    def turned(self, tensor: str) -> int:
        """The number of the line that says whether tiles of ``tensor`` are stored turned."""
        return self._cached.stop + self.tensors.index(tensor)

    def table(self, lines: Ints, schedules: Sequence[TileSchedule], which: Ints | slice = slice(None)) -> ScheduleTable:
        """The table of some lines, with the padding and the bands of ``schedules`` at the positions ``which``."""
        padding = _by_tensor(self.tensors, [schedule.padding for schedule in schedules])
        padding = {tensor: amounts[which] for tensor, amounts in padding.items()}
        raster = np.array([schedule.raster for schedule in schedules], dtype=np.int64)[which]
        return ScheduleTable.of_lines(self.form, self.tensors, lines, padding, raster)


def _by_tensor(tensors: Sequence[str], sizes: Sequence[Sizes]) -> dict[str, Ints]:
    """Sizes by tensor; 0 where a schedule gives none."""
    if not any(sizes):
        return dict.fromkeys(tensors, np.zeros(len(sizes), dtype=np.int64))
    given = [dict(pairs) for pairs in sizes]
    return {tensor: np.array([each.get(tensor, 0) for each in given], dtype=np.int64) for tensor in tensors}


_COLUMNS = tuple(each.name for each in fields(ScheduleTable) if each.name != "form")


def join(tables: Sequence[ScheduleTable]) -> ScheduleTable:
    """The schedules of several tables of one operator, one table after the other."""
    first = tables[0]
    columns: dict[str, Any] = {}
    for name in _COLUMNS:
        value = getattr(first, name)
        if isinstance(value, np.ndarray):
            columns[name] = np.concatenate([getattr(table, name) for table in tables])
        else:
            columns[name] = {key: np.concatenate([getattr(table, name)[key] for table in tables]) for key in value}
    return replace(first, **columns)


def product(columns: Iterable[Ints], count: int) -> Ints:
    """Entry-wise product of some columns of ``count`` entries; ones where there are none.

    >>> product([np.array([2, 3]), np.array([5, 7])], count=2).tolist(), product([], count=2).tolist()
    ([10, 21], [1, 1])
    """
    total: Ints | None = None
    for column in columns:
        total = column if total is None else total * column
    if total is None:
        return np.ones(count, dtype=np.int64)
    # A column that is the same for every schedule may be a single number.
    return total if getattr(total, "shape", ()) == (count,) else np.broadcast_to(total, (count,))
