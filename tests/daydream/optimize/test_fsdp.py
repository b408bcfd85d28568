"""FSDP around two and more blocks, scheduled by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph
from daydream.graph.simulate import simulate
from daydream.optimize.exchange import Exchange
from daydream.optimize.fsdp import BACKWARD, FORWARD, Sharding, Wrapping, best_wrapping, usual_wrapping
from daydream.passes.basis.gradients import Gradients, ParameterGradient
from daydream.passes.distributed.ddp import AllReduceCost
from hal.support.errors import InputError
from tests.daydream.graphs import MAIN, STREAM, graph, task

#: Half of an all-reduce between two moves half the bytes: 1 MB takes 50 µs at 10 GB/s.
SIZE = 1e6


def sharding(blocks: int = 2, kernel_us: float = 100.0, *, rest: float = 0.0, latency_us: float = 0.0) -> Sharding:
    """Blocks of a forward and a backward kernel, launched in 1 µs each, 1 MB of parameters in each."""
    tasks = [task("begin", MAIN, 0.0, mark=Mark.STEP_BEGIN)]
    edges = []
    gradients = []

    def add(name: str, phase: Phase, duration_us: float, **columns: str) -> int:
        tasks.append(task("launch", MAIN, 1.0, phase=phase, **columns))
        tasks.append(task(name, STREAM, duration_us, phase=phase, **columns))
        edges.append((len(tasks) - 2, len(tasks) - 1, Dependency.LAUNCH))
        return len(tasks) - 1

    for block in range(blocks):
        add(f"forward {block}", Phase.FORWARD, kernel_us, layer=f"h.{block}")
    for block in reversed(range(blocks)):
        row = add(f"backward {block}", Phase.BACKWARD, kernel_us, layer=f"h.{block}")
        gradients.append(
            ParameterGradient(name=f"h.{block}.weight", bytes=SIZE, step=0, ready=row, hook=row - 1, layer=0)
        )
    if rest:
        gradients.append(ParameterGradient(name="head.weight", bytes=rest, step=0, ready=row, hook=row - 1, layer=0))
    update = add("update", Phase.UPDATE, 10.0)
    tasks.append(task("wait", MAIN, 0.0))
    edges.append((update, len(tasks) - 1, Dependency.SYNC))
    tasks.append(task("end", MAIN, 0.0, mark=Mark.STEP_END))
    cost = AllReduceCost(2, 10.0, latency_us, 1.0)
    return Sharding.of(Exchange(graph(tasks, edges), Gradients("given", {0: tuple(gradients)}), 0, cost, 0.0))


def times(made: TaskGraph) -> dict[str, tuple[float, float]]:
    timeline = simulate(made)
    rows = [row for row in range(len(made)) if not made.on_cpu[row]]
    return {made.text(row): (timeline.start_us[row], timeline.end_us[row]) for row in rows}


def test_units_are_gathered_before_both_passes_and_scattered_behind_the_second() -> None:
    step = sharding()
    found = times(step.wrapped(usual_wrapping(step)))
    # The first unit waits for its parameters; the second's come while it computes.
    assert (found["ncclAllGather 0"], found["forward 0"]) == ((0, 50), (50, 150))
    assert (found["ncclAllGather 1"], found["forward 1"]) == ((50, 100), (150, 250))
    # The host calls the next two ahead: that of the block that goes first, and the other when that begins.
    assert (found["ncclAllGather backward 0"], found["backward 1"]) == ((100, 150), (250, 350))
    assert (found["ncclAllGather backward 1"], found["backward 0"]) == ((250, 300), (350, 450))
    assert found["ncclReduceScatter 0"] == (350, 400)
    assert found["ncclReduceScatter 1"] == (450, 500)
    # Each of two ranks updates half.
    assert found["update"] == (500, 505)
    assert step.length_us(usual_wrapping(step)) == 505


def test_the_models_own_unit_is_gathered_first_and_scattered_last() -> None:
    step = sharding(rest=2 * SIZE)
    found = times(step.wrapped(usual_wrapping(step)))
    assert found["ncclAllGather root"] == (0, 100)
    assert found["ncclAllGather 0"] == (100, 150)
    assert found["ncclReduceScatter root"][1] == found["update"][0]
    assert step.gathered(usual_wrapping(step)) == 4 * SIZE


def test_units_of_several_blocks_are_gathered_at_once() -> None:
    step = sharding(4)
    wrapping = Wrapping(cuts=(1, 3))
    assert step.modules(wrapping) == [["h.0", "h.1"], ["h.2", "h.3"]]
    assert times(step.wrapped(wrapping))["ncclAllGather 0"] == (0, 100)
    assert step.gathered(wrapping) == 4 * SIZE


def test_a_gathering_waits_for_the_unit_two_before_it() -> None:
    step = sharding(4)
    found = times(step.wrapped(usual_wrapping(step)))
    # The first block begins at 50, the second at 150.
    assert found["ncclAllGather 2"][0] == found["ncclAllGather 1"][1] == 100
    assert found["ncclAllGather 3"][0] == found["forward 1"][0] == 150


def test_where_latency_counts_larger_units_win() -> None:
    step = sharding(4, 10.0, latency_us=500.0)
    wrapping, length, _ = best_wrapping(step)
    assert wrapping.cuts == (3,)
    assert length < step.length_us(usual_wrapping(step))


@pytest.mark.parametrize("kernel_us", [20.0, 60.0, 150.0])
def test_the_wrapping_that_is_found_is_that_of_all_wrappings_of_four_blocks(kernel_us: float) -> None:
    step = sharding(4, kernel_us, rest=SIZE, latency_us=10.0)
    shortest = min(
        step.length_us(Wrapping(cuts=(*cuts, 3), forward=forward, backward=backward))
        for count in range(4)
        for cuts in combinations(range(3), count)
        for forward in FORWARD
        for backward in BACKWARD
    )
    assert best_wrapping(step)[1] == pytest.approx(shortest)


def test_a_step_without_repeated_modules_cannot_be_wrapped() -> None:
    exchange = sharding().exchange
    nameless = replace(exchange, graph=replace(exchange.graph, layers=("first", "second")))
    with pytest.raises(InputError, match=r"--shard: the trace names no repeated modules with parameters"):
        Sharding.of(nameless)
