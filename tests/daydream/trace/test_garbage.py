"""Five hundred damaged traces through the whole way: a result with warnings or one clear error, nothing else."""

from __future__ import annotations

import gzip
import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daydream.graph.simulate import simulate
from daydream.passes import registered
from daydream.tasks.build import build_graph, read_graph
from daydream.trace.files import read_trace
from hal.support.errors import InputError
from tests.daydream.traces import GENERATIONS, Builder

MUTATIONS = 500
JUNK: tuple[Any, ...] = (
    None,
    -1,
    0,
    1e308,
    float("nan"),
    "x",
    "",
    [],
    {},
    [[]],
    {"a": None},
    True,
    2**70,
    -(2**70),
    "1e5",
)


def training_step(generation: str) -> dict[str, Any]:
    """Two steps with loading, forward, autograd's thread, copies, waits, events, a graph launch and an update."""
    trace = Builder(generation)
    for number in range(2):
        at, key = 2000 * number, 100 * number
        trace.step(number + 1, at, 1900)
        trace.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 5, 95)
        trace.operator("aten::stack", at + 20, 30, dims=[[32, 3, 224, 224]], types=["float"])
        trace.launch(at + 110, 20, correlation=key + 1, name="cudaMemcpyAsync")
        trace.memcpy(at + 115, 10, bytes=4096, correlation=key + 1)
        trace.operator(
            "aten::conv2d", at + 140, 60, external=key + 7, sequence=number * 9 + 1, dims=[[8, 3, 9, 9], [4, 3, 3, 3]]
        )
        trace.launch(at + 150, 5, correlation=key + 2, external=key + 7)
        trace.kernel("implicit_convolve_sgemm", at + 160, 300, correlation=key + 2, external=key + 7)
        trace.operator("aten::relu", at + 210, 30, sequence=number * 9 + 2)
        trace.launch(at + 215, 5, correlation=key + 3).kernel("elementwise_kernel", at + 461, 40, correlation=key + 3)
        trace.operator("ReluBackward0", at + 300, 90, thread=200, sequence=number * 9 + 2, forward_thread=1)
        trace.launch(at + 320, 5, correlation=key + 4, thread=200)
        trace.kernel("elementwise_kernel", at + 502, 60, correlation=key + 4)
        trace.operator("ConvolutionBackward0", at + 400, 200, thread=200, sequence=number * 9 + 1, forward_thread=1)
        trace.launch(at + 420, 5, correlation=key + 5, thread=200, name="cudaGraphLaunch")
        trace.kernel("wgrad", at + 570, 200, correlation=key + 5).kernel("dgrad", at + 572, 150, correlation=key + 5)
        trace.launch(at + 620, 2, correlation=key + 8, thread=200, name="cudaEventRecord")
        trace.launch(at + 625, 2, correlation=key + 9, thread=200, name="cudaStreamWaitEvent")
        trace.launch(at + 630, 5, correlation=key + 10, thread=200)
        trace.kernel("ncclKernel_AllReduce_RING", at + 780, 100, correlation=key + 10, stream=20)
        trace.annotation("Optimizer.step#SGD.step", at + 700, 60).operator("aten::add_", at + 710, 20)
        trace.launch(at + 715, 5, correlation=key + 11).kernel("elementwise_kernel", at + 890, 20, correlation=key + 11)
        trace.launch(at + 800, 1000, correlation=key + 12, name="cudaStreamSynchronize")
        trace.memory(at + 145, 4096, address=512).memory(at + 410, -4096, address=512, thread=200)
    document: dict[str, Any] = json.loads(trace.text())
    return document


def mutated(document: dict[str, Any], seed: int) -> bytes:
    """The trace with one to eight faults of random kinds, as the bytes of a file."""
    rng = random.Random(seed)
    document = json.loads(json.dumps(document))
    events = document["traceEvents"]
    for _ in range(rng.randint(1, 8)):
        event = rng.choice(events)
        if not isinstance(event, dict):
            continue
        fault = rng.randrange(9)
        field = rng.choice(list(event) or ["name"])
        if fault == 0:
            event.pop(field, None)
        elif fault == 1:
            event[field] = deepcopy(rng.choice(JUNK))
        elif fault == 2:
            event["dur"] = -rng.random() * 1e4
        elif fault == 3 and isinstance(event.get("args"), dict) and event["args"]:
            event["args"][rng.choice(list(event["args"]))] = deepcopy(rng.choice(JUNK))
        elif fault == 4:
            events.append(dict(event))
        elif fault == 5:
            events[rng.randrange(len(events))] = deepcopy(rng.choice(JUNK))
        elif fault == 6:
            nested: Any = event.get("args")
            for _ in range(10):
                nested = {"junk": nested, "more": [nested]} if rng.random() < 0.3 else [nested]
            event["args"] = nested if rng.random() < 0.5 else {"correlation": nested}
        elif fault == 7 and isinstance(event.get("ts"), int | float):
            event["ts"] = event["ts"] + rng.uniform(-3000, 3000)
        elif fault == 8:
            rng.shuffle(events)
    if rng.random() < 0.1:
        for _ in range(10):
            document = {"traceEvents": [document], "junk": {}}
    text = json.dumps(document).encode()
    if rng.random() < 0.3:
        text = text[: rng.randrange(len(text))]
    if rng.random() < 0.1:
        at = rng.randrange(len(text) or 1)
        text = text[:at] + bytes(rng.randrange(256) for _ in range(5)) + text[at + 5 :]
    if rng.random() < 0.3:
        text = gzip.compress(text, mtime=0)
        if rng.random() < 0.5:
            text = text[: rng.randrange(len(text))]
    return text


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_damaged_trace_gives_a_result_or_one_clear_error(part: int, tmp_path: Path, new_seed: int) -> None:
    results = errors = 0
    for seed in range(new_seed + part, new_seed + MUTATIONS, 10):
        path = tmp_path / f"{seed}.json"
        path.write_bytes(mutated(training_step(GENERATIONS[seed % len(GENERATIONS)]), seed))
        try:
            trace = read_trace(path)
        except InputError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            errors += 1
            continue
        graph = build_graph(trace)
        timeline = simulate(graph)
        assert np.isfinite(timeline.start_us).all() and (timeline.start_us >= 0).all()
        assert len(timeline.step_us) == len(graph.steps)
        results += 1
    assert results + errors == MUTATIONS // 10
    assert results > errors


WITH_FILES = ("metaflow", "replace-kernel", "replace-operator")


@pytest.mark.parametrize("name", [name for name in registered() if name not in WITH_FILES])
def test_every_pass_survives_damaged_traces(name: str, tmp_path: Path, new_seed: int) -> None:
    needed: dict[str, dict[str, Any]] = {
        "scale": {"factor": 0.5},
        "remove": {"match": "relu|elementwise"},
        "blueconnect": {"factors": "4x2", "bandwidths": "100x10"},
        "unprofiled": {"step_ms": 0.05},
        "port": {"device": "a100"},
        "fsdp": {"wrap": ".*"},
    }
    for seed in range(new_seed, new_seed + 40):
        path = tmp_path / f"{seed}.json"
        path.write_bytes(mutated(training_step(GENERATIONS[seed % len(GENERATIONS)]), seed))
        try:
            graph = registered()[name](read_graph(path), **needed.get(name, {})).graph
        except InputError as error:
            assert "\n" not in str(error)
            continue
        assert np.isfinite(simulate(graph).start_us).all()
