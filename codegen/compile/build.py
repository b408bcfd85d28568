"""One schedule to one finished kernel: source, binary, resources; and its proof. Runs in worker processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from codegen.compile.request import BuildRequest, BuiltKernel
from codegen.target import Target
from codegen.tir.lowering import LoweringRequest
from codegen.verify.chain import ChainCheck
from codegen.verify.engines import ORDER_SEEDS, engine_for
from codegen.verify.result import Verification
from sokoban.kernel.form import KernelForm
from sokoban.kernel.problem import tensors_of
from sokoban.schedule.tile import TileSchedule

if TYPE_CHECKING:
    from codegen.tir.lowered import Lowered


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
    from codegen.gpu.lower import lower
    from codegen.gpu.source.nvrtc import compile_cuda
    from codegen.gpu.source.prelude import strip_prelude
    from codegen.gpu.source.residency import squeezed
    from codegen.gpu.source.text import cuda_source, own_architecture

    own = own_architecture(request.schedule, request.target.architecture)
    architecture = own or request.target.architecture
    lowered = lower(_lowering(request))
    source = strip_prelude(cuda_source(lowered, architecture, _parameters(request)))
    compiled = compile_cuda(source, architecture, name=request.entry)
    if lowered.has_barriers:
        # Other kernels are bound by memory, or their registers are no matter of choice.
        threads, shared = math.prod(lowered.block), compiled.shared_bytes + lowered.dynamic_shared_bytes
        source, compiled = squeezed(
            source, compiled, threads, shared, architecture, name=request.entry, worthwhile=request.worthwhile_blocks
        )
    kernel = _source_kernel(request, lowered, source, own)
    return replace(
        kernel,
        binary=compiled.cubin,
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        shared_bytes=compiled.shared_bytes + lowered.dynamic_shared_bytes,
    )


def _build_cuda_source(request: BuildRequest) -> BuiltKernel:
    from codegen.gpu.lower import lower
    from codegen.gpu.source.prelude import strip_prelude
    from codegen.gpu.source.text import cuda_source, own_architecture

    own = own_architecture(request.schedule, request.target.architecture)
    lowered = lower(_lowering(request))
    source = strip_prelude(cuda_source(lowered, own or request.target.architecture, _parameters(request)))
    return _source_kernel(request, lowered, source, own)


def _build_opencl_source(request: BuildRequest) -> BuiltKernel:
    from codegen.gpu.lower import lower
    from codegen.gpu.source.text import opencl_source

    lowered = lower(_lowering(request))
    return _source_kernel(request, lowered, opencl_source(lowered, _parameters(request), request.target.lanes))


def _lowering(request: BuildRequest) -> LoweringRequest:
    return LoweringRequest(request.form, request.schedule, request.entry, request.target)


def _parameters(request: BuildRequest) -> list[str]:
    return [tensor.name for tensor in tensors_of(request.form)]


def _source_kernel(request: BuildRequest, lowered: Lowered, source: str, own: str | None = None) -> BuiltKernel:
    """A kernel as source alone."""
    from codegen.gpu.source.text import static_shared_bytes
    from codegen.tir.lowered import KERNEL_SUFFIX

    return BuiltKernel(
        entry=request.entry + KERNEL_SUFFIX,
        source=source,
        binary=None,
        grid=lowered.grid,
        block=lowered.block,
        shared_bytes=static_shared_bytes(source) + lowered.dynamic_shared_bytes,
        dynamic_shared_bytes=lowered.dynamic_shared_bytes,
        registers=None,
        spill_bytes=None,
        architecture=own,
        tensor_maps=lowered.maps,
    )


def _build_llvm(request: BuildRequest) -> BuiltKernel:
    """Assembly and shared object."""
    from codegen.cpu.lower import lower
    from codegen.cpu.shared_object import build_shared_object

    lowered = lower(_lowering(request))
    built = build_shared_object(lowered, request.target.architecture, len(_parameters(request)))
    return BuiltKernel(
        entry=built.entry,
        source=built.assembly,
        binary=built.data,
        grid=(built.blocks, 1, 1),
        block=(1, 1, 1),
        shared_bytes=built.scratch_bytes,
        dynamic_shared_bytes=built.scratch_bytes,
        registers=None,
        spill_bytes=None,
    )


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
