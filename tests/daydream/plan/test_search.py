"""A search's bounds, its order, and captures at other batches."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from daydream.plan.batches import at_batch
from daydream.plan.bounds import Bounds
from daydream.plan.costs import costs_of
from daydream.plan.layout import Layout
from daydream.plan.planned import most_memory, planned
from daydream.plan.search import Candidate, CandidateOutcome, SearchSpace, fastest_first
from hal.catalog import load_device
from hal.node_catalog import load_node

pytestmark = pytest.mark.usefixtures("pytorch")

DEVICE, NODE = load_device("h100"), load_node("hgx-h100")


def space(**options: Any) -> list[Candidate]:
    given: dict[str, Any] = {
        "ranks": 8, "global_batch": 32, "node": NODE, "blocks": 6, "base": Layout(tensor=2), "checkpoints": ("none",),
    }  # fmt: skip
    return list(SearchSpace(**(given | options)).candidates())


def test_no_layout_takes_less_than_its_bounds(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16", tensor=2, sequence=True, batch=4)
    tried = [each for each in space() if each.batch == 4]
    bounds = Bounds(costs_of(units, tried[0].layout, DEVICE, NODE))
    assert {each.layout.schedule for each in tried} == {"1f1b", "interleaved"} and len(tried) > 8
    for each in tried:
        step = planned(units, each.layout, DEVICE, NODE)
        assert 0.3 * step.seconds < bounds.seconds(each.layout) <= step.seconds * (1 + 1e-9)
        least = most_memory(units, each.layout, DEVICE).least
        assert 0.5 * least < bounds.bytes(each.layout) <= least


def test_only_what_may_be_next_is_simulated() -> None:
    limits = [CandidateOutcome(seconds, 1.0) for seconds in (5.0, 1.0, 2.0, 9.0)] + [CandidateOutcome(0.5, 9.0)]
    seconds = {0: 6.0, 1: 3.0, 2: 2.5, 3: 9.5}
    simulated = []

    def outcome(place: int) -> CandidateOutcome:
        simulated.append(place)
        return CandidateOutcome(seconds[place], 1.0)

    order = fastest_first(limits, outcome, capacity=2.0)
    assert [next(order), next(order)] == [2, 1]
    # The fifth does not fit, and the first and fourth cannot be faster than these.
    assert simulated == [1, 2]
    assert list(order) == [0, 3]


def test_what_does_not_fit_is_no_answer() -> None:
    limits = [CandidateOutcome(1.0, 1.0)]
    assert list(fastest_first(limits, lambda _: CandidateOutcome(inf, 3.0), capacity=2.0)) == []


@pytest.mark.parametrize("compiles", [False, True])
def test_a_capture_at_another_batch_is_what_would_be_captured(
    units_of_model: Callable[..., Any], compiles: bool
) -> None:
    two, three, eight = (units_of_model("six", batch=batch, compiles=compiles) for batch in (2, 3, 8))
    derived = at_batch(two, three, 8)
    assert derived is not None and derived.capture == eight.capture


def test_steps_of_other_operators_are_on_no_line(units_of_model: Callable[..., Any]) -> None:
    assert at_batch(units_of_model("six", batch=2), units_of_model("six", batch=3, compiles=True), 8) is None


def test_experts_and_contexts_are_searched_where_there_are_some() -> None:
    some = space(experts=frozenset([4]), base=Layout(), ranks=4)
    assert {each.layout.expert for each in some} == {1, 2, 4}
    long = space(tokens=65536, base=Layout(), ranks=4)
    assert {each.layout.context for each in long} == {1, 2, 4}
    assert {each.layout.context for each in space(tokens=8192)} == {1}
    assert {each.layout.expert for each in space(experts=frozenset([4]), base=Layout(expert=2))} == {2}


def test_precisions_are_candidates_of_their_own() -> None:
    both = space(precisions=("16-bit", "fp8-tensorwise"))
    assert len(both) == 2 * len(space())
    assert both[1].words.endswith("fp8-tensorwise")
