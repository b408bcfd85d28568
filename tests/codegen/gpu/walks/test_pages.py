"""Attention over pages by every lowering: executed by the emulator with tables in any order, held against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from codegen.gpu.lower import lower
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.walks import pages
from codegen.target import Target
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import LoweringRequest
from codegen.verify.gpu import cuda_trial, emulated_kernel
from sokoban.kernel.instructions import Instruction
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.schedule.attention import AttentionSchedule
from tests.codegen.attention_kernels import V100, by_matrices, by_multiply_adds, checked, form_of, kernel_of

H100 = Target("cuda", "sm_90a", 32)
PAGES = {"page": 16, "pool": 13}


def by_groups(keys: int = 32, stages: int = 2) -> AttentionSchedule:
    return AttentionSchedule(rows=64, keys=keys, warps=4, stages=stages, held=False, instruction=Instruction.WGMMA)


SHARED = {"b": 2, "heads": 4, "kv_heads": 2}
CASES: dict[str, tuple[AttentionSchedule, int, dict[str, Any]]] = {
    "several pages a step": (by_matrices(keys=64, stages=2), 1, {"keys": 150, "causal": True}),
    "several steps a page": (by_matrices(held=True), 1, {"page": 64, "keys": 128, "causal": True, "window": 19}),
    "pages across steps": (by_matrices(keys=32), 1, SHARED | {"page": 5, "keys": 51, "queries": 5}),
    "slices": (by_matrices(keys=32), 3, SHARED | {"keys": 111, "queries": 5, "causal": True}),
    "widths that no piece divides": (by_matrices(), 1, {"keys": 50, "head_dim": 40, "value_dim": 24}),
    "decoding": (by_matrices(rows=16, warps=1), 2, SHARED | {"keys": 64, "queries": 1, "dtype": "bfloat16"}),
}
SCALAR: dict[str, tuple[AttentionSchedule, int, dict[str, Any]]] = {
    "float32": (by_multiply_adds(), 1, SHARED | {"dtype": "float32", "keys": 77, "causal": True}),
    "slices": (by_multiply_adds(rows=8), 3, SHARED | {"keys": 77, "queries": 1}),
    "pages across steps": (by_multiply_adds(), 1, {"dtype": "float32", "page": 5, "keys": 48}),
}
GROUPS: dict[str, tuple[AttentionSchedule, int, dict[str, Any]]] = {
    "several pages a step": (by_groups(), 1, SHARED | {"keys": 80, "queries": 40, "causal": True}),
    "several steps a page": (by_groups(keys=16), 2, {"keys": 64, "page": 32, "head_dim": 72}),
}


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("schedule", "slices", "changes"), CASES.values(), ids=CASES)
def test_results_by_warps(schedule: AttentionSchedule, slices: int, changes: dict[str, Any]) -> None:
    result = checked(schedule, slices, **PAGES | changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("schedule", "slices", "changes"), SCALAR.values(), ids=SCALAR)
def test_results_by_multiply_adds(schedule: AttentionSchedule, slices: int, changes: dict[str, Any]) -> None:
    result = checked(schedule, slices, target=V100, **PAGES | changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize(("schedule", "slices", "changes"), SCALAR.values(), ids=SCALAR)
def test_results_of_the_opencl_text(schedule: AttentionSchedule, slices: int, changes: dict[str, Any]) -> None:
    result = checked(schedule, slices, engine="opencl", **PAGES | changes)
    assert result.passed, result.reason


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("schedule", "slices", "changes"), GROUPS.values(), ids=GROUPS)
def test_results_by_warp_groups(schedule: AttentionSchedule, slices: int, changes: dict[str, Any]) -> None:
    result = checked(schedule, slices, target=H100, **PAGES | changes)
    assert result.passed, result.reason


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("schedule", "target", "changes"),
    [
        (by_matrices(keys=32), Target("cuda", "sm_80", 32), {"keys": 37, "dtype": "float16"}),
        (by_multiply_adds(), V100, {"keys": 37, "dtype": "float32"}),
        (by_groups(keys=64), H100, {"keys": 48, "dtype": "float16"}),
    ],
    ids=["warps", "multiply-adds", "warp groups"],
)
def test_what_lies_behind_the_last_key_may_be_no_number(
    schedule: AttentionSchedule, target: Target, changes: dict[str, Any]
) -> None:
    """Pages that no table names and tokens behind the last key are memory that nothing has written yet."""
    form, kernel = form_of(**PAGES | changes), kernel_of(**PAGES | changes)
    inputs = random_inputs(form.expr, 0)
    inputs["Table"] = np.array([[7, 2, 11]], float)
    expected = evaluate(form.expr, inputs)
    for name in "KV":
        untouched = np.full_like(inputs[name], np.nan)
        untouched[[7, 2, 11]] = inputs[name][[7, 2, 11]]
        untouched[11, :, changes["keys"] - 32 :] = np.nan
        inputs[name] = untouched
    trial = cuda_trial(form, [(kernel, schedule)], target)
    output = emulated_kernel(trial, trial.launches[0], inputs).run().flat[: expected.size]
    np.testing.assert_allclose(output.reshape(expected.shape), expected, atol=2e-3)


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("schedule", [by_matrices(), by_multiply_adds()], ids=["warps", "multiply-adds"])
def test_a_text_that_trusts_the_table_is_noticed(monkeypatch: pytest.MonkeyPatch, schedule: AttentionSchedule) -> None:
    """Of the places in tests some lie outside of the pool."""
    monkeypatch.setattr(pages, "in_pool", lambda page, last: page)
    result = checked(schedule, keys=250, **PAGES | {"pool": 16})
    assert not result.passed and "outside" in result.reason, result.reason


def test_pages_of_a_step_are_looked_up_together_and_by_all_threads_alike() -> None:
    request = LoweringRequest(kernel_of(keys=128, head_dim=64, **PAGES), by_matrices(keys=64), "k", V100)
    text = lower(request).text
    assert all(f"row_of_key(step * KEYS + {first}) + tile_row;" in text for first in (0, 16, 32, 48))
    across = LoweringRequest(kernel_of(keys=128, head_dim=64, page=5, pool=30), by_matrices(keys=64), "k", V100)
    assert "row_of_key(step * KEYS + 8 + tile_row);" in lower(across).text
    assert pages.LOOKUPS_AHEAD == 8


def test_copies_in_bulk_say_what_they_cannot_take() -> None:
    request = LoweringRequest(kernel_of(keys=37, **PAGES), by_groups(), "k", H100)
    with pytest.raises(LoweringError, match="k: copies in bulk take 16 rows of a page together, and 37 keys end"):
        lower(request)


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize(
    ("schedule", "architecture"),
    [(by_matrices(rows=64, keys=64, warps=4), "sm_80"), (by_groups(keys=64), "sm_90a")],
    ids=["warps", "warp groups"],
)
def test_kernels_compile_without_spills(schedule: AttentionSchedule, architecture: str) -> None:
    kernel = kernel_of(head_dim=128, queries=4096, causal=True, page=16, pool=300)
    request = LoweringRequest(kernel, schedule, "attention", Target("cuda", architecture, 32))
    compiled = compile_cuda(strip_prelude(lower(request).text), architecture, name="attention")
    assert compiled.spill_bytes == 0
