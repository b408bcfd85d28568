"""Outputs judged: relative errors, and the largest that a kernel of an operator may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sokoban.language.expression import FLOAT8_DTYPES, TensorExpr
from sokoban.language.named.attention_gradient import AttentionGradient

#: Largest accepted relative error by dtype of the output (narrowest dtype that takes part). Sums of integers are exact.
#: Products of eight-bit floats are, too, but matrix units keep no more than some 13 bits of their sums.
TOLERANCE = {
    "float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2, "int8": 0.0, "int32": 0.0,
    "float8_e4m3fn": 2e-2, "float8_e5m2": 2e-2,
}  # fmt: skip

#: Half a unit in the last of TensorFloat-32's ten bits, and what rounding operands to them may add: that of each of two
#: factors is 2**-10 of a product, whose errors add up as the products themselves do; some deviations of that.
TF32_HALF_UNIT = 2.0**-11
TF32_TOLERANCE = 16 * TF32_HALF_UNIT

#: How much of itself a number changes by at most when it is rounded to a narrow type: half a unit in its last place.
HALF_UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

#: What stands for infinity in the narrowest dtype.
LARGEST_HALF = 65504.0

Array = NDArray[Any]


def tolerance_of(expr: TensorExpr) -> float:
    """The largest relative error that a kernel of ``expr`` may have, by what takes part in it.

    >>> from sokoban.language.operators import operator_from_data
    >>> tolerance_of(operator_from_data({"op": "matmul", "m": 8, "n": 8, "k": 8, "dtype": "float16"}))
    0.02
    """
    dtypes = {tensor.dtype for tensor in (*expr.inputs, expr.output)}
    return max([TOLERANCE[dtype] for dtype in dtypes] + [TF32_TOLERANCE] * expr.allow_tf32)


def exact_tolerance(expr: TensorExpr) -> float:
    """The largest relative error of a kernel of ``expr`` whose every operation is rounded as the kernel asks for.

    That is what sums of its accumulator's type may be off by, and twice the rounding of a narrower output. Matrix units
    and functions of a board are less exact, for which :func:`tolerance_of` has room.

    >>> from sokoban.language.operators import operator_from_data
    >>> operator = {"op": "matmul", "m": 8, "n": 8, "k": 8, "dtype": "float16", "accumulate": "float32"}
    >>> exact_tolerance(operator_from_data(operator)) == 1e-4 + 2 * 2**-11
    True
    """
    if expr.output.dtype in FLOAT8_DTYPES:
        return tolerance_of(expr)
    sums = max(TOLERANCE[expr.final_dtype], TF32_TOLERANCE * expr.allow_tf32)
    is_rounded = (expr.final_dtype, expr.output.dtype) == ("float64", "float32")
    return sums + 2 * (2.0**-24 if is_rounded else HALF_UNITS.get(expr.output.dtype, 0.0))


def output_widths(expr: TensorExpr) -> tuple[int, ...]:
    """Columns of the tensors that lie side by side in an output's rows; empty where it is one tensor.

    >>> from sokoban.language.operators import operator_from_data
    >>> gradient = {"op": "attention_gradient", "of": "keys", "b": 1, "heads": 1, "queries": 8, "head_dim": 16}
    >>> output_widths(operator_from_data(gradient)), output_widths(operator_from_data({**gradient, "of": "queries"}))
    ((16, 16), ())
    """
    gradient = None if expr.epilogue else expr.operator_as(AttentionGradient)
    return gradient.row_widths if gradient is not None and gradient.of == "keys" else ()


def judge(values: Array, expected: Array, tolerance: float, widths: Sequence[int] = ()) -> tuple[float, str]:
    """Relative error of an output, and what is wrong with it (empty where nothing is).

    Args:
        widths: columns of the tensors that lie side by side in its rows, as :func:`output_widths` has them.

    >>> judge(np.array([1.0, np.nan]), np.array([1.0, 2.0]), 1e-4)
    (inf, '1 of 2 outputs not written, or read outside a tensor')
    """
    result = values.reshape(expected.shape).astype(np.float64)
    unwritten = int(np.isnan(result).sum() - np.isnan(expected).sum())
    if unwritten > 0:
        return float("inf"), f"{unwritten} of {result.size} outputs not written, or read outside a tensor"
    error = relative_error(result, expected, widths)
    return error, "" if error <= tolerance else f"relative error {error:.3g} is above {tolerance:.3g}"


def relative_error(result: Array, expected: Array, widths: Sequence[int] = ()) -> float:
    """Largest ``|result - expected| / (|expected| + rms(expected))``: elements near zero are judged by the others, of
    their own tensor where several lie side by side (``widths`` columns of each).

    Infinities have to be infinite or the largest finite number of the same sign, from which kernels begin extremes;
    what the reference finds undefined is not judged.

    >>> relative_error(np.array([3.0, 1.5]), np.array([3.0, 1.0])) == 0.5 / (1.0 + 5.0**0.5)
    True
    """
    if widths:
        edges = np.cumsum(widths)[:-1]
        pairs = zip(np.split(result, edges, axis=-1), np.split(expected, edges, axis=-1), strict=True)
        return max(relative_error(*pair) for pair in pairs)
    finite = np.isfinite(expected)
    infinite = np.isinf(expected)
    if not (np.isfinite(result) | ~finite).all():
        return float("inf")
    if not (np.sign(expected[infinite]) * result[infinite] > LARGEST_HALF / 2).all():
        return float("inf")
    scale = float(np.sqrt(np.mean(np.square(expected[finite])))) if finite.any() else 0.0
    denominator = np.abs(expected[finite]) + max(scale, 1e-30)
    return float(np.max(np.abs(result[finite] - expected[finite]) / denominator, initial=0.0))
