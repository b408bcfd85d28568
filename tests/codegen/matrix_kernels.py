"""Matrix products on Tensor Cores for the tests: operators, schedules, and what their kernels compute when emulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import cuda_source
from codegen.tir.lowered import KERNEL_SUFFIX, Lowered
from codegen.verify.emulator import run_cuda_on_cpu
from codegen.verify.engines import ORDER_SEEDS
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.lowering import lower

needs_emulator = pytest.mark.usefixtures("emulator")


def form_of(**operator: object) -> KernelForm:
    return kernel_form(operator_from_data({"dtype": "float16", **operator}))


def schedule_of(
    form: KernelForm, block: tuple[int, int] = (64, 64), warp: tuple[int, int] = (32, 32), step: int = 32,
    padding: int = 8, **changes: Any,
) -> TileSchedule:  # fmt: skip
    roles = form.roles
    assert roles is not None
    operands = (roles.a.tensor, roles.b.tensor)
    blocks, warps = {roles.m: block[0], roles.n: block[1]}, {roles.m: warp[0], roles.n: warp[1]}
    schedule = TileSchedule(
        block=sizes({axis: blocks.get(axis, 1) for axis in form.spatial}),
        thread=sizes({axis: warps.get(axis, 1) for axis in form.spatial}),
        step=sizes({axis: step if axis == roles.k else 1 for axis in form.reduced}),
        cached=operands,
        vector=sizes(dict.fromkeys(operands, 8)),
        padding=sizes(dict.fromkeys(operands, padding)),
        instruction=Instruction.WMMA,
    )
    return schedule.with_(**changes)


def wgmma_schedule_of(
    form: KernelForm, rows: int = 128, width: int = 128, stages: int = 4, **changes: Any
) -> TileSchedule:
    """A schedule of tiles that a warp group copies in bulk."""
    given = {"step": 64, "padding": 0, "instruction": Instruction.WGMMA, "stages": stages, "vector": (), "cluster": 1}
    return schedule_of(form, (rows, width), (16, width), **{**given, **changes})


def source_of(form: KernelForm, lowered: Lowered, architecture: str = "sm_80") -> str:
    names = [tensor.name for tensor in (*form.expr.inputs, form.expr.output)]
    return cuda_source(lowered, architecture, names)


def to_dtype(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values as a kernel's argument; bfloat16 as the bits in uint16."""
    if dtype.startswith("float8"):
        return values.astype(getattr(ml_dtypes, dtype))
    if dtype in ("int8", "int32"):
        return np.nan_to_num(values, nan=-77).astype(dtype)
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_dtype(values: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    if dtype != "bfloat16":
        return values.astype(np.float64)
    return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def emulate(
    form: KernelForm, lowered: Lowered, source: str, seeds: Sequence[int] = ORDER_SEEDS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the kernel computes in the orders of some seeds, and what it should."""
    inputs = random_inputs(form.expr, 7)
    arguments = [to_dtype(np.asarray(inputs[t.name]).reshape(t.shape), t.dtype) for t in form.expr.inputs]
    output = form.expr.output
    arguments.append(to_dtype(np.full(output.shape, np.nan), output.dtype))
    (result,) = run_cuda_on_cpu(
        source, lowered.entry + KERNEL_SUFFIX, arguments, lowered.grid, lowered.block, [len(arguments) - 1],
        lowered.dynamic_shared_bytes, optimized=False, maps=lowered.maps, seeds=seeds,
    ).outputs  # fmt: skip
    read = {t.name: from_dtype(a, t.dtype) for t, a in zip(form.expr.inputs, arguments[:-1], strict=True)}
    return from_dtype(result, output.dtype), evaluate(form.expr, read)


EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 1e-5, "int32": 0.0}


def assert_right(form: KernelForm, schedule: TileSchedule, strip: bool = False) -> str:
    """The kernel of ``schedule`` computes what it should, in an order of threads that its text picks; the text."""
    lowered = lower(form, schedule, entry="kernel")
    source = source_of(form, lowered)
    source = strip_prelude(source) if strip else source
    seed = ORDER_SEEDS[crc32(source.encode()) % len(ORDER_SEEDS)]
    result, expected = emulate(form, lowered, source, [seed])
    # Sums are float32 of exact products, so that only the last rounding shows.
    np.testing.assert_allclose(result, expected, rtol=1.01 * EPSILON[form.expr.output.dtype], atol=1e-4)
    return source


ODD = {"op": "matmul", "m": 130, "n": 68, "k": 37}
OPERATORS = {
    "odd": ODD,
    "transposed_a": {**ODD, "transpose_a": True},
    "transposed_b": {**ODD, "transpose_b": True},
    "both_bfloat16": {**ODD, "transpose_a": True, "transpose_b": True, "dtype": "bfloat16", "k": 40, "n": 72},
    "batch": {"op": "batch_matmul", "b": 3, "m": 65, "n": 40, "k": 64},
    "conv_1x1": {"op": "conv2d", "n": 2, "c": 33, "h": 15, "w": 15, "f": 65, "kh": 1, "kw": 1},
    "conv_1x1_nhwc": {"op": "conv2d", "n": 2, "c": 40, "h": 8, "w": 9, "f": 65, "kh": 1, "kw": 1, "layout": "NHWC"},
    "float32_output": {
        "expr": "acc[m,n] = sum(k, A[m,k] * B[k,n])\nC[m,n] = max(acc[m,n] + bias[n], 0.0)",
        "sizes": {"m": 50, "n": 72, "k": 64},
        "dtypes": {"C": "float32"},
    },
    "two_depths": {
        "expr": "C[m,n] = sum((j, k), A[j,m,k] * B[j,k,n])",
        "sizes": {"j": 3, "m": 40, "n": 40, "k": 24},
    },
    "column_axis_first": {
        "expr": "C[n,m] = sum(k, A[m,k] * B[k,n])",
        "sizes": {"m": 33, "n": 40, "k": 24},
    },
}
