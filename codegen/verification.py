"""The result of a verification; apart from :mod:`codegen.verify`, which needs TVM to obtain one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sokoban.expression import TensorExpr

#: Largest accepted relative error by dtype of the output (narrowest dtype that takes part). Sums of integers are exact.
#: Products of eight-bit floats are, too, but matrix units keep no more than some 13 bits of their sums.
TOLERANCE = {
    "float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2, "int8": 0.0, "int32": 0.0,
    "float8_e4m3fn": 2e-2, "float8_e5m2": 2e-2,
}  # fmt: skip

#: What rounding operands to the ten bits of TensorFloat-32 may add: half a unit in the last place of each of two
#: factors is 2**-10 of a product, whose errors add up as the products themselves do; some deviations of that.
TF32_TOLERANCE = 8 * 2.0**-10


def tolerance_of(expr: TensorExpr) -> float:
    """The largest relative error that a kernel of ``expr`` may have, by what takes part in it."""
    dtypes = {tensor.dtype for tensor in (*expr.inputs, expr.output)}
    return max([TOLERANCE[dtype] for dtype in dtypes] + [TF32_TOLERANCE] * expr.allow_tf32)


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
