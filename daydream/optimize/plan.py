"""What the search found, as DDP, FSDP and ``torch.utils.checkpoint`` take it, and why it wins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from daydream.optimize.coarse import CoarseStep
from daydream.optimize.exchange import Ends, Exchange
from daydream.optimize.fsdp import Sharding, Wrapping
from daydream.optimize.strategies import Optimized, Variant
from daydream.passes.basis.communication import MEBIBYTE
from daydream.passes.distributed.ddp import AllReduceCost
from daydream.passes.memory.recompute import blocks_of


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One bucket of a replay; times are microseconds from the step's beginning.

    Attributes:
        first: its first gradient.
        last: its last one.
        bytes: of its gradients together.
        ready_us: when they are complete and its call has returned.
        start_us: when its all-reduce starts.
        end_us: when that ends.
    """

    first: int
    last: int
    bytes: float
    ready_us: float
    start_us: float
    end_us: float


def buckets_of(exchange: Exchange, step: CoarseStep, ends: Ends) -> list[Bucket]:
    """The buckets of a list as a replay runs them."""
    progress, first, buckets = step.start(), 0, []
    for last in ends:
        before = progress
        progress = step.extended(before, first, last)
        end = float(progress.end[0])
        returned = before.issued[0, last] + step.call_us[last]
        ready = max(float(before.ready[0, first : last + 1].max()), float(returned) if step.call_us[last] else -np.inf)
        buckets.append(
            Bucket(
                first=first,
                last=last,
                bytes=sum(gradient.bytes for gradient in exchange.of_step[first : last + 1]),
                ready_us=ready - step.begin,
                start_us=max(ready, float(before.end[0])) - step.begin,
                end_us=end - step.begin,
            )
        )
        first = last + 1
    return buckets


def plan_record(answer: Optimized, source: str) -> dict[str, Any]:
    """The plan as JSON; lengths are seconds."""
    before, best = answer.before, answer.best
    exchange = best.exchange
    cost = exchange.cost
    return {
        "source": source,
        "workers": cost.workers,
        "network": _network_name(cost),
        "gradients": len(best.step),
        "step_seconds": {
            "before": _seconds(before.lengths_us[before.usual]),
            "best_limit": _seconds(best.lengths_us[best.limited]),
            "after": _seconds(best.length_us),
        },
        "ddp": {
            "bucket_cap_mb": best.limit_mb,
            "bucket_cap_mb_list": [bucket.bytes / MEBIBYTE for bucket in _found(best)],
            "buckets": [
                [gradient.name for gradient in exchange.of_step[bucket.first : bucket.last + 1]]
                for bucket in _found(best)
            ],
        },
        "passes": [{"name": each.name, "parameters": each.parameters} for each in best.applied],
        "checkpoint": checkpointed(best),
        "peak_bytes": best.peak_bytes,
        "why": why(answer),
        "tried": [
            {
                "passes": [request.text for request in each.requests],
                "step_seconds": _seconds(each.length_us),
                "why": word,
            }
            for each, word in answer.tried
        ],
    }


def checkpointed(variant: Variant) -> list[str]:
    """The modules to put ``torch.utils.checkpoint`` around."""
    names: list[str] = []
    for request in variant.requests:
        # Segments are stretches of the forward pass, which no module need be.
        if request.name == "recompute" and not request.parameters.get("segments"):
            blocks = blocks_of(variant.exchange.graph, str(request.parameters.get("modules", "")))
            names += list(blocks)[:: int(request.parameters.get("every", 1))]
    return names


def why(answer: Optimized) -> list[str]:
    """In sentences where the old and the new step differ."""
    before, best = answer.before, answer.best
    old, new = buckets_of(before.exchange, before.step, before.usual), _found(best)
    sentences = [f"{text}: {note}" for text, note in _of_passes(best)]
    exposed = [_behind(before, before.usual), _behind(best, best.best)]
    if best.best == before.usual and not best.requests:
        return ["no list of buckets makes the step shorter than the one there is"]
    sentences.append(
        f"{len(new)} all-reduces a step in place of {len(old)}: {_network(new):.2f} ms on the network, "
        f"{_network(old):.2f} before; the step waits {exposed[1] / 1e3:.2f} ms for it, {exposed[0] / 1e3:.2f} ms before"
    )
    sentences.append(
        f"the last bucket, which no computation hides, holds {new[-1].bytes / 1e6:.2f} MB and takes "
        f"{_took(new[-1]):.2f} ms; {old[-1].bytes / 1e6:.2f} MB and {_took(old[-1]):.2f} ms before"
    )
    waits = [max(bucket.start_us - bucket.ready_us, 0.0) / 1e3 for bucket in (old[-1], new[-1])]
    if abs(waits[0] - waits[1]) >= 0.01:
        sentences.append(f"it waits {waits[1]:.2f} ms for the buckets in front of it, {waits[0]:.2f} ms before")
    return sentences


def _network_name(cost: AllReduceCost) -> str:
    return cost.node.name if cost.node is not None else f"{cost.bandwidth:g} GB/s"


def _found(variant: Variant) -> list[Bucket]:
    return buckets_of(variant.exchange, variant.step, variant.best)


def _of_passes(variant: Variant) -> list[tuple[str, str]]:
    pairs = zip(variant.requests, variant.applied, strict=True)
    return [(request.text, applied.notes[0]) for request, applied in pairs if applied.notes]


def _behind(variant: Variant, ends: Ends) -> float:
    """Microseconds by which the exchange makes the step longer."""
    return variant.step.replay(ends) - (variant.step.done - variant.step.begin)


def _network(buckets: list[Bucket]) -> float:
    return sum(_took(bucket) for bucket in buckets)


def _took(bucket: Bucket) -> float:
    return (bucket.end_us - bucket.start_us) / 1e3


def _seconds(microseconds: float) -> float:
    return round(microseconds * 1e-6, 9)


def wrapping_record(
    sharding: Sharding, source: str, usual: tuple[Wrapping, float], best: tuple[Wrapping, float], tried: int
) -> dict[str, Any]:
    """The wrapping as JSON; each of both with its step's microseconds."""
    cost = sharding.exchange.cost

    def record(wrapping: Wrapping) -> dict[str, Any]:
        return {
            "wrap": sharding.modules(wrapping),
            "forward_prefetch": wrapping.forward,
            "backward_prefetch": wrapping.backward,
            "gathered_bytes": sharding.gathered(wrapping),
        }

    return {
        "source": source,
        "workers": cost.workers,
        "network": _network_name(cost),
        "step_seconds": {"before": _seconds(usual[1]), "after": _seconds(best[1])},
        "fsdp": record(best[0]),
        "usual": record(usual[0]),
        "tried": tried,
    }
