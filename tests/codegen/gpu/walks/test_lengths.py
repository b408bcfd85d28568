"""Attention of sequences with lengths by every lowering: executed by the emulator, held against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from codegen.gpu.lower import lower
from codegen.gpu.walks import attention_multiply_adds, attention_warps
from codegen.target import Target
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import LoweringRequest
from codegen.verify.gpu import cuda_trial, emulated_kernel
from sokoban.kernel.instructions import Instruction
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.schedule.attention import AttentionSchedule
from tests.codegen.attention_kernels import V100, by_matrices, by_multiply_adds, checked, form_of, kernel_of

LENGTHS = {"lengths": True, "b": 3}
SHARED = {"heads": 4, "kv_heads": 2}
PAGES = {"page": 16, "pool": 40}
CASES: dict[str, tuple[AttentionSchedule, int, dict[str, Any]]] = {
    "all keys": (by_matrices(keys=32), 1, {"keys": 96, "queries": 5}),
    "causal": (by_matrices(keys=32, stages=2), 1, SHARED | {"keys": 96, "queries": 40, "causal": True}),
    "window": (by_matrices(held=True), 1, {"keys": 80, "queries": 9, "causal": True, "window": 19}),
    "slices": (by_matrices(keys=16), 3, SHARED | {"keys": 111, "queries": 5, "causal": True}),
    "pages": (by_matrices(keys=64), 1, PAGES | {"keys": 150, "queries": 3, "causal": True}),
    "decoding of pages": (
        by_matrices(rows=16, warps=1), 2, PAGES | SHARED | {"keys": 64, "queries": 1, "dtype": "bfloat16"},
    ),
}  # fmt: skip
SCALAR: dict[str, tuple[AttentionSchedule, int, dict[str, Any]]] = {
    "float32": (by_multiply_adds(), 1, SHARED | {"dtype": "float32", "keys": 77, "queries": 9, "causal": True}),
    "window": (by_multiply_adds(), 1, {"dtype": "float32", "keys": 64, "queries": 9, "causal": True, "window": 7}),
    "slices": (by_multiply_adds(rows=8), 3, SHARED | {"keys": 96, "queries": 1}),
    "pages": (by_multiply_adds(), 1, PAGES | {"dtype": "float32", "keys": 48}),
}


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("schedule", "slices", "changes"), CASES.values(), ids=CASES)
def test_results_by_warps(schedule: AttentionSchedule, slices: int, changes: dict[str, Any]) -> None:
    result = checked(schedule, slices, **LENGTHS | changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("schedule", "slices", "changes"), SCALAR.values(), ids=SCALAR)
def test_results_by_multiply_adds(schedule: AttentionSchedule, slices: int, changes: dict[str, Any]) -> None:
    result = checked(schedule, slices, target=V100, **LENGTHS | changes)
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize(("schedule", "slices", "changes"), SCALAR.values(), ids=SCALAR)
def test_results_of_the_opencl_text(schedule: AttentionSchedule, slices: int, changes: dict[str, Any]) -> None:
    result = checked(schedule, slices, engine="opencl", **LENGTHS | changes)
    assert result.passed, result.reason


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("lengths", [[1, 33, 64], [0, 64, 99], [32, 16, -5]], ids=["inside", "above", "below"])
@pytest.mark.parametrize(
    ("schedule", "target", "dtype"),
    [(by_matrices(keys=32), Target("cuda", "sm_80", 32), "float16"), (by_multiply_adds(), V100, "float32")],
    ids=["warps", "multiply-adds"],
)
def test_what_lies_behind_a_sequence_may_be_no_number(
    schedule: AttentionSchedule, target: Target, dtype: str, lengths: list[int]
) -> None:
    asked: dict[str, Any] = LENGTHS | {"keys": 64, "queries": 1, "dtype": dtype}
    form, kernel = form_of(**asked), kernel_of(**asked)
    inputs = random_inputs(form.expr, 0)
    inputs["Lengths"] = np.array(lengths, float)
    expected = evaluate(form.expr, inputs)
    for name in "KV":
        untouched = inputs[name].copy()
        for sequence, length in enumerate(lengths):
            untouched[sequence, :, max(1, length) :] = np.nan
        inputs[name] = untouched
    trial = cuda_trial(form, [(kernel, schedule)], target)
    output = emulated_kernel(trial, trial.launches[0], inputs).run().flat[: expected.size]
    np.testing.assert_allclose(output.reshape(expected.shape), expected, atol=2e-3)


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("schedule", "module", "dtype"),
    [(by_matrices(), attention_warps, "float16"), (by_multiply_adds(), attention_multiply_adds, "float32")],
    ids=["warps", "multiply-adds"],
)
def test_a_text_that_takes_all_keys_is_noticed(
    monkeypatch: pytest.MonkeyPatch, schedule: AttentionSchedule, module: Any, dtype: str
) -> None:
    monkeypatch.setattr(
        module, "own_keys", lambda kernel: "  const int KEYS_ALL = 64;\n  const int AHEAD = KEYS_ALL - 1;"
    )
    result = checked(schedule, **LENGTHS | {"keys": 64, "queries": 1, "dtype": dtype})
    assert not result.passed


def test_copies_in_bulk_refuse_lengths() -> None:
    schedule = AttentionSchedule(rows=64, keys=32, warps=4, stages=2, held=False, instruction=Instruction.WGMMA)
    request = LoweringRequest(kernel_of(**LENGTHS | {"keys": 64}), schedule, "k", Target("cuda", "sm_90a", 32))
    with pytest.raises(LoweringError, match="k: copies in bulk take whole tiles, and sequences end where their"):
        lower(request)
