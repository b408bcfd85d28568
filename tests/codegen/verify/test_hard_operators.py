"""Operators that are easy to get wrong, constructed, lowered, run whole and compared with what their author wrote."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.verify.gpu import verify
from hal.catalog import load_device
from roller.construct.construct import construct
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data

pytestmark = [pytest.mark.usefixtures("opencl", "emulator"), pytest.mark.slow]

V100 = load_device("v100")

HARD: list[dict[str, Any]] = [
    # Names that C, TVM and the code generator use themselves.
    {"expr": "float[double] = sum(int, kernel[double,int] * global[int])", "sizes": {"double": 33, "int": 40}},
    {"expr": "blockIdx[threadIdx] = sum(half, verify_kernel[threadIdx,half] * partial_0[half])",
     "sizes": {"threadIdx": 33, "half": 40}},
    {"expr": "accumulator[i,j] = sum(k, A[i,k] * B[k,j])", "sizes": {"i": 33, "j": 40, "k": 17}},
    {"expr": "A_shared[i,j] = sum(k, A[i,k] * B[k,j])", "sizes": {"i": 65, "j": 70, "k": 17}},
    {"expr": "C[i,j] = sum(k, A_shared[i,k] * A[k,j])", "sizes": {"i": 65, "j": 70, "k": 17}},
    {"expr": "A_ptr[i,j] = sum(k, A[i,k] * A_ptr_ptr[k,j])", "sizes": {"i": 33, "j": 40, "k": 17}},
    {"expr": "partial_0[i,j] = X[i,j] / sum(k, X[i,k])", "sizes": {"i": 33, "j": 40, "k": 40}},
    # Axes of one name and several meanings.
    {"expr": "C[a] = sum(i, X[a,i]); D[i] = relu(C[i])", "sizes": {"a": 5, "i": 5}},
    {"expr": "T[a] = max(i, X[a,i]); U[i] = sum(a, exp(X[i,a] - T[i])); D[i,a] = X[i,a] / U[i]",
     "sizes": {"a": 5, "i": 5}},
    # One tensor read in several ways.
    {"expr": "C[i,j] = sum(k, X[i,k] * X[k,j])", "sizes": {"i": 65, "j": 65, "k": 65}},
    {"expr": "C[i,j] = sum(k, X[i,k] * X[j,k])", "sizes": {"i": 65, "j": 65, "k": 30}},
    {"expr": "C[i] = X[i + 1] - X[i]", "sizes": {"i": 1000}},
    {"expr": "C[i] = X[2*i] + X[2*i + 1]", "sizes": {"i": 1000}},
    # Every reduction, over steps that do not divide.
    {"expr": "C[i,j] = prod(k, X[i,k] + Y[k,j])", "sizes": {"i": 33, "j": 35, "k": 19}},
    {"expr": "C[i,j] = min(k, X[i,k] + Y[k,j])", "sizes": {"i": 65, "j": 70, "k": 19}},
    {"expr": "C[i,j] = sum(k, exp(X[i,k] - Y[k,j]))", "sizes": {"i": 65, "j": 70, "k": 19}},
    {"expr": "C[i,j] = max(k, X[i, 18 - k] * Y[k, 69 - j])", "sizes": {"i": 65, "j": 70, "k": 19}},
    # Zero times what lies outside is not zero where that is infinite.
    {"expr": "C[i,j] = sum(k, X[i,k] * (1 / Y[k,j]))", "sizes": {"i": 65, "j": 70, "k": 19}},
    {"expr": "C[i,j] = sum(k, X[i,k] * log(Y[k,j]))", "sizes": {"i": 65, "j": 70, "k": 19}},
    # Part of a larger tensor.
    {"expr": "C[i,j] = sum(k, X[i,k] * Y[k,j])", "sizes": {"i": 65, "j": 70, "k": 19},
     "shapes": {"X": [65, 64], "Y": [64, 70]}},
    # Selections, masks and axis values.
    {"expr": "C[i,j] = sum(k, select(k <= i, X[i,k] * Y[j,k], 0))", "sizes": {"i": 65, "j": 65, "k": 65}},
    {"expr": "C[i] = sum(k, X[i,k] * k) / 65", "sizes": {"i": 65, "k": 65}},
    # Reductions of places alone, which read nothing.
    {"expr": "C[i] = sum(k, select(k <= i, 1, 0)) + X[i]", "sizes": {"i": 100, "k": 33}},
    {"expr": "C[i,j] = max(k, (i - k) * (j - k))", "sizes": {"i": 65, "j": 70, "k": 33}},
    # Padding with infinity.
    {"expr": "C[i] = max(k, Y[k + i | pad=-inf])", "sizes": {"i": 20, "k": 4}, "shapes": {"Y": [20]}},
    # Transposed and mixed orders.
    {"expr": "C[i,j] = X[j,i] * Z[i,j]", "sizes": {"i": 100, "j": 96}},
    {"expr": "C[i,j,k] = X[k,j,i]", "sizes": {"i": 20, "j": 30, "k": 17}},
    # Single numbers, and rows that are the whole tensor.
    {"op": "reduce", "function": "mean", "shape": [10007], "axes": [0]},
    {"op": "reduce", "function": "sum", "shape": [23, 13], "axes": [0, 1], "epilogue": ["relu", "gelu"]},
    {"op": "softmax", "shape": [1009]},
    {"op": "layer_norm", "shape": [17]},
    {"op": "matmul", "m": 1, "n": 1, "k": 1},
    {"op": "matmul", "m": 1, "n": 1, "k": 1000},
    # Softmax along every axis but the last.
    {"op": "softmax", "shape": [8, 33, 17], "axis": 1},
    {"op": "softmax", "shape": [8, 32, 16], "axis": 0, "dtype": "float16"},
    # A reduction that is broadcast.
    {"expr": "C[i,j] = sum(k, X[k,j]) * Y[i,j]", "sizes": {"i": 6, "j": 7, "k": 5}},
    {"expr": "C[i,j] = sum(k, X[k]) * Y[i,j]", "sizes": {"i": 6, "j": 7, "k": 5}},
    # Inputs that nothing depends on.
    {"op": "softmax", "shape": [1, 33, 33], "axis": 0},
    {"op": "softmax", "shape": [1, 33], "axis": 0, "dtype": "bfloat16"},
    # A staged operand that the epilogue reads, too, and elsewhere.
    {"expr": "Y[i,j] = X[i,j] + sum(k, X[i,k] * W[k,j]) + W[1,j]", "sizes": {"i": 70, "j": 65, "k": 65}},
    # Pads other than zero of elements that are staged as bits, and constants that become some.
    {"expr": "C[i,j] = sum(k, A[i,k] * B[k,j]); Y[i,j] = C[i,j] + B[j - 2, j | pad=1]",
     "sizes": {"i": 64, "j": 64, "k": 64}, "shapes": {"B": [64, 64]}, "dtype": "bfloat16"},
    {"expr": "C[i] = sum(k, A[i,k]); Y[i] = C[i] * i", "sizes": {"i": 1, "k": 70}, "dtypes": {"Y": "bfloat16"}},
    # A tensor that is read with a pad and without one.
    {"expr": "C[i] = sum(k, X[i,k] * X[k,i]) + X[3*i, i + 1 | pad=-0.5]", "sizes": {"i": 65, "k": 65},
     "shapes": {"X": [65, 65]}},
    # Double precision, whose constants need all their digits.
    {"op": "matmul", "m": 33, "n": 65, "k": 17, "accumulate": "float64"},
    {"op": "elementwise", "function": "gelu", "shape": [100], "dtype": "float64"},
    {"op": "layer_norm", "shape": [10, 100], "dtype": "float64"},
    {"op": "matmul", "m": 33, "n": 65, "k": 17, "dtype": "float64"},
    {"op": "elementwise", "function": "pow", "shape": [100], "scalar": True, "value": 3},
]  # fmt: skip


@pytest.mark.parametrize("data", HARD, ids=lambda data: data.get("expr", data.get("op")))
def test_a_hard_operator_agrees(data: dict[str, Any]) -> None:
    form = kernel_form(operator_from_data(data))
    for rank, program in enumerate(construct(form, V100, 2).programs):
        result = verify(form, program.schedule, full_size=True, engine="emulator" if rank else "opencl")
        assert result.passed, f"{program.policy}: {result.reason}\n{program.schedule}"
