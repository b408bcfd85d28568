"""Tensor Core kernels by ``nvcuda::wmma``: compiled by NVRTC, executed by the CUDA emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from codegen.gpu.matrix.base import product_problem
from codegen.gpu.matrix.wmma import WmmaKernel
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.verify.emulator import EmulatorError
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.lowering import OPENCL, lower
from tests.codegen.matrix_kernels import (
    OPERATORS,
    assert_right,
    emulate,
    form_of,
    needs_emulator,
    schedule_of,
    source_of,
)


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
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_the_scalar_twin_of_every_operator_computes_the_same(operator: dict[str, Any]) -> None:
    form = form_of(**operator)
    schedule = schedule_of(form)
    twin = schedule.scalar_twin(form)
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
    twin = schedule.scalar_twin(form)
    assert twin.threads_per_block == schedule.threads_per_block == 192


@pytest.mark.parametrize(
    ("block", "warp", "step"), [((64, 64), (32, 32), 32), ((128, 128), (64, 32), 64), ((128, 256), (64, 64), 64)]
)
@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
def test_kernels_compile_without_spills(
    architecture: str, block: tuple[int, int], warp: tuple[int, int], step: int
) -> None:
    form = form_of(op="matmul", m=200, n=200, k=200, epilogue=["relu"])
    schedule = schedule_of(form, block, warp, step)
    lowered = lower(form, schedule, entry="wmma")
    kernel = compile_cuda(source_of(form, lowered, architecture), architecture, name="wmma")
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes + lowered.dynamic_shared_bytes == lowered.shared_bytes


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
    assert lower(form, schedule, entry="wmma", target=OPENCL).dynamic_shared_bytes == 0


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
        ({"stages": 2}, "2 pipeline stages"),
        ({"block": sizes({"m": 512, "n": 512})}, "8192 threads"),
        ({"block": sizes({"m": 512, "n": 64}), "thread": sizes({"m": 16, "n": 64})}, "results"),
    ],
)
def test_illegal_schedules_are_named(changes: dict[str, Any], reason: str) -> None:
    form = form_of(op="matmul", m=512, n=512, k=64)
    schedule = schedule_of(form).with_(**changes)
    problem = product_problem(WmmaKernel, form, schedule)
    assert problem is not None
    assert reason in problem
    if not schedule.reduce_threads:
        with pytest.raises(ValueError, match="matmul"):
            lower(form, schedule, entry="wmma")


def test_operators_that_are_no_products_are_refused() -> None:
    assert "no product" in str(
        product_problem(WmmaKernel, form_of(op="softmax", shape=[4, 4]), TileSchedule(block=(), thread=()))
    )


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
