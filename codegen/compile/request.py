"""What a worker process is asked to build, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.target import Target
from codegen.tensor_map import TensorMap
from codegen.verify.result import Verification
from sokoban.kernel.problem import Problem
from sokoban.schedule.patches import Schedule


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """What to build.

    Attributes:
        form: the operator in canonical form, or what a kernel of a chain computes.
        schedule: the schedule to lower.
        entry: name of the kernel function.
        target: what the kernel is for.
        worthwhile_blocks: numbers of resident blocks of a unit that registers are squeezed for; None for any.
    """

    form: Problem
    schedule: Schedule
    entry: str
    target: Target
    worthwhile_blocks: tuple[int, ...] | None = None


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
            :func:`codegen.gpu.source.text.own_architecture`.
        tensor_maps: of the tensors that it takes as tensor maps.
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


@dataclass(frozen=True)
class BuiltProgram:
    """A program as it was built: its kernels in the order of their launches, one or several.

    Attributes:
        parts: the kernels.
        verification: the proof that all together compute the operator; None where none was asked for.
    """

    parts: tuple[BuiltKernel, ...]
    verification: Verification | None

    @property
    def error(self) -> str:
        """Why one of the kernels cannot be built; empty where all are."""
        return next((kernel.error for kernel in self.parts if kernel.error), "")

    @property
    def spill_bytes(self) -> int | None:
        """Bytes per thread spilled by the kernel that spills most; None without binaries."""
        return max((kernel.spill_bytes for kernel in self.parts if kernel.spill_bytes is not None), default=None)
