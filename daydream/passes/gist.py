"""Gist: feature maps encoded between forward and backward (thesis 4.5.2 and algorithm 11)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind
from daydream.passes import Outcome, what_if
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
from daydream.trace.trace import NONE, Ints


@what_if("gist")
def gist(
    graph: TaskGraph,
    *,
    encode_factor: float = 1.0,
    decode_factor: float = 1.0,
    lossy: bool = False,
    dpr_factor: float = 0.75,
) -> Outcome:
    """Encoding kernels behind ReLUs in the forward pass, decoding ones in the backward pass (algorithm 11).

    A ReLU followed by a pooling layer is binarised behind that; its mask is decoded before the ReLU's backward
    call. A ReLU followed by a convolution (or by pooling and a convolution) is stored sparse (SSDC), encoded behind the
    convolution, its last reader in the forward pass, and decoded before the convolution's backward call. `lossy` adds
    delayed precision reduction (DPR) behind every other convolution, batch norm and pooling layer.

    Durations come from existing element-wise kernels: encoding takes `encode_factor` and decoding `decode_factor`
    times the ReLU's forward kernel, which reads and writes the map once; a conversion by cuSPARSE that passes
    over the map twice is nearer 2. DPR takes `dpr_factor` times the nearest ReLU (0.75: reads 4 bytes, writes 2).
    Each kernel brings a launch of the trace's usual duration. What the memory so saved is good for (a larger
    batch) is not part of the answer: this is the overhead.

    Raises:
        InputError: a negative factor.
    """
    for name, value in {
        "encode-factor": encode_factor,
        "decode-factor": decode_factor,
        "dpr-factor": dpr_factor,
    }.items():
        at_least(name, value, 0.0)
    role = roles(graph)
    calls = _Calls.of(graph, role)
    if not calls.relu:
        return Outcome(graph, ("no forward kernel of a ReLU: nothing is encoded",))
    inserts = _Inserts(Edit(graph), preceding(graph))
    coded = _code_relus(graph, calls, inserts, encode_factor, decode_factor)
    if lossy:
        _reduce(graph, calls, inserts, coded, dpr_factor)
    counted = ", ".join(f"{count} {name}" for name, count in sorted(inserts.count.items()))
    notes = (
        f"inserted {counted}" if counted else "no ReLU is followed by pooling or a convolution",
        f"{inserts.total_us / 1000:.3f} ms of GPU time added in all steps",
    )
    return Outcome(inserts.edit.apply(), notes)


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


def _code_relus(graph: TaskGraph, calls: _Calls, inserts: _Inserts, encode: float, decode: float) -> set[int]:
    """Inserts the lossless kernels; returns the first rows of the calls that are coded."""
    coded: set[int] = set()
    for relu in calls.relu:
        took = float(graph.duration_us[relu.rows].sum())
        follower = calls.after(graph, relu)
        if follower and follower[0] is Role.POOLING:
            coded |= {relu.first, follower[1].first}
            inserts.behind(follower[1], "binarize", encode * took)
            inserts.ahead(calls.back[relu.first], "binarize decode", decode * took)
            follower = calls.after(graph, follower[1])
        if follower and follower[0] is Role.CONVOLUTION:
            coded |= {relu.first, follower[1].first}
            inserts.behind(follower[1], "SSDC encode", encode * took)
            inserts.ahead(calls.back[follower[1].first], "SSDC decode", decode * took)
    return coded


def _reduce(graph: TaskGraph, calls: _Calls, inserts: _Inserts, coded: set[int], factor: float) -> None:
    """Inserts the lossy kernels behind every call that is no ReLU and not coded already."""
    relus = np.array(sorted(run.first for run in calls.relu), np.int64)
    for first, (kind, run) in calls.starts.items():
        if kind is Role.RELU or first in coded:
            continue
        position = min(int(np.searchsorted(relus, first)), len(relus) - 1)
        nearest = min((relus[max(position - 1, 0)], relus[position]), key=lambda row: abs(int(row) - first))
        took = factor * float(graph.duration_us[nearest])
        inserts.behind(run, "DPR", took)
        inserts.ahead(calls.back[first], "DPR decode", took)
