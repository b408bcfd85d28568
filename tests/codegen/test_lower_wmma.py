"""Tensor Core kernels: compiled by NVRTC, executed by the CUDA emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.cuda_emulator import EmulatorError, emulator_available, run_cuda_on_cpu
from codegen.device_compiler import compile_cuda
from codegen.lower import Lowered, lower
from codegen.lower_wmma import tile_twin, wmma_problem, wmma_shared_bytes
from codegen.prelude import strip_prelude
from codegen.targets import KERNEL_SUFFIX, cuda_source
from sokoban.kernel_form import KernelForm, kernel_form
from sokoban.matrix import matrix_roles
from sokoban.operators import operator_from_data
from sokoban.reference import evaluate, random_inputs
from sokoban.schedule import TileSchedule, sizes

needs_emulator = pytest.mark.skipif(emulator_available() is not None, reason=str(emulator_available()))


def form_of(**operator: object) -> KernelForm:
    return kernel_form(operator_from_data({"dtype": "float16", **operator}))


def schedule_of(
    form: KernelForm, block: tuple[int, int] = (64, 64), warp: tuple[int, int] = (32, 32), step: int = 32,
    padding: int = 8, **changes: Any,
) -> TileSchedule:  # fmt: skip
    roles = matrix_roles(form)
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
        instruction="wmma_16x16x16",
    )
    return schedule.with_(**changes)


def source_of(form: KernelForm, lowered: Lowered, architecture: str = "sm_80") -> str:
    names = [tensor.name for tensor in (*form.expr.inputs, form.expr.output)]
    return cuda_source(lowered, architecture, names)


def to_dtype(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values as a kernel's argument; bfloat16 as the bits in uint16."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_dtype(values: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    if dtype != "bfloat16":
        return values.astype(np.float64)
    return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def emulate(form: KernelForm, lowered: Lowered, source: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the kernel computes, and what it should."""
    inputs = random_inputs(form.expr, 7)
    arguments = [to_dtype(np.asarray(inputs[t.name]).reshape(t.shape), t.dtype) for t in form.expr.inputs]
    output = form.expr.output
    arguments.append(to_dtype(np.full(output.shape, np.nan), output.dtype))
    (result,) = run_cuda_on_cpu(
        source, lowered.entry + KERNEL_SUFFIX, arguments, lowered.grid, lowered.block, [len(arguments) - 1],
        lowered.dynamic_shared_bytes,
    )  # fmt: skip
    read = {t.name: from_dtype(a, t.dtype) for t, a in zip(form.expr.inputs, arguments[:-1], strict=True)}
    return from_dtype(result, output.dtype), evaluate(form.expr, read)


EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 1e-5}


def assert_right(form: KernelForm, schedule: TileSchedule, strip: bool = False) -> str:
    lowered = lower(form, schedule, entry="wmma")
    source = source_of(form, lowered)
    result, expected = emulate(form, lowered, strip_prelude(source) if strip else source)
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


@needs_emulator
@pytest.mark.parametrize("name", OPERATORS)
def test_results_are_right_to_the_last_rounding(name: str) -> None:
    form = form_of(**OPERATORS[name])
    source = assert_right(form, schedule_of(form))
    assert "nvcuda::wmma::mma_sync" in source


@needs_emulator
@pytest.mark.parametrize(
    ("block", "warp", "step", "padding"),
    [
        ((16, 16), (16, 16), 16, 0),
        ((48, 32), (48, 16), 16, 0),
        ((32, 64), (16, 16), 48, 16),
        ((128, 128), (64, 32), 64, 8),
        ((128, 256), (64, 64), 64, 8),
    ],
)
def test_every_tiling_gives_the_same(block: tuple[int, int], warp: tuple[int, int], step: int, padding: int) -> None:
    form = form_of(op="matmul", m=100, n=300, k=72, epilogue=["relu"])
    assert_right(form, schedule_of(form, block, warp, step, padding), strip=True)


@needs_emulator
def test_the_scalar_twin_of_every_operator_computes_the_same() -> None:
    for operator in OPERATORS.values():
        form = form_of(**operator)
        schedule = schedule_of(form)
        twin = tile_twin(schedule, form)
        assert twin.instruction == "fma"
        assert twin.threads_per_block == schedule.threads_per_block
        assert (twin.block, twin.step, twin.cached, twin.padding) == (
            schedule.block, schedule.step, schedule.cached, schedule.padding,
        )  # fmt: skip
        assert all(block % twin.register_tile[axis] == 0 for axis, block in twin.block)
        assert_right(form, twin.with_(vector=(*twin.vector, (form.expr.output.name, 4))))


@pytest.mark.parametrize("warp", [(16, 16), (48, 16), (32, 64), (64, 64), (16, 48), (80, 16)])
def test_a_twin_has_as_many_threads_as_its_schedule(warp: tuple[int, int]) -> None:
    form = form_of(op="matmul", m=512, n=512, k=64)
    schedule = schedule_of(form, (warp[0] * 2, warp[1] * 3), warp)
    twin = tile_twin(schedule, form)
    assert twin.threads_per_block == schedule.threads_per_block == 192


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
def test_kernels_compile_without_spills(architecture: str) -> None:
    form = form_of(op="matmul", m=200, n=200, k=200, epilogue=["relu"])
    for block, warp, step in (((64, 64), (32, 32), 32), ((128, 128), (64, 32), 64), ((128, 256), (64, 64), 64)):
        schedule = schedule_of(form, block, warp, step)
        lowered = lower(form, schedule, entry="wmma")
        kernel = compile_cuda(source_of(form, lowered, architecture), architecture, name="wmma")
        assert kernel.spill_bytes == 0
        assert kernel.shared_bytes + lowered.dynamic_shared_bytes == lowered.shared_bytes
        assert lowered.shared_bytes == wmma_shared_bytes(form, schedule)


def test_brain_floats_compile() -> None:
    form = form_of(op="matmul", m=200, n=200, k=200, epilogue=["relu"], dtype="bfloat16")
    lowered = lower(form, schedule_of(form), entry="wmma")
    assert compile_cuda(source_of(form, lowered), "sm_80", name="wmma").spill_bytes == 0


def test_more_than_48_kib_are_allocated_dynamically() -> None:
    form = form_of(op="matmul", m=512, n=512, k=512)
    small = lower(form, schedule_of(form), entry="wmma")
    assert small.dynamic_shared_bytes == 0
    assert small.shared_bytes == 2 * (64 * 40 + 32 * 72) + 4 * 32 * 72
    schedule = schedule_of(form, (128, 128), (64, 32), 64)
    large = lower(form, schedule, entry="wmma")
    assert large.dynamic_shared_bytes == 2 * (128 * 72 + 64 * 136)
    assert large.shared_bytes == large.dynamic_shared_bytes + 4 * 32 * 136
    assert "extern __shared__" in source_of(form, large)
    assert large.block == (32, 8, 1)
    assert lower(form, schedule, entry="wmma", dynamic_shared=False).dynamic_shared_bytes == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block": sizes({"m": 40, "n": 64})}, "multiples of 16"),
        ({"thread": sizes({"m": 8, "n": 32})}, "multiples of 16"),
        ({"thread": sizes({"m": 48, "n": 32})}, "multiples of 16"),
        ({"vthreads": sizes({"m": 2, "n": 1}), "block": sizes({"m": 128, "n": 64})}, "virtual"),
        ({"step": sizes({"k": 8})}, "multiples of 16"),
        ({"step": ()}, "no step"),
        ({"cached": ("A",)}, "both operands"),
        ({"padding": sizes({"A": 4})}, "padding 4 of A"),
        ({"reduce_threads": sizes({"k": 2})}, "share a reduction"),
        ({"block": sizes({"m": 512, "n": 512})}, "8192 threads"),
        ({"block": sizes({"m": 512, "n": 64}), "thread": sizes({"m": 16, "n": 64})}, "results"),
    ],
)
def test_illegal_schedules_are_named(changes: dict[str, Any], reason: str) -> None:
    form = form_of(op="matmul", m=512, n=512, k=64)
    schedule = schedule_of(form).with_(**changes)
    problem = wmma_problem(form, schedule)
    assert problem is not None
    assert reason in problem
    if not schedule.reduce_threads:
        with pytest.raises(ValueError, match="matmul"):
            lower(form, schedule, entry="wmma")


def test_operators_that_are_no_products_are_refused() -> None:
    assert "no product" in str(wmma_problem(form_of(op="softmax", shape=[4, 4]), TileSchedule((), ())))


@needs_emulator
@pytest.mark.parametrize("position", range(4))
def test_every_barrier_is_needed(position: int) -> None:
    """Without any one of its barriers the kernel computes something else: the emulator does see races."""
    form = form_of(op="matmul", m=64, n=64, k=64)
    lowered = lower(form, schedule_of(form), entry="wmma")
    parts = source_of(form, lowered).split("__syncthreads();")
    assert len(parts) == 5
    without = "__syncthreads();".join(parts[: position + 1]) + ";" + "__syncthreads();".join(parts[position + 1 :])
    try:
        result, expected = emulate(form, lowered, without)
    except EmulatorError:
        return
    assert not np.allclose(result, expected, rtol=1e-2, atol=1e-2)
