"""The compile pipeline: operator -> programs -> kernels built in parallel -> ranked -> bundle on disk."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from codegen import (
    FORMAT,
    Argument,
    BuildRequest,
    BuiltKernel,
    KernelRecord,
    Manifest,
    Verification,
    VerificationRecord,
    build_kernel,
    staged_directory,
    to_json,
    verify_schedule,
)
from codegen.reference_kernel import ReferenceKernel, reference_kernel
from hal import DeviceSpec, InputError
from roller.construct import Construction, RProgram, construct
from roller.programs import find_programs, searched, united
from sokoban import KernelForm, TensorExpr, kernel_form, statement_text
from sokoban.search import SearchResult, search

#: Programs constructed beyond those asked for, built only where some of those fail or spill.
SPARES = 4


@dataclass(frozen=True)
class RankedKernel:
    """A built kernel with the program it came from."""

    program: RProgram
    built: BuiltKernel


@dataclass(frozen=True)
class CompiledOperator:
    """An operator's kernels, best first, and how they came about.

    Attributes:
        total_seconds: from the parsed operator to the last kernel; other operators may have run meanwhile.
        failures: why some programs gave no kernel.
    """

    expr: TensorExpr
    form: KernelForm
    construction: Construction
    kernels: tuple[RankedKernel, ...]
    total_seconds: float
    failures: tuple[str, ...]


def compile_operators(
    expressions: Sequence[TensorExpr],
    device: DeviceSpec,
    *,
    top_k: int,
    verify: int,
    pool: Executor,
    method: str = "both",
    ahead: int = 4,
) -> Iterator[CompiledOperator]:
    """Compile operators in order; the next ``ahead`` are queued while one is being built.

    Args:
        top_k: kernels per operator.
        verify: how many of them, from rank 1 down, are run against the reference.
        pool: executes :func:`codegen.build_kernel` and :func:`sokoban.search.search`.
        method: who looks for programs, one of :data:`roller.programs.METHODS`.

    Raises:
        InputError: an operator cannot be compiled; the message names it.
        BrokenProcessPool: a process of the pool died.
    """
    # All of them first: whatever is wrong with the last one is known before the first is written.
    jobs = [_Job(expr, device, top_k, verify, pool, method) for expr in expressions]
    if jobs:
        # The pool is still loading its compilers.
        jobs[0].search_here()
    for position, job in enumerate(jobs):
        near = jobs[position : position + ahead + 1]
        for other in near:
            other.search_in_pool()
        for other in near:
            other.start()
        yield job.finish()


class _Job:
    """One operator on its way through the pool."""

    def __init__(
        self, expr: TensorExpr, device: DeviceSpec, top_k: int, verify: int, pool: Executor, method: str
    ) -> None:
        start = time.perf_counter()
        self.expr, self.device, self.top_k, self.verify, self.pool = expr, device, top_k, verify, pool
        self.form = kernel_form(expr)
        self.constructed = construct(self.form, device, top_k + SPARES) if method != "sokoban" else None
        self.needs_search = method != "roller"
        self.found: Future[SearchResult] | None = None
        self.futures: list[Future[BuiltKernel]] = []
        self.seconds_before = time.perf_counter() - start

    def search_here(self) -> None:
        """Search in this process, if a search is wanted at all."""
        if self.needs_search:
            start = time.perf_counter()
            self.found = Future()
            self.found.set_result(search(self.form, self.device, self.top_k + SPARES))
            self.seconds_before += time.perf_counter() - start

    def search_in_pool(self) -> None:
        """Queue the search, once, if it is wanted."""
        if self.needs_search and self.found is None:
            self.found = self.pool.submit(search, self.form, self.device, self.top_k + SPARES)

    def _programs(self) -> Construction:
        """What construction and search found; waits for the search."""
        if self.found is None:
            assert self.constructed is not None
            return self.constructed
        with self._pool_named():
            result = self.found.result()
        return searched(result) if self.constructed is None else united(self.constructed, result, self.top_k + SPARES)

    def start(self) -> None:
        """Queue the first ``top_k`` programs, once."""
        if self.futures:
            return
        self.started = time.perf_counter()
        self.construction = self._programs()
        programs = self.construction.programs[: self.top_k]
        self.futures = [self._submit(program, rank < self.verify) for rank, program in enumerate(programs)]

    def _submit(self, program: RProgram, verify: bool) -> Future[BuiltKernel]:
        request = BuildRequest(
            self.form,
            program.schedule,
            entry_name(self.expr.name),
            self.device.code_generator or "cuda",
            self.device.architecture,
            self.device.warp_lanes,
            verify,
        )
        return self.pool.submit(build_kernel, request)

    def finish(self) -> CompiledOperator:
        """Wait for the kernels, rank them, and build spares for those that fail."""
        with self._pool_named():
            return self._finish()

    @contextmanager
    def _pool_named(self) -> Iterator[None]:
        """A broken pool says at which operator it broke."""
        try:
            yield
        except BrokenProcessPool as error:
            raise BrokenProcessPool(f"{self.expr.name}: a build process died; try fewer --jobs") from error

    def _finish(self) -> CompiledOperator:
        programs = list(self.construction.programs)
        built = [future.result() for future in self.futures]
        # Spares stand in for programs that do not build, and are tried where every kernel so far spills.
        while len(built) < len(programs) and (_good(built) < self.top_k):
            missing = max(1, self.top_k - _good(built))
            more = programs[len(built) : len(built) + missing]
            built += [future.result() for future in [self._submit(program, False) for program in more]]
        kernels = [RankedKernel(p, b) for p, b in zip(programs, built, strict=False) if not b.error]
        kernels.sort(key=_order)
        kernels = kernels[: self.top_k]
        kernels = self._verify_ranked(kernels)
        failures = tuple(b.error for b in built if b.error)
        if not kernels:
            raise InputError(self.expr.name, f"no program could be built: {failures[0]}", "report this operator")
        seconds = self.seconds_before + time.perf_counter() - self.started
        return CompiledOperator(self.expr, self.form, self.construction, tuple(kernels), seconds, failures)

    def _verify_ranked(self, kernels: list[RankedKernel]) -> list[RankedKernel]:
        """Verify what moved up into the first ranks; what turns out wrong moves behind everything that is right."""
        while True:
            due = [i for i, k in enumerate(kernels[: self.verify]) if k.built.verification is None]
            if not due:
                break
            futures = [self._submit(kernels[i].program, True) for i in due]
            for i, future in zip(due, futures, strict=True):
                kernels[i] = RankedKernel(kernels[i].program, future.result())
        return sorted(kernels, key=lambda kernel: _wrong(kernel.built.verification))


def _good(built: Sequence[BuiltKernel]) -> int:
    return sum(not b.error and not b.spill_bytes for b in built)


def _order(kernel: RankedKernel) -> tuple[bool, bool, float]:
    """Spilling kernels rank below those that do not; then by predicted time."""
    return (_wrong(kernel.built.verification), bool(kernel.built.spill_bytes), kernel.program.estimate.seconds)


def _wrong(verification: Verification | None) -> bool:
    return verification is not None and not verification.passed and verification.relative_error is not None


def entry_name(name: str) -> str:
    """Kernel name for an operator: ``matmul-1`` is ``roller_matmul_1``."""
    return "roller_" + "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


def manifest(compiled: CompiledOperator, device: DeviceSpec) -> Manifest:
    """The manifest of a compiled operator."""
    source_suffix = "cl" if device.code_generator == "opencl-source" else "cu"
    notes = [device.code_generator_reason] if device.code_generator_reason else []
    tensors = (*compiled.expr.inputs, compiled.expr.output)
    reference = _reference(compiled, device)
    return Manifest(
        format=FORMAT,
        name=compiled.expr.name,
        device=device.name,
        architecture=device.architecture,
        statements=[statement_text(statement) for statement in compiled.expr.statements],
        axes=dict(compiled.expr.sizes),
        fused_axes={name: list(parts) for name, parts in compiled.form.fused},
        accumulate=compiled.expr.accumulate,
        arguments=[
            Argument(
                name=tensor.name,
                role="output" if tensor is tensors[-1] else "input",
                dtype=tensor.dtype,
                shape=tensor.caller_shape,
            )
            for tensor in tensors
        ],
        notes=notes,
        kernels=[_record(rank, kernel, source_suffix) for rank, kernel in enumerate(compiled.kernels, start=1)],
        reference=None if reference is None else reference.record,
    )


def _reference(compiled: CompiledOperator, device: DeviceSpec) -> ReferenceKernel | None:
    """The operator as plain CUDA C, by which ``roller profile`` judges its kernels; None where that cannot be said."""
    if device.code_generator == "opencl-source":
        return None
    try:
        return reference_kernel(compiled.expr, entry_name(compiled.expr.name))
    except ValueError:  # a dtype that the reference does not know
        return None


def _record(rank: int, kernel: RankedKernel, source_suffix: str) -> KernelRecord:
    built, program = kernel.built, kernel.program
    schedule, checked = program.schedule, built.verification
    return KernelRecord(
        rank=rank,
        entry=built.entry,
        source=f"kernel_{rank}.{source_suffix}",
        binary=f"kernel_{rank}.cubin" if built.binary is not None else None,
        schedule=f"kernel_{rank}.schedule.json",
        grid=built.grid,
        block=built.block,
        shared_bytes=built.shared_bytes,
        dynamic_shared_bytes=built.dynamic_shared_bytes,
        registers=built.registers,
        spill_bytes=built.spill_bytes,
        seconds=_rounded(program.estimate.seconds),
        bound=program.estimate.bound,
        stage_seconds={name: _rounded(value) for name, value in program.estimate.stage_seconds.items()},
        tiles={
            "registers": dict(schedule.register_tile),
            "shared": {**schedule.block_of, **schedule.step_of},
        },
        policy=program.policy,
        verified=None if checked is None else checked.passed,
        verification=None
        if checked is None
        else VerificationRecord(
            passed=checked.passed,
            method=checked.method,
            relative_error=_error_figure(checked.relative_error),
            tolerance=checked.tolerance,
            axis_sizes=dict(checked.axis_sizes),
            reason=checked.reason,
        ),
    )


def _rounded(seconds: float) -> float:
    """Six significant digits: enough for any estimate, and the same on every machine."""
    return float(f"{seconds:.6g}")


def _error_figure(error: float | None) -> float | None:
    """A measured error for a manifest: upper bound of its power of ten, since CPUs differ in the last bits."""
    if error is None or not math.isfinite(error) or error == 0.0:
        return None if error is None or error != 0.0 else 0.0
    return float(f"1e{math.ceil(math.log10(error))}")


def write_bundle(compiled: CompiledOperator, device: DeviceSpec, out: Path) -> Path:
    """Write ``out/<name>/`` whole or not at all; returns the directory."""
    record = manifest(compiled, device)
    target = out / compiled.expr.name
    out.mkdir(parents=True, exist_ok=True)
    with staged_directory(target) as directory:
        for entry, kernel in zip(record.kernels, compiled.kernels, strict=True):
            (directory / entry.source).write_text(kernel.built.source)
            if entry.binary is not None and kernel.built.binary is not None:
                (directory / entry.binary).write_bytes(kernel.built.binary)
            (directory / entry.schedule).write_bytes(to_json(kernel.program.schedule.to_json()))
        reference = _reference(compiled, device)
        if reference is not None:
            (directory / reference.record.source).write_text(reference.source)
        (directory / "manifest.json").write_bytes(to_json(record))
    return target


def verify_operators(
    expressions: Sequence[TensorExpr],
    device: DeviceSpec,
    *,
    top_k: int,
    pool: Executor,
    engine: str = "opencl",
    method: str = "both",
    ahead: int = 8,
) -> Iterator[tuple[str, list[Verification]]]:
    """Run the best ``top_k`` schedules of every operator against the reference, without compiling for the device.

    ``engine`` as in :func:`codegen.verify.verify`, ``method`` as in :func:`roller.programs.find_programs`.
    """
    started: list[tuple[str, list[Future[Verification]]]] = []
    for expr in expressions:
        form = kernel_form(expr)
        programs = find_programs(form, device, top_k, method).programs
        started.append((expr.name, [pool.submit(verify_schedule, form, p.schedule, engine) for p in programs]))
        if len(started) > ahead:
            name, futures = started.pop(0)
            yield name, [future.result() for future in futures]
    for name, futures in started:
        yield name, [future.result() for future in futures]
