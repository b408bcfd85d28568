"""The exported Chrome trace: valid, complete, aligned with the recording, and readable by our own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskKind, Thread, ThreadKind
from daydream.graph.simulate import simulate
from daydream.report.analysis import analyse
from daydream.report.breakdown import chosen_steps
from daydream.report.timeline import PROCESS_OFFSET, encoded, write_timeline
from daydream.tasks.build import build_graph, read_graph
from daydream.trace.files import read_trace
from daydream.trace.trace import Category
from tests.daydream.graphs import CHANNEL, MAIN, STREAM, graph, launched, pairs, task
from tests.daydream.recorded import recorded_trace
from tests.daydream.traces import Builder


class Head(msgspec.Struct):
    """What stands before the events."""

    schemaVersion: int


def recording() -> Builder:
    builder = Builder()
    for number, start in ((1, 0), (2, 100)):
        builder.step(number, start, 100)
        builder.operator("aten::mm", start + 10, 20, external=number)
        builder.launch(start + 12, 5, correlation=number)
        builder.kernel("sgemm", start + 20, 30, correlation=number, external=number)
        builder.launch(start + 60, 30, name="cudaDeviceSynchronize", correlation=number + 50)
    return builder


def events(text: bytes) -> list[dict[str, Any]]:
    return json.loads(text)["traceEvents"]


def complete(found: list[dict[str, Any]], *categories: str) -> list[dict[str, Any]]:
    return [event for event in found if event["ph"] == "X" and event["cat"] in categories]


def test_our_reader_finds_the_same_kernels_at_the_same_times(tmp_path: Path) -> None:
    trace = read_trace(recording().write(tmp_path / "trace.json"))
    write_timeline(simulate(build_graph(trace)), tmp_path / "out.json.gz")
    again = read_trace(tmp_path / "out.json.gz")
    assert again.warnings == ()
    for category in (Category.KERNEL, Category.RUNTIME, Category.OPERATOR):
        assert (again.category == category).sum() == (trace.category == category).sum()
        # Operators and calls that wait are whole again, although tasks are cut where the next one starts.
        mine, theirs = again.category == category, trace.category == category
        assert again.duration_us[mine].tolist() == trace.duration_us[theirs].tolist()
    kernels, before = again.category == Category.KERNEL, trace.category == Category.KERNEL
    assert again.start_us[kernels] + again.origin_us == pytest.approx(trace.start_us[before] + trace.origin_us)
    assert (build_graph(again).edge_kind == Dependency.LAUNCH).sum() == 2
    assert [step.name for step in build_graph(again).steps] == ["ProfilerStep#1", "ProfilerStep#2"]


def test_modules_and_backward_operators_stay_what_they_are(tmp_path: Path) -> None:
    builder = Builder().step(1, 0, 100).python("nn.Module: Linear_0", 5, 40)
    builder.operator("aten::linear", 10, 30, sequence=3).operator("aten::mm", 15, 20)
    builder.operator("autograd::engine::evaluate_function: MmBackward", 60, 10, sequence=3, forward_thread=1)
    builder.forward_backward(10, 60)
    trace = read_trace(builder.write(tmp_path / "trace.json"))
    write_timeline(simulate(build_graph(trace)), tmp_path / "out.json")
    again = read_trace(tmp_path / "out.json")
    for column in (trace, again):
        rows = np.flatnonzero(column.category != Category.ANNOTATION)
        assert [column.text(row) for row in rows] == [
            "nn.Module: Linear_0", "aten::linear", "aten::mm", "autograd::engine::evaluate_function: MmBackward",
        ]  # fmt: skip
        assert column.sequence[rows].tolist() == [-1, 3, -1, 3]
        assert [column.text(row) for row in column.forward_backward[0]] == [column.text(rows[1]), column.text(rows[3])]
    old, new = build_graph(trace), build_graph(again)
    assert [old.layers[layer] for layer in old.layer] == [new.layers[layer] for layer in new.layer]
    assert old.phase.tolist() == new.phase.tolist()


def test_both_files_can_be_loaded_together(tmp_path: Path) -> None:
    path = recording().write(tmp_path / "trace.json")
    theirs = {event["pid"] for event in json.loads(path.read_text())["traceEvents"]}
    ours = events(encoded(simulate(read_graph(path))))
    assert not theirs & {event["pid"] for event in ours}
    names = {event["pid"]: event["args"]["name"] for event in ours if event["name"] == "process_name"}
    assert set(names.values()) == {"CPU process 100 (predicted)", "GPU 0 (predicted)", "critical path (predicted)"}
    threads = [event["tid"] for event in ours if event["name"] == "thread_name"]
    assert sorted(threads) == [0, 7, 100]


def test_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    builder = Builder("2024").step(1, 0, 9).operator("aten::mm", 1.001, 2.5)
    text = encoded(simulate(read_graph(builder.write(tmp_path / "trace.json"))))
    start = next(line for line in text.splitlines() if b"aten::mm" in line).partition(b'"ts":')[2].partition(b",")[0]
    # The recording begins at 1712195495000000.000; the reader's origin is a float, exact to a quarter.
    assert start == b"1712195495000001.001"


def test_launches_point_at_their_kernels() -> None:
    found = events(encoded(simulate(graph([*launched("a", 10), *launched("b", 5)], pairs(2)))))
    arrows = [(event["ph"], event["id"], event["ts"]) for event in found if event["ph"] in "sf"]
    assert arrows == [("s", 1, 0.0), ("f", 1, 1.0), ("s", 2, 1.0), ("f", 2, 11.0)]
    first, second = complete(found, "kernel")
    assert first["args"]["correlation"] == complete(found, "cuda_runtime")[0]["args"]["correlation"]
    assert (first["ts"], first["dur"], second["ts"], second["dur"]) == (1, 10, 11, 5)


def test_a_task_tells_what_is_known_of_it() -> None:
    tasks = [*launched("a", 10, layer='fc "1"', phase=Phase.BACKWARD, recorded_us=5.0, bytes=64.0)]
    (kernel,) = complete(events(encoded(simulate(graph(tasks, pairs(1))))), "kernel")
    assert kernel["args"] == {
        "task": 1, "layer": 'fc "1"', "phase": "backward", "step": 0, "device": 0, "stream": 7, "bytes": 64,
        "correlation": 1, "waited_for": 0, "recorded_start_us": 5.0, "recorded_duration_us": None,
        "depends_on": ["launch 0"], "critical": True,
    }  # fmt: skip
    assert kernel["cname"] == "terrible"


def test_the_critical_path_has_a_row_of_its_own_without_holes() -> None:
    tasks = [task("aten::x", MAIN, 1, gap_us=3), *launched("a", 10), task("aten::y", MAIN, 2)]
    found = events(encoded(simulate(graph(tasks, [(1, 2, Dependency.LAUNCH)]))))
    path = complete(found, "Trace")
    assert [(event["name"], event["ts"], event["dur"]) for event in path] == [
        ("aten::x", 0, 4), ("cudaLaunchKernel", 4, 1), ("a", 5, 10),
    ]  # fmt: skip
    assert [event["args"]["resource"] for event in path] == ["CPU", "CPU", "GPU compute"]
    assert [event["name"] for event in found if event.get("args", {}).get("critical") and event["cat"] != "Trace"] == [
        "aten::x", "cudaLaunchKernel", "a",
    ]  # fmt: skip


def test_added_tasks_and_channels_are_shown() -> None:
    edit = Edit(graph([*launched("a", 10)], pairs(1)))
    edit.add_kernel("added", 3, after=1, launch_us=1)
    edit.add("allreduce", TaskKind.COMMUNICATION, 4, thread=edit.thread(CHANNEL))
    found = events(encoded(simulate(edit.apply()), "what if"))
    assert [event["name"] for event in complete(found, "kernel")] == ["a", "added"]
    (reduce,) = complete(found, "collective_comm")
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert names[reduce["pid"]] == "network (what if)"


def test_a_stream_in_several_parts_gets_several_rows() -> None:
    part = Thread(kind=ThreadKind.STREAM, label="stream 7 (2)", number=7, device=0)
    found = events(encoded(simulate(graph([task("a", STREAM, 5), task("b", part, 5)]))))
    rows = [(event["pid"], event["tid"], event["args"]["stream"]) for event in complete(found, "kernel")]
    assert rows == [(PROCESS_OFFSET, 7, 7), (PROCESS_OFFSET, PROCESS_OFFSET + 1, 7)]


def test_an_empty_graph_is_a_valid_trace(tmp_path: Path) -> None:
    write_timeline(simulate(graph([])), tmp_path / "out.json")
    assert complete(events((tmp_path / "out.json").read_bytes()), "kernel", "cpu_op") == []


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        write_timeline(simulate(graph([])), tmp_path / "missing" / "out.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["resnet50_v100_nw0", pytest.param("trace_diff_control_a100", marks=pytest.mark.slow), "alexnet_a100"]
)
def test_recorded_traces_come_back_whole(name: str, tmp_path: Path) -> None:
    path = recorded_trace(name)
    trace = read_trace(path)
    timeline = simulate(build_graph(trace))
    write_timeline(timeline, tmp_path / "out.json")
    again = read_trace(tmp_path / "out.json")
    assert again.warnings == ()
    for category in (Category.KERNEL, Category.MEMCPY, Category.MEMSET):
        assert (again.category == category).sum() == (trace.category == category).sum()
    assert msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Head).schemaVersion == 1
    kernels = again.category == Category.KERNEL
    before = trace.category == Category.KERNEL
    moved = np.sort(again.start_us[kernels] + again.origin_us - trace.origin_us) - np.sort(trace.start_us[before])
    assert np.median(np.abs(moved)) < 1000
    # The copy is the same step to whoever asks.
    before, after = (analyse(one, chosen_steps(one.graph)) for one in (timeline, simulate(build_graph(again))))
    assert after.mean_us == pytest.approx(before.mean_us, rel=1e-3)
    assert after.busy.both_us == pytest.approx(before.busy.both_us, rel=0.01)
    assert [phase.gpu_tasks for phase in after.phases] == [phase.gpu_tasks for phase in before.phases]
