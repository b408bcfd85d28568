"""Which plan is fastest: every way to divide a model among so many boards that fits their memory, simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice, product
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from daydream.graph.simulate import simulate
from daydream.plan.bounds import Bounds
from daydream.plan.costs import costs_of
from daydream.plan.experts import divided
from daydream.plan.graph import plan_graph
from daydream.plan.layout import Layout, Shard
from daydream.plan.planned import PlannedStep, most_memory, planned
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.plan.units import Units
    from hal.spec.device import DeviceSpec
    from hal.spec.node import NodeSpec

#: Samples of a micro-batch that are tried.
MICRO_BATCHES = (1, 2, 4, 8)

#: Tokens of a sample that a rank keeps at least where ranks of the context direction are tried, as Llama 3 was trained
#: (Llama Team 2024, table 4: 131,072 tokens among 16).
CONTEXT_TOKENS = 8192

#: Rounds of as many micro-batches as there are stages that are simulated, and one more: from the second round on every
#: further one takes as long as the one before.
FEW_ROUNDS = 2

#: Chunks of an interleaved schedule that are tried.
CHUNKS = 2


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to divide a step.

    Attributes:
        layout: of the ranks.
        batch: samples of a micro-batch.
        checkpoint: what is computed again, as :func:`daydream.capture.pytorch.checkpoints.apply_checkpoints` takes it.
        precision: of linear layers within the blocks.
    """

    layout: Layout
    batch: int
    checkpoint: str
    precision: str

    @property
    def words(self) -> str:
        """In a few words."""
        layout = self.layout
        parts = [layout.words, f"{layout.micro_batches} x {self.batch}"]
        if layout.pipeline > 1:
            parts.append(layout.schedule)
        parts += [self.precision] * (self.precision != "16-bit")
        return ", ".join(parts if self.checkpoint == "none" else [*parts, f"{self.checkpoint} recomputed"])

    @property
    def capturing(self) -> Capturing:
        """Features that captures differ by in more than the batch."""
        return Capturing(self.layout.tensor, self.layout.context, self.checkpoint)


class Capturing(NamedTuple):
    """Common features of candidates whose captures are one at several batches: tensor ranks, which share the sequence,
    too, ranks of the context, recomputation."""

    tensor: int
    context: int
    checkpoint: str


class CandidateOutcome(NamedTuple):
    """Seconds of a candidate's step, and bytes that a board needs at least; bounds of both, or themselves."""

    seconds: float
    least: float


@dataclass(frozen=True, eq=False, kw_only=True)
class FittingPlan:
    """A candidate simulated."""

    candidate: Candidate
    step: PlannedStep


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Limits of what a search tries.

    Attributes:
        ranks: boards.
        global_batch: samples of a step.
        node: in which they are.
        blocks: that the model repeats.
        base: what all candidates have in common: ranks and sharding that it says are tried alone.
        checkpoints: ways to compute again.
        precisions: of linear layers.
        experts: of every layer with some; none where there are none.
        tokens: of a sample; 0 where they are not to be shared.
    """

    ranks: int
    global_batch: int
    node: NodeSpec | None
    blocks: int
    base: Layout
    checkpoints: Sequence[str]
    precisions: Sequence[str] = ("16-bit",)
    experts: frozenset[int] = frozenset()
    tokens: int = 0

    def candidates(self) -> Iterator[Candidate]:
        """Every way to divide a step of so many samples, those that exchange least between nodes first.

        Tensor ranks stay in a node. Copies of the model share the samples equally; a pipeline needs at least as many
        micro-batches as it has stages. FSDP with a pipeline is left to ZeRO's first stage, as Megatron has it. Experts
        are shared by ranks that divide them.
        """
        boards = self.ranks if self.node is None else min(self.node.boards, self.ranks)
        for tensor in (count for count in _divisors(self.ranks) if boards % count == 0):
            for pipeline in (count for count in _divisors(self.ranks // tensor) if count <= max(self.blocks, 1)):
                for context in self._contexts(self.ranks // tensor // pipeline):
                    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context}
                    if all(getattr(self.base, name) in (1, size) for name, size in sizes.items()):
                        yield from self._of_sizes(sizes)

    def _of_sizes(self, sizes: Mapping[str, Any]) -> Iterator[Candidate]:
        data = self.ranks // prod(sizes.values())
        if self.global_batch % data:
            return
        for batch in (size for size in MICRO_BATCHES if (self.global_batch // data) % size == 0):
            count = self.global_batch // data // batch
            if count < sizes["pipeline"]:
                continue
            layout = replace(
                self.base, data=data, micro_batches=count, sequence=sizes["tensor"] > 1, schedule="1f1b", chunks=1,
                overlap_tensor=self.base.overlap_tensor and sizes["tensor"] > 1, **sizes,
            )  # fmt: skip
            for way in product(self._shards(layout), self._experts(layout)):
                shared = replace(layout, shard=way[0], expert=way[1])
                for each in (shared, *self._interleaved(shared)):
                    for checkpoint, precision in product(self.checkpoints, self.precisions):
                        yield Candidate(layout=each, batch=batch, checkpoint=checkpoint, precision=precision)

    def _shards(self, layout: Layout) -> Iterator[Shard]:
        ways: tuple[Shard, ...] = ("none", "zero1") if layout.pipeline > 1 else ("none", "zero1", "zero2", "fsdp")
        for way in ways if layout.sharers > 1 else ("none",):
            if self.base.shard in ("none", way):
                yield way

    def _experts(self, layout: Layout) -> Iterator[int]:
        for ranks in _divisors(layout.token_ranks):
            if self.base.expert == ranks or (self.base.expert == 1 and all(not each % ranks for each in self.experts)):
                yield ranks
            if not self.experts:
                return

    def _contexts(self, ranks: int) -> Iterator[int]:
        for count in _divisors(ranks):
            shares = self.tokens >= count * CONTEXT_TOKENS and self.tokens % (2 * count) == 0
            if count == self.base.context or (shares and self.base.context == 1):
                yield count

    def _interleaved(self, layout: Layout) -> Iterator[Layout]:
        if (
            layout.pipeline > 1
            and layout.micro_batches % layout.pipeline == 0
            and layout.pipeline * CHUNKS <= self.blocks
        ):
            yield replace(layout, schedule="interleaved", chunks=CHUNKS)


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def captures(tried: Sequence[Candidate]) -> dict[Capturing, list[int]]:
    """Candidates by what has to be captured for them: their places."""
    places: dict[Capturing, list[int]] = {}
    for place, each in enumerate(tried):
        places.setdefault(each.capturing, []).append(place)
    return places


def bounds(
    tried: Sequence[Candidate], units_at: Callable[[Candidate], Units], device: DeviceSpec, node: NodeSpec | None,
    *calls: Any,
) -> list[CandidateOutcome]:  # fmt: skip
    """Bounds of candidates of one kind of capture.

    Args:
        tried: the candidates.
        units_at: the captured step of one.
        device: the board.
        node: in which they are.
        calls: further arguments of :func:`daydream.plan.costs.costs_of`.
    """
    known: dict[tuple[int, str, int], Bounds] = {}
    outcomes = []
    for each in tried:
        key = (each.batch, each.precision, each.layout.expert)
        if key not in known:
            units = divided(units_at(each), each.layout.expert)
            known[key] = Bounds(costs_of(units, each.layout, device, node, *calls))
        outcomes.append(CandidateOutcome(known[key].seconds(each.layout), known[key].bytes(each.layout)))
    return outcomes


def outcome(units: Units, layout: Layout, device: DeviceSpec, node: NodeSpec | None, *calls: Any) -> CandidateOutcome:
    """A layout simulated by some of its micro-batches; without end where its memory does not suffice.

    ``calls`` are further arguments of :func:`daydream.plan.planned.planned`.
    """
    capacity = device.dram.capacity_bytes
    least = most_memory(divided(units, layout.expert), layout, device).least
    if capacity is not None and least > capacity:
        return CandidateOutcome(inf, least)
    count = layout.micro_batches
    few, more = FEW_ROUNDS * layout.pipeline, (FEW_ROUNDS + 1) * layout.pipeline
    step = planned(units, replace(layout, micro_batches=min(count, more)), device, node, *calls)
    if count <= more:
        return CandidateOutcome(step.seconds, least)
    shorter = replace(step.costs, layout=replace(layout, micro_batches=few))
    seconds = simulate(plan_graph(shorter)).makespan_us / 1e6
    per_round = step.seconds - seconds
    return CandidateOutcome(seconds + per_round * (count - few) / layout.pipeline, least)


def fastest_first(
    bounds: Sequence[CandidateOutcome], outcome: Callable[[int], CandidateOutcome], capacity: float | None
) -> Iterator[int]:
    """Places of candidates that may fit, the fastest first; only those whose bound says so are simulated.

    Args:
        bounds: of every candidate.
        outcome: of a candidate by its place.
        capacity: bytes of a board; None for any.
    """
    # Bounds and outcomes in one queue: what comes out simulated is faster than all that is left can be.
    queue = [
        (each.seconds, False, place) for place, each in enumerate(bounds) if capacity is None or each.least <= capacity
    ]
    heapify(queue)
    while queue:
        _, is_simulated, place = heappop(queue)
        if is_simulated:
            yield place
            continue
        seconds = outcome(place).seconds
        if seconds < inf:
            heappush(queue, (seconds, True, place))


def best(
    tried: Sequence[Candidate],
    bounds: Sequence[CandidateOutcome],
    units_at: Callable[[Candidate], Units],
    device: DeviceSpec,
    node: NodeSpec | None,
    *calls: Any,
    count: int = 10,
) -> list[FittingPlan]:
    """Candidates that fit, the fastest first; the allocator is replayed for these alone.

    Args:
        tried: what was tried.
        bounds: of each.
        units_at: the captured step of one.
        device: the board.
        node: in which they are.
        calls: further arguments of :func:`daydream.plan.planned.planned`.
        count: how many are wanted.

    Raises:
        InputError: none fits.
    """

    def simulated(place: int) -> CandidateOutcome:
        return outcome(units_at(tried[place]), tried[place].layout, device, node, *calls)

    order = (tried[place] for place in fastest_first(bounds, simulated, device.dram.capacity_bytes))
    steps = ((each, planned(units_at(each), each.layout, device, node, *calls)) for each in order)
    plans = list(islice((FittingPlan(candidate=each, step=step) for each, step in steps if step.fits), count))
    if not plans:
        least = min(range(len(tried)), key=lambda place: bounds[place].least)
        needed = f"{bounds[least].least / 1e9:.1f} GB for {tried[least].words}"
        problem = f"no plan fits on {device.name}: {needed} at least"
        raise InputError("--search", problem, "use more boards, or larger ones")
    return sorted(plans, key=lambda each: each.step.seconds)


def reason(plans: Sequence[FittingPlan], place: int) -> str:
    """Why a plan stands where it does: what it spends most of over the best one, or the best one over the next."""
    best, other = plans[0].step, plans[place if place else min(1, len(plans) - 1)].step
    if best is other:
        return "the only one that fits"
    spent = [_spent(step) for step in (best, other)]
    most = max(spent[1], key=lambda name: spent[1][name] - spent[0][name])
    more = spent[1][most] - spent[0][most]
    if place:
        return f"{1e3 * more:.3g} ms more of {most}"
    return f"{1e3 * more:.3g} ms less of {most} than the next"


def _spent(step: PlannedStep) -> dict[str, float]:
    """Seconds of a step by what they are spent on, mean of the stages."""
    shares = step.shares
    names = {"kernels": "kernels", "tensor": "exchange in layers", "exposed": "other exchange", "waiting": "waiting"}
    return {
        words: step.seconds * sum(getattr(each, name) for each in shares) / len(shares) for name, words in names.items()
    }
