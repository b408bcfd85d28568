"""Gradients from every source, on synthetic traces whose sizes and order are known, and on recorded ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daydream.graph.graph import Mark, Phase, TaskGraph, TaskKind
from daydream.passes.basis.communication import MEBIBYTE, all_reduces, message_bytes
from daydream.passes.basis.gradients import Gradients, consumers, find_gradients, last_of_threads, tied
from daydream.passes.distributed.ddp import buckets
from daydream.tasks.build import read_graph
from hal.support.errors import InputError
from tests.daydream.graphs import MAIN, STREAM2, graph, launched, pairs, task
from tests.daydream.recorded import recorded_trace
from tests.daydream.traces import Builder

AUTOGRAD = 200
ACCUMULATE = "torch::autograd::AccumulateGrad"


def backward(*, dims: Sequence[Any] = (None, None), shapes: Sequence[Any] = (None, None)) -> Builder:
    """A step of two linear layers: forward kernels f1 and f2, backward kernels b2 and b1 with AccumulateGrad behind
    each, and an update. `dims` is what AccumulateGrad recorded of the gradients of layers 2 and 1, `shapes` what the
    forward operators of layers 1 and 2 recorded."""
    trace = Builder("2024")
    trace.step(1, 0, 1000)
    for i in range(2):
        start = 10 + 30 * i
        trace.operator("aten::linear", start, 20, external=i + 1, sequence=i + 1, dims=shapes[i])
        trace.launch(start + 5, 5, correlation=i + 1, external=i + 1)
        trace.kernel(f"f{i + 1}", start + 15, 20, correlation=i + 1)
    for place, i in enumerate((1, 0)):
        start = 100 + 100 * place
        name = "autograd::engine::evaluate_function: AddmmBackward0"
        trace.operator(name, start, 40, thread=AUTOGRAD, sequence=i + 1, forward_thread=1, external=10 + i)
        trace.operator("AddmmBackward0", start + 1, 38, thread=AUTOGRAD, sequence=i + 1, forward_thread=1)
        trace.forward_backward(10 + 30 * i, start, backward_thread=AUTOGRAD)
        trace.launch(start + 5, 5, correlation=10 + i, external=10 + i, thread=AUTOGRAD)
        trace.kernel(f"b{i + 1}", start + 20, 60, correlation=10 + i)
        around = f"autograd::engine::evaluate_function: {ACCUMULATE}"
        trace.operator(around, start + 50, 20, thread=AUTOGRAD)
        given = {"dims": [dims[place]], "types": ["float"]} if dims[place] is not None else {}
        trace.operator(ACCUMULATE, start + 52, 5, thread=AUTOGRAD, **given)
    trace.annotation("Optimizer.step#SGD.step", 400, 50)
    trace.operator("aten::_foreach_add_", 405, 40, external=30).launch(410, 5, correlation=30, external=30)
    trace.kernel("update", 420, 20, correlation=30)
    return trace


def built(trace: Builder, folder: Path) -> TaskGraph:
    return read_graph(trace.write(folder / "trace.json"))


def summary(graph: TaskGraph, found: Gradients) -> list[tuple[float, str]]:
    (of_step,) = found.steps.values()
    return [(gradient.bytes, graph.text(gradient.ready)) for gradient in of_step]


def test_shapes_that_accumulation_recorded(tmp_path: Path):
    made = built(backward(dims=([10, 100], [50])), tmp_path)
    found = find_gradients(made)
    # 1000 and 50 floats; each is ready when the kernel launched last before its hook ends.
    assert summary(made, found) == [(4000, "b2"), (200, "b1")]
    assert found.summary() == "2 gradients of 0.0 MB a step, from the shapes that AccumulateGrad recorded"
    first, second = found.steps[0]
    assert made.text(first.hook) == ACCUMULATE
    assert first.hook < second.hook
    assert first.layer != second.layer


def test_the_update_waits_for_the_gradients(tmp_path: Path):
    made = built(backward(dims=([10, 100], [50])), tmp_path)
    ready = [gradient.ready for gradient in find_gradients(made).steps[0]]
    last = last_of_threads(made, ready)
    assert [made.text(row) for row in last] == ["b1"]
    assert [made.text(row) for row in consumers(made, 0, np.array(last))] == ["update"]


def test_a_gradient_that_is_undefined_is_none(tmp_path: Path):
    trace = backward(dims=([10, 100], [50]))
    trace.operator(ACCUMULATE, 280, 5, thread=AUTOGRAD, dims=[[]], types=[""])
    assert len(find_gradients(built(trace, tmp_path)).steps[0]) == 2


def test_what_was_recorded_on_purpose_comes_first(tmp_path: Path):
    trace = backward(dims=([10, 100], [50]))
    listed = [
        {"name": "one.weight", "module": "one", "elements": 7, "dtype": "float16", "order": 1},
        {"name": "two.weight", "module": "two", "bytes": 36, "elements": 9, "dtype": "float32", "order": 0},
    ]
    trace.head["daydream"] = {"version": 1, "gradients": listed, "buckets": []}
    made = built(trace, tmp_path)
    found = find_gradients(made)
    assert summary(made, found) == [(36, "b2"), (14, "b1")]
    assert [gradient.name for gradient in found.steps[0]] == ["two.weight", "one.weight"]


def test_weights_of_forward_operators(tmp_path: Path):
    # Input, weight and bias of both layers: 20 x 10 + 20 and 5 x 20 + 5 elements.
    shapes = ([[8, 10], [20, 10], [20]], [[8, 20], [5, 20], [5]])
    made = built(backward(shapes=shapes), tmp_path)
    assert summary(made, find_gradients(made)) == [(420, "b2"), (880, "b1")]


def test_grids_of_copies_into_buckets(tmp_path: Path):
    trace = backward()
    for place, blocks in enumerate((4000, 1)):
        start = 160 + 100 * place
        trace.operator("torch::distributed::reducer::mul_out", start, 9, thread=AUTOGRAD, external=40 + place)
        trace.launch(start + 2, 5, correlation=40 + place, external=40 + place, thread=AUTOGRAD)
        name = "void at::native::vectorized_elementwise_kernel<4, Mul>"
        trace.kernel(name, start + 30, 2, correlation=40 + place, grid=(blocks, 1, 1), block=(128, 1, 1))
    made = built(trace, tmp_path)
    found = find_gradients(made)
    # 128 threads of 4 floats a block: 2 KiB.
    assert [gradient.bytes for gradient in found.steps[0]] == [4000 * 2048, 2048]
    assert "grids" in found.source


def test_a_trace_that_says_nothing_needs_a_number(tmp_path: Path):
    made = built(backward(), tmp_path)
    with pytest.raises(InputError, match="set gradient-mb"):
        find_gradients(made)
    # b2 and b1 take 60 µs each.
    assert summary(made, find_gradients(made, 3.0)) == [(1.5 * MEBIBYTE, "b2"), (1.5 * MEBIBYTE, "b1")]


def test_a_total_is_spread_by_backward_time_of_the_layers():
    tasks = [
        *launched("f", 99, phase=Phase.FORWARD, layer="a"),
        *launched("b", 10, phase=Phase.BACKWARD, layer="b"),
        *launched("b", 20, phase=Phase.BACKWARD, layer="b"),
        *launched("b", 10, phase=Phase.BACKWARD, layer="a"),
    ]
    # 30 of 40 µs are layer b's, whose last task is row 5.
    (of_step,) = find_gradients(graph(tasks, pairs(4)), 4.0).steps.values()
    found = [(gradient.name, gradient.bytes / MEBIBYTE, gradient.ready, gradient.hook) for gradient in of_step]
    assert found == [("b", 3.0, 5, 4), ("a", 1.0, 7, 6)]


def test_a_graph_without_gpu_has_no_gradients():
    with pytest.raises(InputError, match="no step has GPU tasks"):
        find_gradients(graph([task("x", MAIN, 1)]), 1.0)
    with pytest.raises(InputError, match="gradient-mb: -1"):
        find_gradients(graph([task("x", MAIN, 1)]), -1.0)


def test_without_a_task_to_wait_the_end_of_the_step_does():
    tasks = [*launched("b", 10, phase=Phase.BACKWARD), task("step ends", MAIN, 0, mark=Mark.STEP_END)]
    assert consumers(graph(tasks, pairs(1)), 0, np.array([1])) == [2]


def test_updates_before_the_backward_pass_do_not_wait():
    tasks = [
        *launched("zero", 1, phase=Phase.UPDATE),
        *launched("b", 10, phase=Phase.BACKWARD),
        *launched("add", 1, phase=Phase.UPDATE),
    ]
    assert consumers(graph(tasks, pairs(3)), 0, np.array([3])) == [5]


def test_gradients_without_gpu_task_hold_back_updates_only():
    tasks = [*launched("f", 1, phase=Phase.FORWARD), *launched("add", 1, phase=Phase.UPDATE)]
    assert consumers(graph(tasks, pairs(2)), 0, np.array([], np.int64)) == [3]


def recorded_all_reduce() -> TaskGraph:
    """Kernel b on one stream, an all-reduce on another, an update on the first; no edge between the streams."""
    tasks = [
        *launched("b", 10, phase=Phase.BACKWARD),
        *launched("ncclKernel_AllReduce", 5, phase=Phase.BACKWARD, stream=STREAM2, kind=TaskKind.COMMUNICATION),
        *launched("u", 5, phase=Phase.UPDATE),
    ]
    times = (0, 1, 1, 11, 2, 16)
    return graph([{**one, "recorded_us": time} for one, time in zip(tasks, times, strict=True)], pairs(3))


def test_recorded_all_reduces_are_tied_to_what_they_need_and_who_needs_them():
    made = recorded_all_reduce()
    again = tied(tied(made, np.array([3])), np.array([3]))
    new = list(zip(again.edge_source.tolist(), again.edge_target.tolist(), strict=True))[3:]
    assert new == [(1, 3), (3, 5)]


def test_nothing_is_tied_against_the_recorded_times():
    made = recorded_all_reduce()
    made.recorded_us[3], made.recorded_us[5] = 9, 12
    assert len(tied(made, np.array([3])).edge_source) == 3


def real(name: str) -> TaskGraph:
    return read_graph(recorded_trace(name))


def test_resnet_50_has_25_557_032_parameters():
    found = find_gradients(real("resnet50_v100_nw0"))
    assert {step: (len(all_), found.bytes_of(step)) for step, all_ in found.steps.items()} == {
        step: (161, 4 * 25_557_032) for step in range(6)
    }


def test_buckets_end_where_ddp_called_for_an_all_reduce():
    made = real("ns_resolution_v100")
    found = find_gradients(made)
    trace = made.trace
    assert trace is not None
    # Grids tell sizes up to a part of a block: less than 0.1 % too much in all.
    assert found.bytes_of(1) == pytest.approx(4 * 25_557_032, rel=1e-3)
    calls = np.flatnonzero([trace.text(row) == "c10d::allreduce_" for row in range(len(trace))])
    for all_ in found.steps.values():
        groups = buckets(all_, MEBIBYTE, 25 * MEBIBYTE)
        ends = np.array([trace.start_us[made.event[group[-1].hook]] for group in groups])
        nexts = np.array([trace.start_us[made.event[gradient.hook]] for gradient in all_])
        step = trace.start_us[calls]
        for end in ends:
            later = step[step > end].min()
            # No other gradient comes in between the bucket's last and the call.
            assert not ((nexts > end) & (nexts < later)).any()


@pytest.mark.slow
def test_all_reduces_of_a_recorded_group_carry_the_gradients():
    made = real("trace_diff_control_a100")
    rows = all_reduces(made)
    sizes = message_bytes(made, rows)
    found = find_gradients(made)
    assert len(rows) == 18
    for step in range(6):
        # One parameter of 50 floats is not DDP's.
        assert sizes[made.step[rows] == step].sum() == found.bytes_of(step) - 200


def test_metadata_survives_as_json(tmp_path: Path):
    trace = backward(dims=([1], [1]))
    trace.head["daydream"] = {"gradients": "nonsense"}
    assert json.loads(trace.text())["daydream"] == {"gradients": "nonsense"}
    assert "AccumulateGrad" in find_gradients(built(trace, tmp_path)).source
