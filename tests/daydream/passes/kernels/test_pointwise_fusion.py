"""Runs of element-wise kernels fused into one."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Dependency, Phase
from daydream.graph.simulate import simulate
from daydream.passes.kernels.pointwise_fusion import pointwise_fusion
from daydream.trace.trace import NONE
from hal.support.errors import InputError
from tests.daydream.graphs import MAIN, STREAM2, graph, launched, pairs, task
from tests.daydream.passes.traced import traced

ONE, TWO, THREE = (
    f"void at::native::vectorized_elementwise_kernel<4, F, at::detail::Array<char*, {n}> >" for n in (1, 2, 3)
)


def run(*kernels):
    return graph([row for name, duration in kernels for row in launched(name, duration)], pairs(len(kernels)))


def fused_us(some, **parameters):
    return pointwise_fusion(some, host="launch", **parameters).graph.duration_us[1]


def test_intermediates_are_neither_written_nor_read():
    # unary 4 + binary 6 + unary 4: 2 + 3 + 2 tensors of 2 µs. Left: 1 read, the other operand, 1 written: 3 tensors.
    some = run((TWO, 4), (THREE, 6), (TWO, 4))
    outcome = pointwise_fusion(some)
    assert simulate(some).makespan_us == 15
    assert simulate(outcome.graph).makespan_us == 1 + 6
    assert [outcome.graph.text(row) for row in range(2)] == ["cudaLaunchKernel", "fused pointwise kernel"]
    assert outcome.notes == (
        "3 element-wise kernels became 1: 0.014 ms of GPU time became 0.006 ms",
        "2 of 2 intermediates stay in registers, the rest differ in size",
    )
    # With intermediates stored only two reads go: 14 - 4.
    assert fused_us(some, keep_intermediates=True) == pytest.approx(10)


def test_a_fill_reads_nothing_that_could_be_handed_over():
    # The second fill still writes (2 µs); the add takes its tensor over: 6 - 2, and the fill's writing goes.
    assert fused_us(run((ONE, 2), (ONE, 2))) == 4
    assert fused_us(run((ONE, 2), (THREE, 6))) == pytest.approx(4)


def test_runs_end_at_other_kernels_steps_phases_and_the_longest_run():
    assert len(pointwise_fusion(run((TWO, 4), ("sgemm", 9), (TWO, 4))).graph) == 6
    assert len(pointwise_fusion(run(*[(TWO, 4)] * 5), max_run=2).graph) == 6
    assert len(pointwise_fusion(run(*[(TWO, 4)] * 5), max_run=4, min_run=3).graph) == 4
    assert len(pointwise_fusion(run(*[(TWO, 4)] * 2), min_run=3).graph) == 4
    for column, value in (("step", 1), ("phase", Phase.BACKWARD)):
        apart = graph([*launched(TWO, 4), *launched(TWO, 4, **{column: value})], pairs(2))
        assert pointwise_fusion(apart).graph is apart


def test_runs_end_where_somebody_else_waits_or_is_waited_for():
    tasks = [*launched(TWO, 4), *launched(TWO, 4), *launched("other", 4, stream=STREAM2)]
    gives = graph(tasks, [*pairs(3), (1, 5, Dependency.SYNC)])
    takes = graph(tasks, [*pairs(3), (5, 3, Dependency.SYNC)])
    free = graph(tasks, [*pairs(3), (3, 5, Dependency.SYNC)])
    assert pointwise_fusion(gives).graph is gives
    assert pointwise_fusion(takes).graph is takes
    # The last kernel of a run may be waited for: launch to 1, fused kernel 1-5, the other one to 9.
    assert simulate(pointwise_fusion(free).graph).makespan_us == 9


def operators(dims):
    """Two aten::add operators of 3 µs with kernels of 6 µs each, whose name does not tell their operands."""
    tasks = []
    for row in range(2):
        tasks += [task("aten::add", MAIN, 3, operator=row), *launched("elementwise_kernel", 6)]
        for part in tasks[-2:]:
            part["operator"] = row
    fields = traced(["aten::add", "aten::add"], [NONE, NONE], dims)
    return graph(tasks, [(1, 2, Dependency.LAUNCH), (4, 5, Dependency.LAUNCH)], **fields)


def test_recorded_sizes_tell_operands_and_which_kernels_belong_together():
    alike = operators({0: [[8, 8], [8, 8], []], 1: [[64], [64], []]})
    # 3 + 3 tensors of 2 µs; 2 read, 1 read, 1 written stay.
    outcome = pointwise_fusion(alike)
    assert outcome.graph.duration_us[-1] == pytest.approx(8)
    # The second operator's host time goes with its launch.
    assert len(outcome.graph) == 3
    assert len(pointwise_fusion(alike, host="launch").graph) == 4
    # A broadcast operand moves next to nothing: 2 + 3 tensors, of which 1 + 2 stay: 3 + 4.
    broadcast = operators({0: [[64], [8], []], 1: [[64], [64], []]})
    assert pointwise_fusion(broadcast).graph.duration_us[-1] == pytest.approx(7)
    different = operators({0: [[64], [64], []], 1: [[65], [65], []]})
    outcome = pointwise_fusion(different)
    assert outcome.graph.duration_us[-1] == pytest.approx(12)
    assert outcome.notes[1] == "0 of 1 intermediates stay in registers, the rest differ in size"


@pytest.mark.parametrize(("threads", "expected"), [(64, 4.0), (128, 8.0)])
def test_recorded_grids_stand_in_for_sizes(threads, expected):
    tasks = [*launched(TWO, 4, event=0), *launched(TWO, 4, event=1)]
    arguments = {0: {"grid": [5, 1, 1], "block": [64, 1, 1]}, 1: {"grid": [5, 1, 1], "block": [threads, 1, 1]}}
    fields = traced(["k", "k"], [NONE, NONE], arguments=arguments)
    # 5 * 64 * 4 = 1280 and 5 * 128 * 4 = 2560 elements, known to a block: equal or not.
    assert fused_us(graph(tasks, pairs(2), **fields)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_run": 1}, "min-run: 1 is out of range; give a number, 2 or more"),
        ({"max_run": 1}, "max-run: 1 is out of range; give a number, 2 or more"),
        ({"host": "gpu"}, "host: 'gpu' is unknown; give launch or operator"),
        ({"match": "*"}, "match: '*' is no regular expression"),
    ],
)
def test_bad_parameters_are_named(given, message):
    with pytest.raises(InputError) as caught:
        pointwise_fusion(run((TWO, 1)), **given)
    assert str(caught.value).startswith(message)
