"""What a rank of a plan holds: its part of the model, gathered parameters, and as much of micro-batches as are under way.

The moments of a rank are the operators of its stage, once for every pass of a micro-batch, in the order of the schedule.
FSDP's buffers follow PyTorch's ``fully_shard``: the gathered array of a unit stays until the next one has arrived, its
parameters are copied out of it, a unit's gradients go into an array that stays until the next unit's is sent, and what
side streams allocate comes from pools of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from daydream.graph.graph import Phase
from daydream.graph.memory import MemoryKind
from daydream.memory.device import context_bytes, handle_bytes
from daydream.memory.footprint import Allocation, Footprint, allocations, replayed
from daydream.plan.layout import Layout, orders
from daydream.trace.dtypes import element_bytes
from daydream.trace.trace import NONE

if TYPE_CHECKING:
    from daydream.plan.units import Units
    from hal.spec.device import DeviceSpec

#: Bytes of what optimizers compute in, and of copies of parameters that they keep.
_FULL = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class RankMemory:
    """What a rank of a stage needs of its board, in bytes.

    Attributes:
        main: what the stream of the step's own kernels allocates.
        beside: what streams of collectives allocate.
        handles: workspace of cuBLAS.
        context: of the process.
    """

    main: Footprint
    beside: Footprint
    handles: int
    context: int

    @cached_property
    def _replays(self) -> tuple[tuple[int, int], ...]:
        pools = [replayed(each, steps=2) for each in (self.main, self.beside)]
        return tuple((each.peak_allocated, each.peak_reserved) for each in pools)

    @property
    def allocated(self) -> int:
        """Largest number of bytes in blocks; both pools at their peaks."""
        return sum(allocated for allocated, _ in self._replays) + self.handles

    @property
    def reserved(self) -> int:
        """Largest number of bytes in segments: ``torch.cuda.max_memory_reserved``."""
        return sum(reserved for _, reserved in self._replays) + self.handles

    @property
    def on_device(self) -> int:
        """What nvidia-smi shows of the process, without what NCCL takes for itself."""
        return self.reserved + self.context

    @cached_property
    def owners(self) -> dict[MemoryKind, int]:
        """Bytes at the peak of the step's own stream by kind, with those of other streams at the same moment."""
        peak = self.main.peak
        sums = {kind: int(self.main.by_kind(kind)[peak] + self.beside.by_kind(kind)[peak]) for kind in MemoryKind}
        return {kind: size for kind, size in sums.items() if size}


def rank_memory(units: Units, layout: Layout, stage: int, device: DeviceSpec) -> RankMemory:
    """The memory of a rank of one stage."""
    moments = _Moments.of(units, _shortened(layout), stage)
    held = list(_Holding(units, layout, moments).all())
    count = max(moments.count, 1)
    main = sorted((each for each, beside in held if not beside), key=lambda each: each.born)
    beside = sorted((each for each, beside in held if beside), key=lambda each: each.born)
    return RankMemory(
        main=Footprint(count, tuple(main)),
        beside=Footprint(count, tuple(beside)),
        handles=handle_bytes(units.capture, device),
        context=context_bytes(device),
    )


def _shortened(layout: Layout) -> Layout:
    """The layout with no more micro-batches than it takes until a stage holds as much as it ever will."""
    if layout.schedule == "gpipe":
        return layout
    needed = (3 if layout.schedule == "interleaved" else 1) * layout.pipeline + (layout.schedule != "interleaved")
    return replace(layout, micro_batches=min(layout.micro_batches, needed))


@dataclass(frozen=True, eq=False)
class _Moments:
    """Passes of a stage, one after the other.

    Attributes:
        stage: its number.
        chunks: units of every chunk of the stage.
        begins: first moment of every pass by whether forward, micro-batch and chunk.
        place: of every operator within its pass; -1 outside the stage.
        chunk: of every operator; -1 outside the stage.
        update: first moment of the update.
        count: of moments.
    """

    stage: int
    chunks: tuple[tuple[int, ...], ...]
    begins: dict[tuple[bool, int, int], int]
    lengths: dict[tuple[bool, int], int]
    place: np.ndarray
    chunk: np.ndarray
    update: int
    count: int
    micro_batches: int

    @classmethod
    def of(cls, units: Units, layout: Layout, stage: int) -> _Moments:
        runs = units.stages(layout.pipeline * layout.chunks)
        chunks = tuple(tuple(runs[chunk * layout.pipeline + stage]) for chunk in range(layout.chunks))
        size = len(units.capture.operators)
        place, chunk = np.full(size, NONE), np.full(size, NONE)
        lengths: dict[tuple[bool, int], int] = {}
        for number, members in enumerate(chunks):
            for forward, phase in ((True, Phase.FORWARD), (False, Phase.BACKWARD)):
                rows = np.flatnonzero(np.isin(units.unit, members) & (units.phase == phase))
                place[rows], chunk[rows] = np.arange(len(rows)), number
                lengths[forward, number] = max(len(rows), 1)
        begins, at = {}, 0
        for forward, micro_batch, number in orders(layout, stage):
            begins[forward, micro_batch, number] = at
            at += lengths[forward, number]
        updates = np.flatnonzero(units.phase == Phase.UPDATE)
        place[updates] = np.arange(len(updates))
        return cls(stage, chunks, begins, lengths, place, chunk, at, at + max(len(updates), 1), layout.micro_batches)


@dataclass(frozen=True, eq=False)
class _Holding:
    """Everything that a rank holds, each with whether a stream of collectives allocates it."""

    units: Units
    layout: Layout
    moments: _Moments
    members: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", frozenset(unit for chunk in self.moments.chunks for unit in chunk))

    def all(self) -> Iterator[tuple[Allocation, bool]]:
        """In any order."""
        yield from ((each, False) for each in self._kept())
        if self.layout.shard == "fsdp":
            yield from self._gathered()
        for each in allocations(self.units.capture):
            if each.born != NONE and each.bytes:
                yield from ((one, False) for one in self._of_step(each))
        if self.layout.shard != "fsdp":
            yield from ((each, False) for each in self._buckets())

    # What outlives the step

    def _kept(self) -> Iterator[Allocation]:
        """Parameters, their copies in full precision, states of the optimizer, buffers and inputs."""
        capture, layout = self.units.capture, self.layout
        states = sum(each.bytes for each in capture.storages if each.kind == "optimizer")
        whole = sum(each.tensor.bytes for each in capture.parameters if each.trained)
        end = self.moments.count
        for each, unit in zip(capture.parameters, self.units.parameter_unit.tolist(), strict=True):
            if unit not in self.members:
                continue
            size, elements = element_bytes(each.tensor.dtype), each.tensor.elements
            full = _FULL if layout.master and each.trained else size
            shared, part = self._part(each.tensor.dims), self._part(each.tensor.dims, states=True)
            yield Allocation(shared * (full if layout.shard == "fsdp" else size), NONE, end, MemoryKind.WEIGHTS)
            if each.trained and whole:
                if layout.shard != "fsdp" and full > size:
                    yield Allocation(part * full, NONE, end, MemoryKind.OPTIMIZER)
                yield Allocation(ceil(part * full * states / whole), NONE, end, MemoryKind.OPTIMIZER)
            del elements
        for storage in capture.storages:
            if storage.kind in ("buffer", "input") and storage.bytes:
                kind = MemoryKind.INPUTS if storage.kind == "input" else MemoryKind.WEIGHTS
                yield Allocation(storage.bytes, NONE, end, kind)

    def _part(self, dims: tuple[int, ...], *, states: bool = False) -> int:
        """Elements of a parameter that the rank keeps: PyTorch divides the first dimension."""
        rows = dims[0] if dims else 1
        rest = int(np.prod(dims[1:], dtype=np.int64)) if dims else 1
        divided = self.layout.shard == "fsdp" or (states and self.layout.shard == "zero1")
        return (ceil(rows / self.layout.data) if divided else rows) * rest

    # What a micro-batch holds

    def _of_step(self, each: Allocation) -> Iterator[Allocation]:
        moments, units = self.moments, self.units
        operators = len(units.capture.operators)
        phase = units.phase[each.born]
        if phase == Phase.UPDATE:
            share = self._updated_share()
            if share:
                begin = moments.update + int(moments.place[each.born])
                end = moments.count if each.died >= operators else moments.update + int(moments.place[each.died])
                yield replace(each, bytes=ceil(each.bytes * share), born=begin, died=end)
            return
        is_gradient = each.kind is MemoryKind.GRADIENTS
        if is_gradient and int(units.unit[each.born]) not in self.members:
            return
        for micro_batch in range(moments.micro_batches):
            interval = self._interval(each.born, each.died, micro_batch, operators)
            if interval is None:
                continue
            born, died = interval
            if is_gradient:
                died = self._gradient_end(born, each.born, micro_batch)
            yield replace(each, born=born, died=died)

    def _gradient_end(self, born: int, operator: int, micro_batch: int) -> int:
        """How long a gradient stays: for good, until it is added to the first micro-batch's, or until it is sent."""
        if self.layout.shard == "fsdp":
            return self._unit_end(int(self.units.unit[operator]), micro_batch, forward=False)
        return self.moments.count if micro_batch == 0 else born

    def _interval(self, born: int, died: int, micro_batch: int, operators: int) -> tuple[int, int] | None:
        """Moments of a storage of one micro-batch; None where the stage has nothing to do with it.

        What comes from another stage is there from when the pass begins that needs it; what goes to another leaves
        with the end of the pass.
        """
        place, chunk, begins, moments = self.moments.place, self.moments.chunk, self.moments.begins, self.moments
        phase = self.units.phase
        last = min(died, operators - 1)
        inside_born, inside_died = chunk[born] != NONE, chunk[last] != NONE and phase[last] != Phase.UPDATE
        if not inside_born and not inside_died:
            return None

        def at(operator: int) -> int:
            forward = phase[operator] == Phase.FORWARD
            return begins[bool(forward), micro_batch, int(chunk[operator])] + int(place[operator])

        if inside_born and inside_died:
            return at(born), max(at(last), at(born))
        if inside_died:
            # It is received for the pass of its last use, or for the forward pass where that keeps it.
            forward = phase[born] == Phase.FORWARD
            return min(begins[bool(forward), micro_batch, int(chunk[last])], at(last)), at(last)
        if died >= operators:
            return at(born), moments.count
        forward = bool(phase[born] == Phase.FORWARD)
        number = int(chunk[born])
        return at(born), begins[forward, micro_batch, number] + moments.lengths[forward, number] - 1

    def _updated_share(self) -> float:
        """What part of all the update's temporaries a rank has."""
        layout, units = self.layout, self.units
        whole = float(units.trained.sum())
        own = float(sum(units.trained[unit] for unit in self.members))
        divided = layout.data if layout.shard != "none" else 1
        sizes = {element_bytes(each.tensor.dtype) for each in units.capture.parameters if each.trained}
        wider = _FULL / min(sizes) if layout.master and sizes else 1.0
        return own / whole / divided * wider if whole else 0.0

    # Buffers of collectives

    def _buckets(self) -> Iterator[Allocation]:
        """DDP's buckets, into which gradients are copied."""
        if self.layout.data == 1 or not self.layout.overlap or self.layout.pipeline > 1:
            return
        for each, unit in zip(self.units.capture.parameters, self.units.parameter_unit.tolist(), strict=True):
            if unit in self.members and each.trained:
                yield Allocation(each.tensor.bytes, NONE, self.moments.count, MemoryKind.GRADIENTS)

    def _unit_begin(self, unit: int, micro_batch: int, *, forward: bool) -> int:
        return self._edge(unit, micro_batch, forward=forward, which=0)

    def _unit_end(self, unit: int, micro_batch: int, *, forward: bool) -> int:
        return self._edge(unit, micro_batch, forward=forward, which=-1)

    def _edge(self, unit: int, micro_batch: int, *, forward: bool, which: int) -> int:
        """First or last moment of a unit in a pass; the root's are those of the whole stage."""
        moments, units = self.moments, self.units
        if unit in (0, units.count - 1):
            chunk = next(number for number, members in enumerate(moments.chunks) if unit in members)
            begin = moments.begins[forward, micro_batch, chunk]
            if which == 0:
                return begin
            if forward:
                return begin + self._model_end(chunk)
            return begin + moments.lengths[forward, chunk] - 1
        rows = units.rows(unit, Phase.FORWARD if forward else Phase.BACKWARD)
        row = int(rows[which])
        return moments.begins[forward, micro_batch, int(moments.chunk[row])] + int(moments.place[row])

    def _model_end(self, chunk: int) -> int:
        """Place of the last operator of a forward pass that belongs to the model, and not to its loss."""
        operators = self.units.capture.operators
        rows = np.flatnonzero((self.moments.chunk == chunk) & (self.units.phase == Phase.FORWARD))
        inside = [row for row in rows.tolist() if operators[row].module != NONE]
        return int(self.moments.place[inside[-1]]) if inside else 0

    def _gathered(self) -> Iterator[tuple[Allocation, bool]]:
        """Arrays of FSDP's collectives and the parameters copied out of them."""
        layout, moments, units = self.layout, self.moments, self.units
        keeps = layout.pipeline > 1
        blocks = [unit for chunk in moments.chunks for unit in chunk if 0 < unit < units.count - 1]
        roots = [unit for chunk in moments.chunks for unit in chunk if unit in (0, units.count - 1)]
        sizes = {unit: self._sizes(unit) for unit in (*blocks, *roots)}
        for micro_batch in range(moments.micro_batches):
            last = micro_batch == moments.micro_batches - 1
            for unit in (*roots, *blocks):
                whole, parts = sizes[unit]
                if not whole:
                    continue
                begin, end = (self._unit_begin(unit, micro_batch, forward=True), self._unit_end(unit, micro_batch, forward=True))
                back, done = (self._unit_begin(unit, micro_batch, forward=False), self._unit_end(unit, micro_batch, forward=False))
                if keeps:
                    if micro_batch == 0:
                        yield from self._unsharded(whole, parts, begin, end, moments.update)
                else:
                    stays = unit == units.count - 2
                    yield from self._unsharded(whole, parts, begin, end, done if stays else end)
                    if not stays:
                        # It is asked for while the block behind it runs.
                        asked = self._unit_begin(unit + 1, micro_batch, forward=False) if unit in blocks else back
                        yield Allocation(whole, asked, back, MemoryKind.TEMPORARY), True
                        yield from ((Allocation(size, back, done, MemoryKind.WEIGHTS), False) for size in parts)
                if not keeps or last:
                    yield from self._reduced(unit, done, micro_batch)

    def _unsharded(
        self, whole: int, parts: list[int], begin: int, end: int, until: int
    ) -> Iterator[tuple[Allocation, bool]]:
        yield Allocation(whole, begin, min(end + 1, self.moments.count - 1), MemoryKind.TEMPORARY), True
        yield from ((Allocation(size, begin, until, MemoryKind.WEIGHTS), False) for size in parts)

    def _reduced(self, unit: int, done: int, micro_batch: int) -> Iterator[tuple[Allocation, bool]]:
        """The array that is sent, held until the next one is, and the rank's part of the sums."""
        elements = int(self.units.trained[unit])
        if not elements:
            return
        size = self.layout.reduce_bytes or self._compute_bytes()
        is_block = 0 < unit < self.units.count - 1
        until = done
        if is_block and unit - 1 in self.members and unit > 1:
            until = self._unit_end(unit - 1, micro_batch, forward=False)
        yield Allocation(elements * size, done, until, MemoryKind.TEMPORARY), False
        kind = MemoryKind.GRADIENTS if micro_batch == 0 else MemoryKind.TEMPORARY
        stays = self.moments.count if micro_batch == 0 else done
        yield Allocation(ceil(elements / self.layout.data) * size, done, stays, kind), True

    def _sizes(self, unit: int) -> tuple[int, list[int]]:
        """Bytes of a unit's gathered array, and of every parameter in it."""
        members = zip(self.units.capture.parameters, self.units.parameter_unit.tolist(), strict=True)
        parts = [each.tensor.bytes for each, of in members if of == unit]
        return sum(parts), parts

    def _compute_bytes(self) -> int:
        return max((element_bytes(each.tensor.dtype) for each in self.units.capture.parameters), default=_FULL)
