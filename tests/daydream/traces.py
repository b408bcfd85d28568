"""Synthetic Kineto traces in the spelling of any generation of the profiler, for tests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daydream.trace.files import read_trace
from daydream.trace.trace import Trace

#: 2021: `Kernel`, text threads. 2022: `kernel`. 2024: nanoseconds since 1970. 2026: since a base time, `ac2g`.
GENERATIONS = ("2021", "2022", "2024", "2026")

_OLD = {
    "cpu_op": "Operator",
    "user_annotation": "Operator",
    "cuda_runtime": "Runtime",
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "gpu_memset": "Memset",
}
_ORIGINS = {"2021": 1_623_142_623_460_000, "2022": 1_661_203_462_598_000, "2024": 0, "2026": 4_420_303_975_000}
_LAUNCH_ARROWS = {"2021": ("async", "launch"), "2022": ("async_cpu_to_gpu", "async_gpu")}


@dataclass
class Builder:
    """Collects events; all times are microseconds from a common start, whole ones before 2024."""

    generation: str = "2026"
    process: int = 100
    thread: int = 100
    """The thread of CPU events that name none."""
    arrows: bool = True
    """Whether launches and kernels get their arrow."""
    events: list[dict[str, Any]] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=dict)

    def operator(
        self,
        name: str,
        start: float,
        duration: float,
        *,
        thread: int | None = None,
        external: int | None = None,
        sequence: int | None = None,
        forward_thread: int | None = None,
        dims: Sequence[Sequence[int]] | None = None,
        types: Sequence[str] | None = None,
        **arguments: Any,
    ) -> Builder:
        """A CPU operator; `forward_thread` above 0 makes it one of the backward pass."""
        given = {
            "External id": external,
            "Sequence number": sequence,
            "Fwd thread id": 0 if sequence is not None and forward_thread is None else forward_thread,
            "Input Dims": dims,
            "Input type": types,
        }
        return self._on_cpu("cpu_op", name, start, duration, thread, {**given, **arguments})

    def annotation(
        self, name: str, start: float, duration: float, *, thread: int | None = None, **arguments: Any
    ) -> Builder:
        """A range that the user, the optimizer or the profiler named."""
        return self._on_cpu("user_annotation", name, start, duration, thread, arguments)

    def step(self, number: int, start: float, duration: float, *, thread: int | None = None) -> Builder:
        """One training step."""
        return self.annotation(f"ProfilerStep#{number}", start, duration, thread=thread)

    def python(self, name: str, start: float, duration: float, *, thread: int | None = None) -> Builder:
        """A Python frame, or `nn.Module: Name_0`."""
        return self._on_cpu("python_function", name, start, duration, thread, {"Python id": len(self.events)})

    def launch(
        self,
        start: float,
        duration: float,
        *,
        correlation: int | None,
        name: str = "cudaLaunchKernel",
        external: int | None = None,
        thread: int | None = None,
        driver: bool = False,
        **arguments: Any,
    ) -> Builder:
        """A CUDA call: launch, copy or wait, by its name."""
        category = "cuda_driver" if driver else "cuda_runtime"
        given = {self._external_key: external, "cbid": 211, "correlation": correlation}
        self._on_cpu(category, name, start, duration, thread, {**given, **arguments})
        return self._arrow("s", correlation, self.events[-1]) if "Launch" in name or "Memcpy" in name else self

    def kernel(
        self,
        name: str,
        start: float,
        duration: float,
        *,
        correlation: int | None,
        external: int | None = None,
        stream: int = 7,
        device: int = 0,
        grid: Sequence[int] = (80, 1, 1),
        block: Sequence[int] = (256, 1, 1),
        **arguments: Any,
    ) -> Builder:
        """A kernel on a stream."""
        given = {"grid": list(grid), "block": list(block), "registers per thread": 32, "shared memory": 0}
        return self._on_stream(
            "kernel", name, start, duration, correlation, external, stream, device, {**given, **arguments}
        )

    def memcpy(
        self,
        start: float,
        duration: float,
        *,
        bytes: int,
        correlation: int | None,
        name: str = "Memcpy HtoD (Pageable -> Device)",
        external: int | None = None,
        stream: int = 7,
        device: int = 0,
    ) -> Builder:
        """A copy on a stream."""
        return self._on_stream(
            "gpu_memcpy", name, start, duration, correlation, external, stream, device, {"bytes": bytes}
        )

    def memset(
        self,
        start: float,
        duration: float,
        *,
        bytes: int,
        correlation: int | None,
        external: int | None = None,
        stream: int = 7,
        device: int = 0,
    ) -> Builder:
        """A fill on a stream."""
        return self._on_stream(
            "gpu_memset", "Memset (Device)", start, duration, correlation, external, stream, device, {"bytes": bytes}
        )

    def sync(
        self,
        name: str,
        start: float,
        duration: float,
        *,
        correlation: int | None,
        stream: int = 7,
        device: int = 0,
        **arguments: Any,
    ) -> Builder:
        """What a stream waited for: `Stream Sync`, `Stream Wait Event` with `wait_on_stream`, `Context Sync`."""
        given = {"cuda_sync_kind": name, **arguments}
        return self._on_stream("cuda_sync", name, start, duration, correlation, None, stream, device, given)

    def gpu_annotation(
        self, name: str, start: float, duration: float, *, stream: int = 7, device: int = 0, **arguments: Any
    ) -> Builder:
        """A range of the user, projected on a stream."""
        self.events.append(self._event("gpu_user_annotation", name, start, duration, device, stream, arguments))
        return self

    def memory(
        self,
        start: float,
        bytes: int,
        *,
        address: int | None = None,
        device: int = 0,
        allocated: int | None = None,
        reserved: int | None = None,
        thread: int | None = None,
    ) -> Builder:
        """Memory of a device, -1 for the host, allocated or (below 0) freed."""
        given = {"Device Type": int(device >= 0), "Device Id": device, "Bytes": bytes}
        if self.generation > "2021":
            given |= {"Addr": address, "Total Allocated": allocated, "Total Reserved": reserved, "Ev Idx": 0}
        line = {"pid": self.process, "tid": self._line(thread), "ts": self._time(start)}
        category = {} if self.generation == "2021" else {"cat": "cpu_instant_event"}
        args = {key: value for key, value in given.items() if value is not None}
        self.events.append({"ph": "i", **category, "s": "t", "name": "[memory]", **line, "args": args})
        return self

    def forward_backward(
        self,
        forward_start: float,
        backward_start: float,
        *,
        forward_thread: int | None = None,
        backward_thread: int | None = None,
        id: int | None = None,
    ) -> Builder:
        """An arrow between the operators that start at these times."""
        id = len(self.events) if id is None else id
        ends = (("s", forward_start, forward_thread), ("f", backward_start, backward_thread))
        for phase, start, thread in ends:
            line = {"pid": self.process, "tid": self._line(thread)}
            kind = {"cat": "fwdbwd", "name": "fwdbwd"}
            self.events.append({"ph": phase, "id": id, **line, "ts": self._time(start), **kind})
        return self

    def label(self, name: str, *, thread: int | None = None) -> Builder:
        """The name of a CPU thread."""
        line = {"pid": self.process, "tid": self._line(thread)}
        self.events.append({"name": "thread_name", "ph": "M", "ts": self._time(0), **line, "args": {"name": name}})
        return self

    def document(self) -> dict[str, Any]:
        """The trace as the object that its file holds, with what Kineto always adds around the events."""
        span = {"ph": "X", "cat": "Trace", "pid": "Spans", "tid": "PyTorch Profiler", "name": "PyTorch Profiler (0)"}
        end = {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": self._time(1e6)}
        head: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": []}
        if self.generation >= "2024":
            head["displayTimeUnit"] = "ns"
        if self.generation >= "2026":
            head["baseTimeNanoseconds"] = 1_790_857_026_000_000_000
        around = {**span, "ts": self._time(0), "dur": 1e6, "args": {"Op count": 0}}
        return {**head, **self.head, "traceEvents": [*self.events, around, end], "traceName": "trace.json"}

    def text(self) -> str:
        """The trace as JSON."""
        text = json.dumps(self.document())
        # 19 digits do not fit a float, and only this generation needs them.
        return text.replace('"ts": "', '"ts": ').replace('.ns"', "") if self.generation == "2024" else text

    def write(self, path: Path) -> Path:
        """Write the trace, compressed if the name ends in .gz, and return `path`."""
        data = self.text().encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        return path

    @property
    def _external_key(self) -> str:
        return "external id" if self.generation == "2021" else "External id"

    def _time(self, start: float) -> Any:
        if self.generation == "2024":
            nanoseconds = 1_712_195_495_000_000_000 + round(start * 1000)
            return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}.ns"
        time = _ORIGINS[self.generation] + start
        return round(time, 3) if self.generation >= "2024" else int(time)

    def _line(self, thread: int | None) -> int | str:
        number = self.thread if thread is None else thread
        return str(number) if self.generation == "2021" else number

    def _event(
        self, category: str, name: str, start: float, duration: float, pid: int, tid: int | str, arguments: Any
    ) -> dict[str, Any]:
        old = self.generation == "2021"
        return {
            "ph": "X",
            "cat": _OLD.get(category, category) if old else category,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": self._time(start),
            "dur": duration if self.generation >= "2024" else int(duration),
            "args": {key: value for key, value in arguments.items() if value is not None},
        }

    def _on_cpu(
        self, category: str, name: str, start: float, duration: float, thread: int | None, arguments: dict[str, Any]
    ) -> Builder:
        event = self._event(category, name, start, duration, self.process, self._line(thread), arguments)
        self.events.append(event)
        return self

    def _on_stream(
        self,
        category: str,
        name: str,
        start: float,
        duration: float,
        correlation: int | None,
        external: int | None,
        stream: int,
        device: int,
        arguments: dict[str, Any],
    ) -> Builder:
        tid = f"stream {stream}" if self.generation == "2021" else stream
        given = {"device": device, "stream": stream, "correlation": correlation, self._external_key: external}
        event = self._event(category, name, start, duration, device, tid, {**given, **arguments})
        self.events.append(event)
        return self._arrow("f", correlation, event) if category != "cuda_sync" else self

    def _arrow(self, phase: str, id: int | None, event: dict[str, Any]) -> Builder:
        if self.arrows and id is not None:
            category, name = _LAUNCH_ARROWS.get(self.generation, ("ac2g", "ac2g"))
            line = {key: event[key] for key in ("pid", "tid", "ts")}
            self.events.append({"ph": phase, "id": id, **line, "cat": category, "name": name})
        return self


def one_step(generation: str) -> Builder:
    """A step with a forward operator, its kernel, its backward operator on another thread, a copy and a fill."""
    builder = Builder(generation=generation)
    builder.step(3, 0, 100)
    builder.operator("aten::mm", 10, 20, external=5, sequence=8, dims=[[2, 3], [3, 4]])
    builder.launch(15, 5, correlation=21, external=5)
    builder.kernel("gemm", 22, 30, correlation=21, external=5)
    builder.operator("MmBackward0", 60, 20, thread=101, external=6, sequence=8, forward_thread=1)
    builder.launch(62, 3, correlation=22, external=6, thread=101, name="cudaMemcpyAsync")
    builder.memcpy(70, 4, bytes=4096, correlation=22, external=6, stream=9)
    builder.memset(80, 2, bytes=64, correlation=23)
    builder.annotation("Optimizer.step#SGD.step", 90, 5)
    return builder.forward_backward(10, 60, backward_thread=101)


def written(path: Path, document: Any) -> Trace:
    """The trace of a document, or of text or bytes as they are."""
    data = (
        document if isinstance(document, bytes) else (document if isinstance(document, str) else json.dumps(document))
    )
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return read_trace(path)


def event(**fields: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::add",
        "pid": 1,
        "tid": 1,
        "ts": 10,
        "dur": 5,
        "args": {},
        **fields,
    }
