"""Which operators are one kernel: any at all, but for those that reduce twice or read a reduction elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.normalize import drop_unit_axes, inline_pointwise
from sokoban.language.expression import TensorExpr, loads
from sokoban.language.operators import operator_from_data
from tests.sokoban.strategies import operators

#: Distinct operators that have to be one kernel, and the share of operators that may need a second one.
ENOUGH = 120
MAY_NEED_TWO_KERNELS = 0.15
#: How many to draw for those.
DRAWS = 360


def needs_two_kernels(expr: TensorExpr) -> bool:
    """Two reductions, or one whose result is read at shifted indices: nothing else may be refused."""
    inlined = inline_pointwise(drop_unit_axes(expr))
    reductions = {statement.tensor for statement in inlined.statements if statement.reduction is not None}
    shifted = any(
        load.tensor in reductions
        and any((index.terms or index.offset) and not index.is_plain_axis for index in load.indices)
        for statement in inlined.statements
        for load in loads(statement.value)
    )
    return len(reductions) > 1 or shifted


def form_of(data: dict[str, Any]) -> KernelForm | None:
    """The operator as one kernel; None where it has to be two."""
    expr = operator_from_data(data)
    try:
        return kernel_form(expr)
    except InputError as error:
        assert "cannot be one kernel" in str(error)
        assert needs_two_kernels(expr), f"{error}\n{data}"
        return None


@pytest.mark.slow
def test_enough_random_operators_are_one_kernel() -> None:
    forms: dict[str, KernelForm | None] = {}

    @settings(max_examples=DRAWS, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
    @given(operators(("float32", "float32", "float16")))
    def draw(data: dict[str, Any]) -> None:
        # The generator repeats itself and varies numbers of one operator.
        if repr(data) not in forms:
            forms[repr(data)] = form_of(data)

    draw()
    kernels = sum(form is not None for form in forms.values())
    assert kernels >= ENOUGH
    assert len(forms) - kernels < MAY_NEED_TWO_KERNELS * len(forms)
