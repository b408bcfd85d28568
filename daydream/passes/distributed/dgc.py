"""Deep Gradient Compression (thesis 4.5.2, A.10, algorithm 12)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind, matching
from daydream.passes import Outcome, what_if
from daydream.passes.basis.communication import check, check_not_negative
from daydream.passes.basis.gradients import last_of_threads, sized_all_reduces
from daydream.trace.trace import NONE, argument
from hal.support.errors import InputError

#: How often compression moves the gradients' bytes: momentum correction and local accumulation read gradient, velocity
#: and residual and write the latter two (5); finding what is above the threshold reads the residual (1); taking it out
#: writes both (2). The sample that sets the threshold, 1 % of the elements, is left out (DGC, section 3).
COMPRESS_PASSES = 8.0

#: How often decompression moves the gradients' bytes: clearing the dense gradient, and adding what arrived to it.
DECOMPRESS_PASSES = 2.0

#: From this size on an element-wise kernel is limited by memory rather than by its start.
LARGE_BYTES = 2.0**20


@what_if("dgc")
@dataclass(frozen=True, kw_only=True)
class Dgc:
    """Deep Gradient Compression: communication shrinks, kernels that compress and decompress come in (algorithm 12).

    A share `ratio` of the elements is sent, each with its index (`index_factor` 2: as many bytes again). Durations
    of all-reduces are scaled by the product, as in the thesis, but for `latency_us` of each, which stays. That is
    right for a sparse all-reduce. What happens in practice among n workers is an all-gather of everybody's different
    elements: n - 1 of them arrive where a ring all-reduce carries 2 (n-1) / n arrays, so the factor is
    ratio x index_factor x n / 2. `workers` 0 is the number that the pass ddp was given, else the recorded one; where
    neither is known, and with 2, the factor is that of the sparse all-reduce.

    Before every all-reduce stands one compression kernel behind the GPU tasks it waits for, after it one
    decompression kernel before the GPU tasks that wait for it, each with a launch of `launch_us`. Their time is the
    gradients' bytes times `compress_passes` or `decompress_passes` at `elementwise_gb_s`; by default the rate that
    the trace's own copies, fills and element-wise kernels reach.

    Assumption: the work of the many small kernels of an implementation takes what one kernel for the bucket takes.

    Raises:
        InputError: a parameter is out of range, no all-reduce in the graph or none of known size, or no rate in
            the trace.
    """

    ratio: float = 0.01
    index_factor: float = 2.0
    workers: int = 0
    latency_us: float = 0.0
    compress_passes: float = COMPRESS_PASSES
    decompress_passes: float = DECOMPRESS_PASSES
    elementwise_gb_s: float = 0.0
    launch_us: float = 10.0

    def __post_init__(self) -> None:
        check("dgc", ratio=self.ratio, index_factor=self.index_factor)
        names = ("workers", "latency_us", "launch_us", "compress_passes", "decompress_passes", "elementwise_gb_s")
        check_not_negative("dgc", **{name: getattr(self, name) for name in names})

    def __call__(self, graph: TaskGraph) -> Outcome:
        """The graph with shorter all-reduces and the kernels around them."""
        graph, rows, sizes, unknown = sized_all_reduces("dgc", graph)
        rate = self.elementwise_gb_s or elementwise_rate(graph)
        workers = self.workers or graph.workers or _recorded_workers(graph)
        factor = self.ratio * self.index_factor * (workers / 2.0 if workers else 1.0)
        fixed = np.minimum(graph.duration_us[rows], self.latency_us)
        shorter = fixed + (graph.duration_us[rows] - fixed) * factor
        edit = Edit(graph)
        edit.set("duration_us", rows, shorter)
        edit.set("bytes", rows, sizes * self.ratio * self.index_factor)
        kernels = _Kernels(edit, self.launch_us)
        passes = (self.compress_passes, self.decompress_passes)
        for row, size in zip(rows.tolist(), sizes.tolist(), strict=True):
            kernels.around(row, *(size * count / (rate * 1e3) for count in passes))
        before, after = float(graph.duration_us[rows].sum()), float(shorter.sum())
        among = f", an all-gather among {workers} workers" if workers else ", a sparse all-reduce among unknown workers"
        notes = [
            f"{len(rows)} all-reduces take {factor:g} of their time{among}: {after / 1e3:.3f} ms instead of "
            f"{before / 1e3:.3f} ms",
            f"compression moves {sizes.sum() / 1e6:.1f} MB of gradients {sum(passes):g} times at {rate:.0f} GB/s"
            + ("" if self.elementwise_gb_s else ", the rate of this trace's element-wise kernels"),
        ]
        if factor >= 1:
            notes.append("with so many workers, sparse gradients are no smaller than dense ones")
        if unknown:
            notes.append(f"{unknown} all-reduces of unknown size stay as they were")
        return Outcome(edit.apply(), tuple(notes))


def _recorded_workers(graph: TaskGraph) -> int:
    """The ranks of the recorded group, 0 where the trace does not say."""
    ranks = graph.trace.distributed.get("world_size") if graph.trace is not None else None
    return ranks if isinstance(ranks, int) and ranks > 1 else 0


@dataclass
class _Kernels:
    edit: Edit
    launch_us: float

    def around(self, row: int, compress_us: float, decompress_us: float) -> None:
        graph = self.edit.graph
        sources = graph.edge_source[graph.edge_target == row]
        targets = graph.edge_target[graph.edge_source == row]
        before = last_of_threads(graph, sources[graph.on_gpu[sources]].tolist())
        after = targets[graph.on_gpu[targets]]
        if before:
            # One kernel: behind the last of the tasks that the all-reduce waits for.
            kernel = self._add("DGC compress", compress_us, row, after=before[-1])
            self.edit.depend(kernel, row, Dependency.COMMUNICATION)
        elif graph.on_gpu[row]:
            self._add("DGC compress", compress_us, row, before=row)
        if len(after):
            kernel = self._add("DGC decompress", decompress_us, row, before=int(after.min()))
            self.edit.depend(row, kernel, Dependency.COMMUNICATION)
        elif graph.on_gpu[row]:
            self._add("DGC decompress", decompress_us, row, after=row)

    def _add(self, name: str, duration_us: float, row: int, after: int | None = None, before: int | None = None) -> int:
        """A kernel next to a GPU task, with its launch next to that task's."""
        graph = self.edit.graph
        neighbour = after if after is not None else before
        assert neighbour is not None
        phase, step = Phase(int(graph.phase[row])), int(graph.step[row])
        kernel = self.edit.add(name, TaskKind.KERNEL, duration_us, after=after, before=before, phase=phase, step=step)
        caller = int(graph.launch[neighbour])
        if caller != NONE:
            place = {"after": caller} if after is not None else {"before": caller}
            call = self.edit.add("cudaLaunchKernel", TaskKind.CPU, self.launch_us, phase=phase, step=step, **place)
            self.edit.depend(call, kernel, Dependency.LAUNCH)
        return kernel


def elementwise_rate(graph: TaskGraph) -> float:
    """Bytes read and written per time by this trace's copies on the device, fills and element-wise kernels, GB/s.

    All of 1 MiB and more together, so that long ones count most. Element-wise kernels are those of PyTorch whose
    grid tells their size: 4 elements a thread of 4 bytes, read once (twice by functions of two tensors, not at all
    by fills) and written once.

    Raises:
        InputError: there is none.
    """
    moved = np.where(np.isnan(graph.bytes), 0.0, graph.bytes)
    factor = np.where(matching(graph.names, r"dtod|device -> device"), 2.0, 0.0)
    moved = moved * np.where(graph.kind == TaskKind.MEMSET, 1.0, factor[graph.name])
    vectorised = matching(graph.names, r"\bvectorized_elementwise_kernel<4")[graph.name] & graph.on_gpu
    for row in np.flatnonzero(vectorised & (graph.event != NONE)):
        moved[row] = _grid_bytes(graph, int(row))
    large = (moved >= LARGE_BYTES) & (graph.duration_us > 0) & (graph.mark == Mark.NONE)
    if not large.any():
        raise InputError(
            "dgc: elementwise-gb-s", "the trace has no element-wise kernel of known size", "write the rate in GB/s"
        )
    return float(moved[large].sum() / graph.duration_us[large].sum() / 1e3)


_FILL = re.compile(r"FillFunctor")
_TWO_INPUTS = re.compile(r"BinaryFunctor|CUDAFunctor_add|CUDAFunctorOnSelf_add|AddFunctor|threshold")


def _grid_bytes(graph: TaskGraph, row: int) -> float:
    assert graph.trace is not None
    arguments = graph.trace.arguments[graph.event[row]]
    grid, block = argument(arguments, "grid"), argument(arguments, "block")
    if not isinstance(grid, list) or not isinstance(block, list):
        return 0.0
    threads = float(math.prod(grid) * math.prod(block))
    name = graph.text(row)
    streams = 1 if _FILL.search(name) else 3 if _TWO_INPUTS.search(name) else 2
    return threads * 16.0 * streams
