"""Gist: feature maps encoded between forward and backward (thesis 4.5.2 and algorithm 11)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind
from daydream.graph.memory import HeldMemory
from daydream.passes import Outcome, what_if
from daydream.passes.basis.bytes import changed_memory, memory_of
from daydream.passes.basis.checks import at_least
from daydream.passes.basis.idioms import (
    LayerRun,
    Role,
    backward_of,
    launch_latency_us,
    launch_us,
    layer_runs,
    preceding,
    roles,
)
from daydream.passes.basis.maps import Absence, absence, encoded, input_bytes
from daydream.trace.trace import NONE, Ints

#: What 2x2 pooling leaves of a map.
_POOLED = 1 / 4

#: Operators of the calls whose inputs are encoded.
_OPERATORS = {
    Role.CONVOLUTION: r"conv(?!ert)",
    Role.BATCHNORM: r"batch_?norm",
    Role.RELU: r"relu|threshold|clamp_min",
    Role.POOLING: r"pool(?!ed)",
}


@what_if("gist")
def gist(
    graph: TaskGraph,
    *,
    encode_factor: float = 1.0,
    decode_factor: float = 1.0,
    lossy: bool = False,
    dpr_factor: float = 0.75,
    density: float = 0.5,
) -> Outcome:
    """Encoding kernels behind ReLUs in the forward pass, decoding ones in the backward pass (algorithm 11).

    A ReLU followed by a pooling layer is binarised behind that; its mask is decoded before the ReLU's backward
    call. A ReLU followed by a convolution (or by pooling and a convolution) is stored sparse (SSDC), encoded behind the
    convolution, its last reader in the forward pass, and decoded before the convolution's backward call. `lossy` adds
    delayed precision reduction (DPR) behind every other convolution, batch norm and pooling layer.

    Durations come from existing element-wise kernels: encoding takes `encode_factor` and decoding `decode_factor`
    times the ReLU's forward kernel, which reads and writes the map once; a conversion by cuSPARSE that passes
    over the map twice is nearer 2. A pooled map takes the share of that which its recorded size is of the ReLU's, a
    quarter without sizes, as windows of 2x2 leave. DPR takes `dpr_factor` times the nearest ReLU (0.75: reads 4 bytes,
    writes 2). Each kernel brings a launch of the trace's usual duration.

    In memory a binarised map takes a bit for each element, a sparse one 5 bytes for each of the share `density` of
    them that is not zero, after DPR 2 bytes; each is whole again while its gradient is made.

    Raises:
        InputError: a negative factor.
    """
    for name, value in {
        "encode-factor": encode_factor,
        "decode-factor": decode_factor,
        "dpr-factor": dpr_factor,
    }.items():
        at_least(name, value, 0.0)
    at_least("density", density, 0.0)
    role = roles(graph)
    calls = _Calls.of(graph, role)
    if not calls.relu:
        return Outcome(graph, ("no forward kernel of a ReLU: nothing is encoded",))
    inserts = _Inserts(Edit(graph), preceding(graph))
    sizes = _Sizes(graph, density)
    coded = _code_relus(graph, calls, inserts, sizes, (encode_factor, decode_factor))
    if lossy:
        _reduce(graph, calls, inserts, sizes, coded, dpr_factor)
    before = memory_of(graph)
    after = None if before is None else encoded(before, _absences(graph, before, sizes.maps))
    changed, told, gain = changed_memory(inserts.edit.apply(), before, after)
    counted = ", ".join(f"{count} {name}" for name, count in sorted(inserts.count.items()))
    notes = (
        f"inserted {counted}" if counted else "no ReLU is followed by pooling or a convolution",
        f"{inserts.total_us / 1000:.3f} ms of GPU time added in all steps",
    )
    return Outcome(changed, (*notes, *told), gain)


@dataclass
class _Calls:
    """Forward calls by role, each with its backward one; `starts` finds a call by its first row."""

    relu: list[LayerRun]
    back: dict[int, LayerRun | None]
    starts: dict[int, tuple[Role, LayerRun]]

    @classmethod
    def of(cls, graph: TaskGraph, role: Ints) -> _Calls:
        back: dict[int, LayerRun | None] = {}
        starts: dict[int, tuple[Role, LayerRun]] = {}
        for kind in (Role.RELU, Role.POOLING, Role.CONVOLUTION, Role.BATCHNORM):
            forward = layer_runs(graph, role, kind, Phase.FORWARD)
            answers = backward_of(forward, layer_runs(graph, role, kind, Phase.BACKWARD))
            for run, answer in zip(forward, answers, strict=True):
                back[run.first] = answer
                starts[run.first] = (kind, run)
        return cls([run for kind, run in starts.values() if kind is Role.RELU], back, starts)

    def after(self, graph: TaskGraph, run: LayerRun) -> tuple[Role, LayerRun] | None:
        """The call that follows on the stream, if it is one of these."""
        return self.starts.get(int(graph.following[run.last]))


@dataclass
class _Inserts:
    edit: Edit
    before: Ints
    count: dict[str, int] = field(default_factory=dict)
    total_us: float = 0.0

    def __post_init__(self) -> None:
        graph = self.edit.graph
        self.call_us, self.latency_us = launch_us(graph), launch_latency_us(graph)

    def behind(self, run: LayerRun, name: str, duration_us: float) -> None:
        self._insert(run, name, duration_us, "after", run.last)

    def ahead(self, run: LayerRun | None, name: str, duration_us: float) -> None:
        if run is not None:
            self._insert(run, name, duration_us, "before", run.first)

    def _insert(self, run: LayerRun, name: str, duration_us: float, side: str, row: int) -> None:
        graph = self.edit.graph
        place = {"layer": run.layer, "phase": int(graph.phase[row]), "step": run.step}
        task = self.edit.add(f"Gist {name}", TaskKind.KERNEL, duration_us, **{side: row}, **place)
        call = int(graph.launch[row])
        if call != NONE:
            added = self.edit.add("cudaLaunchKernel", TaskKind.CPU, self.call_us, **{side: call}, **place)
            self.edit.depend(added, task, Dependency.LAUNCH, self.latency_us)
        self.count[name] = self.count.get(name, 0) + 1
        self.total_us += duration_us


@dataclass
class _Sizes:
    """Recorded sizes of calls' inputs, and the maps that are encoded: calls, bytes, what remains of them."""

    graph: TaskGraph
    density: float
    maps: list[tuple[LayerRun, LayerRun | None, float, float]] = field(default_factory=list)

    def of(self, role: Role, run: LayerRun) -> float:
        """Bytes of a call's input; 0 where unknown."""
        return input_bytes(self.graph, [run], _OPERATORS[role])[0]

    def pooled(self, relu: LayerRun, reader: LayerRun) -> float:
        """What a pooled map that a convolution reads is of the ReLU's."""
        whole, part = self.of(Role.RELU, relu), self.of(Role.CONVOLUTION, reader)
        return part / whole if whole and part else _POOLED

    def keep(self, role: Role, run: LayerRun, back: LayerRun | None, code: str) -> None:
        """The input of a call is encoded."""
        size = self.of(role, run)
        share = {"binarize": 1 / 32, "SSDC": self.density * 5 / 4, "DPR": 1 / 2}[code]
        if size:
            self.maps.append((run, back, size, min(share, 1.0)))


def _absences(
    graph: TaskGraph, memory: HeldMemory, maps: list[tuple[LayerRun, LayerRun | None, float, float]]
) -> Iterator[tuple[Absence, float]]:
    """When maps are encoded in the step whose memory is known, and what remains of them."""
    for run, back, size, share in maps:
        away = absence(graph, memory, size, run, back) if back is not None else None
        if away is not None:
            yield away, share


def _code_relus(
    graph: TaskGraph, calls: _Calls, inserts: _Inserts, sizes: _Sizes, factors: tuple[float, float]
) -> set[int]:
    """Inserts the lossless kernels; returns the first rows of the calls that are coded."""
    coded: set[int] = set()
    encode, decode = factors
    for relu in calls.relu:
        took = float(graph.duration_us[relu.rows].sum())
        follower = calls.after(graph, relu)
        if follower and follower[0] is Role.POOLING:
            coded |= {relu.first, follower[1].first}
            inserts.behind(follower[1], "binarize", encode * took)
            inserts.ahead(calls.back[relu.first], "binarize decode", decode * took)
            sizes.keep(Role.POOLING, follower[1], calls.back[relu.first], "binarize")
            follower = calls.after(graph, follower[1])
            # The convolution reads what the pooling leaves.
            took *= sizes.pooled(relu, follower[1]) if follower and follower[0] is Role.CONVOLUTION else 1.0
        if follower and follower[0] is Role.CONVOLUTION:
            coded |= {relu.first, follower[1].first}
            inserts.behind(follower[1], "SSDC encode", encode * took)
            inserts.ahead(calls.back[follower[1].first], "SSDC decode", decode * took)
            sizes.keep(Role.CONVOLUTION, follower[1], calls.back[follower[1].first], "SSDC")
    return coded


def _reduce(graph: TaskGraph, calls: _Calls, inserts: _Inserts, sizes: _Sizes, coded: set[int], factor: float) -> None:
    """Inserts the lossy kernels behind every call that is no ReLU and not coded already."""
    relus = np.array(sorted(run.first for run in calls.relu), np.int64)
    for first, (kind, run) in calls.starts.items():
        if kind is Role.RELU or first in coded:
            continue
        position = min(int(np.searchsorted(relus, first)), len(relus) - 1)
        nearest = min((relus[max(position - 1, 0)], relus[position]), key=lambda row: abs(int(row) - first))
        took = factor * float(graph.duration_us[nearest]) * (_POOLED if kind is Role.POOLING else 1.0)
        sizes.keep(kind, run, calls.back[first], "DPR")
        inserts.behind(run, "DPR", took)
        inserts.ahead(calls.back[first], "DPR decode", took)
