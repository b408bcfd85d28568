"""A kernel as text and machine code, before it lies in a bundle."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.launch_shape import LaunchShape
from codegen.tensor_map import TensorMap


@dataclass(frozen=True, kw_only=True)
class BuiltKernel:
    """A kernel as text and machine code.

    Attributes:
        entry: name of the function in the source.
        source: CUDA C++, OpenCL C or assembly.
        binary: cubin or shared object; None where only source can be made.
        grid, block: launch extents (x, y, z); of a shared object the number of blocks, each taken by one thread.
        shared_bytes: shared memory of a block, all of it; of a shared object the scratch memory of a thread.
        dynamic_shared_bytes: the part of it to give at launch.
        registers: registers per thread as compiled; None without a binary.
        spill_bytes: bytes per thread spilled to local memory, stores and loads; None without a binary.
        error: why there is no kernel; empty where there is one.
        architecture: what it is compiled for where that is not the request's,
            :func:`codegen.gpu.source.text.specific_architecture`.
        tensor_maps: of the tensors that it takes as tensor maps.
        launch: its grid by a size that is known at launch, which then is its last parameter.
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
    error: str = ""
    architecture: str | None = None
    tensor_maps: tuple[TensorMap, ...] = ()
    launch: LaunchShape | None = None
