"""A point-wise function that is defined in one line is computed, priced and differentiated by everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from codegen.bundle.reference import reference_kernel
from codegen.gpu.adjacent import is_scalar
from codegen.target import Target
from codegen.verify.cpu import verify_cpu
from codegen.verify.gpu import verify
from hal.catalog import load_device
from hal.microbench.cpu.native import host_architecture
from roller.construct.construct import construct
from roller.estimate.derivative import derivative
from roller.library.parts import elementwise
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import FUNCTION_INSTRUCTIONS, value_instructions
from sokoban.language.expression import Load, Reduction, loads
from sokoban.language.functions import FUNCTIONS, Function, X, call
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.schedule.tile import TileSchedule, sizes

#: x * tanh(log(1 + exp(x))).
MISH = Function(name="mish", value=call("mul", X, call("tanh", call("log", call("add", 1.0, call("exp", X))))))

PRODUCT = {"expr": "C[m,n] = sum(k, A[m,k] * B[k,n]); Y[m,n] = mish(C[m,n])", "sizes": {"m": 32, "n": 40, "k": 16}}


@pytest.fixture(autouse=True)
def mish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FUNCTIONS, "mish", MISH)  # type: ignore[arg-type]


def form_of(**data: Any) -> KernelForm:
    return kernel_form(operator_from_data(data))


def test_its_value_is_what_it_is_composed_of() -> None:
    expr = operator_from_data({"expr": "Y[i] = mish(X[i])", "sizes": {"i": 100}})
    inputs = random_inputs(expr, 0)
    assert np.allclose(evaluate(expr, inputs), inputs["X"] * np.tanh(np.log1p(np.exp(inputs["X"]))))
    assert "tanh(log((" in reference_kernel(expr, "mish").source


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_of_gpus_compute_it(dtype: str) -> None:
    form = form_of(**PRODUCT, dtypes=dict.fromkeys("ABY", dtype))
    program = construct(form, load_device("a100")).programs[0]
    result = verify(form, program.schedule, engine="emulator", full_size=True)
    assert result.passed, result.reason


@pytest.mark.usefixtures("c_compiler")
def test_kernels_of_processors_compute_it() -> None:
    form = form_of(**PRODUCT)
    target = Target("llvm", host_architecture(), 8)
    schedule = TileSchedule(block=sizes({"m": 32, "n": 40}), thread=sizes({"m": 4, "n": 8}), step=sizes({"k": 16}))
    result = verify_cpu(form, schedule, target)
    assert result.passed, result.reason


def test_it_costs_what_it_is_composed_of() -> None:
    (load,) = loads(form_of(expr="Y[i] = mish(X[i])", sizes={"i": 8}).final.value)
    parts = sum(FUNCTION_INSTRUCTIONS[name] for name in ("tanh", "log", "exp"))
    assert value_instructions(call("mish", load)) == parts + 2
    assert elementwise("mish", 1000, "float32", 1).variant == elementwise("tanh", 1000, "float32", 1).variant
    assert not is_scalar(call("mish", load)) and is_scalar(call("gelu", load))


def test_its_derivative_follows() -> None:
    x = Load("X", ())
    expr = operator_from_data({"expr": "Y[i] = mish(X[i])", "sizes": {"i": 100}})
    (load,) = loads(expr.statements[0].value)
    slope = derivative(expr.statements[0].value, load)
    assert not isinstance(slope, Reduction) and derivative(call("mish", x), Load("Z", ())) != slope
    inputs = random_inputs(expr, 0)
    differentiated = replace(expr, statements=(replace(expr.statements[0], value=slope),))
    step = 1e-6
    near = [evaluate(expr, {"X": inputs["X"] + sign * step}) for sign in (1, -1)]
    assert np.allclose(evaluate(differentiated, inputs), (near[0] - near[1]) / (2 * step), atol=1e-8)
