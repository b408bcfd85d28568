"""Bytes of a captured step: which storages live when, whose they are, and what the allocator reserves for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from daydream.capture.captured import Capture
from daydream.graph.graph import Phase
from daydream.graph.memory import MemoryKind as MemoryKind
from daydream.graph.memory import curve_of, kinds_at
from daydream.memory.allocator import Block, CachingAllocator, OutOfMemoryError
from daydream.trace.trace import NONE, Ints

#: Steps that the allocator is replayed for: from the second on optimizers have their states, and the third finds the
#: segments that the second left.
REPLAYED_STEPS = 3


#: Kinds of captured storages that exist before the step.
_BEFORE = {
    "parameter": MemoryKind.WEIGHTS,
    "buffer": MemoryKind.WEIGHTS,
    "optimizer": MemoryKind.OPTIMIZER,
    "input": MemoryKind.INPUTS,
}


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that is held for a while.

    Attributes:
        bytes: as asked for, before the allocator rounds.
        born: the operator that makes it, -1 for what exists before the step.
        died: the last operator that it is held for; the number of operators where it outlives the step.
        kind: what it holds.
        module: index of the module of the operator that makes it, or of the parameter's; -1 without.
    """

    bytes: int
    born: int
    died: int
    kind: MemoryKind
    module: int = NONE


def allocations(capture: Capture, workspace: Mapping[int, int] | None = None) -> list[Allocation]:
    """Everything that a step holds, in the order in which it is allocated.

    What the forward pass makes and the backward pass still finds are feature maps; what the backward pass makes and
    leaves behind are gradients of weights.

    Args:
        capture: the step.
        workspace: bytes of scratch memory by operator, held while it runs.
    """
    operators = capture.operators
    born = {number: index for index, operator in enumerate(operators) for number in operator.made}
    died = {number: index for index, operator in enumerate(operators) for number in operator.freed}
    last_forward = max((i for i, each in enumerate(operators) if each.phase == Phase.FORWARD), default=NONE)
    last_backward = max((i for i, each in enumerate(operators) if each.phase == Phase.BACKWARD), default=NONE)
    made = []
    for number, storage in enumerate(capture.storages):
        # Fused steps never make some of their storages.
        if storage.kind == "host" or (storage.kind == "step" and number not in born):
            continue
        begin, end = born.get(number, NONE), died.get(number, len(operators))
        if storage.kind in _BEFORE:
            kind = _BEFORE[storage.kind]
        elif begin <= last_forward < end and capture.training:
            kind = MemoryKind.FEATURE_MAPS
        elif last_forward < begin <= last_backward < end:
            kind = MemoryKind.GRADIENTS
        else:
            kind = MemoryKind.TEMPORARY
        module = operators[begin].module if begin != NONE else NONE
        made.append(Allocation(storage.bytes, begin, end, kind, module))
    for index, scratch in (workspace or {}).items():
        made.append(Allocation(scratch, index, index, MemoryKind.WORKSPACE, operators[index].module))
    return sorted(made, key=lambda each: each.born)


@dataclass(frozen=True, eq=False)
class Footprint:
    """The memory of a step.

    Attributes:
        operators: number of operators of the step.
        held: its allocations.
    """

    operators: int
    held: tuple[Allocation, ...]

    @cached_property
    def allocated(self) -> Ints:
        """Bytes held while each operator runs, before rounding."""
        return curve_of(self.held, self.operators).astype(np.int64)

    @property
    def peak(self) -> int:
        """The operator while which most is held; -1 without operators."""
        return int(self.allocated.argmax()) if self.operators else NONE

    @property
    def peak_bytes(self) -> int:
        """Bytes held at the peak."""
        return int(self.allocated.max(initial=0))

    def by_kind(self, kind: MemoryKind) -> Ints:
        """Bytes of one kind held while each operator runs."""
        return curve_of((each for each in self.held if each.kind is kind), self.operators).astype(np.int64)

    def owners(self) -> dict[MemoryKind, int]:
        """Bytes at the peak by kind."""
        return {kind: int(size) for kind, size in kinds_at(self.held, self.peak).items()} if self.operators else {}

    def at_peak(self) -> list[Allocation]:
        """Memory held at the peak, the largest first."""
        alive = [each for each in self.held if each.born <= self.peak <= each.died]
        return sorted(alive, key=lambda each: -each.bytes)


def footprint(capture: Capture, workspace: Mapping[int, int] | None = None) -> Footprint:
    """The memory of a captured step; ``workspace`` as for :func:`allocations`."""
    return Footprint(len(capture.operators), tuple(allocations(capture, workspace)))


@dataclass(frozen=True, eq=False)
class Replayed:
    """Behaviour of the allocator in the last of some steps.

    Attributes:
        allocated: bytes of blocks in use while each operator runs.
        reserved: bytes of segments while each operator runs.
        peak_allocated: ``torch.cuda.max_memory_allocated`` over all steps.
        peak_reserved: ``torch.cuda.max_memory_reserved`` over all steps.
    """

    allocated: Ints
    reserved: Ints
    peak_allocated: int
    peak_reserved: int


class StepOutOfMemoryError(Exception):
    """A step does not fit; ``operator`` is the one that asked for too much, ``needed`` the bytes that are missing."""

    def __init__(self, operator: int, needed: int) -> None:
        super().__init__(f"operator {operator} lacks {needed} bytes")
        self.operator = operator
        self.needed = needed


class Moment(NamedTuple):
    """An allocation, or a free where ``bytes`` is negative.

    Attributes:
        operator: that asks for it, or behind which it is given back.
        bytes: of the block.
        address: of the block.
        allocated: bytes of blocks in use behind it.
        reserved: bytes of segments behind it.
    """

    operator: int
    bytes: int
    address: int
    allocated: int
    reserved: int


def replayed(
    memory: Footprint,
    *,
    capacity: int | None = None,
    expandable: bool = False,
    steps: int = REPLAYED_STEPS,
) -> Replayed:
    """PyTorch's allocator through some steps of training.

    States of the optimizer are made by the first update; what a step leaves behind, gradients as a rule, is given back
    when the next one begins (``zero_grad`` with ``set_to_none``).

    Args:
        memory: of one step.
        capacity: bytes of the device that segments may take; None is no limit.
        expandable: whether ``expandable_segments`` is set.
        steps: how many.

    Raises:
        StepOutOfMemoryError: a step does not fit.
    """
    allocated = reserved = np.zeros(memory.operators, np.int64)
    peaks = [0, 0]
    for held in _steps(memory, CachingAllocator(capacity, expandable=expandable), steps):
        allocated, reserved = np.array(held, np.int64).reshape(-1, 2).T
        peaks = [max(peaks[0], int(allocated.max(initial=0))), max(peaks[1], int(reserved.max(initial=0)))]
    return Replayed(allocated, reserved, *peaks)


def moments_of_last_step(memory: Footprint) -> list[Moment]:
    """Allocations and frees of the last of :data:`REPLAYED_STEPS` steps on a device without a limit."""
    moments: list[Moment] = []
    for _ in _steps(memory, CachingAllocator(), REPLAYED_STEPS, moments):
        pass
    return moments


def _steps(
    memory: Footprint, allocator: CachingAllocator, steps: int, moments: list[Moment] | None = None
) -> Iterator[list[tuple[int, int]]]:
    """Largest allocated and reserved bytes within every operator, step by step; ``moments`` takes those of the last.

    Raises:
        StepOutOfMemoryError: a step does not fit.
    """
    held: list[tuple[int, int]] = []
    behind: list[Block] = []
    try:
        for each in memory.held:
            if each.born == NONE and each.bytes and each.kind is not MemoryKind.OPTIMIZER:
                allocator.allocate(each.bytes)
        births = _births(memory, first=True)
        for step in range(steps):
            held.clear()
            _through(allocator, births, behind, held, moments if step == steps - 1 else None)
            yield held
            births = _births(memory, first=False) if step == 0 else births
    except OutOfMemoryError as error:
        raise StepOutOfMemoryError(max(len(held) - 1, 0), error.needed) from None


def _births(memory: Footprint, *, first: bool) -> list[list[tuple[int, int]]]:
    """Bytes of what every operator makes, with the operator behind which it is freed: the number of operators where
    that is in the next step, -1 for never, as for the optimizer's states, which the first update makes.
    """
    births: list[list[tuple[int, int]]] = [[] for _ in range(memory.operators)]
    if first and births:
        # The update begins behind the last operator that makes a gradient. A step without one makes states in the end.
        update = 1 + max((each.born for each in memory.held if each.kind is MemoryKind.GRADIENTS), default=NONE)
        states = (each for each in memory.held if each.kind is MemoryKind.OPTIMIZER and each.bytes)
        births[min(update, memory.operators - 1)].extend((each.bytes, NONE) for each in states)
    for each in memory.held:
        if each.born != NONE and each.bytes:
            births[each.born].append((each.bytes, min(each.died, memory.operators)))
    return births


def _through(
    allocator: CachingAllocator,
    births: list[list[tuple[int, int]]],
    behind: list[Block],
    held: list[tuple[int, int]],
    moments: list[Moment] | None,
) -> None:
    """One step; ``behind`` holds the blocks that the step before left, and then those that this one leaves."""

    def note(operator: int, size: int, address: int) -> None:
        if moments is not None:
            moments.append(Moment(operator, size, address, allocator.allocated, allocator.reserved))

    def free(operator: int, blocks: list[Block]) -> None:
        for block in blocks:
            # Joining with neighbours moves the block.
            size, address = block.size, block.address
            allocator.free(block)
            note(operator, -size, address)

    free(0, behind)
    deaths: list[list[Block]] = [[] for _ in range(len(births) + 1)]
    for operator, made in enumerate(births):
        held.append((allocator.allocated, allocator.reserved))
        reserved = allocator.reserved
        for size, died in made:
            block = allocator.allocate(size)
            reserved = max(reserved, allocator.reserved)
            if died != NONE:
                deaths[died].append(block)
            note(operator, block.size, block.address)
        held[-1] = (allocator.allocated, reserved)
        free(operator, deaths[operator])
    behind[:] = deaths[-1]
