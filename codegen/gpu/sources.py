"""Schedules to kernels as source alone: what device compilers, verification and boards without a compiler here take."""

from __future__ import annotations

from codegen.built import BuiltKernel
from codegen.gpu.lower import lower
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import cuda_source, opencl_source, specific_architecture, static_shared_bytes
from codegen.tir.lowered import KERNEL_SUFFIX, Lowered
from codegen.tir.lowering import AnyRequest


def cuda_kernel(request: AnyRequest) -> tuple[Lowered, BuiltKernel]:
    """A kernel in CUDA C++, lowered and as text.

    Raises:
        LoweringError: the schedule does not fit the operator.
        ValueError: a schedule of matrix instructions does not fit the operator or the instruction.
    """
    specific = specific_architecture(request.schedule, request.target.architecture)
    lowered = lower(request)
    text = strip_prelude(cuda_source(lowered, specific or request.target.architecture, _parameters(request)))
    return lowered, _kernel(request, lowered, text, specific)


def opencl_kernel(request: AnyRequest) -> BuiltKernel:
    """A kernel in OpenCL C. Raises as :func:`cuda_kernel` does."""
    lowered = lower(request)
    return _kernel(request, lowered, opencl_source(lowered, _parameters(request), request.target.lanes))


def _parameters(request: AnyRequest) -> list[str]:
    return [tensor.name for tensor in request.problem.tensors]


def _kernel(request: AnyRequest, lowered: Lowered, text: str, specific: str | None = None) -> BuiltKernel:
    return BuiltKernel(
        entry=request.entry + KERNEL_SUFFIX,
        source=text,
        binary=None,
        grid=lowered.grid,
        block=lowered.block,
        shared_bytes=static_shared_bytes(text) + lowered.dynamic_shared_bytes,
        dynamic_shared_bytes=lowered.dynamic_shared_bytes,
        registers=None,
        spill_bytes=None,
        architecture=specific,
        tensor_maps=lowered.maps,
        launch=lowered.launch,
    )
