"""Programs as they were built, ranked or struck out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from codegen.built import BuiltKernel
from codegen.compile.request import BuiltProgram
from codegen.verify.result import Verification
from hal.spec.device import DeviceSpec
from roller.construct.program import Program, ProgramPart
from sokoban.model.compiled import compiled_estimate


@dataclass(frozen=True)
class RankedKernel:
    """A program, what was built of it, kernel by kernel, and for what.

    Attributes:
        program: as its kernels are written.
        built: its kernels.
        device: what they are for.
        priced: the program for the size that its time is predicted for, where a size is known at launch; else None.
    """

    program: Program
    built: BuiltProgram
    device: DeviceSpec
    priced: Program | None = None

    @cached_property
    def seconds(self) -> float:
        """Time that the kernels are expected to take as they were compiled, launches included."""
        priced = self.priced or self.program
        parts = zip(priced.parts, self.built.parts, strict=True)
        more = (_compiled_seconds(part, built, self.device) - part.estimate.seconds for part, built in parts)
        return priced.estimate.seconds + sum(more)

    @property
    def parts(self) -> tuple[tuple[ProgramPart, BuiltKernel], ...]:
        """Computation, schedule and estimate of every kernel, and the kernel, in the order of the launches."""
        return tuple(zip(self.program.parts, self.built.parts, strict=True))


@dataclass(frozen=True)
class StruckOut:
    """A program that computes something else than its operator, as a run of its kernels showed."""

    program: Program
    verification: Verification


def entry_name(name: str) -> str:
    """Kernel name for an operator: ``matmul-1`` is ``roller_matmul_1``."""
    return "roller_" + "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


def _compiled_seconds(part: ProgramPart, built: BuiltKernel, device: DeviceSpec) -> float:
    """A kernel's expected time by the registers that the compiler gave it; the estimate where it reported none."""
    estimate = compiled_estimate(
        part.problem, part.schedule, device, registers=built.registers, spill_bytes=built.spill_bytes or 0
    )
    return (estimate or part.estimate).seconds
