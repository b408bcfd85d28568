"""Speed of reading traces, building graphs and simulating; HolisticTraceAnalysis, too, where it is installed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.accuracy.data import default_directory
from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import simulate
from daydream.tasks.build import read_graph
from daydream.trace.files import read_trace

TRACE = "traces/resnet50_v100_nw0.pt.trace.json.gz"
#: Of the graph of ResNet-50, side by side: about a million tasks.
COPIES = 25


@pytest.fixture(scope="module")
def trace_file() -> Path:
    path = default_directory() / TRACE
    if not path.exists():
        pytest.skip("needs the measured traces")
    return path


@pytest.fixture(scope="module")
def graph(trace_file: Path) -> TaskGraph:
    return read_graph(trace_file)


def repeated(graph: TaskGraph, copies: int) -> TaskGraph:
    """Independent copies of a graph, each with threads of its own."""

    def column(values: Any) -> Any:
        return np.tile(values, copies)

    def shifted(values: Any, by: int) -> Any:
        return (values[None, :] + by * np.arange(copies)[:, None]).reshape(-1)

    names = ("name", "kind", "duration_us", "gap_us", "layer", "phase", "step", "mark", "operator", "event", "bytes")
    columns = {name: column(getattr(graph, name)) for name in (*names, "priority", "recorded_us")}
    return replace(
        graph,
        **columns,
        threads=graph.threads * copies,
        thread=shifted(graph.thread, len(graph.threads)),
        edge_source=shifted(graph.edge_source, len(graph)),
        edge_target=shifted(graph.edge_target, len(graph)),
        edge_kind=column(graph.edge_kind),
        edge_lag_us=column(graph.edge_lag_us),
        # One queue for all copies would tie them together.
        queue_depth=0,
    )


def test_read(benchmark: Any, trace_file: Path) -> None:
    trace = benchmark.pedantic(read_trace, (trace_file,), rounds=5, warmup_rounds=1)
    assert len(trace) > 40_000


def test_file_to_graph(benchmark: Any, trace_file: Path, limits: bool) -> None:
    graph = benchmark.pedantic(lambda: read_graph(trace_file), rounds=5, warmup_rounds=1)
    assert len(graph) > 40_000
    assert not limits or benchmark.stats.stats.median <= 1.5


def test_simulate_one_trace(benchmark: Any, graph: TaskGraph) -> None:
    timeline = benchmark.pedantic(simulate, (graph,), rounds=5, warmup_rounds=1)
    assert timeline.makespan_us > 1e6


def test_simulate_a_million_tasks(benchmark: Any, graph: TaskGraph, limits: bool) -> None:
    large = repeated(graph, COPIES)
    timeline = benchmark.pedantic(simulate, (large,), rounds=5, warmup_rounds=1)
    rate = len(large) / benchmark.stats.stats.median
    benchmark.extra_info["tasks_per_second"] = round(rate)
    assert timeline.makespan_us > 1e6
    assert not limits or rate >= 2e6


def test_simulate_cold(benchmark: Any, trace_file: Path, limits: bool) -> None:
    """`daydream simulate` as a process of its own: seconds, and the most memory it held."""
    command = [sys.executable, "-m", "daydream.cli", "simulate", str(trace_file), "--json"]

    def run() -> None:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert len(json.loads(result.stdout)["steps"]) == 6

    benchmark.pedantic(run, rounds=3, warmup_rounds=0)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    benchmark.extra_info["peak_mib"] = round(peak)
    assert not limits or (benchmark.stats.stats.median <= 3.0 and peak <= 1024)


HOLISTIC = """
import json, sys, time, hta
from hta.trace_analysis import TraceAnalysis
began = time.perf_counter()
analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
loaded = time.perf_counter() - began
try:
    done = "done" if analysis.critical_path_analysis(rank=0, annotation="ProfilerStep", instance_id=1)[1] else "failed"
except Exception as error:
    done = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps({"version": hta.__version__, "load_seconds": round(loaded, 3), "critical_path": done}))
"""


def test_against_holistic_trace_analysis(benchmark: Any, trace_file: Path) -> None:
    """File to graph, against HolisticTraceAnalysis loading the same file in the same run; noted, not judged.

    Its requirements clash with ours, so it may live in another environment, whose Python `HTA_PYTHON` names.
    """
    python = os.environ.get("HTA_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import hta.trace_analysis"], capture_output=True).returncode:
        pytest.skip("needs HolisticTraceAnalysis; name a Python that has it: HTA_PYTHON")
    graph = benchmark.pedantic(lambda: read_graph(trace_file), rounds=3, warmup_rounds=1)
    command = [python, "-c", HOLISTIC, str(trace_file)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    theirs = json.loads(result.stdout.splitlines()[-1])
    benchmark.extra_info.update({f"hta_{key}": value for key, value in theirs.items()})
    assert len(graph) > 40_000
    assert theirs["load_seconds"] > 0
