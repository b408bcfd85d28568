"""Everything that computes an operator: the library, torch.compile, Triton and our kernels, on the same inputs."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.calls.operators import CONTRACTIONS, GENERATED, Problem
from bench.gpu.correctness import check, random_inputs
from bench.gpu.machine import CudaMachine, Run, bundle_of, tf32
from bench.gpu.timing import Contender, contender, interleaved

Tensor = Any
Inputs = Mapping[str, Tensor]

LIBRARY, COMPILE, TRITON, ROLLER = "library", "compile", "triton", "roller"

#: Ways in which the library computes attention, by the names of its backends.
ATTENTION = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}

#: Others may be this much further off in float32 than our kernels: cuDNN's transforms (Winograd, FFT) round more.
OTHERS_SLACK = 10.0

#: Rounds of all contenders of an operator may take this long together.
ROUNDS_SECONDS = 0.35


@dataclass(frozen=True)
class Rival:
    """One way to compute an operator in one precision; `make` gives the call on inputs."""

    who: str
    precision: str
    make: Callable[[Inputs], Run]
    detail: str = ""

    @property
    def name(self) -> str:
        """``library tf32``"""
        return f"{self.who} {self.precision}"

    @property
    def dtype(self) -> str:
        return "float32" if self.precision == "tf32" else self.precision


def rivals(machine: CudaMachine, problem: Problem, bundle: Path | None, rank: int, *, compiled: bool) -> list[Rival]:
    """Who takes part, our kernel of `rank` first. float32 products run in TF32 and float16 too, where the board can."""
    precisions = [problem.dtype]
    if problem.dtype == "float32":
        if problem.op in CONTRACTIONS and machine.supports("tf32"):
            precisions.append("tf32")
        precisions.append("float16")
    found = [_ours(machine, problem, bundle, rank)] if bundle is not None else []
    found += [Rival(LIBRARY, precision, problem.bind) for precision in precisions]
    if problem.op == "attention":
        found += [Rival(name, problem.dtype, _attention(problem, backend)) for name, backend in ATTENTION.items()]
    if compiled:
        found.append(Rival(COMPILE, problem.dtype, lambda inputs: machine.compile(problem.bind(inputs))))
    if problem.op in ("matmul", "batch_matmul") and not problem.spec.get("epilogue"):
        found += [Rival(TRITON, precision, _triton(machine, problem, precision)) for precision in precisions]
    return found


def _attention(problem: Problem, backend: str) -> Callable[[Inputs], Run]:
    def make(inputs: Inputs) -> Run:
        attention, attend = importlib.import_module("torch.nn.attention"), problem.bind(inputs)
        kernel = getattr(attention.SDPBackend, backend)

        def run() -> Tensor:
            with attention.sdpa_kernel(kernel):
                return attend()

        return run

    return make


def _triton(machine: CudaMachine, problem: Problem, precision: str) -> Callable[[Inputs], Run]:
    def make(inputs: Inputs) -> Run:
        spec, matmul = problem.spec, machine.triton_matmul()
        a = inputs["A"].transpose(-1, -2) if spec.get("transpose_a") else inputs["A"]
        b = inputs["B"].transpose(-1, -2) if spec.get("transpose_b") else inputs["B"]
        return lambda: matmul(a, b, precision == "tf32")

    return make


def _ours(machine: CudaMachine, problem: Problem, bundle: Path, rank: int) -> Rival:
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    kernel = next((one for one in manifest["kernels"] if one["rank"] == rank), manifest["kernels"][0])

    def make(inputs: Inputs) -> Run:
        return launched(machine, problem, bundle, manifest, kernel, inputs)

    return Rival(ROLLER, problem.dtype, make, f"rank {kernel['rank']}")


def launched(
    machine: CudaMachine,
    problem: Problem,
    bundle: Path,
    manifest: Mapping[str, Any],
    kernel: Mapping[str, Any],
    inputs: Inputs,
    out: Tensor = None,
) -> Run:
    """A kernel of a bundle on these inputs and a poisoned output, `out` or a new one, which each call returns.

    Raises:
        ValueError: the bundle was made for other shapes or types.
    """
    torch = importlib.import_module("torch")
    *wanted, last = manifest["arguments"]
    for argument in wanted:
        have = inputs.get(argument["name"])
        if have is None or list(have.shape) != list(argument["shape"]) or str(have.dtype)[6:] != argument["dtype"]:
            raise ValueError(f"the bundle's {argument['name']} is {argument['dtype']} of shape {argument['shape']}")
    if tuple(last["shape"]) != problem.output:
        raise ValueError(f"the bundle's output has shape {last['shape']}, not {list(problem.output)}")
    if out is None:
        out = torch.empty(problem.output, dtype=getattr(torch, last["dtype"]), device=machine.device)
    out.fill_(float("nan"))
    tensors = [*(inputs[argument["name"]] for argument in wanted), out]
    launch = machine.load_kernel(bundle, manifest, kernel)

    def run() -> Tensor:
        launch(tensors)
        return out

    return run


def compare(
    machine: CudaMachine, problem: Problem, bundles: Path | None, rank: int, *, compiled: bool
) -> dict[str, Any]:
    """One item of the section ``operators``: every rival checked, then those that are right timed in turns.

    A rival that fails keeps its reason and gets no times. Errors after which the GPU answers no more are raised.
    """
    bundle = bundle_of(bundles, machine.architecture, problem.suite, problem.name)
    by_dtype: dict[str, dict[str, Tensor]] = {}
    contenders: list[Contender] = []
    records: dict[str, dict[str, Any]] = {}
    for rival in rivals(machine, problem, bundle, rank, compiled=compiled):
        record: dict[str, Any] = {"name": rival.name, "who": rival.who, "precision": rival.precision}
        records[rival.name] = record | {"detail": rival.detail, "check": None, "reason": ""}
        record = records[rival.name]
        started = time.perf_counter()
        try:
            if rival.dtype not in by_dtype:
                by_dtype[rival.dtype] = random_inputs(problem, rival.dtype, machine.device)
            _enter(machine, problem, rival, by_dtype[rival.dtype], record, contenders)
        except Exception as error:
            if machine.is_broken(error):
                raise
            record["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        record["setup_seconds"] = round(time.perf_counter() - started, 3)
    for name, times in interleaved(machine, contenders, ROUNDS_SECONDS).items():
        records[name].update(times)
    return {
        **described(problem),
        "bundle": f"{bundle.parents[1].name}/{problem.suite}/{problem.name}" if bundle else None,
        "candidates": list(records.values()),
    }


def described(problem: Problem) -> dict[str, Any]:
    """What every item says of its operator."""
    return {
        "suite": problem.suite,
        "operator": problem.name,
        "op": problem.op,
        "dtype": problem.dtype,
        "flop": problem.flop,
        "bytes": problem.compulsory_bytes,
    }


def _enter(
    machine: CudaMachine,
    problem: Problem,
    rival: Rival,
    inputs: Inputs,
    record: dict[str, Any],
    contenders: list[Contender],
) -> None:
    """Check a rival, and let it take part if it is right."""
    with tf32(rival.precision == "tf32"):
        run = rival.make(inputs)
        out = run()
        machine.synchronize()
        slack = OTHERS_SLACK if rival.who != ROLLER and rival.precision == "float32" else 1.0
        record["check"] = check_of(machine, problem, inputs, out, rival.precision, slack)
        if record["check"]["passed"]:
            contenders.append(contender(machine, rival.name, run))
        else:
            record["reason"] = "differs from the reference"


def check_of(
    machine: CudaMachine, problem: Problem, inputs: Inputs, out: Tensor, precision: str, slack: float = 1.0
) -> dict[str, Any]:
    """The comparison with the reference, with TF32 switched off for it."""
    with tf32(False):
        return check(problem, inputs, out, precision, machine.reference_flop, slack)


def is_generated(problem: Problem) -> bool:
    """Whether torch.compile has something to do for an operator, beyond calling the library."""
    return problem.op in GENERATED or bool(problem.spec.get("epilogue"))
