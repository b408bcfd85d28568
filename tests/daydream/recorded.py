"""A trace and its graph in which every kernel belongs to one operator, for tests of sizes and prices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.accuracy.data import default_directory
from daydream.graph.graph import Phase, TaskGraph
from daydream.trace.trace import NONE, Category, ThreadName, Trace
from tests.daydream.graphs import graph, launched, pairs

V100 = ({"id": 0, "name": "Tesla V100-SXM2-16GB"},)

#: Recorded trainings among the measured data. They are no part of the repository.
TRACES = (
    "alexnet_a100",
    "ns_resolution_v100",
    "resnet50_v100_nw0",
    "simple_add",
    "trace_diff_control_a100",
)


def recorded_trace(name: str) -> Path:
    """The file of a recorded training; skips the test where there is none."""
    path = default_directory() / "traces" / f"{name}.pt.trace.json.gz"
    if not path.exists():
        pytest.skip("the recorded traces are not here")
    return path


def operator(
    name: str,
    dims: Sequence[Any] | None = None,
    types: Sequence[str] | None = None,
    *,
    kernels: Sequence[tuple[str, float]] = (),
    inside: int = NONE,
    sequence: int = NONE,
    phase: Phase = Phase.NONE,
    **arguments: Any,
) -> dict[str, Any]:
    """An operator, the kernels it launches (name, µs), and the position of the operator around it."""
    given = {} if dims is None else {"Input Dims": dims, "Input type": types or ["float" if d else "" for d in dims]}
    return {
        "name": name, "arguments": {**given, **arguments}, "kernels": kernels, "inside": inside, "sequence": sequence,
        "phase": phase,
    }  # fmt: skip


def trace(operators: Sequence[dict[str, Any]], devices: Sequence[dict[str, Any]] = V100) -> Trace:
    """A trace of these operators one after the other on one thread, 10 µs each; those around others last longer."""
    count = len(operators)
    names = tuple(dict.fromkeys(each["name"] for each in operators))
    nothing = np.full(count, NONE)
    return Trace(
        path="", names=names, threads=(ThreadName(1, 1),),
        name=np.array([names.index(each["name"]) for each in operators], np.int64),
        category=np.full(count, int(Category.OPERATOR)), start_us=10.0 * np.arange(count),
        duration_us=np.full(count, 9.0), thread=np.zeros(count, np.int64), correlation=nothing,
        external=np.arange(count), sequence=np.array([each["sequence"] for each in operators], np.int64),
        forward_thread=nothing, bytes=np.full(count, np.nan),
        arguments=tuple(each["arguments"] for each in operators), forward_backward=np.empty((0, 2), np.int64),
        devices=tuple(devices),
    )  # fmt: skip


def enclosing(operators: Sequence[dict[str, Any]]) -> Any:
    """For every operator the one around it."""
    return np.array([each["inside"] for each in operators], np.int64)


def recorded(operators: Sequence[dict[str, Any]], devices: Sequence[dict[str, Any]] = V100) -> TaskGraph:
    """The graph: a launch and a kernel, rows 2i and 2i + 1, for every kernel in turn."""
    tasks: list[Any] = []
    for row, each in enumerate(operators):
        for name, duration in each["kernels"]:
            tasks += launched(name, duration, operator=row, phase=each["phase"])
    return graph(tasks, pairs(len(tasks) // 2), trace=trace(operators, devices), enclosing=enclosing(operators))
