"""A bundle of every kind, launched as a user launches it: read from disk, bound by the runtime, run by the emulator.

The manifest, the parameters of every kernel's text and the float64 reference have to agree about which argument is
which, whatever the kernel: named operators, algorithms of several launches, gradients, pairs of products, sequences.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from codegen.bundle.reader import read_bundle
from codegen.bundle.records import Bundle, KernelRecord
from codegen.bundle.writer import signature_of
from codegen.runtime import tensor_maps
from codegen.runtime.gpu import load_kernel
from codegen.target import Target
from codegen.tir.lowered import identifier
from codegen.tolerance import judge, tolerance_of
from codegen.verify.gpu import cuda_trial
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.algorithms import ALGORITHMS
from roller.compile.bundles import write_bundle
from roller.compile.pipeline import compile_operators
from roller.programs import find_programs, form_on
from sokoban.language.expression import TensorExpr
from sokoban.language.named import NAMED_OPERATORS
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from tests.codegen import fake_cupy
from tests.support.executors import InTurn

BOARDS = {"v100": "70", "a100": "80", "h100": "90", "h200": "90", "b200": "100"}

#: Sizes at which every algorithm has programs, and kernels of attention several tiles.
OPERATORS: tuple[dict[str, Any], ...] = (
    {"op": "matmul", "m": 70, "n": 48, "k": 40, "epilogue": [{"function": "bias_add", "axis": "n"}, "relu"]},
    {"op": "matmul", "m": 64, "n": 128, "k": 64, "dtype": "float16", "transpose_b": True},
    {"op": "matmul", "m": 16, "n": 24, "k": 4096, "algorithms": ("split-k",)},
    {"op": "batch_matmul", "b": 3, "m": 33, "n": 40, "k": 24},
    {"op": "conv2d", "n": 1, "c": 6, "h": 9, "w": 9, "f": 8, "kh": 3, "kw": 3, "padding": 1},
    {"op": "conv2d", "n": 32, "c": 256, "h": 28, "w": 28, "f": 256, "kh": 3, "kw": 3, "padding": 1,
     "algorithms": ("winograd",)},
    {"op": "conv2d", "n": 32, "c": 256, "h": 28, "w": 28, "f": 256, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16",
     "algorithms": ("flat-image",)},
    {"op": "depthwise_conv2d", "n": 1, "c": 5, "h": 9, "w": 9, "kh": 3, "kw": 3, "padding": 1},
    {"op": "avg_pool2d", "n": 1, "c": 5, "h": 9, "w": 9, "kh": 3, "kw": 3, "stride": 2},
    {"op": "max_pool2d", "n": 1, "c": 5, "h": 9, "w": 9, "kh": 3, "kw": 3, "stride": 2},
    {"op": "reduce", "function": "mean", "shape": [37, 130], "axes": [1]},
    {"op": "reduce", "function": "argmax", "shape": [37, 130], "axes": [1]},
    {"op": "scan", "function": "sum", "shape": [37, 130]},
    {"op": "scan", "function": "sum", "shape": [1, 1048576]},
    {"op": "reduce", "function": "argmax", "shape": [2, 524288], "axes": [1]},
    {"op": "topk", "shape": [37, 130], "k": 3, "result": "values"},
    {"op": "topk", "shape": [37, 130], "k": 3, "result": "indices"},
    {"op": "scatter_add", "rows": 40, "columns": 36, "count": 70},
    {"op": "elementwise", "function": "add", "shapes": [[37, 40], [40]]},
    {"op": "softmax", "shape": [5, 130]},
    {"op": "softmax", "shape": [2, 40000], "algorithms": ("split-rows",)},
    {"op": "layer_norm", "shape": [9, 130]},
    {"op": "transpose", "shape": [35, 41], "perm": [1, 0]},
    {"op": "attention", "b": 1, "heads": 2, "queries": 70, "head_dim": 32, "causal": True, "dtype": "float16"},
    {"op": "attention", "b": 1, "heads": 2, "kv_heads": 1, "queries": 40, "head_dim": 32},
    {"op": "attention", "b": 1, "heads": 4, "queries": 1, "keys": 2048, "head_dim": 64, "dtype": "float16"},
    {"op": "attention", "b": 2, "heads": 4, "kv_heads": 2, "queries": 1, "keys": 600, "head_dim": 64, "page": 16,
     "pool": 90, "dtype": "float16"},
    *(
        {"op": "attention_gradient", "of": of, "b": 1, "heads": 2, "queries": 70, "head_dim": 32, "dtype": dtype}
        for of in ("queries", "keys") for dtype in ("float32", "float16")
    ),
    *(
        {"op": "attention_gradient", "of": of, "slopes": True, "b": 1, "heads": 2, "queries": 72, "head_dim": 32,
         "causal": True, "dtype": "float16"}
        for of in ("queries", "keys")
    ),
    {"expr": "H[m,n] = sum(k, X[m,k] * A[n,k]); G[m,n] = gelu(H[m,n]); Y[m,p] = sum(n, G[m,n] * B[p,n])",
     "sizes": {"m": 128, "k": 32, "n": 64, "p": 32}, "dtypes": dict.fromkeys("XABY", "float16")},
    {"expr": "Y[i,j] = sum(k, select(k <= i, A[i,k], 0) * B[k,j])", "sizes": {"i": 40, "j": 36, "k": 40}},
)  # fmt: skip


#: Points of an operator's loops beyond which a program is run on a small problem.
MOST_POINTS = 10**8

#: Algorithms and boards that have no program for the operator above.
WITHOUT = [(("flat-image",), "v100")]


@cache
def board(name: str) -> DeviceSpec:
    """A board whose kernels stay source, which takes no compiler of NVIDIA's."""
    device = load_device(name)
    reason = "the test compiles nothing"
    return msgspec.structs.replace(device, code_generator="cuda-source", code_generator_reason=reason)


def written(data: Mapping[str, Any], device: DeviceSpec, folder: Path) -> tuple[TensorExpr, Bundle] | None:
    """The bundle of an operator, read back; None where an algorithm has no program for it on the board."""
    algorithms = data.get("algorithms", ALGORITHMS)
    expr = operator_from_data({key: value for key, value in data.items() if key != "algorithms"})
    if math.prod(expr.sizes.values()) > MOST_POINTS:
        return cut_down(expr, device, algorithms, folder)
    compiled = next(
        compile_operators([expr], device, top_k=2, verify=0, pool=InTurn(), method="roller", algorithms=algorithms)
    )
    return expr, read_bundle(write_bundle(compiled, device, folder).directory)


def cut_down(
    expr: TensorExpr, device: DeviceSpec, algorithms: Sequence[str], folder: Path
) -> tuple[TensorExpr, Bundle] | None:
    """The bundle in which a program of several launches is proved."""
    try:
        programs = find_programs(form_on(expr, device), device, 1, "roller", algorithms)
    except InputError:
        return None
    check = programs.ranked(1, algorithms)[0].check()
    assert check is not None
    trial = cuda_trial(check.form, [(step.problem, step.schedule) for step in check.steps], Target.of(device))
    for name, content in trial.files.items():
        (folder / name).write_bytes(content)
    return check.form.expr, read_bundle(folder)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as memory holds them; of bfloat16 the bits."""
    return (
        (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "bfloat16"
        else values.astype(dtype)
    )


def launched(expr: TensorExpr, bundle: Bundle, kernel: KernelRecord) -> str:
    """What is wrong with the results of a kernel that the runtime has launched; empty where nothing is."""
    inputs = random_inputs(expr, 3)
    by_name = {argument.name: argument for argument in bundle.arguments}
    arrays = [fake_cupy.asarray(stored(inputs[each.name].reshape(each.shape), each.dtype)) for each in bundle.inputs]
    output = fake_cupy.asarray(stored(np.full(bundle.output.shape, np.nan), by_name[bundle.output.name].dtype))
    loaded = load_kernel(bundle, kernel, 0)
    loaded.launch([array.ctypes.data for array in (*arrays, output)], bundle.output.size_bytes)
    expected = evaluate(expr, inputs).reshape(bundle.output.shape)
    return judge(np.asarray(output).astype(np.float64), expected, max(tolerance_of(expr), kernel.tolerance or 0.0))[1]


@pytest.mark.slow
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("data", OPERATORS, ids=lambda data: "-".join(str(v) for v in data.values())[:70])
@pytest.mark.parametrize("name", BOARDS)
def test_manifest_text_and_reference_agree_about_every_argument(
    name: str, data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    monkeypatch.setattr(tensor_maps, "driver", fake_cupy.Driver)
    tensor_maps.encoded.cache_clear()
    fake_cupy.reset(capability=BOARDS[name], shared_bytes=232448)
    found = written(data, board(name), tmp_path)
    if found is None:
        assert (data["algorithms"], name) in WITHOUT
        return
    expr, bundle = found
    for kernel in bundle.kernels:
        for launch in kernel.parts(bundle.arguments):
            text = (bundle.directory / launch.source).read_text()
            assert signature_of(text, launch.entry) == tuple(map(identifier, launch.tensors))
        assert launched(expr, bundle, kernel) == ""


def test_every_named_operator_and_every_algorithm_is_among_them() -> None:
    assert {data["op"] for data in OPERATORS if "op" in data} == set(NAMED_OPERATORS)
    assert {kind for data in OPERATORS for kind in data.get("algorithms", ALGORITHMS)} == set(ALGORITHMS)
