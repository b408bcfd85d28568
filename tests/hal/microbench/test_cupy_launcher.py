"""The launcher for real boards through a stand-in for CuPy: what it asks of it, what it says where there is none."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hal.microbench.cupy_launcher import CupyLauncher
from hal.microbench.launcher import KernelText, Launch, MicrobenchError, scalar
from hal.support.errors import InputError

_ATTRIBUTES = {
    "MultiProcessorCount": 80, "WarpSize": 32, "MaxThreadsPerBlock": 1024, "MaxThreadsPerMultiProcessor": 2048,
    "MaxBlocksPerMultiprocessor": 32, "MaxRegistersPerMultiprocessor": 65536, "MaxSharedMemoryPerBlock": 49152,
    "MaxSharedMemoryPerBlockOptin": 98304, "MaxSharedMemoryPerMultiprocessor": 98304, "MaxGridDimX": 2147483647,
    "MaxGridDimY": 65535, "MaxGridDimZ": 65535, "L2CacheSize": 6291456, "ClockRate": 1530000,
    "MemoryClockRate": 877000, "GlobalMemoryBusWidth": 4096,
}  # fmt: skip
ADD = KernelText("add", 'extern "C" __global__ void add(float* a) {}', registers=40)


class CompileError(Exception):
    """Stands for cupy.cuda.compiler.CompileException."""


class RuntimeFailure(RuntimeError):
    """Stands for cupy.cuda.runtime.CUDARuntimeError."""


class MemoryFailure(MemoryError):
    """Stands for cupy.cuda.memory.OutOfMemoryError."""


class Calls(list[Any]):
    """What was asked of the stand-in, in order."""


def fake_cupy(calls: Calls, devices: int = 1) -> Any:
    class Event:
        def record(self) -> None:
            calls.append("event")

        def synchronize(self) -> None:
            calls.append("wait")

    class Raw:
        num_regs, local_size_bytes = 40, 16
        kernel = SimpleNamespace(ptr=77)

        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int = 0) -> None:
            calls.append((self.name, grid, block, len(arguments), shared_mem))

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...], backend: str) -> None:
            calls.append((options, backend))
            if "broken" in code:
                raise CompileError("kernel.cu(1): error:\n  broken")

        def get_function(self, name: str) -> Raw:
            return Raw(name)

    def zeros(size: int, dtype: str) -> Any:
        if size > 1 << 30:
            raise MemoryFailure("full")
        return np.zeros(size, dtype)

    def count() -> int:
        if devices < 0:
            raise RuntimeFailure("cudaErrorNoDevice: no CUDA-capable device is detected")
        return devices

    runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeFailure,
        getDeviceCount=count,
        getDeviceProperties=lambda index: {"name": b"Tesla V100-SXM2-16GB", "major": 7, "minor": 0},
        memGetInfo=lambda: (15 << 30, 16 << 30),
        driverGetVersion=lambda: 12090,
    )
    cuda = SimpleNamespace(
        Device=lambda index: SimpleNamespace(
            id=index, use=lambda: calls.append(("use", index)), attributes=_ATTRIBUTES
        ),
        runtime=runtime,
        driver=SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=lambda ptr, threads, shared: ptr + threads),
        compiler=SimpleNamespace(CompileException=CompileError),
        memory=SimpleNamespace(OutOfMemoryError=MemoryFailure),
        Event=Event,
        get_elapsed_time=lambda before, after: 2.5,
    )
    return SimpleNamespace(
        __version__="14.2.0",
        cuda=cuda,
        RawModule=RawModule,
        zeros=zeros,
        asarray=np.asarray,
        asnumpy=np.asarray,
        empty_like=np.empty_like,
        matmul=lambda a, b, out: calls.append(("matmul", str(a.dtype), out.shape)),
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(calls))
    monkeypatch.setitem(sys.modules, "torch", None)
    return calls


def test_the_board_is_what_the_driver_says(calls: Calls) -> None:
    board = CupyLauncher("cuda:0").board
    assert (board.title, board.capability, board.units) == ("Tesla V100-SXM2-16GB", 70, 80)
    assert board.clock_hz == 1.53e9
    assert board.memory_peak == pytest.approx(898e9, rel=1e-3)
    assert board.shared_reserved == 0  # drivers before CUDA 11 do not say
    assert board.software == "CUDA driver 12.9, CuPy 14.2.0"


def test_work_is_timed_between_two_events(calls: Calls) -> None:
    launcher = CupyLauncher("cuda")
    kernel = launcher.kernel(ADD)
    del calls[:]
    launch = Launch(kernel, 4, 32, (launcher.empty(8), scalar(1)), 64)
    assert launcher.seconds([launch, lambda: calls.append("library")]) == 2.5e-3
    assert calls == ["event", ("add", (4,), (32,), 2, 64), "library", "event", "wait"]


def test_the_device_is_kept_busy_while_work_is_submitted_ahead(calls: Calls) -> None:
    launcher = CupyLauncher("cuda:0")
    launch = Launch(launcher.kernel(ADD), 1, 32, ())
    del calls[:]
    launcher.seconds([launch] * 3, ahead=True)
    names = [call[0] for call in calls if isinstance(call, tuple) and isinstance(call[0], str)]
    assert names == ["spin", "add", "add", "add"]
    assert calls.index(("spin", (1,), (1,), 1, 0)) < calls.index("event")


def test_kernels_are_compiled_once_and_describe_themselves(calls: Calls) -> None:
    launcher = CupyLauncher("cuda:0")
    kernel = launcher.kernel(ADD)
    assert launcher.kernel(ADD) is kernel
    assert (("--std=c++17", "--maxrregcount=40"), "nvrtc") in calls
    assert (kernel.registers, kernel.local_bytes, kernel.resident_blocks(64)) == (40, 16, 141)


def test_failures_of_compiler_and_memory_are_ours(calls: Calls) -> None:
    launcher = CupyLauncher("cuda:0")
    with pytest.raises(MicrobenchError, match=r"bad does not compile: kernel.cu\(1\): error: broken"):
        launcher.kernel(KernelText("bad", "broken"))
    with pytest.raises(MicrobenchError, match="no 2048 MiB of device memory are free"):
        launcher.empty(2 << 30)


def test_the_library_is_cupys_where_there_is_no_torch(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = CupyLauncher("cuda:0")
    assert launcher.torch() is None
    product = launcher.matmul(64, "float16")
    assert product is not None
    product()
    assert calls[-2:] == [("matmul", "float16", (64, 64))] * 2
    monkeypatch.setattr(sys.modules["cupy"], "matmul", _no_library)
    assert launcher.matmul(64, "float32") is None


def _no_library(a: Any, b: Any, out: Any) -> None:
    raise ImportError("libcublas.so.12: cannot open shared object file")


@pytest.mark.parametrize(
    ("device", "devices", "message"),
    [
        (
            "cuda:0",
            -1,
            "--device: there is no GPU: cudaErrorNoDevice: no CUDA-capable device is detected; --device cpu",
        ),
        ("cuda:3", 2, "--device: cuda:3, but the GPUs here are 2; count them from cuda:0"),
        ("v100", 1, "--device: got 'v100'; write cpu, cuda or cuda:1"),
    ],
)
def test_what_is_no_gpu_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, device: str, devices: int, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(Calls(), devices))
    with pytest.raises(InputError) as error:
        CupyLauncher(device)
    assert str(error.value).startswith(message)


def test_without_cupy_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InputError, match=r"CuPy cannot be imported .* install cupy-cuda12x"):
        CupyLauncher("cuda:0")
