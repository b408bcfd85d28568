"""NaN of what kernels read are NaN in results, where the reference has them: sums that diverged stay visible."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from codegen.bundle.reader import read_bundle
from codegen.runtime.cpu import CpuOperator
from codegen.verify.emulated_bundle import emulate
from hal.catalog import load_device
from hal.microbench.cpu.topology import read_topology
from hal.spec.device import DeviceSpec
from roller.compile.bundles import write_bundle
from roller.compile.pipeline import compile_operators
from sokoban.language.operators import operator_from_data
from sokoban.language.reference import evaluate
from tests.support.executors import InTurn

#: A shipped processor by the width of its vectors, in bits.
PROCESSORS = {512: "xeon-platinum-8375c", 256: "epyc-7763"}
WIDTH = read_topology().simd_bits

OPERATORS: dict[str, dict[str, Any]] = {
    "rows": {"op": "reduce", "function": "max", "shape": [33, 130], "axes": [1]},
    "columns": {"op": "reduce", "function": "min", "shape": [130, 33], "axes": [0]},
    "window": {"op": "max_pool2d", "n": 1, "c": 5, "h": 9, "w": 9, "kh": 3, "kw": 3, "stride": 2},
    "scan": {"expr": "Y[i,j] = cummax(j, X[i,j])", "sizes": {"i": 8, "j": 200}},
    "softmax": {"op": "softmax", "shape": [12, 130]},
    "two": {"expr": "Y[i,j] = min(3, max(X[i,j], Z[i,j] + 1))", "sizes": {"i": 8, "j": 200}},
    "product": {"op": "matmul", "m": 40, "n": 48, "k": 36, "epilogue": ["relu"]},
    **{
        function: {"op": "elementwise", "function": function, "shape": [8, 200]}
        for function in ("relu", "exp", "tanh", "sigmoid", "silu", "gelu")
    },
}
HALVES = {
    "product of halves": {"op": "matmul", "m": 64, "n": 64, "k": 64, "dtype": "float16", "epilogue": ["relu"]},
    "product of bfloat16": {"op": "matmul", "m": 64, "n": 64, "k": 64, "dtype": "bfloat16", "epilogue": ["gelu"]},
    "rows of halves": {"op": "reduce", "function": "max", "shape": [33, 130], "axes": [1], "dtype": "float16"},
    "halves": {"op": "elementwise", "function": "relu", "shape": [8, 200], "dtype": "float16"},
}  # fmt: skip


@cache
def board(name: str) -> DeviceSpec:
    """A board whose kernels stay source, which takes no compiler of NVIDIA's."""
    return msgspec.structs.replace(
        load_device(name), code_generator="cuda-source", code_generator_reason="the test compiles nothing"
    )


def given_and_wanted(data: dict[str, Any], device: DeviceSpec, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Results of a kernel, and those of the reference, of numbers with NaN and infinities among them."""
    expr = operator_from_data(data)
    compiled = next(compile_operators([expr], device, top_k=1, verify=0, pool=InTurn(), method="roller"))
    bundle = read_bundle(write_bundle(compiled, device, folder).directory)
    generator = np.random.default_rng(0)
    # Eighths, which halves hold exactly.
    inputs = {each.name: generator.integers(-16, 17, each.shape).astype(np.float32) / 8 for each in bundle.inputs}
    for values in inputs.values():
        places = generator.choice(values.size, 3, replace=False)
        values.reshape(-1)[places] = (np.nan, np.inf, -np.inf)
    with np.errstate(invalid="ignore"):
        wanted = evaluate(expr, {name: values.astype(np.float64) for name, values in inputs.items()})
    arrays = [inputs[each.name].astype(each.dtype if bundle.is_for_cpu else "float32") for each in bundle.inputs]
    given = CpuOperator.load(bundle.directory)(*arrays) if bundle.is_for_cpu else emulate(bundle, arrays)
    return np.asarray(given, np.float64).reshape(wanted.shape), wanted


def largest_error(given: np.ndarray, wanted: np.ndarray) -> float:
    """Of what is finite, relative to what is larger than one."""
    finite = np.isfinite(wanted)
    errors = np.abs(given - wanted)[finite] / np.maximum(np.abs(wanted[finite]), 1.0)
    return float(errors.max(initial=0.0))


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.skipif(WIDTH not in PROCESSORS, reason=f"no shipped processor has vectors of {WIDTH} bits")
@pytest.mark.parametrize("data", OPERATORS.values(), ids=OPERATORS)
def test_on_processors(data: dict[str, Any], tmp_path: Path) -> None:
    given, wanted = given_and_wanted(data, load_device(PROCESSORS[WIDTH]), tmp_path)
    assert np.isnan(wanted).any() and np.array_equal(np.isnan(given), np.isnan(wanted))
    assert largest_error(given, wanted) < 1e-4


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("name", ["v100", "h100"])
@pytest.mark.parametrize("data", (OPERATORS | HALVES).values(), ids=OPERATORS | HALVES)
def test_on_gpus(data: dict[str, Any], name: str, tmp_path: Path) -> None:
    if name == "v100" and data.get("dtype") == "bfloat16":
        data = data | {"dtype": "float16"}
    given, wanted = given_and_wanted(data, board(name), tmp_path)
    assert np.isnan(wanted).any() and np.array_equal(np.isnan(given), np.isnan(wanted))
    assert largest_error(given, wanted) < 2e-2
