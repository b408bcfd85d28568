"""The reader of Kineto traces: every generation's spelling, and the recorded traces."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from daydream.trace.files import read_trace
from daydream.trace.trace import NONE, Category, ThreadName, Trace
from tests.daydream.recorded import recorded_trace
from tests.daydream.traces import GENERATIONS, Builder, event, one_step, written

REAL = {
    # name: events in the file (README of the data), CPU ranges, calls, kernels, copies, fills, waits, steps
    "resnet50_v100_nw0": (23646, 11923, 8772, 12, 312, 0, 6),
    "ns_resolution_v100": (23980, 15329, 4350, 1600, 145, 0, 5),
    "trace_diff_control_a100": (40794, 24692, 8568, 228, 654, 0, 6),
    "alexnet_a100": (367, 361, 79, 16, 3, 41, 0),
    "simple_add": (367, 331, 79, 16, 3, 41, 0),
}


def real(name: str) -> Path:
    return recorded_trace(name)


def rows(trace: Trace, category: Category) -> list[int]:
    return np.flatnonzero(trace.category == category).tolist()


class TestGenerations:
    @pytest.mark.parametrize("generation", GENERATIONS)
    @pytest.mark.parametrize("suffix", [".json", ".json.gz", ".txt"])
    def test_same_trace_in_every_spelling(self, generation: str, suffix: str, tmp_path: Path) -> None:
        trace = read_trace(one_step(generation).write(tmp_path / f"trace{suffix}"))
        assert [(trace.text(row), Category(trace.category[row])) for row in range(len(trace))] == [
            ("ProfilerStep#3", Category.ANNOTATION),
            ("aten::mm", Category.OPERATOR),
            ("cudaLaunchKernel", Category.RUNTIME),
            ("gemm", Category.KERNEL),
            ("MmBackward0", Category.OPERATOR),
            ("cudaMemcpyAsync", Category.RUNTIME),
            ("Memcpy HtoD (Pageable -> Device)", Category.MEMCPY),
            ("Memset (Device)", Category.MEMSET),
            ("Optimizer.step#SGD.step", Category.ANNOTATION),
        ]
        assert trace.start_us.tolist() == [0, 10, 15, 22, 60, 62, 70, 80, 90]
        assert trace.duration_us.tolist() == [100, 20, 5, 30, 20, 3, 4, 2, 5]
        assert trace.correlation.tolist() == [-1, -1, 21, 21, -1, 22, 22, 23, -1]
        assert trace.external.tolist() == [-1, 5, 5, 5, 6, 6, 6, -1, -1]
        assert trace.sequence.tolist() == [-1, 8, -1, -1, 8, -1, -1, -1, -1]
        assert trace.forward_thread.tolist() == [-1, 0, -1, -1, 1, -1, -1, -1, -1]
        assert [value for value in trace.bytes.tolist() if not math.isnan(value)] == [4096, 64]
        assert trace.forward_backward.tolist() == [[1, 4]]
        assert trace.arguments[1]["Input Dims"] == [[2, 3], [3, 4]]
        assert [trace.threads[index] for index in trace.thread[[0, 4, 3, 6]]] == [
            ThreadName(100, 100),
            ThreadName(100, 101),
            ThreadName(0, 7, 0),
            ThreadName(0, 9, 0),
        ]
        assert trace.warnings == ()

    def test_nanoseconds_since_1970_are_kept(self, tmp_path: Path) -> None:
        builder = Builder(generation="2024").operator("a", 0.047, 1.5).operator("b", 5.812, 0.25)
        trace = read_trace(builder.write(tmp_path / "t.json"))
        assert trace.start_us.tolist() == [0, 5.765]
        assert trace.origin_us == pytest.approx(1712195495000000.0)

    def test_origin_is_the_earliest_task_as_recorded(self, tmp_path: Path) -> None:
        trace = read_trace(Builder(generation="2022").operator("a", 7, 1).write(tmp_path / "t.json"))
        assert trace.origin_us == 1_661_203_462_598_007

    def test_annotations_and_operators_of_2021_share_a_category(self, tmp_path: Path) -> None:
        builder = Builder(generation="2021").annotation("enumerate(DataLoader)#_Iter.__next__", 0, 5)
        builder.annotation("ProfilerStep#1", 10, 5).operator("detach_", 20, 5)
        trace = read_trace(builder.write(tmp_path / "t.json"))
        assert trace.category.tolist() == [Category.ANNOTATION, Category.ANNOTATION, Category.OPERATOR]

    @pytest.mark.parametrize(
        ("spelling", "category"),
        [
            ("cuda_driver", Category.RUNTIME),
            ("hip_runtime", Category.RUNTIME),
            ("xpu_runtime", Category.RUNTIME),
            ("xpu_driver", Category.RUNTIME),
            ("mtia_runtime", Category.RUNTIME),
            ("glow_runtime", Category.RUNTIME),
            ("privateuse1_runtime", Category.RUNTIME),
            ("privateuse1_driver", Category.RUNTIME),
            ("hpu_op", Category.RUNTIME),
            ("mtia_ccp_events", Category.KERNEL),
            ("mlu_memcpy", Category.MEMCPY),
            ("cuda_sync", Category.SYNC),
            ("xpu_sync", Category.SYNC),
            ("python_function", Category.PYTHON),
            ("gpu_user_annotation", Category.GPU_ANNOTATION),
            ("CPU_OP", Category.OPERATOR),
        ],
    )
    def test_categories_of_other_devices(self, spelling: str, category: Category, tmp_path: Path) -> None:
        assert written(tmp_path / "t.json", [event(cat=spelling)]).category.tolist() == [category]

    def test_markers_are_no_events_and_unknown_categories_are_noted(self, tmp_path: Path) -> None:
        quiet = [event(cat=cat) for cat in ("Trace", "overhead", "cuda_event", "mtia_counters", "cpu_instant_event")]
        strange = [event(cat="dream"), event(cat="{0}"), event(cat=None)]
        trace = written(tmp_path / "t.json", [event(), *quiet, *strange])
        assert len(trace) == 1
        assert trace.warnings == ("3 events of a category that is not known, left out (dream, none, (0))",)

    def test_hip_names_are_calls(self, tmp_path: Path) -> None:
        builder = Builder().launch(0, 5, correlation=3, name="hipLaunchKernel").kernel("k", 6, 5, correlation=3)
        trace = read_trace(builder.write(tmp_path / "t.json"))
        assert trace.correlation.tolist() == [3, 3]

    def test_head_is_kept(self, tmp_path: Path) -> None:
        builder = Builder().operator("a", 0, 1)
        builder.head = {
            "deviceProperties": [{"id": 0, "name": "V100"}, "junk"],
            "distributedInfo": {"backend": "nccl", "world_size": 8},
            "daydream": {"version": 1, "gradients": []},
        }
        trace = read_trace(builder.write(tmp_path / "t.json"))
        assert trace.devices == ({"id": 0, "name": "V100"},)
        assert trace.distributed["world_size"] == 8
        assert trace.metadata["version"] == 1


class TestPlaces:
    def test_threads_streams_devices_and_processes_are_apart(self, tmp_path: Path) -> None:
        builder = Builder().operator("a", 0, 1).operator("a", 1, 1, thread=5)
        builder.kernel("k", 2, 1, correlation=1).kernel("k", 3, 1, correlation=2, stream=8)
        builder.kernel("k", 4, 1, correlation=3, device=1)
        builder.process = 200
        trace = read_trace(builder.operator("a", 5, 1).write(tmp_path / "t.json"))
        assert [trace.threads[index] for index in trace.thread] == [
            ThreadName(100, 100),
            ThreadName(100, 5),
            ThreadName(0, 7, 0),
            ThreadName(0, 8, 0),
            ThreadName(1, 7, 1),
            ThreadName(200, 100),
        ]

    def test_arguments_tell_the_stream_rather_than_the_line(self, tmp_path: Path) -> None:
        lane = event(cat="kernel", pid=0, tid=99, args={"device": 2, "stream": 13})
        bare = event(cat="kernel", pid=1, tid="stream 4", ts=11)
        trace = written(tmp_path / "t.json", [lane, bare])
        assert trace.threads == (ThreadName(0, 13, 2), ThreadName(1, 4, 1))

    def test_a_wait_for_the_whole_device_has_no_stream(self, tmp_path: Path) -> None:
        wait = event(cat="cuda_sync", pid=0, tid=-1, args={"device": 0, "stream": 2**32 - 1})
        assert written(tmp_path / "t.json", [wait]).threads == (ThreadName(0, NONE, 0),)

    def test_labels(self, tmp_path: Path) -> None:
        builder = Builder(generation="2021").label("thread 100 (python) ").operator("a", 0, 1)
        assert read_trace(builder.write(tmp_path / "t.json")).threads == (
            ThreadName(100, 100, label="thread 100 (python)"),
        )

    def test_lines_with_names_instead_of_numbers_stay_apart(self, tmp_path: Path) -> None:
        trace = written(tmp_path / "t.json", [event(tid="main"), event(tid="loader"), event(tid="main")])
        assert trace.thread.tolist() == [0, 1, 0]
        assert len({thread.number for thread in trace.threads}) == 2

    def test_odd_lines(self, tmp_path: Path) -> None:
        odd = [event(pid={"a": 1}, tid=None), event(tid=True), event(tid=7.0), event(cat="kernel", args={"device": []})]
        trace = written(tmp_path / "t.json", odd)
        assert [thread.number for thread in trace.threads] == [NONE, NONE, 7, 1]

    def test_order_is_by_start_then_longest_then_file(self, tmp_path: Path) -> None:
        names = [("c", 5, 1), ("inner", 0, 2), ("outer", 0, 9), ("first", 3, 0), ("second", 3, 0)]
        trace = written(tmp_path / "t.json", [event(name=name, ts=ts, dur=dur) for name, ts, dur in names])
        assert [trace.text(row) for row in range(5)] == ["outer", "inner", "first", "second", "c"]


class TestLinks:
    def test_kernels_of_a_graph_share_a_correlation(self, tmp_path: Path) -> None:
        builder = Builder().launch(0, 5, correlation=7, name="cudaGraphLaunch")
        for start in (10, 20, 30):
            builder.kernel("k", start, 5, correlation=7)
        trace = read_trace(builder.write(tmp_path / "t.json"))
        assert trace.correlation.tolist() == [7, 7, 7, 7]
        assert len(rows(trace, Category.KERNEL)) == 3

    def test_arrows_stand_in_for_missing_correlations(self, tmp_path: Path) -> None:
        builder = Builder().launch(0, 5, correlation=7).kernel("k", 6, 5, correlation=7)
        builder.kernel("unlaunched", 20, 5, correlation=None)
        for entry in builder.events:
            entry.get("args", {}).pop("correlation", None)
        assert read_trace(builder.write(tmp_path / "t.json")).correlation.tolist() == [7, 7, NONE]

    def test_no_links_of_zero_and_none_that_repeat_the_correlation(self, tmp_path: Path) -> None:
        builder = Builder().operator("a", 0, 9, external=14)
        builder.launch(1, 1, correlation=14, external=14).launch(3, 1, correlation=0, external=0)
        builder.kernel("k", 5, 1, correlation=14, external=14)
        trace = read_trace(builder.write(tmp_path / "t.json"))
        assert trace.external.tolist() == [14, NONE, NONE, NONE]
        assert trace.correlation.tolist() == [NONE, 14, NONE, 14]

    def test_arrow_prefers_the_operator_that_autograd_numbered(self, tmp_path: Path) -> None:
        builder = Builder().operator("aten::outer", 0, 50, sequence=3).operator("aten::numbered", 0, 40, sequence=4)
        builder.operator("aten::bare", 0, 30).operator("Backward", 100, 10, sequence=4, forward_thread=1)
        trace = read_trace(builder.forward_backward(0, 100).write(tmp_path / "t.json"))
        assert [(trace.text(a), trace.text(b)) for a, b in trace.forward_backward] == [("aten::numbered", "Backward")]

    def test_arrow_into_the_middle_finds_the_innermost(self, tmp_path: Path) -> None:
        builder = Builder().operator("outer", 0, 50).operator("early", 5, 5).operator("inner", 20, 20)
        builder.operator("back", 100, 30)
        trace = read_trace(builder.forward_backward(25, 110).forward_backward(15, 110).write(tmp_path / "t.json"))
        assert [trace.text(row) for row in trace.forward_backward[:, 0]] == ["inner", "outer"]

    def test_ids_used_again_join_the_latest_start(self, tmp_path: Path) -> None:
        builder = Builder()
        for start in (0, 100):
            builder.operator(f"f{start}", start, 10).operator(f"b{start}", start + 50, 10)
            builder.forward_backward(start, start + 50, id=1)
        trace = read_trace(builder.write(tmp_path / "t.json"))
        joined = [(trace.text(a), trace.text(b)) for a, b in trace.forward_backward]
        assert joined == [("f0", "b0"), ("f100", "b100")]

    def test_arrows_that_touch_nothing_are_noted(self, tmp_path: Path) -> None:
        builder = Builder().operator("a", 0, 10).forward_backward(0, 500).forward_backward(0, 5, backward_thread=77)
        trace = read_trace(builder.write(tmp_path / "t.json"))
        assert trace.forward_backward.shape == (0, 2)
        assert trace.warnings == ("4 events of forward-backward arrows that join no two operators, left out",)

    def test_numbers_written_otherwise(self, tmp_path: Path) -> None:
        odd = [
            event(cat="kernel", args={"correlation": value, "bytes": value})
            for value in ("12", 12.0, 1.5, None, [1], True, 2**64, -5, math.nan)
        ]
        trace = written(tmp_path / "t.json", odd)
        assert trace.correlation.tolist() == [12, 12] + [NONE] * 7
        assert trace.bytes.tolist()[1:3] == [12, 1.5]


class TestHalves:
    def test_begin_and_end_make_an_event(self, tmp_path: Path) -> None:
        halves = [
            event(ph="B", name="outer", ts=0, dur=None, args={"External id": 4}),
            event(ph="B", name="inner", ts=2, dur=None),
            event(ph="E", name="", ts=5, dur=None),
            event(ph="B", name="other", ts=3, tid=2, dur=None),
            event(ph="E", ts=9, dur=None, args={"Sequence number": 3}),
            event(ph="E", ts=4, tid=2, dur=None),
        ]
        trace = written(tmp_path / "t.json", halves)
        assert [trace.text(row) for row in range(3)] == ["outer", "inner", "other"]
        assert trace.duration_us.tolist() == [9, 3, 1]
        assert (trace.external[0], trace.sequence[0]) == (4, 3)

    def test_halves_alone_are_noted(self, tmp_path: Path) -> None:
        halves = [event(ph="E", ts=1), event(ph="B", ts=2), event(ph="B", ts=None), event()]
        trace = written(tmp_path / "t.json", halves)
        assert len(trace) == 1
        assert trace.warnings == ("3 events with a beginning or an end only, left out",)

    def test_halves_with_nanoseconds_since_1970(self, tmp_path: Path) -> None:
        text = '[{"ph":"B","cat":"cpu_op","name":"a","ts":1712195495519689.047},{"ph":"E","ts":1712195495519690.1}]'
        assert written(tmp_path / "t.json", text).duration_us.tolist() == [pytest.approx(1.053)]


class TestRecordedTraces:
    @pytest.mark.parametrize("name", REAL)
    def test_counts(self, name: str) -> None:
        trace = read_trace(real(name))
        on_cpu, calls, kernels, copies, fills, waits, steps = REAL[name]
        counted = np.bincount(trace.category, minlength=9)
        assert counted[Category.OPERATOR] + counted[Category.ANNOTATION] == on_cpu
        assert counted[Category.RUNTIME : Category.SYNC + 1].tolist() == [calls, kernels, copies, fills, waits]
        annotations = [trace.text(row) for row in rows(trace, Category.ANNOTATION)]
        assert sum(text.startswith("ProfilerStep#") for text in annotations) == steps
        assert trace.warnings == ()

    @pytest.mark.parametrize("name", REAL)
    def test_every_kernel_has_its_call(self, name: str) -> None:
        trace = read_trace(real(name))
        calls = trace.correlation[trace.category == Category.RUNTIME]
        kernels = trace.correlation[trace.category == Category.KERNEL]
        assert (kernels != NONE).all()
        # Steps 101-105 of this one begin in the middle: kernels run whose launch was not recorded.
        assert np.isin(kernels, calls).mean() > (0.95 if name == "ns_resolution_v100" else 0.9999)
        assert all(trace.threads[index].is_stream for index in set(trace.thread[trace.category == Category.KERNEL]))

    def test_order_and_times(self) -> None:
        trace = read_trace(real("ns_resolution_v100"))
        assert (np.diff(trace.start_us) >= 0).all()
        assert trace.start_us[0] == 0
        stream = np.flatnonzero(trace.category == Category.KERNEL)
        ends = trace.start_us[stream] + trace.duration_us[stream]
        # With nanoseconds kept, no kernel of this single stream starts before the last one ended.
        assert (trace.start_us[stream][1:] >= ends[:-1] - 1e-3).all()

    def test_arrows_join_operators_of_one_sequence_number(self) -> None:
        trace = read_trace(real("ns_resolution_v100"))
        forward, backward = trace.forward_backward.T
        assert len(forward) == 905
        assert (trace.sequence[forward] == trace.sequence[backward]).all()
        assert (trace.forward_thread[forward] <= 0).all()
        assert (trace.forward_thread[backward] > 0).all()

    def test_links_to_operators(self) -> None:
        trace = read_trace(real("resnet50_v100_nw0"))
        operators = trace.external[trace.category == Category.OPERATOR]
        kernels = trace.external[trace.category == Category.KERNEL]
        assert np.isin(kernels, operators).mean() > 0.99

    def test_repeated_correlations_are_no_links(self) -> None:
        trace = read_trace(real("trace_diff_control_a100"))
        assert (trace.external[trace.category == Category.KERNEL] == NONE).all()

    @pytest.mark.parametrize("fraction", [0.15, 0.31, 0.5, 0.77, 0.999])
    @pytest.mark.parametrize("compressed", [True, False])
    def test_cut(self, fraction: float, compressed: bool, tmp_path: Path) -> None:
        path = real("alexnet_a100")
        whole = len(read_trace(path))
        data = path.read_bytes()
        data = data if compressed else gzip.decompress(data)
        trace = written(tmp_path / "t.json", data[: int(len(data) * fraction)])
        assert 0 < len(trace) <= whole
        assert trace.warnings
