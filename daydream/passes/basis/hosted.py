"""Training whose collectives run on the host (gloo): what a recording has of them taken away, others put in.

The graph is that of a rank without GPU, or the joined one of several. Collectives of a rank run on its channel
"network", one after another; those of joined ranks begin when the last rank has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind, Thread, ThreadKind
from daydream.graph.ranks import by_rank, meetings
from daydream.passes.basis.gradients import ParameterGradient
from daydream.trace.nesting import innermost_of
from daydream.trace.trace import NONE, Flags, Floats, Ints
from hal.support.errors import InputError

#: The channel on which a rank's collectives run.
NETWORK = Thread(kind=ThreadKind.CHANNEL, label="network")

#: CPU time of a call of c10d where the recording has none, microseconds: the median of 10 calls on a 2.6 GHz EPYC.
CALL_US = 200.0

_CALLS = ("c10d::",)
#: DDP's copies of gradients into buckets and back.
_BUCKET_COPIES = ("torch::distributed::reducer::mul_out", "torch.distributed.ddp.reducer::copy_bucket_to_grad")


def on_every_rank(pass_name: str, graph: TaskGraph, change: Callable[[TaskGraph, bool], TaskGraph]) -> TaskGraph:
    """A graph with every rank's part changed; `change` takes whether its part is one of several, which meet.

    Raises:
        InputError: tasks run on a GPU.
    """
    if graph.on_gpu.any():
        problem = "has tasks on a GPU, whose collectives do not run on the host"
        raise InputError(f"{pass_name}: the trace", problem, "use ddp or plan for it")
    joined = bool(graph.ranks) or any(thread.is_meeting for thread in graph.threads)
    return by_rank(graph, lambda part: change(part, joined))


@dataclass(frozen=True)
class Stripped:
    """A rank's graph without exchange of gradients.

    Attributes:
        graph: computation alone.
        call_us: what a call of a collective took its caller.
    """

    graph: TaskGraph
    call_us: float


def without_exchange(graph: TaskGraph, *, copies: bool) -> Stripped:
    """Takes away gloo's threads, meetings of ranks, calls, and with `copies` DDP's copies to and from buckets."""
    of_gloo = np.zeros(len(graph.threads), np.bool_)
    named = np.array([name.startswith("gloo:") for name in graph.names], np.bool_)
    of_gloo[graph.thread[named[graph.name]]] = True
    calls = _inside(graph, _CALLS)
    gone = of_gloo[graph.thread] | meetings(graph) | calls
    if copies:
        gone |= _inside(graph, _BUCKET_COPIES)
    edit = Edit(graph)
    edit.remove(np.flatnonzero(gone))
    edit.set("gap_us", np.arange(len(graph)), _handed_back(graph, gone))
    return Stripped(edit.apply(), _call_us(graph, calls))


def _handed_back(graph: TaskGraph, gone: Flags) -> Floats:
    """Gaps of the tasks that stay, with those behind what goes, in which their thread works unrecorded."""
    gap = graph.gap_us.copy()
    before: dict[int, int] = {}
    for row in np.flatnonzero(graph.on_cpu).tolist():
        thread = int(graph.thread[row])
        if not gone[row]:
            before[thread] = row
        elif thread in before:
            gap[before[thread]] += gap[row]
    return gap


def _inside(graph: TaskGraph, prefixes: tuple[str, ...]) -> Flags:
    """Which tasks are within an event whose name begins so."""
    trace = graph.trace
    if trace is None:
        return np.zeros(len(graph), np.bool_)
    named = np.array([name.startswith(prefixes) for name in trace.names], np.bool_)
    inside = innermost_of(graph.enclosing, named[trace.name]) != NONE
    return np.append(inside, False)[graph.event] & (graph.event != NONE)


def _call_us(graph: TaskGraph, inside: Flags) -> float:
    """The median time of a caller's thread within a call of c10d."""
    trace = graph.trace
    if trace is None or not inside.any():
        return CALL_US
    named = np.array([name.startswith(_CALLS) for name in trace.names], np.bool_)[trace.name]
    events = np.unique(graph.event[inside])
    return float(np.median(trace.duration_us[events[named[events]]]))


class Exchange:
    """Puts collectives into a rank's graph.

    Attributes:
        edit: the changes so far.
    """

    def __init__(self, graph: TaskGraph, joined: bool) -> None:
        """`joined`: whether the graph is one of several that are joined again, so that ranks have to meet."""
        self.edit = Edit(graph)
        self._joined = joined
        self._count = 0

    def collective(self, name: str, us: float, sources: Iterable[int], *, step: int, size: float) -> int:
        """Adds a collective of `size` bytes that begins behind `sources`, on every rank; returns its id."""
        added = self.edit.add(
            name, TaskKind.COMMUNICATION, us, thread=self.edit.thread(NETWORK), step=step, bytes=size,
            priority=-self._count,
        )  # fmt: skip
        before = added
        if self._joined:
            thread = self.edit.thread(Thread(kind=ThreadKind.CHANNEL, label="group of all", process=NONE))
            before = self.edit.add(f"exchange {self._count}", TaskKind.CPU, 0.0, thread=thread, step=step)
            self.edit.depend(before, added, Dependency.COMMUNICATION)
        for source in sources:
            self.edit.depend(source, before, Dependency.COMMUNICATION)
        self._count += 1
        return added

    def wait(self, collective: int, row: int) -> None:
        """Lets a task wait for a collective; none does where `row` is -1."""
        if row != NONE:
            self.edit.depend(collective, row, Dependency.COMMUNICATION)


def caller_rows(graph: TaskGraph, gradients: Iterable[ParameterGradient]) -> Ints:
    """The tasks of the gradients' step on the thread that hands them over, in order, its marks among them."""
    first = next(iter(gradients))
    return np.flatnonzero((graph.thread == graph.thread[first.hook]) & (graph.step == first.step))


def behind_backward(graph: TaskGraph, gradients: Sequence[ParameterGradient]) -> int:
    """The task that waits for a step's gradients: on their thread the first behind the backward pass, -1 without."""
    rows = caller_rows(graph, gradients)
    last = max(gradient.hook for gradient in gradients)
    later = rows[(rows > last) & (graph.phase[rows] != Phase.BACKWARD)]
    return int(later[0]) if len(later) else NONE
