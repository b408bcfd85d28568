"""Request to a worker process, and its answer."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.built import BuiltKernel
from codegen.target import Target
from codegen.verify.result import Verification
from sokoban.kernel.problem import Problem
from sokoban.schedule.patches import Schedule


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """Kernel to build.

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
