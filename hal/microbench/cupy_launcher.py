"""A real GPU through CuPy, which is imported only here and only when a board is asked for."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.microbench.launcher import Board, KernelText, Launch, MicrobenchError, Work
from hal.support.errors import InputError

_SPIN = r"""
extern "C" __global__ void spin(long long cycles) { long long start = clock64(); while (clock64() - start < cycles); }
"""
#: The host's time to submit one launch through CuPy, with much to spare; the device is kept busy for as long.
_AHEAD_SECONDS = 2e-5


class CupyKernel:
    """A `cupy.RawKernel` with the names that quantities use."""

    def __init__(self, cupy: Any, raw: Any, kernel: KernelText) -> None:
        self._cupy, self.raw, self.text = cupy, raw, kernel

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return int(self.raw.num_regs)

    @property
    def local_bytes(self) -> int:
        """Bytes of a thread that did not fit into registers."""
        return int(self.raw.local_size_bytes)

    def resident_blocks(self, threads: int) -> int:
        """Blocks of that many threads that a unit keeps at a time, as the driver says."""
        driver = self._cupy.cuda.driver
        return int(driver.occupancyMaxActiveBlocksPerMultiprocessor(self.raw.kernel.ptr, threads, 0))


class CupyLauncher:
    """One GPU, ``cuda:0``; raises InputError where CuPy or the GPU is missing."""

    def __init__(self, device: str) -> None:
        index = _index(device)
        self._cupy = _cupy()
        _check_present(self._cupy, index)
        self._device = self._cupy.cuda.Device(index)
        self._device.use()
        self._kernels: dict[KernelText, CupyKernel] = {}
        self.board = _board(self._cupy, index)

    def kernel(self, kernel: KernelText) -> CupyKernel:
        """Compile with NVRTC, once; raises MicrobenchError with the compiler's complaint."""
        if kernel not in self._kernels:
            options = ["--std=c++17"]
            if kernel.registers is not None:
                options.append(f"--maxrregcount={kernel.registers}")
            try:
                module = self._cupy.RawModule(code=kernel.source, options=tuple(options), backend="nvrtc")
                raw = module.get_function(kernel.entry)
            except self._cupy.cuda.compiler.CompileException as error:
                raise MicrobenchError(f"{kernel.entry} does not compile: {' '.join(str(error).split())}") from error
            self._kernels[kernel] = CupyKernel(self._cupy, raw, kernel)
        return self._kernels[kernel]

    def array(self, values: NDArray[Any]) -> Any:
        """A buffer with these values."""
        return self._cupy.asarray(values)

    def empty(self, size_bytes: int) -> Any:
        """A buffer of zeros; raises MicrobenchError where the memory is full."""
        try:
            return self._cupy.zeros(size_bytes, "uint8")
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise MicrobenchError(f"no {size_bytes >> 20} MiB of device memory are free") from error

    def host(self, buffer: Any, dtype: str) -> NDArray[Any]:
        """The values of a buffer."""
        values: NDArray[Any] = self._cupy.asnumpy(buffer).view(dtype)
        return values

    def seconds(self, work: Sequence[Work], *, ahead: bool = False) -> float:
        """Device time of the work between two events of the current stream."""
        cuda = self._cupy.cuda
        before, after = cuda.Event(), cuda.Event()
        if ahead:
            spin = self.kernel(KernelText("spin", _SPIN)).raw
            cycles = int(self.board.clock_hz * _AHEAD_SECONDS * len(work))
            spin((1,), (1,), (cycles,))
        before.record()
        for each in work:
            self._submit(each)
        after.record()
        after.synchronize()
        return float(cuda.get_elapsed_time(before, after)) * 1e-3

    def _submit(self, work: Work) -> None:
        if not isinstance(work, Launch):
            work()
            return
        kernel = work.kernel
        if not isinstance(kernel, CupyKernel):
            raise TypeError(f"{kernel.text.entry} was compiled by another launcher")
        kernel.raw((work.grid,), (work.block,), work.arguments, shared_mem=work.shared)

    def release(self) -> None:
        """Give memory that no buffer uses back to the device."""
        self._cupy.get_default_memory_pool().free_all_blocks()

    def matmul(self, size: int, dtype: str) -> Callable[[], object] | None:
        """PyTorch's product if it sees the GPU, else CuPy's, else None; float32 without TensorFloat-32."""
        torch = self.torch()
        try:
            if torch is not None:
                a, b = (torch.randn(size, size, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
                c = torch.empty_like(a)
                product: Callable[[], object] = lambda: torch.mm(a, b, out=c)  # noqa: E731
            else:
                # Made on the host: CuPy's own random numbers need one more library.
                random = np.random.default_rng(1)
                x, y = (self.array(random.random((size, size), np.float32).astype(dtype)) for _ in range(2))
                z = self._cupy.empty_like(x)
                product = lambda: self._cupy.matmul(x, y, out=z)  # noqa: E731
            product()
        except (RuntimeError, ImportError, OSError, MemoryError):
            return None  # no cuBLAS with this CuPy, or no memory for three matrices
        return product

    def torch(self) -> Any:
        """The module ``torch`` if it is installed and sees this GPU, else None."""
        with suppress(ImportError, OSError):
            torch = importlib.import_module("torch")
            if torch.cuda.is_available():
                torch.cuda.set_device(self._device.id)
                return torch
        return None


def _index(device: str) -> int:
    match = re.fullmatch(r"cuda(?::(\d{1,3}))?", device)
    if match is None:
        raise InputError("--device", f"got {device!r}", "write cpu, cuda or cuda:1")
    return int(match[1] or 0)


def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except (ImportError, OSError) as error:
        raise InputError(
            "--device",
            f"CuPy cannot be imported ({error})",
            "install cupy-cuda12x on the machine with the GPU, or measure this one with --device cpu",
        ) from None


def _check_present(cupy: Any, index: int) -> None:
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise InputError("--device", f"there is no GPU: {error}", "--device cpu measures this machine") from None
    if index >= count:
        raise InputError("--device", f"cuda:{index}, but the GPUs here are {count}", "count them from cuda:0")


def _board(cupy: Any, index: int) -> Board:
    """Facts of the board by its driver."""
    facts, runtime = cupy.cuda.Device(index).attributes, cupy.cuda.runtime
    properties = runtime.getDeviceProperties(index)
    free, total = runtime.memGetInfo()
    title = properties["name"]
    return Board(
        title=title.decode() if isinstance(title, bytes) else str(title),
        compute_capability=(int(properties["major"]), int(properties["minor"])),
        units=facts["MultiProcessorCount"],
        lanes=facts["WarpSize"],
        threads_per_block=facts["MaxThreadsPerBlock"],
        threads_per_unit=facts["MaxThreadsPerMultiProcessor"],
        blocks_per_unit=facts["MaxBlocksPerMultiprocessor"],
        registers_per_unit=facts["MaxRegistersPerMultiprocessor"],
        shared_per_block=facts["MaxSharedMemoryPerBlock"],
        shared_opt_in=facts["MaxSharedMemoryPerBlockOptin"],
        shared_per_unit=facts["MaxSharedMemoryPerMultiprocessor"],
        shared_reserved=facts.get("ReservedSharedMemoryPerBlock", 0),
        grid=(facts["MaxGridDimX"], facts["MaxGridDimY"], facts["MaxGridDimZ"]),
        l2_bytes=facts["L2CacheSize"],
        memory_bytes=int(total),
        free_bytes=int(free),
        clock_hz=1e3 * facts["ClockRate"],
        memory_clock_hz=1e3 * facts.get("MemoryClockRate", 0),
        memory_bus_bits=facts.get("GlobalMemoryBusWidth", 0),
        software=f"CUDA driver {_version(runtime.driverGetVersion())}, CuPy {cupy.__version__}",
    )


def _version(number: int) -> str:
    """``12.9`` for 12090."""
    return f"{number // 1000}.{number % 1000 // 10}"


__all__ = ["CupyKernel", "CupyLauncher"]
