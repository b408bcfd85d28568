"""One schedule to one finished kernel: source, binary, resources, proof. Runs in a worker process of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.chain import ChainCheck, Problem, Schedule, tensors_of
from codegen.verification import Verification
from sokoban import KernelForm, TileSchedule


@dataclass(frozen=True)
class BuildRequest:
    """What to build.

    Attributes:
        form: the operator in canonical form, or what a kernel of a chain computes.
        schedule: the schedule to lower.
        entry: name of the kernel function.
        generator: ``"cuda"`` (source and cubin), ``"cuda-source"`` or ``"opencl-source"``.
        architecture: ``"sm_70"`` and the like.
        wavefront: lanes of a TEU, for OpenCL.
        verify: run the schedule on a cut-down problem too; of a chain's kernels only all together are verified.
    """

    form: Problem
    schedule: Schedule
    entry: str
    generator: str
    architecture: str
    wavefront: int
    verify: bool


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel as text and machine code.

    Attributes:
        entry: name of the function in the source.
        source: CUDA C++ or OpenCL C.
        binary: cubin; None where only source can be made.
        grid, block: launch extents (x, y, z).
        shared_bytes: shared memory of a block, all of it.
        dynamic_shared_bytes: the part of it to give at launch.
        registers: registers per thread as compiled; None without a binary.
        spill_bytes: bytes per thread spilled to local memory, stores and loads; None without a binary.
        verification: the proof; None where none was asked for.
        error: why there is no kernel; empty where there is one.
        architecture: what it is compiled for where that is not the request's, :func:`codegen.targets.own_architecture`.
    """

    entry: str
    source: str
    binary: bytes | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    dynamic_shared_bytes: int
    registers: int | None
    spill_bytes: int | None
    verification: Verification | None
    error: str = ""
    architecture: str | None = None


@dataclass(frozen=True)
class BuiltChain:
    """The kernels of a chain, in the order of their launches."""

    launches: tuple[BuiltKernel, ...]
    verification: Verification | None

    @property
    def error(self) -> str:
        """Why one of them cannot be built; empty where all are."""
        return next((kernel.error for kernel in self.launches if kernel.error), "")

    @property
    def spill_bytes(self) -> int | None:
        """Of the kernel that spills most; None without binaries."""
        return max((kernel.spill_bytes for kernel in self.launches if kernel.spill_bytes is not None), default=None)


def build_kernel(request: BuildRequest) -> BuiltKernel:
    """Lower, compile and (on request) verify one schedule. Never raises for a schedule that does not build: the
    result carries the reason."""
    from codegen.device_compiler import CompileError, compile_cuda
    from codegen.lower_problem import lower_problem
    from codegen.prelude import strip_prelude
    from codegen.residency import squeezed
    from codegen.targets import (
        KERNEL_SUFFIX,
        LoweringError,
        cuda_source,
        opencl_source,
        own_architecture,
        static_shared_bytes,
    )

    form = request.form
    parameters = [tensor.name for tensor in tensors_of(form)]
    registers = spills = binary = None
    own = own_architecture(request.schedule, request.architecture)
    architecture = own or request.architecture
    try:
        lowered = lower_problem(
            form, request.schedule, entry=request.entry, dynamic_shared=request.generator != "opencl-source"
        )
        if request.generator == "opencl-source":
            source = opencl_source(lowered, parameters, request.wavefront)
        else:
            source = strip_prelude(cuda_source(lowered, architecture, parameters))
        shared_bytes = static_shared_bytes(source) + lowered.dynamic_shared_bytes
        if request.generator == "cuda":
            compiled = compile_cuda(source, architecture, name=request.entry)
            if lowered.has_barriers:
                # Other kernels are bound by memory, or their registers are no matter of choice.
                threads, shared = math.prod(lowered.block), compiled.shared_bytes + lowered.dynamic_shared_bytes
                source, compiled = squeezed(source, compiled, threads, shared, architecture, name=request.entry)
            binary, registers, spills = compiled.cubin, compiled.registers, compiled.spill_bytes
            shared_bytes = compiled.shared_bytes + lowered.dynamic_shared_bytes
    except (LoweringError, CompileError, ValueError) as error:
        return BuiltKernel(request.entry, "", None, (0, 0, 0), (0, 0, 0), 0, 0, None, None, None, str(error))
    verification = None
    if request.verify:
        from codegen.verify import verify

        assert isinstance(form, KernelForm) and isinstance(request.schedule, TileSchedule)
        verification = verify(form, request.schedule)
    return BuiltKernel(
        request.entry + KERNEL_SUFFIX,
        source,
        binary,
        lowered.grid,
        lowered.block,
        shared_bytes,
        lowered.dynamic_shared_bytes,
        registers,
        spills,
        verification,
        architecture=own,
    )


def verify_schedule(form: KernelForm, schedule: TileSchedule, engine: str = "opencl") -> Verification:
    """Run one schedule against the reference; see :func:`codegen.verify.verify`."""
    from codegen.verify import verify

    return verify(form, schedule, engine=engine)


def verify_chain(check: ChainCheck, engine: str = "opencl") -> Verification:
    """Run the kernels of a chain against the reference; see :func:`codegen.verify.verify_chain`."""
    from codegen.verify import verify_chain

    return verify_chain(check, engine=engine)
