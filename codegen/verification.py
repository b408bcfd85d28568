"""The result of a verification; apart from :mod:`codegen.verify`, which needs TVM to obtain one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Largest accepted relative error by dtype of the output (narrowest dtype that takes part).
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Verification:
    """What was run and what came out.

    Attributes:
        passed: the outputs agree and the guards are untouched.
        method: how the kernel was run: the target, and the twin where there was one.
        relative_error: largest |out - reference| / (|reference| + rms(reference)); None where nothing ran.
        tolerance: the bound it was held to.
        axis_sizes: sizes of the problem that ran.
        reason: why it did not pass or did not run; empty otherwise.
    """

    passed: bool
    method: str
    relative_error: float | None
    tolerance: float
    axis_sizes: Mapping[str, int]
    reason: str = ""
