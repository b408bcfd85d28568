"""Waits between streams in traces that record `cudaStreamWaitEvent` but neither its streams nor `cudaEventRecord`.

A call says only that some stream waits from now on for something that was launched before. Whom, follows from when
tasks started: one that starts just as a task of another stream ends, though its own stream was free and its launch
long called, waited for it. Where starts do not say, since the wait was over in time, the order of calls does:
collectives wait for the stream that their thread launched to last, and what a thread launches after a wait waits for
the last collective that could have been over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from daydream.graph.graph import TaskKind
from daydream.tasks.cpu import CpuTasks
from daydream.tasks.gpu import GpuTasks
from daydream.trace.trace import NONE, Flags, Floats, Ints, Trace, looked_up

#: A start this soon after an end may be its consequence, microseconds. Barriers of AMD's queues take 15.
_NEAR_US = 20.0

#: How much later than a task's start what it waited for may end: clocks are rounded to microseconds.
_OVERRUN_US = 2.0

#: How many launches back the stream is looked for that a collective waits for.
_LOOK_BACK = 64

#: Calls of a collective; waits inside one, behind its launch, are the library's own.
_COLLECTIVE_CALL = re.compile(r"^(nccl|rccl|c10d|xccl)::?|^record_param_comms$")


@dataclass(frozen=True, eq=False)
class InferredWaits:
    """The tasks of a trace as waits without a record look at them.

    Attributes:
        trace: what was recorded.
        enclosing: for each row of the trace the innermost CPU event around it, -1 without.
        cpu: CPU tasks.
        gpu: GPU tasks.
    """

    trace: Trace
    enclosing: Ints
    cpu: CpuTasks
    gpu: GpuTasks

    def pair(self, call: int) -> tuple[int, int] | None:
        """Positions of the GPU task waited for and of the one that waited, for a CPU task `cudaStreamWaitEvent`."""
        called_us = float(self.cpu.start_us[call])
        return self.by_starts(called_us) or self._by_calls(call, called_us)

    # By what starts when

    def by_starts(self, called_us: float) -> tuple[int, int] | None:
        """The task launched first after this time whose start nothing explains but an end on another stream.

        The pair is (waited for, waiting); None where there is no such task.
        """
        following = [self._first_after(lane, called_us) for lane in self._lanes]
        for target in sorted((each for each in following if each != NONE), key=lambda each: self._called_us[each]):
            ready_us = max(self._called_us[target], self._free_us[target])
            if self.gpu.start_us[target] <= ready_us + _OVERRUN_US:
                continue
            sources = self._over_before(target, called_us)
            source = max(sources, key=lambda each: self._ends[each], default=NONE)
            if source != NONE and self._ends[source] > max(ready_us, self.gpu.start_us[target] - _NEAR_US):
                return source, target
        return None

    # By who calls what

    def _by_calls(self, call: int, called_us: float) -> tuple[int, int] | None:
        thread = int(self.cpu.thread[call])
        target = self._launched_after(thread, called_us)
        if target == NONE:
            return None
        if self._is_collective[target]:
            source = self._launched_before(thread, called_us, target)
            return (source, target) if source != NONE else None
        if self._inside_collective(call):
            return None
        sources = [each for each in self._over_before(target, called_us) if self._is_collective[each]]
        if not sources:
            source = self._launched_before(thread, called_us, target)
            return (source, target) if source != NONE else None
        return max(sources, key=lambda each: self._called_us[each]), target

    def _launched_after(self, thread: int, called_us: float) -> int:
        """The next task that a CPU thread launches, -1 without."""
        times, tasks = self._by_thread.get(thread, (np.empty(0), np.empty(0, np.int64)))
        place = int(np.searchsorted(times, called_us))
        return int(tasks[place]) if place < len(tasks) else NONE

    def _launched_before(self, thread: int, called_us: float, target: int) -> int:
        """The last task that is no collective that a thread launched to another stream of the target's device."""
        times, tasks = self._by_thread.get(thread, (np.empty(0), np.empty(0, np.int64)))
        for task in tasks[: int(np.searchsorted(times, called_us))][::-1][:_LOOK_BACK].tolist():
            if self._other_lane(task, target) and not self._is_collective[task]:
                return task if self._ends[task] <= self.gpu.start_us[target] + _OVERRUN_US else NONE
        return NONE

    def _inside_collective(self, call: int) -> bool:
        """True if a call lies in that of a collective, behind the launch of the collective itself."""
        around = self._calls_of_collectives(int(self.cpu.event[call]))
        before = int(self._previous_launch[call])
        if not around or before == NONE or not self._is_collective[before]:
            return False
        launch = int(self.cpu.event[self.gpu.launch[before]])
        return not around.isdisjoint(self._calls_of_collectives(launch))

    def _calls_of_collectives(self, row: int) -> set[int]:
        """Rows around a row of the trace that are calls of a collective."""
        rows = set()
        while row != NONE and (row := int(self.enclosing[row])) != NONE:
            if _COLLECTIVE_CALL.match(self.trace.text(row)):
                rows.add(row)
        return rows

    # Tasks by lane and thread

    def _over_before(self, target: int, called_us: float) -> list[int]:
        """Of every other lane of the target's device the last task called before this time and over at its start."""
        sources = []
        limit_us = float(self.gpu.start_us[target]) + _OVERRUN_US
        for lane, (times, tasks) in self._lanes.items():
            if lane == self.gpu.lane[target] or self._device[lane] != self._device[self.gpu.lane[target]]:
                continue
            called = int(np.searchsorted(times, called_us))
            # Tasks of a lane end in order.
            over = int(np.searchsorted(self._ends[tasks[:called]], limit_us, side="right"))
            if over:
                sources.append(int(tasks[over - 1]))
        return sources

    def _first_after(self, lane: int, called_us: float) -> int:
        times, tasks = self._lanes[lane]
        place = int(np.searchsorted(times, called_us))
        return int(tasks[place]) if place < len(tasks) else NONE

    def _other_lane(self, task: int, target: int) -> bool:
        lane, other = int(self.gpu.lane[task]), int(self.gpu.lane[target])
        return lane != other and self._device[lane] == self._device[other]

    @cached_property
    def _called_us(self) -> Floats:
        return looked_up(self.cpu.start_us, self.gpu.launch, np.inf)

    @cached_property
    def _ends(self) -> Floats:
        return self.gpu.start_us + self.gpu.duration_us

    @cached_property
    def _free_us(self) -> Floats:
        """When each task's lane became free for it."""
        return looked_up(self._ends, self.gpu.before(), -np.inf)

    @cached_property
    def _is_collective(self) -> Flags:
        return self.gpu.kind == TaskKind.COMMUNICATION

    @cached_property
    def _device(self) -> list[int]:
        return [self.trace.threads[thread].device for thread, _ in self.gpu.lanes]

    @cached_property
    def _lanes(self) -> dict[int, tuple[Floats, Ints]]:
        """Times of call and positions of the launched tasks of every lane, in order of call."""
        return self._grouped(self.gpu.lane)

    @cached_property
    def _by_thread(self) -> dict[int, tuple[Floats, Ints]]:
        """Times of call and positions of the tasks that every CPU thread launched, in order of call."""
        return self._grouped(looked_up(self.cpu.thread, self.gpu.launch, NONE))

    def _grouped(self, key: Ints) -> dict[int, tuple[Floats, Ints]]:
        launched = np.flatnonzero(self.gpu.launch != NONE)
        order = launched[np.lexsort((self._called_us[launched], key[launched]))]
        keys, first = np.unique(key[order], return_index=True)
        parts = np.split(order, first[1:]) if len(order) else []
        return {int(each): (self._called_us[part], part) for each, part in zip(keys.tolist(), parts, strict=True)}

    @cached_property
    def _previous_launch(self) -> Ints:
        """For each CPU task the GPU task that its thread launched last before it, -1 without."""
        previous = np.full(len(self.cpu.start_us), NONE)
        for thread, (times, tasks) in self._by_thread.items():
            of_thread = np.flatnonzero(self.cpu.thread == thread)
            place = np.searchsorted(times, self.cpu.start_us[of_thread]) - 1
            previous[of_thread] = np.where(place >= 0, tasks[np.maximum(place, 0)], NONE)
        return previous
