"""CuPy's launch interface without a GPU: arrays are NumPy's, kernels run on the CPU emulator, time is made up.

What :mod:`codegen.runtime.gpu` and :mod:`roller.profile.gpu` use of CuPy 13 and 14, with the same signatures. Time
passes only by launches: each takes what :data:`gpu` says for its entry, so that medians can be foretold. Put it in
CuPy's place with ``sys.modules["cupy"] = fake_cupy``.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from codegen.tensor_map import TensorMap
from codegen.verify.emulator import run_cuda_on_cpu

__version__ = "14.0.0-fake"


class Driver:
    """The driver's library, as far as tensor maps go: it refuses what the real one refuses, and remembers the rest."""

    @staticmethod
    def cuTensorMapEncodeTiled(
        to: Any, dtype: Any, rank: Any, address: Any, sizes: Any, pitches: Any, box: Any, strides: Any, *options: Any
    ) -> int:
        names = {6: "float16", 9: "bfloat16"}
        shape, pitch = list(sizes), [2, *pitches]
        rows_fit = all(pitches[i] % 16 == 0 and pitches[i] == pitch[i] * shape[i] for i in range(rank.value - 1))
        boxes_fit = (
            all(1 <= extent <= 256 for extent in box) and box[0] * 2 == 128 and list(strides) == [1] * rank.value
        )
        if to.value % 64 or address.value % 16 or not rows_fit or not boxes_fit or not 2 <= rank.value <= 5:
            return 1
        assert [option.value for option in options] == [0, 3, 3, 0]
        words = [address.value, len(gpu.tensor_maps), *[0] * 14]
        (ctypes.c_uint64 * 16).from_address(to.value)[:] = words
        content = bytes((ctypes.c_char * 128).from_address(to.value))
        gpu.tensor_maps[content] = TensorMap(
            tensor="seen", dtype=names[dtype.value], shape=tuple(shape[::-1]), box=tuple(list(box)[::-1])
        )
        return 0


class CUDADriverError(RuntimeError):
    """As CuPy's: any failure of a launch or of loading."""


@dataclass
class Gpu:
    """The pretended machine; tests set its fields and read what happened.

    Attributes:
        seconds: source file or entry -> seconds of a launch; 1e-5 for others.
        faults: source file -> what its kernel does: ``crash`` takes the process down, ``illegal`` loses the context,
            ``hang`` never ends, ``wrong`` adds one to every float32 output.
        launches: (entry, grid, block, shared memory, stream) of every launch outside graphs.
        compiled: (options, source) of everything that NVRTC was given; loaded: names of the cubins.
        memory: address -> array, of all that was ever allocated.
        tensor_maps: what the driver has encoded, by its bytes.
    """

    count: int = 1
    names: Sequence[str] = ("Pretended GPU",)
    capability: str = "70"
    l2_bytes: int = 0
    shared_bytes: int = 98304
    seconds: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    compiled: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    now: float = 0.0
    lost: bool = False
    device: int = 0
    memory: dict[int, Any] = field(default_factory=dict)
    streams: list[Any] = field(default_factory=list)
    tensor_maps: dict[bytes, TensorMap] = field(default_factory=dict)

    @staticmethod
    def map_address(encoded: np.ndarray[Any, Any]) -> int:
        """Where the tensor of a map lies."""
        return int.from_bytes(encoded.tobytes()[:8], "little")


gpu = Gpu()


def reset(**settings: Any) -> Gpu:
    """A fresh machine, in place, as every module holds the same one."""
    gpu.__init__(**settings)  # type: ignore[misc]
    return gpu


# Arrays


class ndarray(np.ndarray[Any, Any]):
    """A NumPy array that is said to lie on a GPU."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=getattr(self, "on", gpu.device))

    def __array_finalize__(self, parent: Any) -> None:
        self.on = getattr(parent, "on", gpu.device)


def _known(array: np.ndarray[Any, Any]) -> ndarray:
    """The array at a multiple of 256 bytes like every allocation of a GPU's, to be found again by its address."""
    store = np.empty(array.nbytes + 256, np.uint8)
    start = -store.ctypes.data % 256
    placed = store[start : start + array.nbytes].view(array.dtype).reshape(array.shape).view(ndarray)
    placed[...] = array
    gpu.memory[placed.ctypes.data] = placed
    return placed


def empty(shape: Any, dtype: Any = "float32") -> ndarray:
    _alive()
    return _known(np.empty(shape, dtype))


def asarray(values: Any) -> ndarray:
    return _known(np.asarray(values))


def asnumpy(values: Any) -> np.ndarray[Any, Any]:
    return np.array(values)


def from_dlpack(tensor: Any) -> ndarray:
    array = np.from_dlpack(tensor.host if hasattr(tensor, "host") else tensor).view(ndarray)
    gpu.memory[array.ctypes.data] = array
    return array


ndarray.copy = lambda self: _known(self)  # type: ignore[method-assign,assignment,misc]
abs, isfinite, isinf, isnan, sign, where = np.abs, np.isfinite, np.isinf, np.isnan, np.sign, np.where


def get_default_memory_pool() -> Any:
    return SimpleNamespace(free_all_blocks=lambda: None)


# Kernels


def _alive() -> None:
    if gpu.lost:
        raise CUDADriverError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")


class RawModule:
    """A cubin, which stands for the CUDA source beside it, or a source."""

    def __init__(
        self, code: str | None = None, *, path: str | None = None, options: tuple[str, ...] = (), backend: str = "nvrtc"
    ) -> None:
        assert (code is None) != (path is None) and backend == "nvrtc"
        if path is not None:
            assert Path(path).is_file(), path
            gpu.loaded.append(Path(path).name)
            code = Path(path).with_suffix(".cu").read_text()
        else:
            assert code is not None
            gpu.compiled.append((options, code))
        self.code, self.name = code, "" if path is None else Path(path).with_suffix(".cu").name

    def get_function(self, name: str) -> RawKernel:
        if f"{name}(" not in self.code:
            raise CUDADriverError("CUDA_ERROR_NOT_FOUND: named symbol not found")
        return RawKernel(self, name)


class RawKernel:
    """A function of a module; a launch runs it at once, or notes it for the graph that is being captured."""

    def __init__(self, module: RawModule, name: str) -> None:
        self.module, self.name, self.max_dynamic_shared_size_bytes = module, name, 48 * 1024
        self.maps: tuple[TensorMap, ...] = ()

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        _alive()
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        stream = cuda.get_current_stream()
        # A tensor map is 128 bytes by value, of which the pretended driver knows what it has put there.
        seen = [gpu.tensor_maps[arg.tobytes()] for arg in args if isinstance(arg, np.ndarray)]
        addresses = [gpu.map_address(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
        self.maps = tuple(seen)
        # A number of 32 bits is a parameter by value, a pointer one of 64.
        arrays = [np.array([arg]) if isinstance(arg, np.int32) else gpu.memory[arg] for arg in addresses]
        if stream.captured is not None:
            stream.captured.append((self, grid, block, arrays, shared_mem))
            return
        gpu.launches.append((self.name, grid, block, shared_mem, stream))
        self.run(grid, block, arrays, shared_mem)

    def cost(self) -> float:
        return gpu.seconds.get(self.module.name, gpu.seconds.get(self.name, 1e-5))

    def run(self, grid: Any, block: Any, arrays: Sequence[Any], shared_mem: int) -> None:
        gpu.now += self.cost()
        fault = gpu.faults.get(self.module.name, "")
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "hang":
            signal.pause()
        if fault == "illegal":
            gpu.lost = True
            _alive()
        every = range(len(arrays))
        code, name = self.module.code, self.name
        results = run_cuda_on_cpu(
            code, name, arrays, grid, block, every, shared_mem, optimized=False, checked=False, seeds=(0,),
            maps=self.maps,
        ).outputs  # fmt: skip
        for array, result in zip(arrays, results, strict=True):
            np.asarray(array)[...] = result
        if fault == "wrong":
            np.asarray(arrays[-1]).view(np.float32)[:1] += 1.0


# Streams, events, graphs, devices


class Stream:
    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.ptr = 0 if null else id(self)
        self.captured: list[Any] | None = None

    @classmethod
    def from_external(cls, other: Any) -> Stream:
        version, handle = other.__cuda_stream__()
        assert version == 0
        return ExternalStream(handle)

    def __enter__(self) -> Stream:
        gpu.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        gpu.streams.pop()

    def synchronize(self) -> None:
        _alive()

    def begin_capture(self, mode: int | None = None) -> None:
        assert self.captured is None
        self.captured = []

    def end_capture(self) -> Graph:
        assert self.captured is not None
        graph, self.captured = Graph(self.captured), None
        return graph


Stream.null = Stream(null=True)


class ExternalStream(Stream):
    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__()
        self.ptr = ptr


class Graph:
    """Launches that are run for their results once, and after that only for their time."""

    def __init__(self, nodes: list[Any]) -> None:
        self.nodes, self.run = nodes, False

    def launch(self, stream: Stream | None = None) -> None:
        _alive()
        assert self.nodes, "an empty graph"
        done: set[tuple[Any, ...]] = set()
        for kernel, grid, block, arrays, shared_mem in self.nodes:
            key = (kernel.name, *(array.ctypes.data for array in arrays))
            if self.run or key in done:
                gpu.now += kernel.cost()
            else:
                kernel.run(grid, block, arrays, shared_mem)
                done.add(key)
        self.run = True


class Event:
    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        _alive()
        self.at = gpu.now

    def synchronize(self) -> None:
        _alive()


class Device:
    def __init__(self, device: int = 0) -> None:
        self.id = device
        self.before: list[int] = []

    @property
    def compute_capability(self) -> str:
        return gpu.capability

    @property
    def attributes(self) -> dict[str, int]:
        return {"MaxSharedMemoryPerBlockOptin": gpu.shared_bytes}

    def __enter__(self) -> Device:
        self.before.append(gpu.device)
        gpu.device = self.id
        return self

    def __exit__(self, *error: object) -> None:
        gpu.device = self.before.pop()


def _memset(pointer: int, value: int, size: int, stream: int) -> None:
    gpu.launches.append(("memset", value, size, stream))
    gpu.memory[pointer].reshape(-1).view(np.uint8)[:size] = value


cuda = SimpleNamespace(
    set_allocator=lambda allocator: None,
    Device=Device,
    Stream=Stream,
    ExternalStream=ExternalStream,
    Event=Event,
    get_current_stream=lambda device_id=-1: gpu.streams[-1] if gpu.streams else Stream.null,
    get_elapsed_time=lambda start, end: (end.at - start.at) * 1e3,
    runtime=SimpleNamespace(
        getDeviceCount=lambda: gpu.count,
        getDeviceProperties=lambda device: {
            "name": gpu.names[device % len(gpu.names)].encode(),
            "l2CacheSize": gpu.l2_bytes,
        },
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 12090,
        memGetInfo=lambda: (1 << 30, 1 << 31),
        memsetAsync=_memset,
    ),
)
