"""A GPU that is not there: everything a harvest does, on the CPU, with tiny sizes (``--dry-run``).

Events read the host's clock, graphs call what they captured, kernels of bundles are PyTorch's operators, and
micro-benchmarks return a constant. Times mean nothing; every line around them is the one that runs on a GPU.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.calls.operators import Problem, problem
from bench.gpu.board import QUERY
from bench.gpu.machine import CudaEvent, CudaMachine, Launch, Run, Tensor

#: Prints one sample as nvidia-smi does, then waits to be stopped.
SMI = (
    sys.executable,
    "-c",
    f"import time; print('{', '.join(map(str, range(len(QUERY))))}', flush=True); time.sleep(600)",
)


class FakeMachine(CudaMachine):
    """`broken_by` is a message after which the GPU counts as lost, as after an illegal access."""

    device = "cpu"
    architecture = "sm_90"
    reference_flop = 1e9

    def __init__(self, broken_by: str = "an illegal memory access") -> None:
        self._broken_by = broken_by
        self.flushes = 0
        self.replays = 0

    def event(self) -> CudaEvent:
        return _FakeEvent()

    def synchronize(self) -> None:
        pass

    def flush(self) -> None:
        self.flushes += 1

    def graph(self, run: Run, copies: int) -> Run:
        run()

        def replay() -> None:
            self.replays += 1
            for _ in range(copies):
                run()

        return replay

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # Traced as on a GPU, and then left to PyTorch: generating code for the CPU takes a minute.
        compiled: Callable[..., Any] = importlib.import_module("torch").compile(function, backend="eager")
        return compiled

    def triton_matmul(self) -> Callable[[Tensor, Tensor, bool], Tensor]:
        return lambda a, b, tf32: a @ b

    def load_kernel(self, bundle: Path, manifest: Mapping[str, Any], kernel: Mapping[str, Any]) -> Launch:
        if not (bundle / str(kernel["binary"])).is_file():
            raise RuntimeError(f"{kernel['binary']} cannot be loaded")
        what = problem(manifest["name"], json.loads(manifest["notes"][0]))
        names = [argument["name"] for argument in manifest["arguments"]]
        if "crash" in kernel["entry"]:
            raise RuntimeError(self._broken_by)

        def launch(tensors: Sequence[Tensor]) -> None:
            *inputs, out = tensors
            given = dict(zip(names, inputs, strict=False))
            if what.scales:  # no processor multiplies eight bits
                given = {name: tensor.double() for name, tensor in given.items()}
            out.copy_(what.bind(given)())
            if "wrong" in kernel["entry"]:
                out.view(-1)[-1] += 1e6

        return launch

    def microbench(self, progress: Callable[[str], None]) -> dict[str, Any]:
        progress("dram")
        return {"measurements": {"dram.copy": {"value": 3.0e12, "unit": "B/s"}}, "failures": {}, "device": None}

    def supports(self, precision: str) -> bool:
        return True

    def release(self) -> None:
        importlib.import_module("torch")._dynamo.reset()

    def peak_bytes(self) -> int:
        return 1 << 20

    def properties(self) -> dict[str, Any]:
        return {"name": "no GPU at all", "multi_processor_count": 0}

    def is_broken(self, error: BaseException) -> bool:
        return self._broken_by in str(error)


class _FakeEvent(CudaEvent):
    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def seconds_until(self, later: Any) -> float:
        return float(later._at - self._at)


def write_bundle(
    root: Path, what: Problem, kernels: Sequence[str] = ("right", "wrong"), *, device: str = "h200"
) -> Path:
    """A bundle for the fake: entries say whether a kernel is ``right``, ``wrong`` or a ``crash``."""
    directory = root / device / what.suite / what.name
    directory.mkdir(parents=True)
    arguments = [
        {"name": name, "role": "input", "dtype": what.dtype_of(name), "shape": list(shape)}
        for name, shape in what.inputs.items()
    ]
    arguments.append({"name": "out", "role": "output", "dtype": what.output_dtype, "shape": list(what.output)})
    records = [
        {"rank": rank, "entry": f"{entry}_{rank}", "binary": f"kernel_{rank}.cubin", "grid": [1, 1, 1],
         "block": [32, 1, 1], "dynamic_shared_bytes": 0, "seconds": 1e-5 * rank, "bound": "dram", "policy": "fake",
         "schedule": f"schedule_{rank}.json"}
        for rank, entry in enumerate(kernels, 1)
    ]  # fmt: skip
    for record in records:
        (directory / str(record["binary"])).write_bytes(b"fake")
    manifest = {
        "name": what.name, "device": device, "architecture": "sm_90", "notes": [json.dumps(what.spec)],
        "arguments": arguments, "kernels": records,
    }  # fmt: skip
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory
