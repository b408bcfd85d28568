"""Recordings of nsys, rocprofv3 and rocmProfileData as columns, and one line for what cannot be read."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from daydream.answers import replay
from daydream.trace.files import read_trace
from daydream.trace.recorders.events import Range
from daydream.trace.recorders.ranges import step_ranges
from daydream.trace.trace import Category, Trace
from hal.support.errors import InputError
from tests.daydream.recorder_files import (
    NSYS_TABLES,
    PROCESS,
    NsysFile,
    nsys_steps,
    rocpd_file,
    rocprof_json,
    rocprof_process,
    rpd_file,
)


def rows(trace: Trace, category: Category) -> np.ndarray:
    return np.flatnonzero(trace.category == category)


def test_an_export_of_nsys_has_its_kernels_calls_copies_and_waits(tmp_path: Path) -> None:
    trace = read_trace(nsys_steps(tmp_path / "run.sqlite"))
    kernels = rows(trace, Category.KERNEL)
    assert [trace.text(row) for row in kernels] == 3 * ["void gemm_a<float>(float*)", "void relu_b<float>(float*)"]
    assert trace.duration_us[kernels].tolist() == 3 * [200.0, 300.0]
    assert trace.start_us[kernels[:2]].tolist() == [25.0, 226.0]
    assert trace.arguments[kernels[0]]["grid"] == [120, 2, 1]
    assert trace.arguments[kernels[0]]["shared memory"] == 3072
    assert [trace.text(row) for row in rows(trace, Category.MEMCPY)] == 3 * ["Memcpy DtoH (Device -> Pinned)"]
    assert trace.bytes[rows(trace, Category.MEMCPY)].tolist() == 3 * [1 << 20]
    calls = rows(trace, Category.RUNTIME)
    assert {trace.text(row) for row in calls} == {"cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"}
    assert trace.correlation[kernels[0]] == trace.correlation[calls[0]] == 1
    assert [trace.text(row) for row in rows(trace, Category.SYNC)] == 3 * ["Stream Sync"]
    assert trace.devices == ({"id": 0, "name": "NVIDIA H100 PCIe"},)
    assert trace.host == "host-a"
    assert trace.base_us == 1_750_000_000_000_000 + 5000
    assert "python3" in [thread.label for thread in trace.threads]


def test_numbered_ranges_are_the_steps(tmp_path: Path) -> None:
    answer = replay(nsys_steps(tmp_path / "run.sqlite"))
    assert [step.name for step in answer.graph.steps] == ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]
    assert "Steps are the 3 ranges iteration 40 to iteration 42" in answer.graph.warnings
    assert answer.timeline.step_us.tolist() == pytest.approx([990.0] * 3)


def test_a_step_waits_for_its_kernels_as_it_did(tmp_path: Path) -> None:
    graph = replay(nsys_steps(tmp_path / "run.sqlite")).graph
    waiting = [row for row in range(len(graph)) if graph.text(row).startswith("cudaStreamSynchronize")]
    assert sum(graph.duration_us[row] for row in waiting) < 3 * 50.0


def test_the_process_with_most_kernels_is_read(tmp_path: Path) -> None:
    path = nsys_steps(tmp_path / "run.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT 0, 9000, 1, 1, 7, 1, {NsysFile.thread(0, 77)}, 1, 1, "
            "1, 1, 1, 1, 1, 1, 1, 1, 1, NULL"
        )
        connection.commit()
    trace = read_trace(path)
    assert len(rows(trace, Category.KERNEL)) == 6
    assert f"The file holds 2 processes with kernels; that of number {PROCESS} is read" in trace.warnings


def test_a_wait_for_an_event_names_its_record(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(NSYS_TABLES)
        file = NsysFile(connection)
        file.call("cudaLaunchKernel_v7000", 0, 5, 1)
        file.kernel("first", 10, 100, 1, stream=7)
        for number, (start, stream) in enumerate([(6, 7), (300, 9)], start=2):
            file.call("cudaEventRecord_v3020", start, 2, number)
            file.insert("CUPTI_ACTIVITY_KIND_CUDA_EVENT", 0, 1, stream, number, file.thread(0), 5)
        file.call("cudaStreamWaitEvent_v3020", 20, 2, 4)
        file.insert("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", 20_000, 22_000, 0, 1, 9, 4, file.thread(0), 2, 5)
        file.call("cudaLaunchKernel_v7000", 25, 5, 5)
        file.kernel("second", 111, 50, 5, stream=9)
        connection.commit()
    trace = read_trace(path)
    wait = rows(trace, Category.SYNC)[0]
    assert trace.text(wait) == "Stream Wait Event"
    assert trace.arguments[wait]["wait_on_stream"] == 7
    assert trace.arguments[wait]["wait_on_cuda_event_record_corr_id"] == 2
    graph = replay(path).graph
    second = next(row for row in range(len(graph)) if graph.text(row) == "second")
    sources = graph.edge_source[graph.edge_target == second]
    assert "first" in [graph.text(row) for row in sources]


def test_boards_go_by_the_numbers_of_the_process(tmp_path: Path) -> None:
    path = nsys_steps(tmp_path / "run.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO TARGET_INFO_GPU VALUES (1, 'Tesla T4', 0, 40)")
        connection.execute("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (1, 0, 99)")
        connection.commit()
    assert read_trace(path).devices == ({"id": 0, "name": "NVIDIA H100 PCIe"},)


def test_ranges_of_emit_nvtx_are_operators_with_sizes_and_sequence(tmp_path: Path) -> None:
    path = nsys_steps(tmp_path / "run.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        file = NsysFile(connection, dict(connection.execute("SELECT value, id FROM StringIds")))
        text = "aten::addmm, seq = 5, op_id = 12, sizes = [[64], [32, 128], [128, 64], [], []], input_op_ids = [(3,0)]"
        file.range(text, 5005, 30)
        file.range("all_reduce, big", 5100, 30)
        connection.commit()
    trace = read_trace(path)
    operator = rows(trace, Category.OPERATOR)
    assert [trace.text(row) for row in operator] == ["aten::addmm"]
    assert trace.sequence[operator[0]] == 5
    assert trace.arguments[operator[0]]["Input Dims"] == [[64], [32, 128], [128, 64], [], []]
    assert "all_reduce, big" in [trace.text(row) for row in rows(trace, Category.ANNOTATION)]


def test_steps_are_the_outermost_ranges_that_follow_one_another() -> None:
    ranges = []
    for step in range(4):
        at = 1000 * step
        ranges.append(Range("train", 1, at, at + 900))
        ranges += [Range(f"layer {layer}", 1, at + 100 * layer, at + 100 * layer + 90) for layer in range(8)]
    launches = [(at, 1) for at in range(0, 4000, 50)]
    assert [each.begin_ns for each in step_ranges(ranges, launches)] == [0, 1000, 2000, 3000]
    # Layers alone are no steps, although they are numbered and hold every launch.
    assert step_ranges([each for each in ranges[:9] if each.name != "train"], launches[:20]) == []
    # Ranges that hold a few launches only mark something else.
    rare = [Range("log", 1, 10, 40), Range("log", 1, 3010, 3040)]
    assert step_ranges(rare, launches) == []
    assert step_ranges([], []) == []


def test_rocprofv3s_json_has_kernels_copies_calls_and_steps(tmp_path: Path) -> None:
    path = rocprof_json(tmp_path / "results.json")
    trace = read_trace(path)
    kernel = rows(trace, Category.KERNEL)[0]
    assert trace.text(kernel) == "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32"
    assert (trace.arguments[kernel]["grid"], trace.arguments[kernel]["block"]) == ([16, 2, 1], [256, 1, 1])
    assert trace.threads[trace.thread[kernel]].number == 3
    assert trace.text(rows(trace, Category.MEMCPY)[0]) == "Memcpy DtoH (Device -> Host)"
    assert trace.devices == ({"id": 0, "name": "AMD Instinct MI300X"},)
    answer = replay(path)
    assert len(answer.graph.steps) == 3
    assert "Steps are the 3 ranges train_step" in answer.graph.warnings
    assert answer.timeline.step_us.tolist() == pytest.approx([980.0] * 3)


def test_the_busiest_process_of_rocprofv3s_json_is_read(tmp_path: Path) -> None:
    first, second = rocprof_process(2), rocprof_process(3)
    first["metadata"]["pid"] = 11
    second["kernel_symbols"][0]["formatted_kernel_name"] = "gemm.kd"
    trace = read_trace(rocprof_json(tmp_path / "results.json", [first, second]))
    assert [trace.text(row) for row in rows(trace, Category.KERNEL)] == ["gemm"] * 3
    assert any(f"that of number {PROCESS}" in warning for warning in trace.warnings)


def test_a_rocpd_file_is_read_by_its_views(tmp_path: Path) -> None:
    path = rocpd_file(tmp_path / "results.db")
    trace = read_trace(path)
    assert trace.arguments[rows(trace, Category.KERNEL)[0]]["grid"] == [2, 1, 1]
    assert trace.devices == ({"id": 0, "name": "AMD Instinct MI250X"},)
    assert {trace.text(row) for row in rows(trace, Category.RUNTIME)} == {"hipLaunchKernel", "hipStreamSynchronize"}
    answer = replay(path)
    assert "Steps are the 3 ranges step 0 to step 2" in answer.graph.warnings
    assert answer.timeline.step_us.tolist() == pytest.approx([980.0] * 3)


def test_rocm_profile_data_is_read(tmp_path: Path) -> None:
    trace = read_trace(rpd_file(tmp_path / "trace.rpd"))
    assert trace.duration_us[rows(trace, Category.KERNEL)].tolist() == [400.0] * 3
    assert "Steps are the 3 ranges step" in trace.warnings


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.nsys-rep", b"\x89\x01\x02", "nsys export --type sqlite -o {stem}.sqlite {path}"),
        ("a.qdrep", b"\x89\x01\x02", "nsys export --type sqlite -o {stem}.sqlite {path}"),
        ("a.ncu-rep", b"NVR\0\1\2", "counters of kernels that ran alone, no timeline; record one with nsys profile"),
        ("other", b"NVR\0\1\2", "is a report of Nsight Compute"),
        ("a.pftrace", b"\n\x0b\x32\x05\x08\x01", "rocprofv3 --runtime-trace --output-format json"),
        ("trace", b"\n\x0b\x32\x05\x08\x01", "is a Perfetto trace in protocol buffers"),
        ("perf.data", b"PERFILE2\0\0", "samples of the CPU, no kernel of a GPU"),
        ("rank0.et", b"\x12\x08\x08\x01", "chakra_jsonizer --input_filename {path}"),
        ("snapshot.pickle", b"\x80\x04\x95", "allocations, no timeline"),
        ("1_kernel_trace.csv", b'"Kind","Agent_Id","Queue_Id"\n', "record with rocprofv3"),
        ("host.xplane.pb", b"\n\x0b\x12", "is a profile of XLA"),
        ("et.json", b'{"schema": "1.1.1-chakra.0.0.4", "nodes": []}', "give the Kineto trace of the same run"),
        (
            "job.json",
            b'[{"name": "forward-compute", "cat": "forward-compute", "ph": "X"}]',
            "give their folder to daydream merge",
        ),
        ("a.json.zst", b"\x28\xb5\x2f\xfd\x04", "is compressed with zstd; decompress it with zstd -d {path}"),
        ("a.zip", b"PK\x03\x04", "is a zip archive; decompress it with unzip {path}"),
        ("a.sqlite", b"SQLite format 3\0damaged", "cannot be read as SQLite"),
        ("a.json", b'{"rocprofiler-sdk-tool": [{"metadata": {"pid": 1}}]}', "has no kernel; record with rocprofv3"),
        ("a.json", b'{"rocprofiler-sdk-tool": [{"metad', "is no complete file of rocprofv3"),
    ],
)
def test_what_cannot_be_read_names_the_command_that_helps(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        read_trace(path)
    assert said.format(path=path, stem=tmp_path / "a") in str(error.value)


@pytest.mark.parametrize("make", (nsys_steps, rocpd_file, rpd_file))
def test_damaged_exports_give_a_trace_or_one_line(make: Callable[[Path], Path], tmp_path: Path) -> None:
    whole = make(tmp_path / "whole.db")
    draw = random.Random(make.__name__)
    outcomes = Counter()
    for number in range(40):
        path = tmp_path / f"{number}.db"
        shutil.copy(whole, path)
        with closing(sqlite3.connect(path)) as connection:
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            table = draw.choice(tables)
            column = draw.choice([row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')])
            value = draw.choice([None, "text", -1, 2**62, 1.5, b"x", 0, -(10**18)])
            with suppress(sqlite3.IntegrityError):
                connection.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid % 3 = 1', (value,))
            connection.commit()
        try:
            outcomes[len(replay(path).graph) > 0] += 1
        except InputError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert outcomes[True] >= 20 and outcomes[False] == 0


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "songs.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
        connection.commit()
    with pytest.raises(InputError, match="is a database of no recorder that is known"):
        read_trace(path)


def test_an_export_without_cuda_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(NSYS_TABLES)
        connection.commit()
    with pytest.raises(InputError, match="has no kernel: CUDA was not traced; record with nsys profile"):
        read_trace(path)
