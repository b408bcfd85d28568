"""The cheapest boards that keep a promise: kinds of boards, tensor ranks, limits of a batch, and replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from daydream.serving.costs import Engine, IterationCosts, iteration_costs
from daydream.serving.served import Promise, Served, check_fit, served
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.serving.parts import ServedModel
    from daydream.serving.requests import Requests
    from daydream.serving.scheduler import Host
    from hal.spec.device import DeviceSpec

#: Tensor ranks and limits of a batch that are tried.
TENSORS = (1, 2, 4, 8)
SEQUENCES = (16, 32, 64, 128, 256, 512)

#: Most replicas that are tried.
REPLICAS = 256


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
        return each.boards * self.hourly.get(each.costs.device.name, 1.0)

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
    hourly: Mapping[str, float] | None = None,
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

    Raises:
        InputError: nothing fits, or nothing keeps the promise.
    """
    best: list[Served] = []
    tried: list[Served] = []
    problems: list[InputError] = []
    for costs in _configurations(model, devices, engine, tensors, problems):
        try:
            check_fit(requests, costs)
        except InputError as error:
            problems.append(error)
            continue
        smaller: Served | None = None
        for limit in (*(each for each in SEQUENCES if each < engine.sequences), engine.sequences):
            limited = replace(costs, engine=costs.engine._replace(sequences=limit))
            outcomes = list(_fewest(limited, requests, promise, host, reserves=reserves))
            tried += outcomes
            last = outcomes[-1]
            # What never fills a smaller batch is the same with a larger one.
            if last.keeps(promise) and (smaller is None or smaller.replicas != last.replicas or _fills(smaller)):
                best.append(last)
            smaller = last
            if not any(map(_fills, outcomes)):
                break
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


def _configurations(
    model: ServedModel, devices: Sequence[DeviceSpec], engine: Engine, tensors: Sequence[int],
    problems: list[InputError],
) -> Iterator[IterationCosts]:  # fmt: skip
    """Costs of every kind of board and ranks; what cannot be is left out, and why goes into ``problems``."""
    for device in devices:
        for ranks in tensors:
            try:
                yield iteration_costs(model, device, engine._replace(ranks=ranks))
            except InputError as error:
                problems.append(error)


def _fewest(
    costs: IterationCosts, requests: Requests, promise: Promise, host: Host, *, reserves: bool
) -> Iterator[Served]:
    """Simulations with the fewest replicas that keep the promise as the last, by doubling and halving.

    Requests that never wait are as fast as they can be: where those break the promise no number helps.
    """
    outcomes: dict[int, Served] = {}

    def keeps(replicas: int) -> bool:
        if replicas not in outcomes:
            outcomes[replicas] = served(requests, costs, host, replicas=replicas, reserves=reserves)
        return outcomes[replicas].keeps(promise)

    least = most = 1
    if not keeps(1) and served(replace(requests, concurrency=1), costs, host, reserves=reserves).keeps(promise):
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
