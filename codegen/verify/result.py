"""The result of a verification; :mod:`codegen.verify.gpu`, which obtains one, needs TVM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: The method of a verification for which this machine has no engine.
NOT_RUN = "none"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Record of a run and its outcome.

    Attributes:
        passed: the outputs agree and the guards are untouched.
        method: how the kernel was run: the target, and the twin where there was one; :data:`NOT_RUN` where nothing ran.
        relative_error: largest |out - reference| / (|reference| + rms(reference)); None where nothing ran.
        tolerance: the bound it was held to.
        axis_sizes: sizes of the problem that ran.
        reason: why it did not pass or did not run; empty otherwise.
        engine: what ran it, a key of :data:`codegen.verify.engines.CHECKS`; empty where nothing did.
        checks: what that looks at.
        seeds: of the orders in which threads, warps and blocks ran, where the engine draws those.
        needless: barriers, waits and fences that ordered nothing, whatever the seed: ``line 41: __syncthreads();``.
        sizes: that are known at launch, for each of which it ran.
    """

    passed: bool
    method: str
    relative_error: float | None
    tolerance: float
    axis_sizes: Mapping[str, int]
    reason: str = ""
    engine: str = ""
    checks: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    needless: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def ran(self) -> bool:
        """True if an engine was at hand to run the kernel."""
        return self.method != NOT_RUN

    @property
    def is_wrong(self) -> bool:
        """True if an engine ran the kernel and found that it computes something else."""
        return self.ran and not self.passed
