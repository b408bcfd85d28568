"""The GPU as the harvest needs it: events, graphs, L2 flushes, kernels from bundles; a fake of it is in `fakes`."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Tensor = Any
Run = Callable[[], Any]
Launch = Callable[[Sequence[Tensor]], None]

#: Written between two measurements; larger than any L2 so far.
FLUSH_BYTES = 256 << 20


class CudaMachine:
    """A CUDA GPU through PyTorch, whose tensors kernels run on; CuPy launches those of bundles on PyTorch's stream.

    Attributes:
        device: PyTorch's name of it.
        architecture: ``sm_90``.
        reference_flop: operations in float64 that one reference may take.
    """

    device: str
    architecture: str
    reference_flop: float

    def __init__(self, index: int = 0) -> None:
        self._torch = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no CUDA device; --dry-run tries everything on the CPU")
        self._torch.cuda.set_device(index)
        self._index = index
        self.device = f"cuda:{index}"
        self._capability = self._torch.cuda.get_device_capability(index)
        self.architecture = "sm_{}{}".format(*self._capability)
        # A tenth of a second or so where float64 runs at half of float32, a second and more where it does not.
        self.reference_flop = 2e11 if self._capability in ((6, 0), (7, 0), (8, 0), (9, 0)) else 2e10
        self._flushed = self._torch.empty(FLUSH_BYTES, dtype=self._torch.uint8, device=self.device)

    def event(self) -> CudaEvent:
        """A point in time on the device's current stream."""
        return CudaEvent(self._torch.cuda.Event(enable_timing=True))

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def flush(self) -> None:
        """Queue something that leaves nothing useful in L2."""
        self._flushed.zero_()

    def graph(self, run: Run, copies: int) -> Run:
        """`run`, `copies` times in a row, as one CUDA graph; returns what replays it."""
        cuda = self._torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):  # what is tuned or loaded on the first call must not happen while capturing
            for _ in range(3):
                run()
        cuda.current_stream().wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            for _ in range(copies):
                run()
        replay: Run = graph.replay
        return replay

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.compile``."""
        compiled: Callable[..., Any] = self._torch.compile(function, dynamic=False)
        return compiled

    def triton_matmul(self) -> Callable[[Tensor, Tensor, bool], Tensor]:
        """A product of two matrices (or two batches of them) tuned by Triton; the flag allows TF32."""
        matmul: Callable[[Tensor, Tensor, bool], Tensor] = importlib.import_module("bench.gpu.triton_matmul").matmul
        return matmul

    def load_kernel(self, bundle: Path, manifest: Mapping[str, Any], kernel: Mapping[str, Any]) -> Launch:
        """A kernel of a bundle, as a function of all its tensors in the manifest's order."""
        cupy, launching = importlib.import_module("cupy"), importlib.import_module("codegen.runtime.gpu")
        reader = importlib.import_module("codegen.bundle.reader")
        entries = reader.read_bundle(bundle)
        entry = next(one for one in entries.kernels if one.rank == kernel["rank"])
        loaded = launching.load_kernel(entries, entry, self._index)
        current = self._torch.cuda.current_stream

        def launch(tensors: Sequence[Tensor]) -> None:
            out = tensors[-1]
            with cupy.cuda.ExternalStream(current().cuda_stream):
                loaded.launch([tensor.data_ptr() for tensor in tensors], out.numel() * out.element_size())

        return launch

    def microbench(self, progress: Callable[[str], None]) -> dict[str, Any]:
        """Measurements of ``hal.microbench`` on the board; `progress` gets the name of each quantity before it."""
        from bench.gpu.adapters import microbench

        return microbench(self.device, progress)

    def supports(self, precision: str) -> bool:
        """True if ``tf32``, ``bfloat16`` run on matrix units."""
        return bool(self._capability >= {"tf32": (8, 0), "bfloat16": (8, 0)}[precision])

    def release(self) -> None:
        """Give memory back, forget compiled code and the peak of memory."""
        self._torch.cuda.empty_cache()
        self._torch.cuda.reset_peak_memory_stats()
        self._torch._dynamo.reset()

    def peak_bytes(self) -> int:
        return int(self._torch.cuda.max_memory_allocated())

    def properties(self) -> dict[str, Any]:
        properties_of_board = self._torch.cuda.get_device_properties(self._index)
        names = [name for name in dir(properties_of_board) if not name.startswith("_")]
        values = {name: getattr(properties_of_board, name) for name in names}
        return {name: value for name, value in values.items() if isinstance(value, int | float | str)}

    def is_broken(self, error: BaseException) -> bool:
        """True if nothing can run in this process after `error`."""
        if isinstance(error, self._torch.cuda.OutOfMemoryError):
            return False
        try:
            self._torch.cuda.synchronize()
        except Exception:  # whatever it is, the context answers no more
            return True
        return False


class CudaEvent:
    """A recorded point in time."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def record(self) -> None:
        self._event.record()

    def seconds_until(self, later: CudaEvent) -> float:
        """Time to a later event; both must have come to pass."""
        return float(self._event.elapsed_time(later._event)) * 1e-3


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Permission to round operands of float32 products and convolutions to TF32, while this lasts."""
    backends = importlib.import_module("torch").backends
    before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = before


def bundle_of(bundles: Path | None, architecture: str, suite: str, name: str) -> Path | None:
    """The bundle of an operator for a GPU, looked for in ``BUNDLES/*/SUITE/NAME``; None if none was carried.

    A cubin runs on devices of its own major architecture from its minor one on; the closest is taken.
    """
    from codegen.runtime.gpu import runs_on

    capability = int(architecture[3:-1]), int(architecture[-1])
    dated_bundles: list[tuple[str, Path]] = []
    for path in sorted(bundles.glob(f"*/{suite}/{name}/manifest.json")) if bundles else ():
        built = str(json.loads(path.read_bytes()).get("architecture", ""))
        if runs_on(built, capability):
            dated_bundles.append((built, path.parent))
    return max(dated_bundles, key=lambda one: one[0])[1] if dated_bundles else None
