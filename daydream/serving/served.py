"""Servings as users see them: times to the first token and between tokens, tokens a second, at percentiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from daydream.serving.requests import Requests
from daydream.serving.scheduler import BINS, Host, Schedule, bin_seconds, schedule
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.serving.costs import IterationCosts
    from daydream.trace.trace import Floats

#: Percentiles that are told.
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Promise of a server to its users.

    Attributes:
        ttft: seconds to the first token at most; None for any.
        tpot: seconds for each further token at most, of a request; None for any.
        percentile: of the requests that keep it.
    """

    ttft: float | None = None
    tpot: float | None = None
    percentile: float = 90.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Served:
    """Requests served by replicas of a model.

    Attributes:
        costs: of an iteration of one replica.
        host: of its scheduler.
        requests: all of them.
        replicas: that take requests in turns.
        schedules: of each replica.
        order: the request of every entry of the schedules, one replica after the other.
    """

    costs: IterationCosts
    host: Host
    requests: Requests
    replicas: int
    schedules: tuple[Schedule, ...]
    order: Any

    @property
    def boards(self) -> int:
        """Boards of all replicas."""
        return self.replicas * self.costs.engine.ranks

    @cached_property
    def _times(self) -> tuple[Floats, Floats, Floats]:
        arrived, first, finished = (
            np.concatenate([getattr(each, name) for each in self.schedules])
            for name in ("arrived", "first", "finished")
        )
        return arrived, first, finished

    @cached_property
    def seconds(self) -> float:
        """From the first request to the last token."""
        arrived, _, finished = self._times
        return float(finished.max() - arrived.min())

    @cached_property
    def ttft(self) -> Floats:
        """Seconds to the first token of every request."""
        arrived, first, _ = self._times
        return first - arrived

    @cached_property
    def tpot(self) -> Floats:
        """Seconds for each further token, the mean of a request; of those with more than one."""
        _, first, finished = self._times
        further = self.requests.output[self.order] - 1
        return (finished - first)[further > 0] / further[further > 0]

    @cached_property
    def latency(self) -> Floats:
        """Seconds from a request to its last token."""
        arrived, _, finished = self._times
        return finished - arrived

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers."""
        return float(self.requests.output.sum()) / self.seconds

    @property
    def user_tokens_per_second(self) -> float:
        """Tokens that a user sees a second, the median of the requests."""
        return 1 / float(np.median(self.tpot)) if len(self.tpot) else float("inf")

    def gap(self, percentile: float) -> float:
        """Seconds between two tokens of a sequence, at a percentile of the tokens."""
        gaps = np.cumsum(np.sum([each.gaps for each in self.schedules], axis=0))
        place = int(np.searchsorted(gaps, gaps[-1] * percentile / 100))
        return float(bin_seconds()[min(place, BINS - 1)]) if gaps[-1] else 0.0

    def keeps(self, promise: Promise) -> bool:
        """True if so many requests are as fast as promised."""
        return all(
            limit is None or not len(times) or float(np.percentile(times, promise.percentile)) <= limit
            for limit, times in ((promise.ttft, self.ttft), (promise.tpot, self.tpot))
        )

    def record(self, hourly: float | None = None) -> dict[str, Any]:
        """As JSON; ``hourly`` is what a board costs."""
        costs, schedules = self.costs, self.schedules
        engine, iterations = costs.engine, sum(each.iterations for each in schedules)
        record = {
            "model": costs.model.title,
            "device": costs.device.name,
            "tensor": engine.ranks,
            "replicas": self.replicas,
            "boards": self.boards,
            "precision": engine.precision,
            "cache": engine.cache,
            "max_sequences": engine.sequences,
            "max_tokens": engine.tokens,
            "requests": len(self.order),
            "seconds": _rounded(self.seconds),
            "output_tokens_per_second": _rounded(self.tokens_per_second),
            "output_tokens_per_second_and_board": _rounded(self.tokens_per_second / self.boards),
            "output_tokens_per_second_and_user": _rounded(self.user_tokens_per_second),
            "requests_per_second": _rounded(len(self.order) / self.seconds),
            "ttft_seconds": _percentiles(self.ttft),
            "tpot_seconds": _percentiles(self.tpot),
            "gap_seconds": {f"p{each}": _rounded(self.gap(each)) for each in PERCENTILES},
            "latency_seconds": _percentiles(self.latency),
            "iterations": iterations,
            "mean_sequences": _rounded(sum(each.running * each.iterations for each in schedules) / max(iterations, 1)),
            "preemptions": sum(each.preemptions for each in schedules),
            "busy_share": _rounded(sum(each.busy for each in schedules) / self.seconds / self.replicas),
            "weight_bytes": round(costs.weights),
            "cache_tokens": costs.cache_tokens,
            "cache_share_at_peak": _rounded(max(each.pages for each in schedules) / max(costs.blocks, 1)),
            "assumed": list(self.assumed),
        }
        if hourly is not None:
            record["price_per_million_output_tokens"] = _rounded(
                hourly * self.boards / 3600 / self.tokens_per_second * 1e6
            )
        return record

    @property
    def assumed(self) -> tuple[str, ...]:
        """Assumptions, a sentence each."""
        host = self.host
        ahead = "while the boards compute" if host.overlaps else "before the boards compute"
        launches = "iterations are launched as graphs" if host.graphs else "kernels are launched one by one"
        times = f"{1e3 * host.iteration:g} ms an iteration and {1e6 * host.sequence:g} us a sequence"
        even = ("experts get equally many tokens",) if self.costs.model.has_experts else ()
        return (f"the host takes {times}, {ahead}; {launches}", *even)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _percentiles(times: Floats) -> dict[str, float]:
    if not len(times):
        return {}
    shares = {f"p{each}": _rounded(float(np.percentile(times, each))) for each in PERCENTILES}
    return {"mean": _rounded(float(times.mean())), **shares}


def served(
    requests: Requests, costs: IterationCosts, host: Host, *, replicas: int = 1, reserves: bool = False
) -> Served:
    """Requests served by equal replicas, which take them in turns.

    Args:
        requests: all of them; of a limited concurrency each replica has its share.
        costs: of an iteration of one replica.
        host: of its scheduler.
        replicas: how many.
        reserves: whether a sequence begins only where all that it will need is free.

    Raises:
        InputError: the weights, or a request, do not fit.
    """
    check_fit(requests, costs)
    if requests.concurrency and requests.concurrency < replicas:
        problem = f"{requests.concurrency} requests at a time cannot be shared by {replicas} replicas"
        raise InputError("--concurrency", problem, "use fewer replicas")
    places = [np.arange(replica, len(requests.arrival), replicas) for replica in range(replicas)]
    places = [each for each in places if len(each)]
    parts = (
        replace(
            requests, arrival=requests.arrival[each], prompt=requests.prompt[each], output=requests.output[each],
            concurrency=-(-requests.concurrency // replicas),
        ) for each in places
    )  # fmt: skip
    schedules = tuple(schedule(part, costs, host, reserves=reserves) for part in parts)
    return Served(
        costs=costs, host=host, requests=requests, replicas=replicas, schedules=schedules, order=np.concatenate(places)
    )


def check_fit(requests: Requests, costs: IterationCosts) -> None:
    """Refuses what no schedule can serve.

    Raises:
        InputError: the weights leave no room for the longest request.
    """
    engine = costs.engine
    if not costs.blocks:
        gigabytes, board = costs.weights / 1e9, costs.device.name
        problem = f"{gigabytes:.1f} GB of weights leave a {board} no room for keys and values"
        raise InputError("--tensor", problem, "use more boards, larger ones, or --precision")
    if requests.longest > costs.cache_tokens:
        problem = f"a request has {requests.longest} tokens, and a replica has room for {costs.cache_tokens}"
        raise InputError("--prompt", problem, "use more boards, or --cache fp8")
    if engine.sequences > engine.tokens:
        problem = f"{engine.sequences} sequences need a token each, but an iteration has {engine.tokens}"
        raise InputError("--max-tokens", problem, "raise it, or lower --max-sequences")
