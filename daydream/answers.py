"""From a trace to an answer: read and build, simulate, change, simulate again, analyse.

The command line goes this way, and so do scripts::

    before = replay(Path("trace.json.gz"))
    prediction = predict(before, [parse_pass("amp")])
    print(prediction.after.analysis().mean_us / before.analysis().mean_us)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import CycleError, Timeline, simulate
from daydream.report.analysis import Analysis, analyse
from daydream.report.breakdown import chosen_steps
from daydream.tasks.build import build_graph, read_graph
from daydream.trace.trace import Trace
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.whatif import AppliedPass, PassRequest


@dataclass(frozen=True)
class Replay:
    """A graph simulated.

    Attributes:
        timeline: when every task of the graph starts and ends.
        steps: indices of the training steps that answers are about.
    """

    timeline: Timeline
    steps: tuple[int, ...]

    @property
    def graph(self) -> TaskGraph:
        """Graph that was simulated."""
        return self.timeline.graph

    def analysis(
        self, *, rows: int = 15, recorded: bool = False, device: str | None = None, batch: int | None = None
    ) -> Analysis:
        """Everything that tables and reports say of these steps.

        Args:
            rows: of each table, at most.
            recorded: whether to break down the recorded times, too.
            device: whether to work utilisations out, too: the board whose peaks count, or ``auto``.
            batch: samples per step, for these; by default, what the trace says.

        Raises:
            InputError: there is no board of that name.
        """
        return analyse(self.timeline, self.steps, recorded=recorded, rows=rows, device=device, batch=batch)


@dataclass(frozen=True)
class Prediction:
    """A training step before and after changes, and what was changed."""

    before: Replay
    after: Replay
    applied: tuple[AppliedPass, ...]


def replay(trace: Path, step: int | None = None, steps_by: str = "auto", *, execution: Path | None = None) -> Replay:
    """A trace file as it was recorded, replayed.

    Args:
        trace: a file of PyTorch's profiler, or a folder of those of a job's ranks, which are merged.
        step: answers are about this one: ``ProfilerStep#N``, else the N-th from 0; None is all full ones.
        steps_by: what tells the steps of a trace without marks.
        execution: PyTorch's execution trace (Chakra) of the same run, for sizes of operators that `trace` lacks.

    Raises:
        InputError: the file cannot be read or is no trace, or there is no such step.
    """
    if execution is not None:
        return _replay(_linked(trace, execution, steps_by), str(trace), step)
    return _replay(_merged(trace) if trace.is_dir() else read_graph(trace, steps_by), str(trace), step)


def _linked(trace: Path, execution: Path, steps_by: str) -> TaskGraph:
    if trace.is_dir():
        raise InputError("--execution-trace", "is of one rank, and TRACE a folder of several", "name a rank's file")
    from daydream.trace.files import read_trace
    from daydream.trace.recorders.chakra import with_execution

    return build_graph(replace(with_execution(read_trace(trace), execution), steps_by=steps_by))


def _merged(folder: Path) -> TaskGraph:
    # What replays a rank alone needs no solver.
    from daydream.ranks.merge import merge, read_ranks

    return merge(read_ranks([folder])).graph


def replay_of(trace: Trace, step: int | None = None) -> Replay:
    """A trace that is no file, such as a predicted one, replayed.

    Raises:
        InputError: there is no such step.
    """
    return _replay(build_graph(trace), trace.path, step)


def _replay(graph: TaskGraph, source: str, step: int | None) -> Replay:
    return Replay(_simulated(graph, source), chosen_steps(graph, step))


def predict(before: Replay, passes: Sequence[PassRequest]) -> Prediction:
    """A replay's steps after what-if passes, applied one after another.

    Raises:
        InputError: a pass refuses its parameters or this graph, or ties tasks into a circle.
    """
    # What only replays needs no passes.
    from daydream.memory.attached import with_memory
    from daydream.whatif import apply_passes

    changed, applied = apply_passes(with_memory(before.graph), passes)
    return Prediction(before, Replay(_simulated(changed, "--pass"), before.steps), tuple(applied))


def _simulated(graph: TaskGraph, field: str) -> Timeline:
    try:
        if not graph.ranks:
            return simulate(graph)
        from daydream.ranks.equal import simulate_ranks

        return simulate_ranks(graph)
    except CycleError as error:
        raise InputError(field, str(error), "tasks must not depend on what depends on them") from None
