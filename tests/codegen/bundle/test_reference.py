"""The reference in CUDA C: the same numbers as the reference in NumPy, and text that every compiler takes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from codegen.bundle.reference import ReferenceKernel, reference_kernel
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.verify.emulator import run_cuda_on_cpu
from codegen.verify.guards import guarded
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate

emulated = pytest.mark.usefixtures("emulator")

OPERATORS: list[dict[str, Any]] = [
    {"op": "matmul", "m": 13, "n": 9, "k": 17},
    {"op": "softmax", "shape": [9, 100], "dtype": "float16"},
    {"op": "layer_norm", "shape": [3, 1500], "dtype": "bfloat16"},
    {
        "op": "conv2d", "n": 2, "c": 6, "h": 9, "w": 7, "f": 4, "kh": 3, "kw": 3, "padding": 1, "groups": 2,
        "dtype": "float16", "epilogue": [{"function": "bias_add", "axis": "f"}, "gelu"],
    },
    {"op": "max_pool2d", "n": 1, "c": 3, "h": 8, "w": 8, "kh": 2, "kw": 2, "stride": 2, "padding": 1},
    {"op": "reduce", "function": "mean", "shape": [3, 2000], "axes": [1], "dtype": "float64"},
    {"op": "reduce", "function": "min", "shape": [4099], "axes": [0]},
    {"op": "reduce", "function": "argmax", "shape": [3, 1500, 2], "axes": [1], "dtype": "float16"},
    {"op": "scan", "function": "sum", "shape": [3, 40, 5], "axis": 1, "reverse": True},
    {"op": "topk", "shape": [3, 40, 5], "axis": 1, "k": 6},
    {"op": "topk", "shape": [7, 33], "k": 4, "largest": False, "result": "indices"},
    {"expr": "Y[j,i] = cumprod(j, 1 + X[i,j] / 9, exclusive) - i", "sizes": {"i": 3, "j": 40}},
    {
        "expr": "Y[i,j] = select(i < j and not (X[i,j] == 0), -log(X[i,j]) ** 2, rsqrt(Z[j,i]) + i - 3)",
        "sizes": {"i": 6, "j": 11},
    },
    {"expr": "Y[i] = max(sigmoid(X[i]), silu(X[i]) * sin(X[i])) / (abs(cos(X[i])) + 2)", "sizes": {"i": 300}},
    {"expr": "int[double] = sum(float, for[double, float] * char[float])", "sizes": {"double": 3, "float": 5}},
    {"op": "matmul", "m": 13, "n": 9, "k": 17, "dtype": "int8"},
    {"op": "matmul", "m": 13, "n": 9, "k": 17, "dtype": "float8_e4m3fn"},
    {"op": "matmul", "m": 13, "n": 9, "k": 17, "dtype": "float8_e5m2", "output_dtype": "bfloat16"},
    {
        "expr": "Y[t,d] = sum(k, E[I[t,k], d | pad=0.5] * V[J[k]])", "sizes": {"t": 5, "d": 7, "k": 3},
        "shapes": {"E": [9, 7], "V": [4]},
    },
    *(
        {"op": "attention_gradient", "of": of, "slopes": True, "b": 2, "heads": 4, "kv_heads": 2, "queries": 8,
         "keys": 11, "head_dim": 4, "causal": True, "window": 5, "dtype": "float16"}
        for of in ("queries", "keys")
    ),
    {"expr": "Y[i] = prod(k, X[2*i + k - 1 | pad=0.75])", "sizes": {"i": 5, "k": 4}, "shapes": {"X": [10]}},
]  # fmt: skip


def computed(expr: TensorExpr, made: ReferenceKernel) -> np.ndarray[Any, Any]:
    """What the reference's kernels leave in the output, run one after another."""
    inputs = random_inputs(expr, 0)
    values = {tensor.name: guarded(inputs[tensor.name], tensor)[: tensor.element_count] for tensor in expr.inputs}
    values |= {name: np.full(count, np.nan) for name, count in made.record.workspace.items()}
    for launch in made.record.launches:
        arrays = [values[name] for name in launch.tensors]
        last = len(arrays) - 1
        (values[launch.tensors[-1]],) = run_cuda_on_cpu(
            made.source, launch.entry, arrays, launch.grid, launch.block, [last], optimized=False
        ).outputs
    return values[expr.output.name].reshape(expr.output.shape)


@emulated
@pytest.mark.parametrize("data", OPERATORS, ids=lambda data: str(data.get("op", data.get("expr"))))
def test_it_computes_what_the_operator_means(data: dict[str, Any]) -> None:
    expr = operator_from_data(data)
    made = reference_kernel(expr, "op")
    np.testing.assert_allclose(computed(expr, made), evaluate(expr, random_inputs(expr, 0)), rtol=1e-12, atol=1e-14)


@emulated
@pytest.mark.parametrize("bits", [0x0000, 0x8001, 0x03FF, 0x3C00, 0xC0A5, 0x7BFF])
def test_half_precision_is_read_bit_by_bit(bits: int) -> None:
    expr = operator_from_data({"expr": "Y[i] = X[i]", "sizes": {"i": 1}, "dtype": "float16"})
    made = reference_kernel(expr, "op")
    half = np.array([bits], np.uint16)
    (result,) = run_cuda_on_cpu(made.source, "op_reference_0", [half, np.zeros(1)], [1], [256], [1]).outputs
    assert result[0] == float(half.view(np.float16)[0])


@emulated
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_floats_are_read_bit_by_bit(dtype: str) -> None:
    expr = operator_from_data(
        {"expr": "Y[i,j] = sum(k, A[i,k] * B[k,j])", "sizes": {"i": 256, "j": 1, "k": 1}, "dtype": dtype}
    )
    made = reference_kernel(expr, "op")
    every = np.arange(256, dtype=np.uint8)
    one = np.ones(1).astype(getattr(ml_dtypes, dtype)).view(np.uint8)
    (result,) = run_cuda_on_cpu(made.source, "op_reference_0", [every, one, np.zeros(256)], [1], [256], [2]).outputs
    expected = every.view(getattr(ml_dtypes, dtype)).astype(np.float64)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("architecture", ["sm_50", "sm_70", "sm_90", "sm_120"])
@pytest.mark.usefixtures("device_compiler")
def test_it_compiles_for_every_architecture_without_headers(architecture: str) -> None:
    for data in OPERATORS[1:4]:
        made = reference_kernel(operator_from_data(data), "op")
        assert "#include" not in made.source
        compiled = compile_cuda(made.source, architecture, name="reference")
        assert compiled.cubin.startswith(b"\x7fELF")


def test_a_block_shares_an_element_where_there_are_few_and_much_to_reduce() -> None:
    few = reference_kernel(
        operator_from_data({"op": "reduce", "function": "sum", "shape": [3, 2000], "axes": [1]}), "op"
    ).record
    many = reference_kernel(
        operator_from_data({"op": "reduce", "function": "sum", "shape": [20000, 2000], "axes": [1]}), "op"
    ).record
    assert few.launches[0].grid == (3, 1, 1)
    assert many.launches[0].grid == (79, 1, 1)


def test_large_tensors_get_indices_of_64_bits() -> None:
    small = reference_kernel(operator_from_data({"op": "matmul", "m": 64, "n": 64, "k": 64}), "op").source
    large = reference_kernel(operator_from_data({"op": "matmul", "m": 2**15, "n": 2**15, "k": 2**4}), "op").source
    assert "const int v_m" in small and "const long long v_m" in large


def test_the_record_says_how_to_run_and_to_judge_it() -> None:
    expr = operator_from_data({"expr": "Y[i] = log(X[i]) * Z[i]", "sizes": {"i": 300}, "dtype": "float16"})
    record = reference_kernel(expr, "roller_x").record
    assert record.source == "reference.cu"
    assert [(launch.entry, launch.grid, launch.tensors) for launch in record.launches] == [
        ("roller_x_reference_0", (2, 1, 1), ("X", "Z", "Y"))
    ]
    assert record.workspace == {"Y": 300}
    assert record.tolerance == 2e-2
    assert record.ranges == {"X": (0.5, 1.5), "Z": (-1.0, 1.0)}
