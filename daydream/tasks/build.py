"""From a trace to its dependency graph (thesis 4.4.2): the steps, in their order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from daydream.graph.graph import Mark, TaskGraph
from daydream.tasks.assemble import TaskPlan, assemble
from daydream.tasks.cpu import CpuTasks, cpu_tasks, hand_over
from daydream.tasks.gloo import gloo_threads, link_gloo
from daydream.tasks.gpu import GpuTasks, gpu_tasks
from daydream.tasks.held import cut_waiting_calls, release_full_queue
from daydream.tasks.lags import explain_late, join_branches, time_launches
from daydream.tasks.steps import find_steps
from daydream.tasks.waits import CallWaits, find_waits
from daydream.trace.files import read_trace
from daydream.trace.nesting import enclosing_events
from daydream.trace.text import no_collection
from daydream.trace.trace import NONE, Category, Flags, Trace


def read_graph(path: Path, steps_by: str = "auto") -> TaskGraph:
    """The dependency graph of a trace file of PyTorch's profiler.

    `steps_by` says what tells its steps where it marks none: one of :data:`daydream.tasks.steps.STEPS_BY`.

    Raises:
        InputError: the file cannot be read, or is no trace.
    """
    # A collection while the graph is built would walk all of the trace, for longer than the building takes.
    with no_collection():
        return build_graph(replace(read_trace(path), steps_by=steps_by))


def build_graph(trace: Trace) -> TaskGraph:
    """The dependency graph of a trace: replayed by :func:`daydream.graph.simulate.simulate` it takes the recorded time.

    Waiting is never part of a duration: a synchronising call becomes its own cost and a second task, "(return)",
    that waits for the GPU; a launch held back by a full queue keeps the usual cost; a thread that sleeps while
    another works for it waits for that one. What remains are durations of work, gaps of busy threads, and lags.

    Every step takes values and makes new ones. Waits are found on the tasks as recorded; launches are timed on calls
    that no longer wait; what launches leave unexplained, waits between streams and branches of CUDA graphs explain.
    Collectives of gloo are tied to their callers in the finished graph.
    """
    enclosing = enclosing_events(trace)
    steps = find_steps(trace, enclosing)
    recorded = cpu_tasks(trace, enclosing, steps)
    streams = gpu_tasks(trace, recorded)
    waits = find_waits(trace, enclosing, recorded, streams)
    cut, returns = cut_waiting_calls(trace, recorded, streams, waits.calls)
    released, queue_depth = release_full_queue(trace, cut, streams)
    launched = time_launches(released, streams, waits.streams.target)
    explained = explain_late(launched.gpu, waits.streams, launched.late)
    joined = join_branches(explained.gpu, explained.waits)
    of_gloo = gloo_threads(trace)
    working, handoff = hand_over(launched.cpu, _has_operators(trace, recorded) & ~of_gloo)
    clocked = _clocked(trace, recorded, streams, waits.calls) & ~of_gloo[recorded.thread]
    graph = assemble(
        TaskPlan(
            trace=trace,
            enclosing=enclosing,
            steps=steps,
            cpu=replace(working, gap_us=np.where(clocked, 0.0, working.gap_us)),
            gpu=joined.gpu,
            returns=returns,
            call_waits=waits.calls,
            stream_waits=joined.waits,
            handoff=handoff,
            clocked=clocked,
            queue_depth=queue_depth,
            warnings=(*steps.warnings, *streams.warnings, *waits.warnings),
        )
    )
    return link_gloo(graph)


def _has_operators(trace: Trace, cpu: CpuTasks) -> Flags:
    """For each thread of the trace whether operators run on it; one with CUDA calls alone only polls."""
    events = cpu.event[cpu.event != NONE]
    operators = events[trace.category[events] == Category.OPERATOR]
    return np.bincount(trace.thread[operators], minlength=len(trace.threads)) > 0


def _clocked(trace: Trace, cpu: CpuTasks, gpu: GpuTasks, waits: CallWaits) -> Flags:
    """Tasks of polling threads, which have no operator, launch, wait or mark.

    Such a thread sleeps by the clock between its calls, as NCCL's watchdog does, whatever the training does.
    """
    works = _has_operators(trace, cpu)
    works[cpu.thread[gpu.launch[gpu.launch != NONE]]] = True
    works[cpu.thread[waits.call]] = True
    works[cpu.thread[cpu.mark != Mark.NONE]] = True
    # Where nothing at all works, as in a recording of annotations alone, nothing polls either.
    return ~works[cpu.thread] & works.any()
