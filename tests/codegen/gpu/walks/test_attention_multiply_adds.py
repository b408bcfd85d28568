"""Attention by multiply-adds: the same text in CUDA, executed by the emulator, and in OpenCL C, executed by PoCL."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.gpu.lower import lower
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import static_shared_bytes
from codegen.target import Target
from codegen.tir.lowering import LoweringRequest
from sokoban.schedule.attention import AttentionSchedule, SharedFloats, shared_bytes
from tests.codegen.attention_kernels import V100, by_matrices, by_multiply_adds, checked, kernel_of

CASES = [
    (by_multiply_adds(), {"dtype": "float32"}),
    (by_multiply_adds(rows=32, keys=32, warps=4, lanes=16), {"dtype": "float32", "causal": True, "head_dim": 20}),
    (by_multiply_adds(rows=8), {"causal": True, "window": 9}),
    (by_multiply_adds(warps=4, keys=64), {"dtype": "bfloat16", "keys": 77, "b": 2}),
    (by_multiply_adds(), {"heads": 6, "kv_heads": 2, "queries": 7, "causal": True, "dtype": "float32", "scale": -0.5}),
]
IDS = ["float32", "causal", "window", "bfloat16", "groups"]


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("schedule", "changes"), CASES, ids=IDS)
def test_results_of_the_cuda_text(schedule: AttentionSchedule, changes: dict[str, Any]) -> None:
    result = checked(schedule, target=V100, **changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize(("schedule", "changes"), CASES, ids=IDS)
def test_results_of_the_opencl_text(schedule: AttentionSchedule, changes: dict[str, Any]) -> None:
    result = checked(schedule, engine="opencl", **changes)
    assert result.passed, result.reason
    # Elements of 16 bits are read and written as they are, not as float32.
    assert result.method == "opencl"


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize("slices", [1, 3])
def test_matrix_instructions_have_a_twin(slices: int) -> None:
    result = checked(by_matrices(stages=2), slices, engine="opencl", causal=True, heads=4, kv_heads=2)
    assert result.passed, result.reason
    assert result.method == "opencl (scalar twin of the Tensor Core tiling)"


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_slices_of_the_keys_come_together(dtype: str) -> None:
    result = checked(by_multiply_adds(rows=8), 4, target=V100, queries=3, keys=100, causal=True, dtype=dtype)
    assert result.passed, result.reason


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_older_boards_compile_it(dtype: str) -> None:
    """sm_60 makes no pairs of elements in one instruction."""
    kernel, schedule = kernel_of(dtype=dtype, head_dim=64), by_multiply_adds(rows=64, keys=32, warps=4)
    text = strip_prelude(lower(LoweringRequest(kernel, schedule, "attention", Target("cuda", "sm_60", 32))).text)
    compiled = compile_cuda(text, "sm_60", name="attention")
    assert compiled.spill_bytes == 0


def test_shared_memory_is_what_the_schedule_says() -> None:
    kernel, schedule = kernel_of(dtype="float32"), by_multiply_adds()
    opencl = lower(LoweringRequest(kernel, schedule, "attention", Target("opencl-source", "", 64)))
    assert static_shared_bytes(opencl.text) == opencl.shared_bytes == shared_bytes(kernel, schedule)
    assert opencl.dynamic_shared_bytes == 0
    cuda = lower(LoweringRequest(kernel, schedule, "attention", V100))
    assert cuda.dynamic_shared_bytes == shared_bytes(kernel, schedule)
    # 16 rows and 16 keys of 20 floats; values of 32; 16 rows of 16 weights and 4 more; 8 lanes of 16 rows.
    assert SharedFloats.of(kernel, schedule).total == 16 * 20 + 16 * 32 + 16 * 20 + 16 * 8
