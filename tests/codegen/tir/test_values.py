"""Every function of the expression language, through TVM, in both precisions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from codegen.gpu.source.text import opencl_source
from codegen.tir.values import BFLOAT16_BITS, affine, constant, identity, stored_constant
from codegen.verify.gpu import verify
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.expression import AffineIndex
from sokoban.language.functions import FUNCTIONS
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.lowering import lower

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
NUMERIC = sorted(set(FUNCTIONS) - {*COMPARISONS, "and", "or", "not", "select"})


def form_of(text: str, dtype: str = "float32", size: int = 100, **more: Any) -> KernelForm:
    return kernel_form(operator_from_data({"expr": text, "sizes": {"i": size}, "dtype": dtype, **more}))


def flat(form: KernelForm, **changes: Any) -> TileSchedule:
    axis = form.spatial[0]
    return TileSchedule(block=sizes({axis: 32}), thread=sizes({axis: 4}), **changes)


def source_of(form: KernelForm) -> str:
    names = [tensor.name for tensor in (*form.expr.inputs, form.expr.output)]
    return opencl_source(lower(form, flat(form), entry="value"), names)


@pytest.mark.usefixtures("opencl", "emulator")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("function", NUMERIC)
def test_a_function_is_computed_as_the_reference_does(function: str, dtype: str) -> None:
    arguments = ", ".join(["X[i]", "Z[i]"][: FUNCTIONS[function].arity])
    text = f"Y[i] = neg({arguments})" if function == "neg" else f"Y[i] = {function}({arguments})"
    form = form_of(text, dtype)
    result = verify(form, flat(form), full_size=True)
    assert result.passed, result.reason
    # Vectors of two or four, too.
    result = verify(form, flat(form, vector=sizes({"Y": 1})), full_size=True, engine="emulator")
    assert result.passed, result.reason


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize(
    "text",
    [
        *(f"Y[i] = select({function}(X[i], Z[i]), X[i], 2*Z[i])" for function in COMPARISONS),
        "Y[i] = select(X[i] < 0 and not (Z[i] > 0.5 or i == 3), X[i], -Z[i])",
        "Y[i] = select(i < 50, X[i], 0) + i / 2",
        # The side that is not taken may be outside its tensor.
        "Y[i] = select(i >= 1, X[i - 1 | pad=0], 7)",
        "Y[i] = X[i] ** 2 + X[i] ** 3 + X[i] ** 0.5 + 2 ** X[i]",
    ],
)
def test_choices_and_powers_agree(text: str) -> None:
    form = form_of(text, **({"shapes": {"X": [100]}} if "pad" in text else {}))
    result = verify(form, flat(form), full_size=True)
    assert result.passed, result.reason


def test_a_square_is_a_product() -> None:
    text = source_of(form_of("Y[i] = X[i] ** 2"))
    assert "pow" not in text


def test_constants_keep_all_their_digits() -> None:
    for dtype, number in (("float64", 0.1234567890123456789), ("float32", float(np.float32(0.12345679)))):
        text = source_of(form_of(f"Y[i] = X[i] * {number!r}", dtype))
        assert number.hex() in text
    # Two constants that print alike stay as they are rather than take each other's place.
    text = source_of(form_of("Y[i] = X[i] * 0.12345678901 + 0.12345678902", "float64"))
    assert "1.234568e-01" in text


def test_infinities_are_infinite_and_of_integers_their_extremes() -> None:
    assert float(constant(math.inf, "float32").value) == math.inf
    assert float(constant(-math.inf, "float16").value) == -math.inf
    assert int(constant(-math.inf, "int8").value) == -128
    assert int(stored_constant(-math.inf, BFLOAT16_BITS).value) == 0xFF80


@pytest.mark.usefixtures("opencl", "emulator")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("engine", ["emulator", "opencl"])
def test_functions_of_infinities_are_theirs(dtype: str, engine: str) -> None:
    text = "Y[i] = max(s, log(abs(X[i + s - 1 | pad=-inf])))"
    form = kernel_form(
        operator_from_data({"expr": text, "sizes": {"i": 40, "s": 2}, "shapes": {"X": [40]}, "dtype": dtype})
    )
    schedule = TileSchedule(block=sizes({"i": 32}), thread=sizes({"i": 1}), step=sizes({"s": 2}))
    check = verify(form, schedule, engine=engine)
    assert check.passed, check.reason


def test_identities_are_finite() -> None:
    assert float(identity("max", "float32").value) == -np.finfo(np.float32).max
    assert float(identity("min", "float64").value) == np.finfo(np.float64).max
    assert float(identity("prod", "float32").value) == 1.0


def test_an_affine_index_is_its_value() -> None:
    index = AffineIndex.of({"h": 2, "w": -3}, 5)
    assert affine(index, {"h": 7, "w": 4}) == 5 + 2 * 7 - 3 * 4
