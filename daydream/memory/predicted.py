"""The memory of a predicted step: allocated, reserved, and what the board's own tools would show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from daydream.capture.captured import Capture
from daydream.memory.device import context_bytes, handle_bytes
from daydream.memory.footprint import (
    Allocation,
    Footprint,
    MemoryKind,
    Replayed,
    footprint,
    moments_of_last_step,
    replayed,
)
from daydream.memory.workspace import workspaces
from daydream.operators.calls import OperatorPrice
from daydream.trace.trace import NONE, Floats, MemoryEvents

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec


@dataclass(frozen=True, eq=False, kw_only=True)
class StepMemory:
    """Memory that a step needs on a board, in bytes.

    Attributes:
        capture: the step.
        device: the board.
        footprint: every allocation of the step.
        replay: what PyTorch's allocator makes of it.
        handles: workspace of cuBLAS, among the allocated bytes of every moment.
        context: of the process, besides what PyTorch's allocator reserves.
    """

    capture: Capture
    device: DeviceSpec
    footprint: Footprint
    replay: Replayed
    handles: int
    context: int

    @property
    def allocated(self) -> int:
        """Largest number of bytes in blocks: ``torch.cuda.max_memory_allocated``."""
        return self.replay.peak_allocated + self.handles

    @property
    def reserved(self) -> int:
        """Largest number of bytes in segments: ``torch.cuda.max_memory_reserved``."""
        return self.replay.peak_reserved + self.handles

    @property
    def on_device(self) -> int:
        """Memory that nvidia-smi shows for the process."""
        return self.reserved + self.context

    @property
    def fits(self) -> bool:
        """True if the board has that much."""
        capacity = self.device.dram.capacity_bytes
        return capacity is None or self.on_device <= capacity

    @cached_property
    def owners(self) -> dict[MemoryKind, int]:
        """Bytes at the peak by kind, as asked for."""
        return {kind: size for kind, size in self.footprint.owners().items() if size}

    def path_of(self, allocation: Allocation) -> str:
        """The module that an allocation belongs to; empty outside all."""
        return self.capture.modules[allocation.module].path if allocation.module != NONE else ""

    @property
    def limiting(self) -> str:
        """The moment of the peak in words: the operator and its module."""
        if self.footprint.peak == NONE:
            return ""
        operator = self.capture.operators[self.footprint.peak]
        path = self.capture.modules[operator.module].path if operator.module != NONE else ""
        phase = operator.phase.name.lower()
        return f"{operator.name.removeprefix('aten::')} in the {phase} pass" + (f" of {path}" if path else "")

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "device_bytes": self.on_device,
            "fits": self.fits,
            "peak": self.limiting,
            "owners_bytes": {kind.value: size for kind, size in self.owners.items()},
        }


def memory_events(memory: StepMemory, begin_us: Floats, end_us: Floats) -> MemoryEvents:
    """The allocations and frees of the last of some steps, as a recording has them.

    Args:
        memory: of the step.
        begin_us: when the host begins with every operator, microseconds.
        end_us: when it is done with it.
    """
    moments = moments_of_last_step(memory.footprint)
    operator = np.array([each.operator for each in moments], np.int64)
    size = np.array([each.bytes for each in moments], np.int64)
    # What an operator needs it asks for when it begins; what is not needed any more goes when it is done. What the step
    # before has left goes first.
    time = np.where(size > 0, begin_us[operator], end_us[operator]) if len(moments) else np.empty(0)
    first = int(np.argmax(size > 0)) if len(moments) else 0
    time[:first] = begin_us[:1]
    return MemoryEvents(
        time_us=np.maximum.accumulate(time),
        thread=np.zeros(len(moments), np.int64),
        device=np.zeros(len(moments), np.int64),
        bytes=size,
        address=np.array([each.address for each in moments], np.int64),
        allocated=np.array([each.allocated + memory.handles for each in moments], np.int64),
        reserved=np.array([each.reserved + memory.handles for each in moments], np.int64),
    )


def step_memory(
    capture: Capture, prices: Sequence[OperatorPrice], device: DeviceSpec, *, expandable: bool = False
) -> StepMemory:
    """The memory of a captured step on a board, where ``prices`` tell which convolutions need scratch memory."""
    memory = footprint(capture, workspaces(capture.operators, prices))
    return StepMemory(
        capture=capture,
        device=device,
        footprint=memory,
        replay=replayed(memory, expandable=expandable),
        handles=handle_bytes(capture, device),
        context=context_bytes(device),
    )
