"""Data-parallel training on gloo with other buckets or workers than those recorded (thesis 4.5.1, algorithm 6)."""

from __future__ import annotations

from dataclasses import replace

from daydream.graph.graph import Phase, TaskGraph, TaskKind
from daydream.passes import Outcome, what_if
from daydream.passes.basis.communication import MEBIBYTE, all_reduce_us, check, check_not_negative
from daydream.passes.basis.gradients import ParameterGradient, find_gradients
from daydream.passes.basis.hosted import Exchange, behind_backward, on_every_rank, without_exchange
from daydream.passes.distributed.ddp import USUAL_BUCKET_MB, buckets


@what_if("rebucket")
def rebucket(
    graph: TaskGraph,
    *,
    workers: int = 2,
    bandwidth: float = 1.0,
    latency_us: float = 100.0,
    bucket_mb: float = 0.0,
    first_bucket_mb: float = 0.0,
) -> Outcome:
    """DDP on gloo with other buckets, or among other workers, than those recorded.

    The recorded exchange is taken away, if there is one: gloo's work, its calls, and the waits for it. Gradients are
    gathered in buckets in the order in which they become ready: a bucket is full as soon as it holds `bucket_mb` MiB,
    the first one `first_bucket_mb` (0: as much as the others). With `bucket_mb` 0 they are DDP's usual ones, of 1 and
    25 MiB. Every bucket's all-reduce begins when its last gradient is there and its call is made, one after another;
    what follows the backward pass waits for all.

    Assumptions: workers are alike; what they compute does not change, nor do DDP's copies to and from buckets; gloo
    works beside the computation without taking its cores. An all-reduce takes 2 (n-1)/n S / `bandwidth` (GB/s) and
    2 (n-1) times `latency_us`: measure both where it shall run, for they depend on the number of workers where these
    share a network.

    Raises:
        InputError: a parameter is out of range, no source tells the gradients' sizes, or tasks run on a GPU.
    """
    check("rebucket", workers=workers, bandwidth=bandwidth)
    check_not_negative("rebucket", latency_us=latency_us, bucket_mb=bucket_mb, first_bucket_mb=first_bucket_mb)
    later_mb = bucket_mb or USUAL_BUCKET_MB
    first_mb = first_bucket_mb or (bucket_mb or 1.0)
    found: list[list[list[ParameterGradient]]] = []

    def change(part: TaskGraph, joined: bool) -> TaskGraph:
        stripped = without_exchange(part, copies=False)
        gradients = find_gradients(stripped.graph)
        exchange = Exchange(stripped.graph, joined)
        for of_step in gradients.steps.values():
            groups = buckets(of_step, first_mb * MEBIBYTE, later_mb * MEBIBYTE)
            found.append(groups)
            waiting = behind_backward(stripped.graph, of_step)
            for number, group in enumerate(groups):
                size = sum(gradient.bytes for gradient in group)
                hook = max(gradient.hook for gradient in group)
                call = exchange.edit.add(
                    "c10d::allreduce_", TaskKind.CPU, stripped.call_us, after=hook, phase=Phase.BACKWARD
                )
                us = all_reduce_us(size, workers, bandwidth, latency_us)
                task = exchange.collective(f"all_reduce bucket {number}", us, [call], step=group[0].step, size=size)
                exchange.wait(task, waiting)
        return replace(exchange.edit.apply(), workers=workers)

    changed = on_every_rank("rebucket", graph, change)
    largest = max(found, key=len)
    sizes = [sum(gradient.bytes for gradient in group) for group in largest]
    total = sum(all_reduce_us(size, workers, bandwidth, latency_us) for size in sizes)
    note = (
        f"{len(sizes)} all-reduces a step of {min(sizes) / 1e6:.1f} to {max(sizes) / 1e6:.1f} MB among {workers} "
        f"workers, {total / 1e3:.3f} ms a step on the network"
    )
    return Outcome(changed, (note,))
