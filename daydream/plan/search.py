"""Which plan is fastest: every way to divide a model among so many boards that fits their memory, simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from daydream.graph.simulate import simulate
from daydream.plan.graph import plan_graph
from daydream.plan.layout import Layout, Shard
from daydream.plan.planned import PlannedStep, planned
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.plan.units import Units
    from hal.spec.device import DeviceSpec
    from hal.spec.node import NodeSpec

#: Samples of a micro-batch that are tried.
MICRO_BATCHES = (1, 2, 4, 8)

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
    """

    layout: Layout
    batch: int
    checkpoint: str

    @property
    def words(self) -> str:
        """In a few words."""
        layout = self.layout
        parts = [layout.words, f"{layout.micro_batches} x {self.batch}"]
        if layout.pipeline > 1:
            parts.append(layout.schedule)
        return ", ".join(parts if self.checkpoint == "none" else [*parts, f"{self.checkpoint} recomputed"])


class Capturing(NamedTuple):
    """Options of a candidate's capture: tensor ranks, samples of a micro-batch, parts of the sequence,
    recomputation."""

    tensor: int
    batch: int
    sequence: bool
    checkpoint: str


class CandidateOutcome(NamedTuple):
    """Seconds of a candidate's step, and bytes that a board needs at least."""

    seconds: float
    least: int


@dataclass(frozen=True, eq=False, kw_only=True)
class FittingPlan:
    """A candidate simulated."""

    candidate: Candidate
    step: PlannedStep


def candidates(
    ranks: int, global_batch: int, node: NodeSpec | None, base: Layout, checkpoints: Sequence[str], blocks: int
) -> Iterator[Candidate]:
    """Every way to divide a step of so many samples, those that exchange least between nodes first.

    Tensor ranks stay in a node. Copies of the model share the samples equally; a pipeline needs at least as many
    micro-batches as it has stages. FSDP with a pipeline is left to ZeRO's first stage, as Megatron has it.

    Args:
        ranks: boards.
        global_batch: samples of a step.
        node: in which they are.
        base: what all candidates have in common: ranks and sharding that it says are tried alone.
        checkpoints: to try.
        blocks: that the model repeats.
    """
    boards = ranks if node is None else min(node.boards, ranks)
    for tensor in (count for count in _divisors(ranks) if boards % count == 0 and base.tensor in (1, count)):
        stages = [count for count in _divisors(ranks // tensor) if count <= max(blocks, 1)]
        for pipeline in (count for count in stages if base.pipeline in (1, count)):
            data = ranks // tensor // pipeline
            if global_batch % data:
                continue
            for batch in (size for size in MICRO_BATCHES if (global_batch // data) % size == 0):
                count = global_batch // data // batch
                if count < pipeline:
                    continue
                for shard in (way for way in _shards(data, pipeline) if base.shard in ("none", way)):
                    layout = replace(
                        base, data=data, tensor=tensor, pipeline=pipeline, micro_batches=count, shard=shard,
                        sequence=tensor > 1, schedule="1f1b", chunks=1,
                    )  # fmt: skip
                    for each in (layout, *_interleaved(layout, blocks)):
                        yield from (Candidate(layout=each, batch=batch, checkpoint=way) for way in checkpoints)


def _shards(data: int, pipeline: int) -> tuple[Shard, ...]:
    if data == 1:
        return ("none",)
    return ("none", "zero1") if pipeline > 1 else ("none", "zero1", "fsdp")


def _interleaved(layout: Layout, blocks: int) -> Iterator[Layout]:
    if layout.pipeline > 1 and layout.micro_batches % layout.pipeline == 0 and layout.pipeline * CHUNKS <= blocks:
        yield replace(layout, schedule="interleaved", chunks=CHUNKS)


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def captures(tried: Sequence[Candidate]) -> dict[Capturing, list[int]]:
    """Candidates by what has to be captured for them: their places."""
    places: dict[Capturing, list[int]] = {}
    for place, each in enumerate(tried):
        key = Capturing(each.layout.tensor, each.batch, each.layout.sequence, each.checkpoint)
        places.setdefault(key, []).append(place)
    return places


def outcome(units: Units, layout: Layout, device: DeviceSpec, node: NodeSpec | None, *calls: Any) -> CandidateOutcome:
    """A layout simulated by some of its micro-batches; ``calls`` are further arguments of
    :func:`daydream.plan.planned.planned`."""
    count = layout.micro_batches
    few, more = FEW_ROUNDS * layout.pipeline, (FEW_ROUNDS + 1) * layout.pipeline
    step = planned(units, replace(layout, micro_batches=min(count, more)), device, node, *calls)
    if count <= more:
        return CandidateOutcome(step.seconds, step.memory.least)
    shorter = replace(step.costs, layout=replace(layout, micro_batches=few))
    seconds = simulate(plan_graph(shorter)).makespan_us / 1e6
    per_round = step.seconds - seconds
    return CandidateOutcome(seconds + per_round * (count - few) / layout.pipeline, step.memory.least)


def best(
    tried: Sequence[Candidate],
    outcomes: Sequence[CandidateOutcome],
    plan: Callable[[Candidate], PlannedStep],
    device: DeviceSpec,
    count: int = 10,
) -> list[FittingPlan]:
    """Candidates that fit, the fastest first; the allocator is replayed for these alone.

    Args:
        tried: what was tried.
        outcomes: of each.
        plan: simulates one again.
        device: the board.
        count: how many are wanted.

    Raises:
        InputError: none fits.
    """
    capacity = device.dram.capacity_bytes
    places = sorted(range(len(tried)), key=lambda place: outcomes[place].seconds)
    likely = (place for place in places if capacity is None or outcomes[place].least <= capacity)
    steps = ((tried[place], plan(tried[place])) for place in likely)
    plans = list(islice((FittingPlan(candidate=each, step=step) for each, step in steps if step.fits), count))
    if not plans:
        least = min(range(len(tried)), key=lambda place: outcomes[place].least)
        needed = f"{outcomes[least].least / 1e9:.1f} GB for {tried[least].layout.words}"
        problem = f"no plan fits on {device.name}: {needed} at least"
        raise InputError("--search", problem, "use more boards, or larger ones")
    return plans


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
