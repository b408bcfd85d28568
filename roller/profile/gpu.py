"""One operator on one GPU: its reference, what its kernels compute, and how long they take.

It needs NumPy and CuPy alone. A kernel's time counts only after its output agreed with the reference
on the device, and before and after timing alike, so that a race that shows under load strikes it out too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import numpy as np

from codegen.bundle.records import ITEM_BYTES, Argument, Bundle, KernelRecord
from codegen.runtime.arrays import cupy_module
from codegen.runtime.gpu import LoadedKernel, capability_of, load_kernel, source_module
from hal.support.errors import InputError
from roller.profile.measurement import Board, Measurement

#: Bytes behind every tensor that no kernel may touch.
GUARD_BYTES = 1024

#: Every byte of an output before a kernel runs, and of all guards: NaN in every float type.
POISON = 0xFF

#: The copies of the tensors that launches rotate over fill L2 so many times: nothing is left of a copy in it when its
#: turn comes again, whatever the replacement policy.
L2_FILLS = 3

#: At most so many copies, and this share of the memory that is free.
MAX_COPIES = 64
MEMORY_SHARE = 0.5

#: At most so many launches in one graph.
MAX_GRAPH_LAUNCHES = 4096

#: What stands for infinity in the narrowest dtype; as in :mod:`codegen.verify.result`, which needs more than NumPy.
LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class MeasureOptions:
    """Options of a measurement.

    Attributes:
        repeats: measurements of a kernel, each of one graph.
        graph_seconds: launches are put into a graph until it takes this long.
        warmup_seconds: the first kernel runs this long before anything is timed, until clocks and power are steady;
            every further one a tenth of it.
        limit_seconds: a slow kernel is repeated less often, so that all its repeats together take about this long, but
            three times at least.
    """

    repeats: int = 20
    graph_seconds: float = 2e-3
    warmup_seconds: float = 0.5
    limit_seconds: float = 2.0


def board_of(device: int) -> Board:
    """Board at a device number.

    Raises:
        InputError: there is no such GPU.
    """
    cupy = cupy_module()
    runtime = cupy.cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except Exception as error:  # without a driver CuPy raises an error class of its own
        raise InputError("--device", f"CuPy finds no GPU: {error}", "run this where nvidia-smi lists one") from None
    if not 0 <= device < count:
        raise InputError("--device", f"there is no cuda:{device}", f"there are {count} GPUs, from cuda:0 on")
    name = runtime.getDeviceProperties(device)["name"]
    major, minor = capability_of(cupy, device)
    versions = {
        "cupy": str(cupy.__version__),
        "driver": _version(runtime.driverGetVersion()),
        "runtime": _version(runtime.runtimeGetVersion()),
    }
    return Board(name.decode() if isinstance(name, bytes) else str(name), f"{major}.{minor}", versions)


def _version(number: int) -> str:
    """A version number of CUDA as people write it.

    >>> _version(12090)
    '12.9'
    """
    return f"{number // 1000}.{number % 1000 // 10}"


class OperatorBench:
    """An operator's tensors and its reference result on one GPU.

    Raises:
        InputError: the bundle has no reference, or it does not compile or fit on the GPU.
    """

    def __init__(self, bundle: Bundle, device: int, options: MeasureOptions) -> None:
        if bundle.reference is None:
            raise InputError(str(bundle.directory), "has no reference to check against", "compile the operator again")
        self.bundle, self.device, self.options = bundle, device, options
        self.reference = bundle.reference
        self.cupy = cupy_module()
        self.warm = False
        with self.cupy.cuda.Device(device):
            # What the operator before this one left to CuPy would count as taken.
            self.cupy.get_default_memory_pool().free_all_blocks()
            self.stream = self.cupy.cuda.Stream(non_blocking=True)
            with self.stream:
                first = [self._random(argument, number) for number, argument in enumerate(bundle.inputs)]
                self.expected = self._expected(first)
                self.copies = self._copied([*first, self._poisoned(bundle.output)])
            self.stream.synchronize()

    def measure(self, entry: KernelRecord) -> Measurement:
        """Check one kernel and time it; never raises for what a kernel does, the result tells."""
        loaded, error, limit = "", None, self._tolerance(entry)
        try:
            with self.cupy.cuda.Device(self.device), self.stream:
                kernel = load_kernel(self.bundle, entry, self.device)
                loaded = kernel.how
                error, reason = self._check(kernel)
                if reason:
                    return self._refused(limit, reason, error, loaded)
                launches, times = self._times(kernel)
                error, reason = self._check(kernel, launch=False)
                if reason:
                    return self._refused(limit, f"after {len(times)} timed runs: {reason}", error, loaded)
        except InputError as problem:
            return self._refused(limit, str(problem), error, loaded)
        except Exception as problem:  # whatever the driver reports
            return self._refused(limit, f"{type(problem).__name__}: {problem}", error, loaded, lost=self._lost())
        return Measurement.timed(times, launches=launches, relative_error=error, tolerance=limit, loaded=loaded)

    def _refused(self, limit: float, reason: str, error: float | None, loaded: str, lost: bool = False) -> Measurement:
        return Measurement.refused(reason, tolerance=limit, loaded=loaded, relative_error=error, lost=lost)

    def _lost(self) -> bool:
        """True if the context is gone: then every further call fails, this one too."""
        try:
            self.stream.synchronize()
            self.cupy.empty(1, "uint8")[...] = 0
            self.stream.synchronize()
        except Exception:
            return True
        return False

    # Tensors: flat byte arrays with a guard behind them

    def _bytes(self, argument: Argument) -> Any:
        size = -(-argument.size_bytes // 16) * 16 + GUARD_BYTES
        array = self.cupy.empty(size, "uint8")
        array.fill(POISON)
        return array

    def _poisoned(self, argument: Argument) -> Any:
        return self._bytes(argument)

    def _random(self, argument: Argument, number: int) -> Any:
        array = self._bytes(argument)
        stored = input_bytes(argument, number, self.reference.ranges)
        array[: stored.size] = self.cupy.asarray(stored)
        return array

    def _copied(self, first: Sequence[Any]) -> list[list[Any]]:
        """Copies of all tensors to rotate over; the first is the given one."""
        runtime = self.cupy.cuda.runtime
        cache_bytes = int(runtime.getDeviceProperties(self.device)["l2CacheSize"])
        set_bytes = sum(array.nbytes for array in first)
        free_bytes = runtime.memGetInfo()[0]
        filling = math.ceil(L2_FILLS * cache_bytes / set_bytes)
        count = min(1 + filling, 1 + int(MEMORY_SHARE * free_bytes / set_bytes), MAX_COPIES)
        return [list(first), *([array.copy() for array in first] for _ in range(count - 1))]

    # The reference

    def _expected(self, inputs: Sequence[Any]) -> Any:
        """The output in float64, flat, computed on the device."""
        module = source_module(self.bundle.directory / self.reference.source)
        values: dict[str, Any] = {
            argument.name: array for argument, array in zip(self.bundle.inputs, inputs, strict=True)
        }
        values |= {name: self.cupy.empty(count, "float64") for name, count in self.reference.workspace.items()}
        try:
            for launch in self.reference.launches:
                pointers = tuple(values[name].data.ptr for name in launch.tensors)
                module.get_function(launch.entry)(launch.grid, launch.block, pointers)
            self.stream.synchronize()
        except Exception as error:
            problem = f"cannot be run: {type(error).__name__}: {error}"
            raise InputError(str(self.bundle.directory / self.reference.source), problem, "report this") from error
        return values[self.bundle.output.name]

    # Checking

    def _check(self, kernel: LoadedKernel, *, launch: bool = True) -> tuple[float | None, str]:
        """Relative error of what a kernel computes, and what is wrong with it (empty where nothing is).

        With ``launch`` it runs over a poisoned output first; without, the outputs of all timed copies are judged.
        """
        if launch:
            self.copies[0][-1].fill(POISON)
            for array in kernel.workspace().values():
                array.fill(POISON)
            self._launch(kernel, 0)
            self.stream.synchronize()
        worst = 0.0
        for tensors in self.copies[:1] if launch else self.copies:
            error, reason = self._judged(tensors, self._tolerance(kernel.entry))
            if reason:
                return error, reason
            worst = max(worst, error)
        return worst, ""

    def _tolerance(self, entry: KernelRecord) -> float:
        """The largest relative error that counts as right: the reference's, or what the kernel's algorithm asks for."""
        return max(self.reference.tolerance, entry.tolerance or 0.0)

    def _judged(self, tensors: Sequence[Any], limit: float) -> tuple[float, str]:
        size = self.bundle.output.size_bytes
        for argument, array in zip(self.bundle.arguments, tensors, strict=True):
            if not bool((array[argument.size_bytes :] == POISON).all()):
                return math.inf, f"written behind the end of {argument.name}"
        result = widened(self.cupy, tensors[-1][:size], self.bundle.output.dtype)
        unwritten = int(self.cupy.isnan(result).sum()) - int(self.cupy.isnan(self.expected).sum())
        if unwritten > 0:
            return math.inf, f"{unwritten} of {result.size} outputs not written or not a number"
        error = device_relative_error(self.cupy, result, self.expected, self.reference.widths)
        return error, "" if error <= limit else f"relative error {error:.3g} is above {limit:.3g}"

    # Timing

    def _launch(self, kernel: LoadedKernel, copy: int) -> None:
        pointers = [array.data.ptr for array in self.copies[copy]]
        kernel.launch(pointers, self.bundle.output.size_bytes)

    def _times(self, kernel: LoadedKernel) -> tuple[int, list[float]]:
        """Launches in a graph, and seconds of one launch for every replay of it."""
        rotation = len(self.copies)
        graph = self._graph(kernel, rotation)
        once = self._replay(graph)  # the first replay also uploads the graph
        once = min(once, self._replay(graph))
        rounds = max(1, min(math.ceil(self.options.graph_seconds / max(once, 1e-9)), MAX_GRAPH_LAUNCHES // rotation))
        if rounds > 1:
            graph = self._graph(kernel, rotation * rounds)
        self._warm_up(graph)
        repeats = min(self.options.repeats, max(3, int(self.options.limit_seconds / max(once * rounds, 1e-9))))
        launches = rotation * rounds
        return launches, [self._replay(graph) / launches for _ in range(repeats)]

    def _graph(self, kernel: LoadedKernel, launches: int) -> Any:
        """Launches one after another, each on the next copy of the tensors, as one CUDA graph."""
        self.stream.begin_capture()
        try:
            for number in range(launches):
                self._launch(kernel, number % len(self.copies))
        finally:
            graph = self.stream.end_capture()
        return graph

    def _replay(self, graph: Any) -> float:
        """Seconds between the events around one replay."""
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        start.record(self.stream)
        graph.launch(self.stream)
        end.record(self.stream)
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(start, end)) * 1e-3

    def _warm_up(self, graph: Any) -> None:
        wanted = self.options.warmup_seconds * (0.1 if self.warm else 1.0)
        self.warm = True
        end = time.monotonic() + wanted
        while time.monotonic() < end:
            graph.launch(self.stream)
            self.stream.synchronize()


def input_bytes(
    argument: Argument, number: int, ranges: Mapping[str, Sequence[float]]
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Test data of an input, byte by byte and the same on every run; drawn on the host, where they can be drawn again.

    Args:
        number: of the input among the operator's.
        ranges: least and largest value by name, (-1, 1) where nothing is said.
    """
    low, high = ranges.get(argument.name, (-1.0, 1.0))
    generator = np.random.default_rng([0, number])
    values = generator.random(math.prod(argument.shape), dtype=np.float32) * np.float32(high - low) + np.float32(low)
    return stored_bytes(values, argument.dtype)


def stored_bytes(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Values as a tensor holds them, byte by byte; bfloat16, which NumPy lacks, is a float32's upper half, rounded.

    >>> stored_bytes(np.array([1.0], np.float32), "bfloat16").tolist()
    [128, 63]
    """
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)
    if dtype in ("int8", "int32"):
        values = np.rint(values)
    return values.astype(_numpy_type(dtype)).view(np.uint8)


def _numpy_type(dtype: str) -> Any:
    """NumPy's type of that name, or that of ``ml_dtypes`` where NumPy has none."""
    if dtype not in ITEM_BYTES:
        raise InputError(dtype, "has no test data", f"profile operators of {', '.join(ITEM_BYTES)}")
    if not dtype.startswith("float8"):
        return np.dtype(dtype)
    try:
        return getattr(import_module("ml_dtypes"), dtype)
    except ImportError:
        raise InputError(dtype, "has no test data without ml_dtypes", "pip install ml_dtypes") from None


def widened(cupy: Any, raw: Any, dtype: str) -> Any:
    """The bytes of a tensor as float64."""
    if dtype == "bfloat16":
        return (raw.view("uint16").astype("uint32") << 16).view("float32").astype("float64")
    assert ITEM_BYTES[dtype] > 1, "no results are of eight bits"
    return raw.view(dtype).astype("float64")


def device_relative_error(cupy: Any, result: Any, expected: Any, widths: Sequence[int] = ()) -> float:
    """Largest ``|result - expected| / (|expected| + rms(expected))``, worked out on the device; the definition is that
    of :func:`codegen.verify.result.relative_error`.

    Infinities have to be infinite or the largest finite number of the same sign; what the reference finds undefined is
    not judged. Of tensors that lie side by side in rows, ``widths`` columns of each, every one is judged by itself.
    """
    if widths:
        rows = [each.reshape(-1, sum(widths)) for each in (result, expected)]
        ends = list(accumulate(widths))
        parts = [slice(end - width, end) for width, end in zip(widths, ends, strict=True)]
        return max(device_relative_error(cupy, rows[0][:, part], rows[1][:, part]) for part in parts)
    finite = cupy.isfinite(expected)
    infinite = cupy.isinf(expected)
    if bool((finite & ~cupy.isfinite(result)).any()):
        return math.inf
    if bool((infinite & ~(cupy.sign(expected) * result > LARGEST_HALF / 2)).any()):
        return math.inf
    finite_values = cupy.where(finite, expected, 0.0)
    scale = math.sqrt(float((finite_values * finite_values).sum()) / max(int(finite.sum()), 1))
    difference = cupy.abs(cupy.where(finite, result, 0.0) - finite_values)
    return float((difference / (cupy.abs(finite_values) + max(scale, 1e-30))).max())
