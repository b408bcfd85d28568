"""The single-device passes on recorded traces: what must hold whatever the model."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from daydream.graph.graph import TaskGraph, TaskKind
from daydream.graph.simulate import simulate
from daydream.passes import registered
from daydream.tasks.build import read_graph
from tests.daydream.recorded import recorded_trace

RESNET, DISTRIBUTED, RECOMMENDER = "resnet50_v100_nw0", "ns_resolution_v100", "trace_diff_control_a100"


@cache
def recorded(name: str) -> TaskGraph:
    return read_graph(recorded_trace(name))


def step_ms(graph: TaskGraph) -> float:
    return float(np.median(simulate(graph).step_us)) / 1000


@pytest.mark.parametrize("trace", [RESNET, DISTRIBUTED, RECOMMENDER])
@pytest.mark.parametrize(
    "name", ["fused-optimizer", "restructure-batchnorm", "cuda-graphs", "pointwise-fusion", "dataloader", "bandwidth"]
)
@pytest.mark.slow
def test_an_optimisation_never_takes_longer(trace: str, name: str) -> None:
    graph = recorded(trace)
    assert step_ms(registered()[name](graph).graph) <= step_ms(graph) * 1.001


@pytest.mark.parametrize("trace", [RESNET, DISTRIBUTED])
@pytest.mark.parametrize("name", ["vdnn", "gist"])
@pytest.mark.slow
def test_saving_memory_never_takes_less(trace: str, name: str) -> None:
    graph = recorded(trace)
    assert step_ms(registered()[name](graph).graph) >= step_ms(graph)


def test_resnet_50_has_53_batch_norms_49_relus_and_one_update_a_step() -> None:
    graph = recorded(RESNET)
    # 53 norms forward and backward in 6 steps; 33 of 49 ReLUs directly behind one, 16 behind a residual sum.
    notes = registered()["restructure-batchnorm"](graph).notes
    assert notes[0].startswith(f"{2 * 53 * 6} batch-norm kernels")
    assert notes[1].startswith(f"{2 * 33 * 6} of {2 * 49 * 6} ReLU kernels removed")
    fused = registered()["fused-optimizer"](graph).graph
    assert len(fused.select(name="^fused optimizer$")) == 6


def test_resnet_50_offloads_53_inputs_of_convolutions() -> None:
    graph = recorded(RESNET)
    after = registered()["vdnn"](graph).graph
    copies = after.select(name="^vDNN offload")
    assert len(copies) == 53 * 6
    # Of a batch of 32 pictures of 3 x 224 x 224 single-precision numbers, the first.
    assert after.bytes[copies[0]] == 32 * 3 * 224 * 224 * 4


def test_workers_take_the_loading_off_the_main_thread() -> None:
    graph = recorded(RESNET)
    after = registered()["dataloader"](graph, workers=4).graph
    loading = after.kind == TaskKind.DATA_LOADING
    assert loading.sum() == (graph.kind == TaskKind.DATA_LOADING).sum()
    assert len(np.unique(after.thread[loading])) == 4
    assert len(after) == len(graph) + 6


def test_graph_launches_leave_the_time_of_the_gpu() -> None:
    graph = recorded(DISTRIBUTED)
    after = registered()["cuda-graphs"](graph, per_kernel_us=0.0).graph
    busy = after.duration_us[after.on_gpu & (after.step == 3)].sum() / 1000
    # Neither gaps nor launches remain; the stream was 98 % busy before.
    assert step_ms(after) == pytest.approx(busy, rel=0.01)
    assert busy == pytest.approx(graph.duration_us[graph.on_gpu & (graph.step == 3)].sum() / 1000)
