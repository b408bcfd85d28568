"""Schedules to kernels for processors: assembly and shared object."""

from __future__ import annotations

from dataclasses import replace

from codegen.built import BuiltKernel
from codegen.cpu.lower import lower
from codegen.cpu.shared_object import build_shared_object
from codegen.tir.lowering import AnyRequest


def cpu_kernel(request: AnyRequest, *, needs_vectors: bool = True) -> BuiltKernel:
    """A kernel as a shared object.

    Args:
        needs_vectors: whether it refuses to run where the processor lacks vectors of the target's width. LLVM splits
            wider ones, so that a twin for another processor runs anywhere.

    Raises:
        LoweringError: the schedule does not fit the operator, or the compiler refuses it.
    """
    lowered = lower(request)
    if not needs_vectors:
        lowered = replace(lowered, vector_bytes=0)
    library = build_shared_object(lowered, request.target.architecture, len(request.problem.tensors))
    return BuiltKernel(
        entry=library.entry,
        source=library.assembly,
        binary=library.data,
        grid=(library.blocks, 1, 1),
        block=(1, 1, 1),
        shared_bytes=library.scratch_bytes,
        dynamic_shared_bytes=library.scratch_bytes,
        registers=None,
        spill_bytes=None,
    )
