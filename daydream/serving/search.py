"""The cheapest boards that keep a promise: kinds of boards, tensor ranks, limits of a batch, and replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from daydream.serving.costs import Engine, IterationCosts, iteration_costs
from daydream.serving.scheduler import compiled_run
from daydream.serving.separate import LinkName, Prefilled, decoded, prefilled
from daydream.serving.served import Promise, Served, check_fit, served
from hal.support.errors import InputError
from hal.support.threads import cores

if TYPE_CHECKING:
    from daydream.serving.parts import ServedModel
    from daydream.serving.requests import Requests
    from daydream.serving.scheduler import Host
    from hal.spec.device import DeviceSpec

#: Tensor ranks and limits of a batch that are tried.
TENSORS = (1, 2, 4, 8)
SEQUENCES = (16, 32, 64, 128, 256, 512)

#: Boards that share experts, none of them in parts, that are tried where a model has some.
_EXPERTS = (8, 16)

#: Most replicas that are tried.
REPLICAS = 256


#: Simulations of a configuration by replicas, the last with the fewest that keep a promise.
_Way = Callable[[IterationCosts], Iterator[Served]]

#: What is new of a limit of a batch, if anything is, and all that was simulated for it.
_Limit = tuple[Served | None, list[Served]]


@dataclass(frozen=True, eq=False, kw_only=True)
class SearchOutcome:
    """Outcome of a search.

    Attributes:
        best: those that keep the promise by their price, the cheapest first: of each kind of board, tensor ranks and
            limit of a batch the fewest replicas.
        tried: everything that was simulated.
        hourly: price of a board by its name.
    """

    best: tuple[Served, ...]
    tried: tuple[Served, ...]
    hourly: Mapping[str, float]

    def price(self, each: Served) -> float:
        """Of an hour of all boards; boards alone count where none has a price."""
        return sum(count * self.hourly.get(name, 1.0) for name, count in each.pools)

    def frontier(self, board: str) -> tuple[Served, ...]:
        """Those of a kind of board that no other of it beats both in tokens a second of a board and of a user, the
        fastest for users first."""
        frontier: list[Served] = []
        of_board = [each for each in self.tried if each.costs.device.name == board]
        for each in sorted(of_board, key=lambda one: (-one.user_tokens_per_second, -_per_board(one))):
            if not frontier or _per_board(each) > _per_board(frontier[-1]):
                frontier.append(each)
        return tuple(frontier)


def _per_board(each: Served) -> float:
    return each.tokens_per_second / each.boards


def search(
    model: ServedModel, devices: Sequence[DeviceSpec], requests: Requests, promise: Promise, host: Host,
    engine: Engine, *, tensors: Sequence[int] = TENSORS, reserves: bool = False,
    hourly: Mapping[str, float] | None = None, draft: ServedModel | None = None, link: LinkName | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> SearchOutcome:  # fmt: skip
    """Simulates what serves some requests, and finds the fewest replicas of each configuration that keep a promise.

    Args:
        model: that is served.
        devices: kinds of boards.
        requests: with their arrivals.
        promise: to be kept.
        host: of a scheduler.
        engine: what all configurations have in common; batches are limited to its sequences.
        tensors: ranks that are tried.
        reserves: see :func:`daydream.serving.served.served`.
        hourly: prices of boards by name.
        draft: see :func:`daydream.serving.costs.iteration_costs`.
        link: what carries keys and values, where boards for prompts alone are tried too.
        progress: called with "3 of 8" behind every kind of board and ranks.

    Raises:
        InputError: nothing fits, or nothing keeps the promise.
    """
    best: list[Served] = []
    tried: list[Served] = []
    problems: list[InputError] = []
    configurations = list(_configurations(model, devices, engine, tensors, draft, requests, problems))

    def simulate(way: _Way) -> None:
        simulated = _on_cores(lambda costs: _limits(costs, engine, way), configurations)
        for number, (limits, problem) in enumerate(simulated, 1):
            problems.extend([] if problem is None else [problem])
            for last, outcomes in limits:
                tried.extend(outcomes)
                best.extend([last] if last is not None and last.keeps(promise) else [])
            progress(f"{number} of {len(configurations)}")

    simulate(partial(_both, requests, promise, host, reserves=reserves))
    source = None if link is None else _cheapest_prompts(configurations, requests, promise, host, link, hourly or {})
    if source is not None:
        simulate(partial(_decoding, source, promise, host, reserves=reserves))
    if not tried:
        raise problems[0] if problems else InputError("--device", "nothing was tried", "name boards")
    outcome = SearchOutcome(best=(), tried=tuple(tried), hourly=hourly or {})
    if not best:
        fastest = min(tried, key=lambda each: (float(each.tpot.mean()), float(each.ttft.mean())))
        problem = (
            f"nothing of {len(tried)} keeps it; the fastest has {1e3 * float(fastest.ttft.mean()):.0f} ms to the first"
            f" token and {1e3 * float(fastest.tpot.mean()):.1f} ms for each further one"
        )
        raise InputError("--ttft, --tpot", problem, "promise less, or name faster boards")
    order = sorted(best, key=lambda each: (outcome.price(each), float(each.tpot.mean())))
    return replace(outcome, best=tuple(order))


def _fills(each: Served) -> bool:
    """True if an iteration had as many sequences as it may."""
    return any(part.sequences == each.costs.engine.sequences for part in each.schedules)


def _on_cores(
    function: Callable[[IterationCosts], Iterable[_Limit]], configurations: Sequence[IterationCosts]
) -> Iterator[tuple[list[_Limit], InputError | None]]:
    """A function of each configuration, and what it refused, by a thread a core: simulations are machine code that
    runs without Python's lock."""

    def answer(costs: IterationCosts) -> tuple[list[_Limit], InputError | None]:
        limits: list[_Limit] = []
        try:
            limits.extend(function(costs))
        except InputError as error:
            return limits, error
        return limits, None

    compiled_run()  # once, before threads ask for it
    with ThreadPoolExecutor(cores()) as pool:
        try:
            yield from pool.map(answer, configurations)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _limits(costs: IterationCosts, engine: Engine, way: _Way) -> Iterator[_Limit]:
    """The fewest replicas for each limit of a batch, and all that was simulated for it, as long as limits matter; None
    in place of what a smaller limit has given already."""
    smaller: Served | None = None
    for limit in (*(each for each in SEQUENCES if each < engine.sequences), engine.sequences):
        outcomes = list(way(replace(costs, engine=costs.engine._replace(sequences=limit))))
        last = outcomes[-1]
        # One that never fills a smaller batch is the same with a larger one.
        is_same = smaller is not None and smaller.replicas == last.replicas and not _fills(smaller)
        yield None if is_same else last, outcomes
        smaller = last
        if not any(map(_fills, outcomes)):
            return


def _both(
    requests: Requests, promise: Promise, host: Host, costs: IterationCosts, *, reserves: bool
) -> Iterator[Served]:
    """Replicas that compute prompts and decode."""

    def serve(replicas: int) -> Served:
        return served(requests, costs, host, replicas=replicas, reserves=reserves)

    def alone() -> bool:
        return served(replace(requests, concurrency=1), costs, host, reserves=reserves).keeps(promise)

    return _fewest(serve, requests, promise, alone)


def _decoding(
    source: Prefilled, promise: Promise, host: Host, costs: IterationCosts, *, reserves: bool
) -> Iterator[Served]:
    """Replicas that decode what other boards computed."""
    requests = source.requests
    seconds = costs.seconds(1, float(requests.prompt.mean())) + host.iteration * (not host.overlaps)

    def serve(replicas: int) -> Served:
        return decoded(source, costs, host, replicas=replicas, reserves=reserves)

    def alone() -> bool:
        return promise.tpot is None or seconds / costs.engine.tokens_an_iteration <= promise.tpot

    return _fewest(serve, requests, promise, alone)


def _cheapest_prompts(
    configurations: Sequence[IterationCosts], requests: Requests, promise: Promise, host: Host, link: LinkName,
    hourly: Mapping[str, float],
) -> Prefilled | None:  # fmt: skip
    """The cheapest boards that compute prompts alone in the time to the first token; None where there are none."""
    short = replace(requests, output=np.ones_like(requests.output))
    found: list[tuple[float, Prefilled]] = []
    for costs in configurations:
        *_, last = _both(short, replace(promise, tpot=None), host, costs, reserves=False)
        if last.keeps(promise):
            price = last.boards * hourly.get(costs.device.name, 1.0)
            found.append((price, prefilled(requests, costs, host, replicas=last.replicas, link=link)))
    return min(found, key=lambda each: each[0])[1] if found else None


def _configurations(
    model: ServedModel, devices: Sequence[DeviceSpec], engine: Engine, tensors: Sequence[int],
    draft: ServedModel | None, requests: Requests, problems: list[InputError],
) -> Iterator[IterationCosts]:  # fmt: skip
    """Costs of every kind of board, tensor and expert ranks; what cannot be is left out, and why goes into
    ``problems``."""
    for device in devices:
        for ranks in tensors:
            experts = [engine.experts] if engine.experts or not model.has_experts else [0, *_EXPERTS]
            for each in experts:
                try:
                    costs = iteration_costs(model, device, engine._replace(ranks=ranks, experts=each), draft)
                    check_fit(requests, costs)
                except InputError as error:
                    problems.append(error)
                else:
                    yield costs


def _fewest(
    serve: Callable[[int], Served], requests: Requests, promise: Promise, alone: Callable[[], bool]
) -> Iterator[Served]:
    """Simulations with the fewest replicas that keep the promise as the last, by doubling and halving.

    Requests that never wait are as fast as they can be: where those break the promise no number helps.
    """
    outcomes: dict[int, Served] = {}

    def keeps(replicas: int) -> bool:
        if replicas not in outcomes:
            outcomes[replicas] = serve(replicas)
        return outcomes[replicas].keeps(promise)

    least = most = 1
    if not keeps(1) and alone():
        # One that always has requests waiting answers about as much as a replica can.
        offered = float(requests.output.sum()) / max(float(requests.arrival[-1]), 1e-9)
        least, most = 2, min(max(int(offered / outcomes[1].tokens_per_second), 2), REPLICAS, len(requests.arrival))
        while not keeps(most) and most < min(REPLICAS, len(requests.arrival)):
            least, most = most + 1, min(2 * most, REPLICAS, len(requests.arrival))
        while least < most and keeps(most):
            middle = (least + most) // 2
            least, most = (least, middle) if keeps(middle) else (middle + 1, most)
    yield from (each for replicas, each in outcomes.items() if replicas != most)
    yield outcomes[most]
