"""One schedule to one finished kernel: source, binary, resources, proof. Runs in a worker process of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from codegen.chain import ChainCheck, Problem, Schedule, tensors_of
from codegen.generators import GENERATORS, engine_for
from codegen.verification import Verification
from sokoban import KernelForm, TileSchedule
from sokoban.expression import DTYPE_BYTES

if TYPE_CHECKING:
    from codegen.lower import Lowered


@dataclass(frozen=True)
class BuildRequest:
    """What to build.

    Attributes:
        form: the operator in canonical form, or what a kernel of a chain computes.
        schedule: the schedule to lower.
        entry: name of the kernel function.
        generator: ``"cuda"`` (source and cubin), ``"cuda-source"``, ``"opencl-source"`` or ``"llvm"`` (shared library).
        architecture: ``"sm_70"``, ``"icelake-server"`` and the like.
        lanes: of a TEU: work-items of a wavefront for OpenCL, float32 elements of a vector for LLVM.
        verify: run the schedule on a cut-down problem too; of a chain's kernels only all together are verified.
    """

    form: Problem
    schedule: Schedule
    entry: str
    generator: str
    architecture: str
    lanes: int
    verify: bool


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel as text and machine code.

    Attributes:
        entry: name of the function in the source.
        source: CUDA C++, OpenCL C or assembly.
        binary: cubin or shared library; None where only source can be made.
        grid, block: launch extents (x, y, z); of a shared library the number of blocks, each taken by one thread.
        shared_bytes: shared memory of a block, all of it; of a shared library the scratch memory of a thread.
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
    from codegen.device_compiler import CompileError
    from codegen.lower import LoweringError

    try:
        built = _BUILDERS[request.generator](request)
    except (LoweringError, CompileError, ValueError) as error:
        return BuiltKernel(request.entry, "", None, (0, 0, 0), (0, 0, 0), 0, 0, None, None, None, str(error))
    if not request.verify:
        return built
    form, schedule = request.form, request.schedule
    assert isinstance(form, KernelForm) and isinstance(schedule, TileSchedule)
    engine = engine_for(GENERATORS[request.generator].lane)
    return replace(built, verification=verify_schedule(form, schedule, engine, request.architecture, request.lanes))


def _build_cuda(request: BuildRequest) -> BuiltKernel:
    """Source and cubin."""
    from codegen.device_compiler import compile_cuda
    from codegen.lower_problem import lower_problem
    from codegen.prelude import strip_prelude
    from codegen.residency import squeezed
    from codegen.targets import cuda_source, own_architecture

    own = own_architecture(request.schedule, request.architecture)
    architecture = own or request.architecture
    lowered = lower_problem(request.form, request.schedule, entry=request.entry)
    source = strip_prelude(cuda_source(lowered, architecture, _parameters(request)))
    compiled = compile_cuda(source, architecture, name=request.entry)
    if lowered.has_barriers:
        # Other kernels are bound by memory, or their registers are no matter of choice.
        threads, shared = math.prod(lowered.block), compiled.shared_bytes + lowered.dynamic_shared_bytes
        source, compiled = squeezed(source, compiled, threads, shared, architecture, name=request.entry)
    kernel = _source_kernel(request, lowered, source, own)
    return replace(
        kernel,
        binary=compiled.cubin,
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        shared_bytes=compiled.shared_bytes + lowered.dynamic_shared_bytes,
    )


def _build_cuda_source(request: BuildRequest) -> BuiltKernel:
    from codegen.lower_problem import lower_problem
    from codegen.prelude import strip_prelude
    from codegen.targets import cuda_source, own_architecture

    own = own_architecture(request.schedule, request.architecture)
    lowered = lower_problem(request.form, request.schedule, entry=request.entry)
    source = strip_prelude(cuda_source(lowered, own or request.architecture, _parameters(request)))
    return _source_kernel(request, lowered, source, own)


def _build_opencl_source(request: BuildRequest) -> BuiltKernel:
    from codegen.lower_problem import lower_problem
    from codegen.targets import opencl_source

    lowered = lower_problem(request.form, request.schedule, entry=request.entry, dynamic_shared=False)
    return _source_kernel(request, lowered, opencl_source(lowered, _parameters(request), request.lanes))


def _parameters(request: BuildRequest) -> list[str]:
    return [tensor.name for tensor in tensors_of(request.form)]


def _source_kernel(request: BuildRequest, lowered: Lowered, source: str, own: str | None = None) -> BuiltKernel:
    """A kernel as source alone."""
    from codegen.targets import KERNEL_SUFFIX, static_shared_bytes

    return BuiltKernel(
        request.entry + KERNEL_SUFFIX,
        source,
        None,
        lowered.grid,
        lowered.block,
        static_shared_bytes(source) + lowered.dynamic_shared_bytes,
        lowered.dynamic_shared_bytes,
        None,
        None,
        None,
        architecture=own,
    )


def _build_llvm(request: BuildRequest) -> BuiltKernel:
    """Assembly and shared library."""
    from codegen.cpu_build import build_library
    from codegen.lower import LoweringError
    from codegen.lower_cpu import lower_cpu

    form, schedule = request.form, request.schedule
    if not isinstance(form, KernelForm) or not isinstance(schedule, TileSchedule):
        raise LoweringError(f"{request.entry}: shared libraries hold operators, no transforms between kernels")
    vector_bytes = DTYPE_BYTES["float32"] * request.lanes
    lowered = lower_cpu(form, schedule, entry=f"{request.entry}_blocks", vector_bytes=vector_bytes)
    built = build_library(lowered, request.architecture, len(form.expr.inputs) + 1)
    return BuiltKernel(
        built.entry,
        built.assembly,
        built.library,
        (built.blocks, 1, 1),
        (1, 1, 1),
        built.scratch_bytes,
        built.scratch_bytes,
        None,
        None,
        None,
    )


#: Generator -> what builds with it.
_BUILDERS: Mapping[str, Callable[[BuildRequest], BuiltKernel]] = {
    "cuda": _build_cuda,
    "cuda-source": _build_cuda_source,
    "opencl-source": _build_opencl_source,
    "llvm": _build_llvm,
}


def verify_schedule(
    form: KernelForm, schedule: TileSchedule, engine: str = "opencl", architecture: str = "", lanes: int = 1
) -> Verification:
    """Run one schedule against the reference; see :func:`codegen.verify.verify`, and for the engine ``"native"``, which
    alone needs to know the processor, :func:`codegen.verify_native.verify_native`."""
    if engine == "native":
        from codegen.verify_native import verify_native

        return verify_native(form, schedule, architecture=architecture, lanes=lanes)
    from codegen.verify import verify

    return verify(form, schedule, engine=engine)


def verify_chain(check: ChainCheck, engine: str = "opencl") -> Verification:
    """Run the kernels of a chain against the reference; see :func:`codegen.verify.verify_chain`."""
    from codegen.verify import verify_chain

    return verify_chain(check, engine=engine)
