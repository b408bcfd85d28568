"""The real machine's calls, on a PyTorch and a CuPy that only note them; the calls into hal and codegen."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import adapters, machine
from bench.gpu.board import Sampler, environment
from bench.gpu.machine import CudaMachine, tf32
from hal.microbench import Measurement as Reading
from hal.microbench import QuantityResults as MicrobenchRun


class Calls:
    """A stand-in for torch.cuda that notes what happens in which order."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.log: list[str] = []
        self.capability = capability
        self.lost = False
        self.OutOfMemoryError = MemoryError
        self.now = 0.0

    def is_available(self) -> bool:
        return True

    def set_device(self, index: int) -> None:
        self.log.append(f"device {index}")

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return self.capability

    def get_device_properties(self, index: int) -> Any:
        return types.SimpleNamespace(name="GPU", total_memory=1 << 34, uuid=object())

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error")

    def current_stream(self) -> Any:
        return types.SimpleNamespace(cuda_stream=7, wait_stream=lambda other: self.log.append("wait"))

    def Stream(self) -> Any:
        return self.current_stream()

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append("side stream")
        yield

    def CUDAGraph(self) -> Any:
        return types.SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.log.append("capture")
        yield
        self.log.append("captured")

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        self.now += 5
        at = self.now
        return types.SimpleNamespace(record=lambda: None, at=at, elapsed_time=lambda other: other.at - at)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls((9, 0))
    fake = types.SimpleNamespace(
        cuda=found, uint8=torch.uint8, empty=lambda *_, **__: torch.ones(4), compile=lambda f, dynamic: ("compiled", f)
    )
    real = machine.importlib.import_module
    monkeypatch.setattr(machine.importlib, "import_module", lambda name: fake if name == "torch" else real(name))
    return found


def test_a_graph_is_warmed_up_on_another_stream_and_then_captured(calls: Calls) -> None:
    gpu = CudaMachine(1)
    calls.log.clear()
    replay = gpu.graph(lambda: calls.log.append("run"), copies=2)
    assert calls.log == [
        "wait", "side stream", "run", "run", "run", "wait", "capture", "run", "run", "captured",
    ]  # fmt: skip
    replay()
    assert calls.log[-1] == "replay"


def test_what_the_board_is(calls: Calls) -> None:
    gpu = CudaMachine(1)
    assert (gpu.device, gpu.architecture, gpu.reference_flop) == ("cuda:1", "sm_90", 2e11)
    assert gpu.supports("tf32") and gpu.supports("bfloat16")
    assert gpu.properties() == {"name": "GPU", "total_memory": 1 << 34}
    calls.capability = (7, 5)
    turing = CudaMachine(0)
    assert (turing.supports("tf32"), turing.reference_flop) == (False, 2e10)
    gpu.flush()


def test_events_give_seconds(calls: Calls) -> None:
    gpu = CudaMachine(0)
    first, second = gpu.event(), gpu.event()
    first.record()
    assert first.seconds_until(second) == pytest.approx(5e-3)


def test_the_gpu_is_lost_if_it_answers_no_more(calls: Calls) -> None:
    gpu = CudaMachine(0)
    assert not gpu.is_broken(RuntimeError("shapes differ"))
    calls.lost = True
    assert gpu.is_broken(RuntimeError("an illegal memory access"))
    assert not gpu.is_broken(MemoryError("out of memory")), "which empties itself"


def test_without_a_gpu_the_dry_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="PyTorch sees no CUDA device; --dry-run tries everything on the CPU"):
        CudaMachine()


def test_a_kernel_of_a_bundle_is_launched_on_pytorchs_stream(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    @contextlib.contextmanager
    def external(pointer: int) -> Iterator[None]:
        log.append(("stream", pointer))
        yield

    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(ExternalStream=external))
    loaded = types.SimpleNamespace(launch=lambda pointers, size: log.append((pointers, size)))
    entries = types.SimpleNamespace(kernels=[types.SimpleNamespace(rank=1), types.SimpleNamespace(rank=2)])
    modules = {
        "cupy": cupy,
        "codegen.runtime.gpu": types.SimpleNamespace(
            load_kernel=lambda bundle, entry, device: log.append((entry.rank, device)) or loaded
        ),
        "codegen.bundle.reader": types.SimpleNamespace(read_bundle=lambda path: entries),
    }
    gpu = CudaMachine(1)
    before = machine.importlib.import_module
    monkeypatch.setattr(machine.importlib, "import_module", lambda name: modules.get(name) or before(name))
    a, out = torch.zeros(3), torch.zeros(5, dtype=torch.float16)
    gpu.load_kernel(Path("b"), {}, {"rank": 2})([a, out])
    assert log == [(2, 1), ("stream", 7), ([a.data_ptr(), out.data_ptr()], 10)]


def test_tf32_is_set_for_a_while_only() -> None:
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [one.allow_tf32 for one in flags]
    with tf32(True):
        assert [one.allow_tf32 for one in flags] == [True, True]
        with tf32(False):
            assert [one.allow_tf32 for one in flags] == [False, False]
    assert [one.allow_tf32 for one in flags] == before


# hal.microbench and roller.profile.profile


def test_microbench_keeps_medians_and_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    import hal.microbench as package
    from hal.microbench import cupy_launcher

    said: list[str] = []

    def measured(launcher: Any, settings: Any, progress: Any) -> MicrobenchRun:
        progress("dram")
        reading = Reading(key="dram.copy", unit="B/s", samples=(2.9e12, 3.0e12, 3.1e12), method="copied", high=math.inf)
        return MicrobenchRun({"dram.copy": reading}, {"l2": "did not settle"})

    monkeypatch.setattr(cupy_launcher, "CupyLauncher", lambda device: types.SimpleNamespace(board=None))
    monkeypatch.setattr(package, "measure_gpu", measured)
    found = adapters.microbench("cuda:0", said.append)
    assert said == ["dram"]
    reading = found["measurements"]["dram.copy"]
    assert (reading["value"], reading["high"], "samples" in reading) == (3.0e12, None, False)
    assert found["failures"] == {"l2": "did not settle"}
    assert found["device"] is None and "a device file needs" in found["device_error"]


# The board


def test_without_nvidia_smi_there_are_no_samples() -> None:
    with Sampler(("no-such-command-here",)) as sampler:
        assert sampler.take() == []


def test_the_environment_names_versions() -> None:
    found = environment({"name": "x"})
    assert found["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["properties"] == {"name": "x"} and found["packages"]["cupy"] is None
