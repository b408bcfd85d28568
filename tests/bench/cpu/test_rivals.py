"""What the rivals compute is what the float64 reference says, on all kinds of operators of the suite."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from bench.cpu.rivals import (
    NoRival,
    Operator,
    Rival,
    Unable,
    bandwidth_limit,
    blas_environment,
    metaschedule_rival,
    numpy_rival,
    openblas_kernels,
    ours,
    torch_other_layout,
    torch_rival,
)
from bench.cpu.worker import relative_error
from hal.microbench.cpu.machine import Machine
from hal.support.errors import InputError
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate

CPU = (min(os.sched_getaffinity(0)),)
BIAS_RELU = [{"function": "bias_add", "axis": "n"}, "relu"]
CONVOLUTION = {"op": "conv2d", "n": 1, "c": 6, "h": 9, "w": 9, "f": 5, "kh": 3, "kw": 3, "stride": 2, "padding": 1}


def error_of(rival: Rival, spec: dict[str, Any]) -> float:
    """How far a rival is off on a small operator."""
    operator = Operator({"name": "small", **spec}, CPU)
    expr = operator.expr
    values = random_inputs(expr, 1)
    inputs = {tensor.name: values[tensor.name].reshape(tensor.caller_shape).astype("float32") for tensor in expr.inputs}
    call = rival(operator).bind(inputs)
    call()
    out = call()
    found = out if isinstance(out, np.ndarray) else out.numpy()
    return relative_error(found, evaluate(expr, values).reshape(expr.output.caller_shape))


@pytest.mark.parametrize(
    "spec",
    [
        {"op": "matmul", "m": 7, "n": 5, "k": 9, "epilogue": BIAS_RELU},
        {"op": "matmul", "m": 7, "n": 5, "k": 9, "transpose_a": True, "epilogue": [{"function": "residual_add"}]},
        {"op": "batch_matmul", "b": 2, "m": 7, "n": 5, "k": 9, "transpose_b": True},
    ],
)
def test_numpy_multiplies(spec: dict[str, Any]) -> None:
    assert error_of(numpy_rival, spec) < 1e-5


def test_numpy_competes_in_products_alone() -> None:
    with pytest.raises(NoRival):
        numpy_rival(Operator({"op": "softmax", "shape": [4, 8]}, CPU))
    with pytest.raises(Unable, match="gelu"):
        numpy_rival(Operator({"op": "matmul", "m": 4, "n": 4, "k": 4, "epilogue": ["gelu"]}, CPU))


@pytest.mark.usefixtures("pytorch")
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("rival", [torch_rival, torch_other_layout])
@pytest.mark.parametrize(
    "spec",
    [
        {**CONVOLUTION, "epilogue": [{"function": "bias_add", "axis": "f"}, "relu"]},
        {"op": "depthwise_conv2d", "n": 1, "c": 6, "h": 9, "w": 9, "kh": 3, "kw": 3, "padding": 1},
        {"op": "max_pool2d", "n": 1, "c": 6, "h": 9, "w": 9, "kh": 3, "kw": 3, "stride": 2, "padding": 1},
    ],
)
def test_pytorch_computes_the_same_in_both_layouts(rival: Rival, spec: dict[str, Any], layout: str) -> None:
    assert error_of(rival, {**spec, "layout": layout}) < 1e-5


@pytest.mark.usefixtures("pytorch")
@pytest.mark.parametrize(
    "spec",
    [
        {"op": "reduce", "function": "mean", "shape": [6, 8], "axes": [0]},
        {"op": "layer_norm", "shape": [4, 8]},
        {"op": "elementwise", "function": "gelu", "shape": [4, 8]},
        {"op": "transpose", "shape": [4, 8], "perm": [1, 0]},
    ],
)
def test_pytorch_computes_what_has_no_layout_once(spec: dict[str, Any]) -> None:
    assert error_of(torch_rival, spec) < 1e-5
    with pytest.raises(NoRival):
        torch_other_layout(Operator(spec, CPU))


def test_the_limit_times_itself() -> None:
    prepared = bandwidth_limit(Operator({"op": "elementwise", "function": "add", "shape": [64, 512]}, CPU))
    assert prepared.self_timed and 0 < prepared.bind({})() < 1


def test_the_limit_copies_within_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an operator's bytes are no whole turns of the loops."""
    arrays: dict[int, int] = {}
    copied: list[bool] = []

    def array(self: Machine, size_bytes: int) -> Any:
        made = array_of(self, size_bytes)
        arrays[made.ctypes.data] = made.nbytes
        return made

    def memmove(target: int, source: int, count: int) -> None:
        copied.append(count == 333 * 777 * 4 and count <= arrays[target] and count <= arrays[source])

    array_of = Machine.array
    monkeypatch.setattr(Machine, "array", array)
    monkeypatch.setattr("ctypes.memmove", memmove)
    operator = {"op": "elementwise", "function": "relu", "shape": [333, 777]}
    bandwidth_limit(Operator(operator, CPU)).bind({})()
    assert copied == [True]


def test_openblas_is_asked_to_use_avx512_only_where_there_is_avx512() -> None:
    features = ("avx512bw", "avx512dq", "avx512f", "avx512vl")
    assert blas_environment(features) == {"OPENBLAS_CORETYPE": "SkylakeX"}
    assert blas_environment(features[1:]) == {} and blas_environment(()) == {}


def test_openblas_tells_its_kernels() -> None:
    assert openblas_kernels().isalnum()


def test_what_was_not_tuned_is_said_with_the_remedy() -> None:
    operator = Operator({"name": "small", **CONVOLUTION}, CPU, {"trials": 64, "tuned": "/nowhere/tuned.json"})
    with pytest.raises(Unable, match=r"not tuned over 64 trials here: python -m bench\.cpu\.tune"):
        metaschedule_rival(operator)


def test_an_adapter_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="module:function"):
        ours(Operator(CONVOLUTION, CPU, {"adapter": "bench.cpu.ours:nothing"}))


def test_ours_without_a_bundle_says_how_to_make_one(tmp_path: Any) -> None:
    options = {"adapter": "bench.cpu.ours:from_bundle", "bundles": str(tmp_path)}
    with pytest.raises(Unable, match="roller compile"):
        ours(Operator({"name": "small", **CONVOLUTION}, CPU, options))


def test_an_output_that_is_not_finite_is_as_wrong_as_can_be() -> None:
    wanted = np.array([1.0, -1.0])
    assert relative_error(np.array([1.0, np.nan]), wanted) > 1e300
    assert relative_error(np.array([1.0, -1.2]), wanted) == pytest.approx(0.1)
