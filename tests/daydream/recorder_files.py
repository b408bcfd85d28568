"""Small files of other recorders, written as their tools write them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROCESS = 4321

NSYS_TABLES = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, totalMemory INTEGER, smCount INTEGER);
CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, name TEXT, value TEXT);
CREATE TABLE ThreadNames (nameId INTEGER, priority INTEGER, globalTid INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
  streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER,
  gridX INTEGER, gridY INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER,
  registersPerThread INTEGER, staticSharedMemory INTEGER, dynamicSharedMemory INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
  streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER,
  dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER,
  correlationId INTEGER, nameId INTEGER, returnValue INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
  streamId INTEGER, correlationId INTEGER, globalPid INTEGER, syncType INTEGER, eventId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_CUDA_EVENT (deviceId INTEGER, contextId INTEGER, streamId INTEGER,
  correlationId INTEGER, globalPid INTEGER, eventId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER);
"""


@dataclass
class NsysFile:
    """An export of ``nsys export --type sqlite``. Times are microseconds from the session's start."""

    connection: sqlite3.Connection
    strings: dict[str, int] = field(default_factory=dict)

    def string(self, text: str) -> int:
        """The number of a text."""
        if text not in self.strings:
            self.strings[text] = len(self.strings) + 1
            self.insert("StringIds", self.strings[text], text)
        return self.strings[text]

    def insert(self, table: str, *values: Any) -> None:
        """A row of a table, columns in their order."""
        self.connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)

    @staticmethod
    def thread(number: int, process: int = PROCESS) -> int:
        """A thread as a serialised number."""
        return (1 << 48) | (process << 24) | number

    def call(self, name: str, start: float, duration: float, correlation: int, thread: int = 7) -> None:
        """A call of CUDA's runtime."""
        begin, end = round(start * 1000), round((start + duration) * 1000)
        where = self.thread(thread)
        self.insert("CUPTI_ACTIVITY_KIND_RUNTIME", begin, end, 0, where, correlation, self.string(name), 0)

    def kernel(self, name: str, start: float, duration: float, correlation: int, stream: int = 7) -> None:
        """A kernel on a stream."""
        begin, end = round(start * 1000), round((start + duration) * 1000)
        text = self.string(name)
        place = (0, 1, stream, correlation, self.thread(0))
        shape = (120, 2, 1, 256, 1, 1, 40, 1024, 2048, None)
        self.insert("CUPTI_ACTIVITY_KIND_KERNEL", begin, end, *place, text, self.string(name[:4]), *shape)

    def range(self, name: str, start: float, duration: float, thread: int = 7, *, kind: int = 59) -> None:
        """An NVTX range."""
        begin, end = round(start * 1000), round((start + duration) * 1000)
        self.insert("NVTX_EVENTS", begin, end, kind, None, self.string(name), self.thread(thread))


def nsys_steps(path: Path, steps: int = 3, name: str = "iteration {}", board: str = "NVIDIA H100 PCIe") -> Path:
    """Steps of 1000 us: two kernels each of 200 and 300 us, a copy to the host of 20 us, and a wait for it all."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(NSYS_TABLES)
        file = NsysFile(connection)
        file.insert("TARGET_INFO_GPU", 3, board, 80 << 30, 114)
        file.insert("TARGET_INFO_CUDA_DEVICE", 3, 0, PROCESS)
        file.insert("TARGET_INFO_SESSION_START_TIME", 1_750_000_000_000_000_000)
        file.insert("TARGET_INFO_SYSTEM_ENV", 0, "Hostname", "host-a")
        file.insert("ThreadNames", file.string("python3"), 0, file.thread(7))
        for step in range(steps):
            start, number = 5000.0 + 1000 * step, 10 * step + 1
            file.range(name.format(step + 40), start, 990)
            file.call("cudaLaunchKernel_v7000", start + 10, 8, number)
            file.kernel("void gemm_a<float>(float*)", start + 25, 200, number)
            file.call("cudaLaunchKernel_v7000", start + 40, 8, number + 1)
            file.kernel("void relu_b<float>(float*)", start + 226, 300, number + 1)
            file.call("cudaMemcpyAsync_v3020", start + 60, 8, number + 2)
            copy = (round((start + 530) * 1000), round((start + 550) * 1000))
            file.insert(
                "CUPTI_ACTIVITY_KIND_MEMCPY", *copy, 0, 1, 7, number + 2, file.thread(0), 1 << 20, 2, 3, 2
            )  # fmt: skip
            file.call("cudaStreamSynchronize_v3020", start + 80, 480, number + 3)
            wait = (round((start + 80) * 1000), round((start + 560) * 1000))
            file.insert("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", *wait, 0, 1, 7, number + 3, file.thread(0), 3, None)
        connection.commit()
    return path


def rocprof_process(steps: int = 3, board: str = "AMD Instinct MI300X") -> dict[str, Any]:
    """Steps of 1000 us as rocprofv3 has them: a kernel of 400 us, a copy of 20 us, a synchronisation."""
    hip = ["hipLaunchKernel", "hipMemcpyAsync", "hipStreamSynchronize"]
    kinds = [
        {"kind": "NONE", "operations": []},
        {"kind": "HIP_RUNTIME_API", "operations": hip},
        {"kind": "KERNEL_DISPATCH", "operations": ["KERNEL_DISPATCH_COMPLETE"]},
        {"kind": "MEMORY_COPY", "operations": ["MEMORY_COPY_NONE", "MEMORY_COPY_DEVICE_TO_HOST"]},
        {"kind": "MARKER_CORE_API", "operations": ["roctxRangePushA"]},
    ]
    records: dict[str, list[dict[str, Any]]] = {
        key: [] for key in ("kernel_dispatch", "hip_api", "memory_copy", "marker_api")
    }
    messages = []

    def record(
        kind: int, operation: int, number: int, begin_us: float, length_us: float, **more: Any
    ) -> dict[str, Any]:
        begin = 7_000_000_000_000 + round(begin_us * 1000)
        times = {"start_timestamp": begin, "end_timestamp": begin + round(length_us * 1000)}
        joined = {"correlation_id": {"internal": number, "external": 0}, "thread_id": 4400}
        return {"size": 72, "kind": kind, "operation": operation, **joined, **times, **more}

    for step in range(steps):
        at, number = 1000.0 * step, 10 * step + 1
        records["marker_api"].append(record(4, 0, number, at, 980))
        messages.append({"key": number, "value": "train_step"})
        records["hip_api"].append(record(1, 0, number + 1, at + 10, 8))
        info = {
            "agent_id": {"handle": 99}, "queue_id": {"handle": 1}, "kernel_id": 5, "dispatch_id": step,
            "workgroup_size": {"x": 256, "y": 1, "z": 1}, "grid_size": {"x": 4096, "y": 2, "z": 1},
        }  # fmt: skip
        records["kernel_dispatch"].append(
            record(2, 0, number + 1, at + 30, 400, dispatch_info=info, stream_id={"handle": 3})
        )
        records["hip_api"].append(record(1, 1, number + 2, at + 40, 8))
        ends = {"dst_agent_id": {"handle": 1}, "src_agent_id": {"handle": 99}}
        records["memory_copy"].append(
            record(3, 1, number + 2, at + 435, 20, **ends, bytes=4096, stream_id={"handle": 3})
        )
        records["hip_api"].append(record(1, 2, number + 3, at + 60, 400))
    return {
        "metadata": {"pid": PROCESS},
        "agents": [
            {"id": {"handle": 1}, "type": 1, "name": "AMD EPYC"},
            {"id": {"handle": 99}, "type": 2, "name": "gfx942", "product_name": board},
        ],
        "kernel_symbols": [{"kernel_id": 5, "formatted_kernel_name": "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32"}],
        "strings": {"buffer_records": kinds, "marker_api": messages},
        "buffer_records": records,
    }  # fmt: skip


def rocprof_json(path: Path, processes: Iterable[dict[str, Any]] | None = None) -> Path:
    """A file of ``rocprofv3 --output-format json``."""
    path.write_text(json.dumps({"rocprofiler-sdk-tool": list(processes or [rocprof_process()])}))
    return path


def rocpd_file(path: Path, steps: int = 3) -> Path:
    """A file of rocprofv3's default format; its views stand here as tables of the columns that they have."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            """
            CREATE TABLE rocpd_info_agent (id INTEGER, guid TEXT, type TEXT, type_index INTEGER, name TEXT,
              product_name TEXT);
            CREATE TABLE kernels (name TEXT, pid INTEGER, tid INTEGER, agent_type_index INTEGER, stream_id INTEGER,
              start INTEGER, end INTEGER, stack_id INTEGER, grid_x INTEGER, grid_y INTEGER, grid_z INTEGER,
              workgroup_x INTEGER, workgroup_y INTEGER, workgroup_z INTEGER);
            CREATE TABLE memory_copies (name TEXT, pid INTEGER, stream_id INTEGER, start INTEGER, end INTEGER,
              stack_id INTEGER, size INTEGER, dst_agent_type TEXT, dst_agent_type_index INTEGER,
              src_agent_type_index INTEGER);
            CREATE TABLE regions (category TEXT, name TEXT, pid INTEGER, tid INTEGER, start INTEGER, end INTEGER,
              stack_id INTEGER, extdata TEXT);
            INSERT INTO rocpd_info_agent VALUES (1, 'g', 'CPU', 0, 'AMD EPYC', ''),
              (2, 'g', 'GPU', 0, 'gfx90a', 'AMD Instinct MI250X');
            """
        )
        for step in range(steps):
            at, number = 9_000_000_000_000 + 1_000_000 * step, 10 * step + 1
            marker = json.dumps({"message": f"step {step}"})
            for row in (
                ("MARKER_CORE_RANGE_API", "roctxThreadRangeA", PROCESS, 44, at, at + 980_000, number, marker),
                ("HIP_RUNTIME_API", "hipLaunchKernel", PROCESS, 44, at + 10_000, at + 18_000, number + 1, "{}"),
                ("HIP_RUNTIME_API", "hipStreamSynchronize", PROCESS, 44, at + 60_000, at + 440_000, number + 2, "{}"),
                ("HSA_CORE_API", "hsa_queue_create", PROCESS, 44, at + 11_000, at + 12_000, number + 3, "{}"),
            ):
                connection.execute("INSERT INTO regions VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            kernel = ("gemm", PROCESS, 44, 0, 2, at + 30_000, at + 430_000, number + 1, 512, 1, 1, 256, 1, 1)
            connection.execute(f"INSERT INTO kernels VALUES ({', '.join('?' * 14)})", kernel)
        connection.commit()
    return path


def rpd_file(path: Path) -> Path:
    """A file of rocmProfileData: three steps of a kernel of 400 us."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            """
            CREATE TABLE rocpd_string (id INTEGER, string TEXT);
            CREATE TABLE rocpd_op (id INTEGER, gpuId INTEGER, queueId INTEGER, sequenceId INTEGER, start INTEGER,
              end INTEGER, description_id INTEGER, opType_id INTEGER);
            CREATE TABLE rocpd_api (id INTEGER, pid INTEGER, tid INTEGER, start INTEGER, end INTEGER,
              apiName_id INTEGER, args_id INTEGER);
            CREATE TABLE rocpd_api_ops (id INTEGER, api_id INTEGER, op_id INTEGER);
            INSERT INTO rocpd_string VALUES (1, 'hipLaunchKernel'), (2, 'gemm'), (3, 'KernelExecution'),
              (4, 'UserMarker'), (5, 'step'), (6, '');
            """
        )
        for step in range(3):
            at, number = 8_000_000_000_000 + 1_000_000 * step, 10 * step + 1
            rows = (
                ("rocpd_api", (number, PROCESS, 44, at, at + 900_000, 4, 5)),
                ("rocpd_api", (number + 1, PROCESS, 44, at + 10_000, at + 18_000, 1, 6)),
                ("rocpd_op", (number, 0, 1, 0, at + 30_000, at + 430_000, 2, 3)),
                ("rocpd_api_ops", (number, number + 1, number)),
            )
            for table, values in rows:
                connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)
        connection.commit()
    return path
