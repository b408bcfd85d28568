"""Servings as users see them: times to the first token and between tokens, tokens a second, at percentiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daydream.serving.requests import Requests
from daydream.serving.scheduler import BINS, Host, Schedule, bin_seconds, schedule
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.serving.costs import IterationCosts
    from daydream.trace.trace import Floats, Ints

#: Percentiles that are reported.
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


class Carried(NamedTuple):
    """Prompts that other boards computed.

    Attributes:
        served: the prompts, with a token each.
        link: that keys and values take.
        seconds: from the first token of each request until its keys and values are there.
    """

    served: Served
    link: str
    seconds: Floats

    def record(self) -> dict[str, Any]:
        """As JSON."""
        prompts = self.served
        return {
            "device": prompts.costs.device.name, "tensor": prompts.costs.engine.ranks, "replicas": prompts.replicas,
            "boards": prompts.boards, "busy_share": _rounded(prompts.busy_share), "link": self.link,
            "carry_seconds": _percentiles(self.seconds),
        }  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class Served:
    """Requests served by replicas of a model.

    Attributes:
        costs: of an iteration of one replica.
        host: of its scheduler.
        requests: all of them.
        replicas: that take requests in turns.
        schedules: of each group of tensor ranks.
        arrived: seconds at which each request was sent.
        first: at which each had its first token.
        finished: at which each had its last one.
        prompts: what computed the prompts, where other boards did.
    """

    costs: IterationCosts
    host: Host
    requests: Requests
    replicas: int
    schedules: tuple[Schedule, ...]
    arrived: Floats
    first: Floats
    finished: Floats
    prompts: Carried | None = None

    @property
    def pools(self) -> tuple[tuple[str, int], ...]:
        """Kinds of boards and how many of each: those that decode, and those for prompts alone."""
        decoding = (self.costs.device.name, self.replicas * self.costs.engine.boards)
        return (decoding,) if self.prompts is None else (decoding, *self.prompts.served.pools)

    @property
    def boards(self) -> int:
        """Boards of all replicas."""
        return sum(count for _, count in self.pools)

    @cached_property
    def seconds(self) -> float:
        """From the first request to the last token."""
        return float(self.finished.max() - self.arrived.min())

    @cached_property
    def ttft(self) -> Floats:
        """Seconds to the first token of every request."""
        return self.first - self.arrived

    @cached_property
    def tpot(self) -> Floats:
        """Seconds for each further token, the mean of a request; of those with more than one."""
        further = self.requests.output - 1
        return (self.finished - self.first)[further > 0] / further[further > 0]

    @cached_property
    def latency(self) -> Floats:
        """Seconds from a request to its last token."""
        return self.finished - self.arrived

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
        gaps = np.cumsum(np.sum([each.gaps for each in self.schedules], axis=0) if self.schedules else np.zeros(BINS))
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
            "expert": engine.experts or 1,
            "replicas": self.replicas,
            "boards": self.boards,
            "precision": engine.precision,
            "cache": engine.cache,
            "max_sequences": engine.sequences,
            "max_tokens": engine.tokens,
            "draft": engine.draft,
            "tokens_an_iteration": _rounded(engine.tokens_an_iteration),
            "requests": len(self.arrived),
            "seconds": _rounded(self.seconds),
            "output_tokens_per_second": _rounded(self.tokens_per_second),
            "output_tokens_per_second_and_board": _rounded(self.tokens_per_second / self.boards),
            "output_tokens_per_second_and_user": _rounded(self.user_tokens_per_second),
            "requests_per_second": _rounded(len(self.arrived) / self.seconds),
            "ttft_seconds": _percentiles(self.ttft),
            "tpot_seconds": _percentiles(self.tpot),
            "gap_seconds": {f"p{each}": _rounded(self.gap(each)) for each in PERCENTILES},
            "latency_seconds": _percentiles(self.latency),
            "iterations": iterations,
            "mean_sequences": _rounded(sum(each.running * each.iterations for each in schedules) / max(iterations, 1)),
            "preemptions": sum(each.preemptions for each in schedules),
            "busy_share": _rounded(self.busy_share),
            "weight_bytes": round(costs.weights),
            "cache_tokens": costs.cache_tokens,
            "cache_share_at_peak": _rounded(max((each.pages for each in schedules), default=0) / max(costs.blocks, 1)),
            "assumed": list(self.assumed),
        }
        if self.prompts is not None:
            record["prefill"] = self.prompts.record()
        if hourly is not None:
            record["price_per_million_output_tokens"] = _rounded(
                hourly * self.boards / 3600 / self.tokens_per_second * 1e6
            )
        return record

    @property
    def busy_share(self) -> float:
        """Share of the time in which the boards that decode compute."""
        return sum(each.busy for each in self.schedules) / self.seconds / (self.replicas * self.costs.engine.groups)

    @property
    def assumed(self) -> tuple[str, ...]:
        """Assumptions, a sentence each."""
        host = self.host
        ahead = "while the boards compute" if host.overlaps else "before the boards compute"
        launches = "iterations are launched as graphs" if host.graphs else "kernels are launched one by one"
        times = f"{1e3 * host.iteration:g} ms an iteration and {1e6 * host.sequence:g} us a sequence"
        engine = self.costs.engine
        sentences = [f"the host takes {times}, {ahead}; {launches}"]
        if self.costs.model is not None and self.costs.model.has_experts:
            sentences.append("experts get equally many tokens")
        if engine.groups > 1:
            sentences.append(f"the {engine.groups} groups that share experts have equally many tokens in an iteration")
        if engine.draft:
            sentences.append(
                f"{100 * engine.acceptance:g} % of drafted tokens are accepted where those before were:"
                f" {engine.tokens_an_iteration:.2f} tokens an iteration of a sequence; "
                + (
                    "they are looked up in no time"
                    if self.costs.draft is None
                    else "what drafts runs on the same boards"
                )
            )
        if self.prompts is not None:
            sentences.append("keys and values follow when all of a prompt is computed, one prompt after the other")
        return tuple(sentences)


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
    schedules, places = in_turns(requests, costs, host, replicas * costs.engine.groups, reserves=reserves)
    arrived, first, finished = (np.empty(len(requests.arrival)) for _ in range(3))
    for place, each in zip(places, schedules, strict=True):
        arrived[place], first[place], finished[place] = each.arrived, each.first, each.finished
    return Served(
        costs=costs, host=host, requests=requests, replicas=replicas, schedules=tuple(schedules),
        arrived=arrived, first=first, finished=finished,
    )  # fmt: skip


def in_turns(
    requests: Requests, costs: IterationCosts, host: Host, replicas: int, *, reserves: bool
) -> tuple[list[Schedule], list[Ints]]:
    """Schedules of replicas that take requests in turns, and which requests each of these has.

    Raises:
        InputError: fewer requests are under way at a time than there are replicas.
    """
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
    return [schedule(part, costs, host, reserves=reserves) for part in parts], places


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
    if engine.sequences * (1 + engine.draft) > engine.tokens:
        each = "a token" if not engine.draft else f"{1 + engine.draft} tokens"
        problem = f"{engine.sequences} sequences need {each} each, but an iteration has {engine.tokens}"
        raise InputError("--max-tokens", problem, "raise it, or lower --max-sequences")
