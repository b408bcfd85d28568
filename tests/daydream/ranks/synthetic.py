"""Recordings of a data-parallel job that never ran, with clocks that are wrong by known amounts.

Every rank launches kernels from one thread. Behind every few layers of the backward pass an all-reduce starts on a
stream of its own, and ends on all ranks `transfer` after the last rank has come to it, give or take a little; the
update waits for all of them. What ranks take varies from task to task, and from rank to rank as `load` says. Times are
microseconds.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from daydream.ranks.merge import Merged
from daydream.trace.trace import Floats

_ELEMENTS = 6_553_600
_BASE_NS = 1_790_857_026_000_000_000
_MAIN, _COMPUTE, _NCCL = 100, 7, 20


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, and how its clocks are wrong.

    Attributes:
        ranks: how many.
        per_host: ranks that share a host and its clock.
        steps: recorded ones.
        layers: of the model; each is a kernel forwards and one backwards.
        buckets: all-reduces a step.
        kernel_us: mean length of a kernel.
        transfer_us: of an all-reduce once all ranks are there.
        spread: share by which kernels and launches vary, one standard deviation.
        jitter_us: mean time by which a rank's all-reduce ends late.
        load: of every rank, what its kernels take in those of an even load; by default all alike.
        loading_us: of every rank, how long a step waits for its data; by default not at all.
        offset_us: of every host, by how much its clock is behind at the beginning.
        drift: of every host, microseconds that its clock loses in one.
        seed: of all draws.
    """

    ranks: int = 2
    per_host: int = 1
    steps: int = 4
    layers: int = 24
    buckets: int = 4
    kernel_us: float = 200.0
    transfer_us: float = 500.0
    spread: float = 0.05
    jitter_us: float = 3.0
    load: tuple[float, ...] = ()
    loading_us: tuple[float, ...] = ()
    offset_us: tuple[float, ...] = ()
    drift: tuple[float, ...] = ()
    seed: int = 0

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return -(-self.ranks // self.per_host)


@dataclass
class _Rank:
    """The events of a rank, in the true clock."""

    number: int
    events: list[tuple[str, str, int, float, float, dict[str, Any]]] = field(default_factory=list)
    correlation: int = 0

    def on_host(self, category: str, name: str, start: float, length: float, **arguments: Any) -> None:
        self.events.append((category, name, _MAIN, start, length, arguments))

    def on_stream(self, name: str, stream: int, start: float, length: float, **arguments: Any) -> None:
        self.events.append(("kernel", name, stream, start, length, {"device": 0, "stream": stream, **arguments}))


def recordings(job: Job) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every rank's number and the trace that it would have recorded."""
    ranks = _run(job)
    offsets = job.offset_us or (0.0,) * job.hosts
    drifts = job.drift or (0.0,) * job.hosts
    for rank in ranks:
        host = rank.number // job.per_host
        yield rank.number, _document(rank, job, offsets[host], drifts[host])


def write(job: Job, folder: Path) -> list[Path]:
    """Writes every rank's trace into a folder; the files in order of ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = msgspec.json.Encoder()
    paths = []
    for number, document in recordings(job):
        path = folder / f"node{number // job.per_host}_{1000 + number}.1.pt.trace.json.gz"
        path.write_bytes(gzip.compress(encoder.encode(document), 1, mtime=0))
        paths.append(path)
    return paths


def true_times(job: Job, rank: int, time_us: Floats) -> tuple[Floats, Floats]:
    """Moments so long after the first event of any rank: in the clock of a rank's trace, and on the common clock.

    The common one is the first host's, and starts with the first event of the rank that recorded, by its own clock, the
    earliest one.
    """
    starts = np.array([min(event[3] for event in each.events) for each in _run(job)])
    offsets, drifts = (np.array(given or (0.0,) * job.hosts) for given in (job.offset_us, job.drift))
    host = np.arange(job.ranks) // job.per_host
    begins = starts * (1.0 - drifts[host]) - offsets[host]
    moments = starts.min() + time_us
    own = moments * (1.0 - drifts[host[rank]]) - offsets[host[rank]] - begins[rank]
    return own, moments * (1.0 - drifts[0]) - offsets[0] - begins.min()


def _run(job: Job) -> list[_Rank]:
    """All ranks through all steps."""
    draw = np.random.default_rng(job.seed)
    ranks = [_Rank(number) for number in range(job.ranks)]
    load = np.array(job.load or (1.0,) * job.ranks)
    # Nobody presses the button at the same time.
    now = 1000.0 + draw.uniform(0.0, 300.0, job.ranks)
    for step in range(job.steps):
        now = _step(job, ranks, load, now, step, draw)
    return ranks


def _step(job: Job, ranks: list[_Rank], load: Floats, begin: Floats, step: int, draw: np.random.Generator) -> Floats:
    """A step of all ranks; when each of them was done with it."""

    def around(mean: float) -> Floats:
        return np.maximum(mean * draw.normal(1.0, job.spread, job.ranks), 0.2 * mean)

    host = begin + 20.0
    if job.loading_us:
        for index, rank in enumerate(ranks):
            name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
            rank.on_host("user_annotation", name, host[index], job.loading_us[index])
        host = host + np.array(job.loading_us) + 5.0
    compute = np.zeros(job.ranks)
    nccl = np.zeros(job.ranks)
    every = max(job.layers // job.buckets, 1)
    for layer in range(2 * job.layers):
        backward = layer >= job.layers
        name = "autograd::engine::evaluate_function: AddmmBackward0" if backward else "aten::addmm"
        op, call = around(12.0), around(5.0)
        length = around(job.kernel_us) * load
        start = np.maximum(host + 3.0 + call + 4.0, compute + 1.0)
        for index, rank in enumerate(ranks):
            rank.correlation += 1
            rank.on_host("cpu_op", name, host[index], op[index], **{"External id": rank.correlation})
            rank.on_host(
                "cuda_runtime", "cudaLaunchKernel", host[index] + 3.0, call[index], correlation=rank.correlation
            )
            rank.on_stream("ampere_sgemm", _COMPUTE, start[index], length[index], correlation=rank.correlation)
        host, compute = host + op + around(2.0), start + length
        if backward and (layer - job.layers + 1) % every == 0 and (layer - job.layers) // every < job.buckets:
            host, nccl = _all_reduce(job, ranks, host, compute, nccl, draw)
    # The update waits for the last all-reduce.
    host = host + 5.0
    start = np.maximum(np.maximum(host + 12.0, compute + 1.0), nccl + 1.5)
    length = around(job.kernel_us)
    for index, rank in enumerate(ranks):
        rank.correlation += 1
        rank.on_host(
            "cuda_runtime", "cudaStreamWaitEvent", host[index], 2.0, correlation=900_000_000 + rank.correlation
        )
        rank.on_host("cuda_runtime", "cudaLaunchKernel", host[index] + 3.0, 5.0, correlation=rank.correlation)
        rank.on_stream("multi_tensor_apply_kernel", _COMPUTE, start[index], length[index], correlation=rank.correlation)
    done = start + length
    host = host + 10.0
    for index, rank in enumerate(ranks):
        wait = max(done[index] + 3.0 - host[index], 2.0)
        rank.on_host(
            "cuda_runtime", "cudaDeviceSynchronize", host[index], wait, correlation=800_000_000 + rank.correlation
        )
        rank.on_host("user_annotation", f"ProfilerStep#{step}", begin[index], host[index] + wait + 5.0 - begin[index])
        host[index] += wait + 5.0
    return host + around(10.0)


def _all_reduce(
    job: Job, ranks: list[_Rank], host: Floats, compute: Floats, nccl: Floats, draw: np.random.Generator
) -> tuple[Floats, Floats]:
    """An all-reduce of what the compute stream has made; when the host and the stream of every rank are done."""
    launched = host + 8.0
    start = np.maximum(np.maximum(launched + 10.0, compute + 2.0), nccl + 1.0)
    end = start.max() + job.transfer_us * draw.normal(1.0, job.spread) + draw.exponential(job.jitter_us, job.ranks)
    end = np.maximum(end, start.max() + 1.0)
    told = {
        "Collective name": "allreduce", "In msg nelems": _ELEMENTS, "Out msg nelems": _ELEMENTS, "dtype": "Float",
        "Group size": job.ranks, "Process Group Name": "0", "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(range(job.ranks))) if job.ranks <= 30 else "[0, 1, 2, ...]",
    }  # fmt: skip
    for index, rank in enumerate(ranks):
        rank.correlation += 1
        at = float(host[index])
        record = 900_000_000 + rank.correlation
        rank.on_host("cuda_runtime", "cudaEventRecord", at, 1.0, correlation=record)
        rank.on_host("cpu_op", "record_param_comms", at + 1.5, 20.0, **told)
        rank.on_host("cuda_runtime", "cudaStreamWaitEvent", at + 3.0, 1.0, correlation=700_000_000 + rank.correlation)
        rank.on_host("cuda_runtime", "cudaLaunchKernelExC", at + 8.0, 8.0, correlation=rank.correlation)
        rank.on_stream(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", _NCCL, start[index],
            end[index] - start[index], correlation=rank.correlation, **told,
        )  # fmt: skip
        rank.on_host("cuda_runtime", "cudaEventRecord", at + 18.0, 1.0, correlation=record + 1)
    return host + 25.0, end


def _document(rank: _Rank, job: Job, offset_us: float, drift: float) -> dict[str, Any]:
    """A rank's trace as its own clock tells it: at true time t a clock that loses `drift` shows less."""
    events = []
    for category, name, line, start, length, arguments in sorted(rank.events, key=lambda event: event[3]):
        on_stream = category == "kernel"
        begin = start * (1.0 - drift) - offset_us
        events.append({
            "ph": "X", "cat": category, "name": name, "pid": 0 if on_stream else 1000 + rank.number, "tid": line,
            "ts": round(float(begin), 3), "dur": round(float(length) * (1.0 - drift), 3), "args": arguments,
        })  # fmt: skip
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}],
        "distributedInfo": {
            "backend": "nccl", "rank": rank.number, "world_size": job.ranks, "pg_count": 1,
            "pg_config": [{
                "pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": job.ranks,
                "ranks": list(range(job.ranks)),
            }],
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": _BASE_NS,
        "traceEvents": events,
        "traceName": f"rank{rank.number}.json",
    }  # fmt: skip


#: How much longer the kernels of the last rank take in a planted job.
SLOW = 1.2


def planted_job(hosts: int, per_host: int, spread_us: float, seed: int, *, steps: int = 6) -> Job:
    """A job whose clocks are apart by about `spread_us`, and drift by about 20 µs a second; one rank is slow."""
    draw = np.random.default_rng(seed)
    load = np.ones(hosts * per_host)
    load[-1] = SLOW
    return Job(
        ranks=hosts * per_host,
        per_host=per_host,
        steps=steps,
        load=tuple(load.tolist()),
        offset_us=tuple(draw.normal(0.0, spread_us, hosts).tolist()),
        drift=tuple(draw.normal(0.0, 2e-5, hosts).tolist()),
        seed=seed,
    )


def worst_clock_us(job: Job, merged: Merged) -> float:
    """The largest distance of a rank's aligned clock from the first host's, in the recording, microseconds."""
    span = merged.graph.recorded_us
    ends = np.array([0.0, float(np.nanmax(span) - np.nanmin(span))])
    worst = 0.0
    for rank in range(job.ranks):
        own_us, truth_us = true_times(job, rank, ends)
        place = np.full(len(ends), rank)
        worst = max(worst, float(np.abs(merged.clocks.aligned(place, own_us) - truth_us).max()))
    return worst
