"""Prompts and decoding on boards of their own: caches of prompts travel from the ones to the others.

The boards for prompts compute the first token too, which the user sees at once (Zhong et al. 2024, section 4). Keys and
values follow when a prompt is computed, one prompt after the other on the adapters of a replica, whose boards each send
what they keep; the side with fewer boards sets the pace. A sequence decodes from when all of it is there. What is
preempted there is computed again there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from daydream.serving.served import Carried, Served, check_fit, in_turns, served
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.serving.costs import IterationCosts
    from daydream.serving.requests import Requests
    from daydream.serving.scheduler import Host, Schedule
    from daydream.trace.trace import Floats

#: Ways from board to board: the network between nodes, or the links within one.
LINKS = ("network", "nvlink")
LinkName = Literal["network", "nvlink"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Prefilled:
    """Prompts computed on boards of their own.

    Attributes:
        requests: with their answers.
        prompts: the same with one token each, as served.
        link: one of :data:`LINKS`.
    """

    requests: Requests
    prompts: Served
    link: LinkName


def prefilled(
    requests: Requests, costs: IterationCosts, host: Host, *, replicas: int = 1, link: LinkName = "network"
) -> Prefilled:
    """Prompts of some requests computed by equal replicas, which take them in turns.

    Raises:
        InputError: the weights, or a prompt, do not fit, or requests wait for answers to others.
    """
    if requests.concurrency:
        raise InputError("--concurrency", "needs boards that do both", "say --rate, or leave out --prefill")
    short = replace(requests, output=np.ones_like(requests.output))
    return Prefilled(requests=requests, prompts=served(short, costs, host, replicas=replicas), link=link)


def decoded(
    source: Prefilled, costs: IterationCosts, host: Host, *, replicas: int = 1, reserves: bool = False
) -> Served:
    """The answers to computed prompts, by replicas that decode.

    Args:
        source: the prompts.
        costs: of an iteration of a replica that decodes.
        host: of its scheduler.
        replicas: how many.
        reserves: see :func:`daydream.serving.served.served`.

    Raises:
        InputError: the weights, or a request, do not fit, or the boards have no such link.
    """
    requests, prompts = source.requests, source.prompts
    check_fit(requests, costs)
    there = _there(source, costs)
    rows = np.flatnonzero(requests.output > 1)
    rows = rows[np.argsort(there[rows], kind="stable")]
    finished = prompts.finished.copy()
    schedules: list[Schedule] = []
    if len(rows):
        answers = replace(
            requests, arrival=there[rows], prompt=requests.prompt[rows], output=requests.output[rows], carried=True
        )
        schedules, places = in_turns(answers, costs, host, replicas * costs.engine.groups, reserves=reserves)
        for place, schedule in zip(places, schedules, strict=True):
            finished[rows[place]] = schedule.finished
    return Served(
        costs=costs, host=host, requests=requests, replicas=replicas, schedules=tuple(schedules),
        arrived=prompts.arrived, first=prompts.first, finished=finished,
        prompts=Carried(served=prompts, link=source.link, seconds=there - prompts.first),
    )  # fmt: skip


def _there(source: Prefilled, costs: IterationCosts) -> Floats:
    """Seconds at which the cache of every prompt is where it is decoded."""
    prompts = source.prompts
    latency, rate = link_rates(prompts.costs, costs, source.link)
    both = (prompts.costs, costs)
    size = max(each.cache_bytes for each in both)
    tokens = source.requests.prompt - source.requests.shared
    travel = tokens * size / rate
    there = np.empty(len(tokens))
    lanes = prompts.replicas * prompts.costs.engine.groups
    for lane in range(lanes):
        rows = np.arange(lane, len(tokens), lanes)
        rows = rows[np.argsort(prompts.first[rows], kind="stable")]
        ends = np.cumsum(travel[rows])
        # One after the other: each begins when it is computed and the one before has left.
        there[rows] = np.maximum.accumulate(prompts.first[rows] - ends + travel[rows]) + ends + latency
    return there


def link_rates(one: IterationCosts, other: IterationCosts, link: LinkName) -> tuple[float, float]:
    """Seconds of a few bytes from a board of the one to the other, and bytes a second of long messages.

    Raises:
        InputError: one of the boards has no such link.
    """
    from roller.library.collectives import link_rate, node_for

    nodes = [node_for(each.device) for each in (one, other)]
    if link == "nvlink":
        if nodes[0].link != nodes[1].link or nodes[0].link.kind != "nvlink":
            problem = f"{one.device.name} and {other.device.name} have no NVLink in common"
            raise InputError("--link", problem, "choose network")
        return nodes[0].collectives.step_seconds, float(link_rate(nodes[0], np.array([2.0]))[0])
    networks = [each.network for each in nodes]
    for node, network in zip(nodes, networks, strict=True):
        if network is None:
            raise InputError("--link", f"{node.name} has no network", "choose nvlink, or other boards")
    latency = max(each.latency_seconds for each in networks if each is not None)
    return latency, min(each.reached_bytes_per_second for each in networks if each is not None)
