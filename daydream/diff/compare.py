"""Two replays by operator and kernel: times of a step, side by side.

An operator is the innermost CPU event that a GPU task belongs to, by its name; its kernels are distinguished by theirs.
Times are means of the steps. A change is one where it exceeds what the steps of the same recording differ by: twice the
standard error of both means, and :data:`SAME` of the larger.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from daydream.graph.graph import Mark, TaskGraph
from daydream.graph.simulate import Timeline
from daydream.report.breakdown import of_steps, step_breakdowns
from daydream.report.kinds import KernelKind, kernel_kinds, unknown_share
from daydream.trace.trace import NONE, Category, Floats, Ints

Status = Literal["slower", "faster", "same", "new", "gone"]

#: Differences below this share of the larger time are none, whatever the steps' own spread.
SAME = 0.01

#: Standard errors of both means that a difference exceeds.
STANDARD_ERRORS = 2.0

#: Microseconds a step below which an operator or kernel that only one recording has is not worth a word.
LEAST_US = 0.001

_NUMBER = re.compile(r"#?\d+")

#: Name of GPU tasks that no operator launched.
NO_OPERATOR = "no operator"


@dataclass(frozen=True)
class Amount:
    """Tasks of one name in a step: their number, their time in microseconds, and the standard error of that time."""

    count: float = 0.0
    us: float = 0.0
    error_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """Tasks of one name before and after.

    Attributes:
        name: of the kernel, the operator or the kind.
        before, after: on the GPU, a step.
    """

    name: str
    before: Amount
    after: Amount

    @property
    def change_us(self) -> float:
        """Change of their time on the GPU, microseconds a step."""
        return self.after.us - self.before.us

    @property
    def status(self) -> Status:
        """Their change in a word."""
        return status(self.before, self.after)


@dataclass(frozen=True, kw_only=True)
class OperatorChange(Change):
    """An operator before and after.

    Attributes:
        cpu_before, cpu_after: its own time on the CPU with the gaps behind it, a step, and its calls.
        kernels: its GPU tasks by name, the largest change first.
    """

    cpu_before: Amount
    cpu_after: Amount
    kernels: tuple[Change, ...]

    @property
    def cpu_change_us(self) -> float:
        """Change of its time on the CPU, microseconds a step."""
        return self.cpu_after.us - self.cpu_before.us

    @property
    def gpu_status(self) -> Status:
        """Its change on the GPU in a word; an operator that is called in both is neither new nor gone."""
        return _called_in_both(self, status(self.before, self.after))

    @property
    def cpu_status(self) -> Status:
        """Its change on the CPU in a word."""
        return status(self.cpu_before, self.cpu_after)

    @property
    def status(self) -> Status:
        """Its change in a word: on the GPU where it runs anything there, else on the CPU."""
        return self.gpu_status if self.before.count or self.after.count else self.cpu_status

    @property
    def weight_us(self) -> float:
        """The larger of its changes on GPU and CPU that are no noise."""
        gpu = 0.0 if self.gpu_status == "same" else abs(self.change_us)
        return max(gpu, 0.0 if self.cpu_status == "same" else abs(self.cpu_change_us))


def _called_in_both(operator: OperatorChange, became: Status) -> Status:
    if became == "new" and operator.cpu_before.count:
        return "slower"
    return "faster" if became == "gone" and operator.cpu_after.count else became


@dataclass(frozen=True, kw_only=True)
class Side:
    """One recording. Times are microseconds, means of the steps.

    Attributes:
        path: the file.
        board: recorded on, empty where the file does not tell.
        steps: names of the steps.
        measured_us: length of a step as recorded.
        simulated_us: as replayed.
        gpu_us: sum of the durations of its GPU tasks.
        critical_us: time on the critical path by resource.
        unknown: share of the GPU's time in kernels whose kind is not known.
    """

    path: str
    board: str
    steps: tuple[str, ...]
    measured_us: float
    simulated_us: float
    gpu_us: float
    critical_us: tuple[float, ...]
    unknown: float


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two recordings compared.

    Attributes:
        before, after: the recordings.
        operators: those that changed, on the GPU or on the CPU, by more than noise; the largest change first.
        same: how many others there are.
        kinds: GPU tasks by what they do, the largest change first.
    """

    before: Side
    after: Side
    operators: tuple[OperatorChange, ...]
    same: int
    kinds: tuple[Change, ...]

    def count(self, wanted: Status) -> int:
        """Number of operators of this status."""
        return sum(each.status == wanted for each in self.operators)


def status(before: Amount, after: Amount) -> Status:
    """The change from one amount to another in a word.

    >>> status(Amount(1, 100, 1), Amount(1, 101, 1)), status(Amount(1, 100, 1), Amount(1, 120, 2))
    ('same', 'slower')
    >>> status(Amount(), Amount(2, 3))
    'new'
    """
    if not before.count or not after.count:
        return "new" if after.count else "gone" if before.count else "same"
    noise_us = STANDARD_ERRORS * math.hypot(before.error_us, after.error_us)
    change_us = after.us - before.us
    if abs(change_us) <= max(noise_us, SAME * max(before.us, after.us)):
        return "same"
    return "slower" if change_us > 0 else "faster"


def compare(
    before: Timeline, after: Timeline, steps: tuple[Sequence[int], Sequence[int]], paths: tuple[str, str] = ("", "")
) -> Difference:
    """Two replays compared.

    Args:
        before, after: the replays.
        steps: indices of the steps of either that count.
        paths: what both are called; by default, their files.
    """
    tables = _Table(before, steps[0]), _Table(after, steps[1])
    operators = [_operator(name, *tables) for name in dict.fromkeys(name for table in tables for name in table.names)]
    kinds = [Change(name=kind.label, before=tables[0].kind(kind), after=tables[1].kind(kind)) for kind in KernelKind]
    return Difference(
        before=_side(before, tables[0], paths[0]),
        after=_side(after, tables[1], paths[1]),
        operators=tuple(sorted((each for each in operators if each.weight_us >= LEAST_US), key=_largest)),
        same=sum(each.weight_us < LEAST_US for each in operators),
        kinds=tuple(sorted((each for each in kinds if each.before.count or each.after.count), key=_largest)),
    )


def _largest(change: Change) -> tuple[float, str]:
    """Key that sorts the largest change first, equal ones by name."""
    weight = change.weight_us if isinstance(change, OperatorChange) else abs(change.change_us)
    return -weight, change.name


def _side(timeline: Timeline, table: _Table, path: str) -> Side:
    graph, steps = timeline.graph, table.steps
    parts = step_breakdowns(timeline, steps)
    devices = graph.trace.devices if graph.trace is not None else ()
    return Side(
        path=path or (graph.trace.path if graph.trace is not None else ""),
        board=next((str(device["name"]) for device in devices if device.get("name")), ""),
        steps=tuple(graph.steps[index].name for index in steps),
        measured_us=float(np.mean([graph.steps[index].measured_us for index in steps])),
        simulated_us=float(np.mean([part.length_us for part in parts])),
        gpu_us=float(graph.duration_us[table.gpu].sum()) / len(steps),
        critical_us=tuple(np.mean([part.critical_us for part in parts], axis=0).tolist()),
        unknown=unknown_share(graph, table.kinds, table.gpu),
    )


class _Table:
    """Tasks of one recording added up by operator, kernel and kind."""

    def __init__(self, timeline: Timeline, steps: Sequence[int]) -> None:
        graph = timeline.graph
        self.graph = graph
        self.steps = list(steps)
        self._names: dict[int, str] = {}
        chosen = of_steps(graph, steps)
        runs = (graph.duration_us > 0) | (graph.event != NONE)
        self.gpu = np.flatnonzero(chosen & graph.on_gpu & runs)
        self.kinds = kernel_kinds(graph)
        cpu = np.flatnonzero(chosen & graph.on_cpu & graph.working & (graph.mark == Mark.NONE))
        launched_by = [self._operator_of(row) or NO_OPERATOR for row in self.gpu.tolist()]
        texts = [graph.text(row) for row in self.gpu.tolist()]
        self._kernels: dict[str, dict[str, Amount]] = {}
        for (operator, kernel), amount in self._sums(list(zip(launched_by, texts, strict=True)), self.gpu).items():
            self._kernels.setdefault(operator, {})[kernel] = amount
        self._gpu_of = self._sums([(name,) for name in launched_by], self.gpu)
        names = [(self._operator_of(row) or graph.text(row),) for row in cpu.tolist()]
        self._cpu_of = self._sums(names, cpu, graph.duration_us[cpu] + graph.gap_us[cpu], _calls(graph, cpu))
        self._kinds = self._sums([(KernelKind(kind).label,) for kind in self.kinds[self.gpu].tolist()], self.gpu)
        self.names = list(dict.fromkeys(key[0] for key in (*self._gpu_of, *self._cpu_of)))

    def _operator_of(self, row: int) -> str:
        """The innermost CPU event of a task, empty without. A range's numbers count its rounds, and are dropped."""
        graph = self.graph
        event = int(graph.operator[row])
        if event == NONE or graph.trace is None:
            return ""
        name = int(graph.trace.name[event])
        if name not in self._names:
            text = graph.trace.names[name]
            is_range = graph.trace.category[event] == Category.ANNOTATION
            self._names[name] = _NUMBER.sub("#", text) if is_range else text
        return self._names[name]

    def _sums(
        self, keys: Sequence[tuple[str, ...]], rows: Ints, amount: Floats | None = None, count: Floats | None = None
    ) -> dict[tuple[str, ...], Amount]:
        """Amounts of these tasks by key: means of the steps, and their standard errors where there are several."""
        index: dict[tuple[str, ...], int] = {}
        place = np.array([index.setdefault(key, len(index)) for key in keys], np.int64)
        amount = self.graph.duration_us[rows] if amount is None else amount
        count = np.ones(len(rows)) if count is None else count
        size, steps = len(index), max(len(self.steps), 1)
        counts, means = np.bincount(place, count, size) / steps, np.bincount(place, amount, size) / steps
        error = np.zeros(size)
        if steps > 1:
            # Steps in which a key has no task add the square of the mean.
            cell, inverse = np.unique(place * steps + self._step_of(rows), return_inverse=True)
            sums = np.bincount(inverse.reshape(-1), amount, len(cell))
            squares = np.bincount(cell // steps, sums * sums, size)
            error = np.sqrt(np.maximum(squares - steps * means * means, 0.0) / (steps - 1) / steps)
        values = zip(counts.tolist(), means.tolist(), error.tolist(), strict=True)
        return {key: Amount(*value) for key, value in zip(index, values, strict=True)}

    def _step_of(self, rows: Ints) -> Ints:
        """Which of the chosen steps each task belongs to; the first where the graph marks none."""
        if not (self.graph.mark != Mark.NONE).any():
            return np.zeros(len(rows), np.int64)
        place = np.zeros(len(self.graph.steps), np.int64)
        place[self.steps] = np.arange(len(self.steps))
        return np.asarray(place[self.graph.step[rows]], np.int64)

    def gpu_of(self, operator: str) -> Amount:
        """An operator's time on the GPU."""
        return self._gpu_of.get((operator,), Amount())

    def cpu_of(self, operator: str) -> Amount:
        """An operator's own time on the CPU, and its calls."""
        return self._cpu_of.get((operator,), Amount())

    def kernels_of(self, operator: str) -> dict[str, Amount]:
        """An operator's GPU tasks by name."""
        return self._kernels.get(operator, {})

    def kind(self, kind: KernelKind) -> Amount:
        """GPU tasks of a kind."""
        return self._kinds.get((kind.label,), Amount())


def _calls(graph: TaskGraph, rows: Ints) -> Floats:
    """For each CPU task whether it is an operator's own begin, so that a call counts once, and not its CUDA calls."""
    trace = graph.trace
    if trace is None:
        return np.ones(len(rows))
    events = graph.event[rows]
    return np.where((events == NONE) | (trace.category[events] == Category.RUNTIME), 0.0, 1.0)


def _operator(name: str, before: _Table, after: _Table) -> OperatorChange:
    kernels = before.kernels_of(name), after.kernels_of(name)
    changes = [
        Change(name=kernel, before=kernels[0].get(kernel, Amount()), after=kernels[1].get(kernel, Amount()))
        for kernel in dict.fromkeys((*kernels[0], *kernels[1]))
    ]
    return OperatorChange(
        name=name,
        before=before.gpu_of(name),
        after=after.gpu_of(name),
        cpu_before=before.cpu_of(name),
        cpu_after=after.cpu_of(name),
        kernels=tuple(sorted(changes, key=_largest)),
    )
