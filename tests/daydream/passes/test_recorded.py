"""The single-device passes on recorded traces: what must hold whatever the model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from daydream.graph.graph import TaskGraph, TaskKind
from daydream.graph.memory import MemoryKind
from daydream.graph.simulate import simulate
from daydream.memory.attached import with_memory
from daydream.passes import registered
from daydream.passes.basis.bytes import memory_of
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


def inputs_of_convolutions() -> Iterator[int]:
    """Bytes of the inputs of ResNet-50's convolutions, 32 pictures of 224 x 224, in no order."""
    yield 32 * 3 * 224 * 224 * 4
    channels, side = 64, 56
    for blocks, width, smaller in ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)):
        for block in range(blocks):
            # The first of three, and the way around the first block; the second has the stride.
            yield from [32 * channels * side * side * 4] * (1 if block else 2)
            yield 32 * width * side * side * 4
            yield 32 * width * smaller * smaller * 4
            channels, side = 4 * width, smaller


@pytest.mark.slow
def test_resnet_50_in_bytes() -> None:
    graph = with_memory(recorded(RESNET))
    before = graph.memory
    assert before is not None
    offloaded = registered()["vdnn"](graph, pcie_gbps=12.0)
    copies = offloaded.graph.select(name="^vDNN offload")
    sizes = list(inputs_of_convolutions())
    assert offloaded.graph.bytes[copies].tolist().count(sizes[0]) == 6
    assert sorted(offloaded.graph.bytes[copies].tolist()) == sorted(sizes * 6)
    assert offloaded.graph.duration_us[copies].sum() == pytest.approx(6 * sum(sizes) / 12e3)
    # 25,557,032 weights and as many numbers of momentum, which come and go.
    states = registered()["offload"](graph, pcie_gbps=12.0)
    assert states.memory_bytes == {"optimizer states": pytest.approx(-25_557_032 * 4)}
    assert before.peak_bytes - memory_of(states.graph).peak_bytes == pytest.approx(25_557_032 * 4)
    copies = states.graph.select(name="^offload to board")
    assert states.graph.duration_us[copies].tolist() == pytest.approx([25_557_032 * 4 / 12e3] * 6)
    # Micro-batches of a quarter leave weights, momentum, gradients and the batch, and a quarter of all else.
    quarter = memory_of(registered()["accumulate"](graph, steps=4).graph)
    kinds, after = before.at_peak(), quarter.at_peak()
    assert after[MemoryKind.FEATURE_MAPS] == pytest.approx(kinds[MemoryKind.FEATURE_MAPS] / 4, rel=0.01)
    assert after[MemoryKind.GRADIENTS] == pytest.approx(25_557_032 * 4, rel=0.01)


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
