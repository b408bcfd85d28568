"""Memory of a rank of a plan: its part of the model, gathered parameters, and the micro-batches that are under way.

The moments of a rank are the operators of its stage, once for every pass of a micro-batch, in the schedule's order.
FSDP's buffers follow PyTorch's ``fully_shard``: the gathered array of a unit stays until the next one has arrived, its
parameters are copied out of it, a unit's gradients go into an array that stays until the next unit's is sent, and what
side streams allocate comes from pools of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, prod
from typing import TYPE_CHECKING

import numpy as np

from daydream.graph.graph import Phase
from daydream.graph.memory import MemoryKind, curve_of
from daydream.memory.device import context_bytes, handle_bytes
from daydream.memory.footprint import Allocation, Footprint, allocations, replayed
from daydream.memory.narrow import kept_bytes, weight_copies
from daydream.plan.layout import Layout
from daydream.plan.moments import Made, Moments, lives
from daydream.trace.dtypes import element_bytes
from daydream.trace.trace import NONE

if TYPE_CHECKING:
    from daydream.capture.captured import CapturedParameter
    from daydream.plan.units import Units
    from hal.spec.device import DeviceSpec

#: Bytes of what optimizers compute in, and of copies of parameters that they keep.
FULL_BYTES = 4

#: Bytes of a step counter at most.
_COUNTER = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class RankMemory:
    """Memory that a rank of a stage needs on its board, in bytes.

    Attributes:
        count: of the stage's moments.
        standing: everything that no micro-batch makes, each with whether a stream of collectives allocates it.
        made: by micro-batches.
        handles: workspace of cuBLAS.
        context: of the process.
    """

    count: int
    standing: tuple[tuple[Allocation, bool], ...]
    made: Made
    handles: int
    context: int

    @cached_property
    def main(self) -> Footprint:
        """Allocations of the stream of the step's own kernels."""
        compute = [*(each for each, exchanged in self.standing if not exchanged), *self.made.allocations()]
        return Footprint(self.count, tuple(sorted(compute, key=lambda each: each.born)))

    @cached_property
    def collectives(self) -> Footprint:
        """Allocations of streams of collectives."""
        exchange = (each for each, exchanged in self.standing if exchanged)
        return Footprint(self.count, tuple(sorted(exchange, key=lambda each: each.born)))

    @cached_property
    def _replays(self) -> tuple[tuple[int, int], ...]:
        pools = [replayed(each, steps=2) for each in (self.main, self.collectives)]
        return tuple((each.peak_allocated, each.peak_reserved) for each in pools)

    @property
    def least(self) -> int:
        """Least memory that nvidia-smi shows: nothing is rounded, and no segment is left half empty."""
        held = curve_of((each for each, _ in self.standing), self.count) + self.made.curve(self.count)
        return int(held.max(initial=0)) + self.handles + self.context

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
        """Memory that nvidia-smi shows of the process, without what NCCL takes for itself."""
        return self.reserved + self.context

    @cached_property
    def owners(self) -> dict[MemoryKind, int]:
        """Bytes at the peak of the step's own stream by kind, with those of other streams at the same moment."""
        peak = self.main.peak
        sums = {kind: int(self.main.by_kind(kind)[peak] + self.collectives.by_kind(kind)[peak]) for kind in MemoryKind}
        return {kind: size for kind, size in sums.items() if size}


def rank_memory(units: Units, layout: Layout, stage: int, device: DeviceSpec) -> RankMemory:
    """The memory of a rank of one stage."""
    units = narrow_units(units)
    holding = _Holding(units, layout, Moments.of(units, _shortened(layout), stage))
    return RankMemory(
        count=max(holding.moments.count, 1),
        standing=tuple(holding.standing()),
        made=holding.made(),
        handles=handle_bytes(units.capture, device),
        context=context_bytes(device),
    )


@lru_cache(maxsize=32)
def narrow_units(units: Units) -> Units:
    """The units whose storages have the bytes that they keep under ``--precision``."""
    kept = kept_bytes(units.capture)
    if not kept:
        return units
    storages = tuple(
        replace(each, bytes=min(kept.get(number, each.bytes), each.bytes))
        for number, each in enumerate(units.capture.storages)
    )
    return replace(units, capture=replace(units.capture, storages=storages))


def _shortened(layout: Layout) -> Layout:
    """The layout with no more micro-batches than it takes until a stage holds as much as it ever will."""
    if layout.schedule == "gpipe":
        return layout
    needed = (3 if layout.schedule == "interleaved" else 1) * layout.pipeline + (layout.schedule != "interleaved")
    return replace(layout, micro_batches=min(layout.micro_batches, needed))


@dataclass(frozen=True, eq=False)
class _Holding:
    """Everything that a rank holds, each with whether a stream of collectives allocates it."""

    units: Units
    layout: Layout
    moments: Moments

    def standing(self) -> Iterator[tuple[Allocation, bool]]:
        """Everything but what micro-batches make, in any order."""
        yield from ((each, False) for each in self._resident())
        if self.layout.shard == "fsdp":
            yield from self._gathered()
        else:
            yield from ((each, False) for each in self._buckets())
        yield from ((each, False) for each in self._updating())

    @property
    def _members(self) -> list[int]:
        return list(self.moments.chunk)

    @cached_property
    def _copies(self) -> Mapping[int, float]:
        """Bytes per element of narrow copies of parameters, by storage."""
        return weight_copies(self.units.capture)

    def _is_narrow(self, storage: int) -> bool:
        """True if a parameter lies in narrow numbers alone."""
        return self.layout.narrow and self.layout.shard != "fsdp" and storage in self._copies

    # What outlives the step

    def _resident(self) -> Iterator[Allocation]:
        """Parameters, their copies in full precision, states of the optimizer, buffers and inputs."""
        capture, layout = self.units.capture, self.layout
        states = [each.bytes for each in capture.storages if each.kind == "optimizer"]
        parameter_bytes = sum(each.tensor.bytes for each in capture.parameters if each.trained)
        # Some optimizers count their steps on the device.
        copies, counters = (sum(states) // parameter_bytes, min(states, default=0)) if parameter_bytes else (0, 0)
        end = self.moments.count
        for each in (each for unit in self._members for each in self.units.parameters_of(unit)):
            size = element_bytes(each.tensor.dtype)
            full = max(FULL_BYTES, size) if layout.master and each.trained else size
            if each.storage in self._copies and layout.shard != "fsdp":
                size_of_copies = int(each.tensor.elements * self._copies[each.storage])
                yield Allocation(size_of_copies, NONE, end, MemoryKind.WEIGHTS)
            elements, part = self._part(each), self._part(each, states=True)
            if layout.offload != "parameters" and not self._is_narrow(each.storage):
                # FSDP keeps what it updates; where that lies with the host, what it computes with.
                resident = full if layout.shard == "fsdp" and layout.offload == "none" else size
                yield Allocation(elements * resident, NONE, end, MemoryKind.WEIGHTS)
            if layout.offload != "none":
                continue
            if each.trained and layout.shard != "fsdp" and full > size:
                yield Allocation(part * full, NONE, end, MemoryKind.OPTIMIZER)
            if each.trained:
                state_bytes = [part * full] * copies + [counters] * (0 < counters <= _COUNTER)
                yield from (Allocation(each_size, NONE, end, MemoryKind.OPTIMIZER) for each_size in state_bytes)
        for storage in capture.storages:
            if storage.kind in ("buffer", "input") and storage.bytes:
                kind = MemoryKind.INPUTS if storage.kind == "input" else MemoryKind.WEIGHTS
                yield Allocation(storage.bytes, NONE, end, kind)

    def _part(self, parameter: CapturedParameter, *, states: bool = False) -> int:
        """Elements of a parameter that the rank keeps: PyTorch divides the first dimension."""
        dims = parameter.tensor.dims
        rows, row_elements = (dims[0], prod(dims[1:])) if dims else (1, 1)
        divided = self.layout.shard == "fsdp" or (states and self.layout.shard in ("zero1", "zero2"))
        ranks = self.layout.group(experts=parameter.storage in self.units.experts)
        if rows < ranks:
            # Few experts a rank: their stacks are divided along what follows.
            return ceil(rows * row_elements / ranks) if divided else rows * row_elements
        return (ceil(rows / ranks) if divided else rows) * row_elements

    def _updating(self) -> Iterator[Allocation]:
        """Memory that the update allocates while it runs, of the rank's part of the parameters."""
        layout, units, moments = self.layout, self.units, self.moments
        captured = sum(each.tensor.elements for each in units.capture.parameters if each.trained)
        if not captured or layout.offload != "none":
            return
        rank_elements = sum(self._shared(unit, 1.0) for unit in self._members)
        sizes = {element_bytes(each.tensor.dtype) for each in units.capture.parameters if each.trained}
        wider = max(FULL_BYTES / min(sizes), 1.0) if layout.master else 1.0
        share = rank_elements / captured * wider
        for each in allocations(units.capture):
            if each.born != NONE and each.bytes and units.phase[each.born] == Phase.UPDATE:
                outlives = each.died >= len(units.capture.operators)
                died = moments.count if outlives else moments.update + int(moments.place[each.died])
                born = moments.update + int(moments.place[each.born])
                yield replace(each, bytes=ceil(each.bytes * share), born=born, died=died)

    def _shared(self, unit: int, element: float) -> float:
        """Bytes of a unit's trained parameters that the rank updates, of so many bytes an element."""
        sizes = self.units.sizes(unit, lambda each: each.tensor.elements * each.trained * element)
        if self.layout.shard == "none":
            return sizes.total
        return sizes.shared / self.layout.group() + sizes.experts / self.layout.group(experts=True)

    # What a micro-batch holds

    def made(self) -> Made:
        """Memory of all micro-batches in the rank's moments.

        What comes from another stage is there from when the pass begins that needs it, its last use's or the forward
        one where that keeps it; what goes to another leaves with the end of the pass. Gradients of later micro-batches
        are added to the first one's.
        """
        layout, moments = self.layout, self.moments
        every = lives(self.units, Layout(context=layout.context, exchange_context=layout.exchange_context))
        chunk = np.full(self.units.count + 1, NONE)
        chunk[list(moments.chunk)] = list(moments.chunk.values())
        is_born_here, dies_here = chunk[every.born] != NONE, chunk[every.died] != NONE
        chosen = is_born_here | (dies_here & ~every.is_gradient)
        some, is_born_here, dies_here = every.some(chosen), is_born_here[chosen], dies_here[chosen]
        born_chunk, died_chunk = chunk[some.born], chunk[some.died]
        sizes = some.bytes
        if layout.shard != "fsdp":
            sizes = np.where(some.is_gradient, [self._gradient_bytes(size) for size in sizes.tolist()], sizes)
        parts = []
        for micro_batch in range(moments.micro_batches):
            begins = moments.starts[:, micro_batch]
            # Rows of these tables are backward and forward.
            born = begins[some.is_forward, born_chunk] + moments.ahead[some.is_forward, some.born] + some.at
            dies = begins[some.dies_forward, died_chunk] + moments.ahead[some.dies_forward, some.died] + some.until
            last = np.where(dies_here, dies, moments.count)
            received = np.minimum(begins[some.is_forward, died_chunk], last)
            leaves = begins[some.is_forward, born_chunk] + moments.spans[some.is_forward, born_chunk] - 1
            last = np.where(is_born_here & (some.died != NONE) & ~dies_here, leaves, last)
            if micro_batch:
                last = np.where(some.died == NONE, born, last)
            if layout.shard == "fsdp":
                ends = np.zeros(self.units.count + 1, np.int64)
                for unit in self._members:
                    ends[unit] = self._end(unit, micro_batch, forward=False)
                last = np.where(some.is_gradient, ends[some.born], last)
            elif micro_batch == 0:
                last = np.where(some.is_gradient, moments.count, last)
            else:
                last = np.where(some.is_gradient, born, last)
            born = np.where(is_born_here, born, received)
            parts.append((born, np.maximum(last, born)))
        columns = zip(*parts, strict=True)
        born, died = (np.concatenate(column) for column in columns)
        return Made(some, np.tile(sizes, moments.micro_batches), born, died)

    def _gradient_bytes(self, size: int) -> int:
        """Bytes of a gradient that stays: in the type of the exchange where ranks share states, and of ZeRO's second
        stage a rank's part alone."""
        layout = self.layout
        if layout.shard == "none" or not self._parameter_bytes:
            return size
        exchanged = size * (layout.reduce_bytes or self._parameter_bytes) // self._parameter_bytes
        return ceil(exchanged / layout.sharers) if layout.shard == "zero2" else exchanged

    @cached_property
    def _parameter_bytes(self) -> int:
        """Bytes of an element of the widest parameter that is trained."""
        trained = (each for each in self.units.capture.parameters if each.trained)
        return max((element_bytes(each.tensor.dtype) for each in trained), default=0)

    # Buffers of collectives

    def _buckets(self) -> Iterator[Allocation]:
        """DDP's buckets, into which gradients are copied; Megatron's and DeepSpeed's gradients lie in theirs."""
        layout = self.layout
        if layout.sharers == 1 or not layout.overlap or layout.pipeline > 1 or layout.shard != "none":
            return
        for each in (each for unit in self._members for each in self.units.parameters_of(unit) if each.trained):
            yield Allocation(each.tensor.bytes, NONE, self.moments.count, MemoryKind.GRADIENTS)

    def _begin(self, unit: int, micro_batch: int, *, forward: bool) -> int:
        """When FSDP needs a unit's parameters: those outside the blocks from the begin of the pass."""
        moments = self.moments
        if self.units.is_root(unit):
            return moments.begins[forward, micro_batch, moments.chunk[unit]]
        return moments.at(unit, micro_batch, 0, forward=forward)

    def _end(self, unit: int, micro_batch: int, *, forward: bool) -> int:
        """When FSDP is done with a unit: with those outside the blocks at the end of the model, or of the pass."""
        moments = self.moments
        if not self.units.is_root(unit):
            return moments.end(unit, micro_batch, forward=forward)
        if not forward:
            return moments.pass_end(unit, micro_batch, forward=False)
        if self.units.count - 1 not in moments.chunk:
            return moments.pass_end(unit, micro_batch, forward=True)
        last = self.units.count - 1
        return moments.at(last, micro_batch, self._model_end, forward=True)

    @cached_property
    def _model_end(self) -> int:
        """Place of the last operator behind the blocks that belongs to the model, and not to its loss."""
        rows = self.units.rows[int(self.units.captured[-1]), Phase.FORWARD].tolist()
        inside = [place for place, row in enumerate(rows) if self.units.capture.operators[row].module != NONE]
        return inside[-1] if inside else 0

    def _gathered(self) -> Iterator[tuple[Allocation, bool]]:
        """Arrays of FSDP's collectives and the parameters copied out of them."""
        for micro_batch in range(self.moments.micro_batches):
            for unit in self._members:
                if self.units.elements[unit]:
                    yield from self._of_unit(unit, micro_batch)

    def _of_unit(self, unit: int, micro_batch: int) -> Iterator[tuple[Allocation, bool]]:
        moments, units = self.moments, self.units
        parts = [each.tensor.bytes for each in units.parameters_of(unit)]
        begin, end = (which(unit, micro_batch, forward=True) for which in (self._begin, self._end))
        back, done = (which(unit, micro_batch, forward=False) for which in (self._begin, self._end))
        if self.layout.pipeline > 1:
            if micro_batch == 0:
                yield from self._unsharded(parts, begin, end + 1, moments.update)
            if micro_batch == moments.micro_batches - 1:
                yield from self._reduced(unit, done, micro_batch)
            return
        # The last block is needed again at once.
        stays = unit == units.count - 2
        yield from self._unsharded(parts, begin, end + 1, done if stays else end, since=begin)
        if not stays:
            # A block is asked for while the one behind it runs.
            asked = back if units.is_root(unit) else self._begin(unit + 1, micro_batch, forward=False)
            yield from self._unsharded(parts, asked, back, done, since=back)
        yield from self._reduced(unit, done, micro_batch)

    def _unsharded(
        self, parts: Sequence[int], begin: int, end: int, until: int, since: int | None = None
    ) -> Iterator[tuple[Allocation, bool]]:
        """An array from ``begin`` to ``end``, and its parameters from ``since`` on."""
        born = begin if since is None else since
        yield Allocation(sum(parts), begin, min(end, self.moments.count - 1), MemoryKind.TEMPORARY), True
        yield from ((Allocation(size, born, until, MemoryKind.WEIGHTS), False) for size in parts)

    def _reduced(self, unit: int, done: int, micro_batch: int) -> Iterator[tuple[Allocation, bool]]:
        """The array that is sent, held until the next one is, and the rank's part of the sums."""
        elements, layout, units = int(self.units.trained[unit]), self.layout, self.units
        if not elements:
            return
        size = layout.reduce_bytes or max(element_bytes(each.tensor.dtype) for each in units.capture.parameters)
        follows = not units.is_root(unit) and unit > 1 and unit - 1 in self.moments.chunk
        until = self._end(unit - 1, micro_batch, forward=False) if follows else done
        yield Allocation(elements * size, done, until, MemoryKind.TEMPORARY), False
        stays = micro_batch == 0 and layout.offload != "parameters"
        kind = MemoryKind.GRADIENTS if stays else MemoryKind.TEMPORARY
        yield (
            Allocation(ceil(self._shared(unit, size)), done, self.moments.count if stays else done, kind),
            True,
        )
