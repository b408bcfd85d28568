"""One schedule to one finished kernel: source, binary, resources; and its proof. Runs in worker processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from codegen.built import BuiltKernel
from codegen.compile.request import BuildRequest
from codegen.target import Target
from codegen.tir.lowering import AnyRequest, LoweringRequest
from codegen.verify.chain import ChainCheck
from codegen.verify.engines import ORDER_SEEDS, engine_for
from codegen.verify.result import Verification
from sokoban.kernel.form import KernelForm
from sokoban.schedule.tile import TileSchedule


def build_kernel(request: BuildRequest) -> BuiltKernel:
    """Lower and compile one schedule. Never raises for a schedule that does not build: the result carries the
    reason."""
    from codegen.gpu.source.nvrtc import CompileError
    from codegen.tir.lowered import LoweringError

    try:
        return _BUILDERS[request.target.generator](request)
    except (LoweringError, CompileError, ValueError) as error:
        return BuiltKernel(
            entry=request.entry,
            source="",
            binary=None,
            grid=(0, 0, 0),
            block=(0, 0, 0),
            shared_bytes=0,
            dynamic_shared_bytes=0,
            registers=None,
            spill_bytes=None,
            error=str(error),
        )


def _build_cuda(request: BuildRequest) -> BuiltKernel:
    """Source and cubin."""
    from codegen.gpu.source.nvrtc import compile_cuda
    from codegen.gpu.source.residency import squeezed
    from codegen.gpu.sources import cuda_kernel

    lowered, kernel = cuda_kernel(_lowering(request))
    architecture, source = kernel.architecture or request.target.architecture, kernel.source
    compiled = compile_cuda(source, architecture, name=request.entry)
    if lowered.has_barriers:
        # Other kernels are bound by memory, or their registers are no matter of choice.
        threads, shared = math.prod(lowered.block), compiled.shared_bytes + lowered.dynamic_shared_bytes
        source, compiled = squeezed(
            source, compiled, threads, shared, architecture, name=request.entry, worthwhile=request.worthwhile_blocks
        )
    return replace(
        kernel,
        source=source,
        binary=compiled.cubin,
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        shared_bytes=compiled.shared_bytes + lowered.dynamic_shared_bytes,
    )


def _build_cuda_source(request: BuildRequest) -> BuiltKernel:
    from codegen.gpu.sources import cuda_kernel

    return cuda_kernel(_lowering(request))[1]


def _build_opencl_source(request: BuildRequest) -> BuiltKernel:
    from codegen.gpu.sources import opencl_kernel

    return opencl_kernel(_lowering(request))


def _build_llvm(request: BuildRequest) -> BuiltKernel:
    """Assembly and shared object."""
    from codegen.cpu.kernel import cpu_kernel

    return cpu_kernel(_lowering(request))


def _lowering(request: BuildRequest) -> AnyRequest:
    return LoweringRequest(request.form, request.schedule, request.entry, request.target)


#: Generator -> what builds with it.
_BUILDERS: Mapping[str, Callable[[BuildRequest], BuiltKernel]] = {
    "cuda": _build_cuda,
    "cuda-source": _build_cuda_source,
    "opencl-source": _build_opencl_source,
    "llvm": _build_llvm,
}


def verify_schedule(
    form: KernelForm,
    schedule: TileSchedule,
    target: Target,
    engine: str | None = None,
    order_seeds: Sequence[int] = ORDER_SEEDS,
) -> Verification:
    """Run one schedule against the reference.

    Args:
        target: what it is for.
        engine: what runs it; None for what :func:`codegen.verify.engines.engine_for` says.
        order_seeds: of the orders in which the emulator runs threads, warps and blocks.
    """
    engine = engine or engine_for(target.generator)
    if engine == "native":
        from codegen.verify.cpu import verify_cpu

        return verify_cpu(form, schedule, target)
    from codegen.verify.gpu import verify

    return verify(form, schedule, engine=engine, target=target, order_seeds=order_seeds)


def verify_chain(
    check: ChainCheck, target: Target, engine: str | None = None, order_seeds: Sequence[int] = ORDER_SEEDS
) -> Verification:
    """Run the kernels of a chain against the reference; arguments as for :func:`verify_schedule`."""
    engine = engine or engine_for(target.generator)
    if engine == "native":
        from codegen.verify.cpu import verify_cpu_chain

        return verify_cpu_chain(check, target)
    from codegen.verify.gpu import verify_chain

    return verify_chain(check, engine=engine, target=target, order_seeds=order_seeds)
