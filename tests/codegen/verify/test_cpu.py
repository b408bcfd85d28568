"""Schedules for processors run on this one: right ones pass, whatever they were compiled for; wrong ones do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from codegen.built import BuiltKernel
from codegen.verify import cpu as module
from codegen.verify.cpu import FULL_SIZE_POINTS, verify_cpu
from hal.microbench.cpu.native import host_architecture
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from tests.codegen.cpu_kernels import form_of, host, schedule_for, vector_bytes

pytestmark = pytest.mark.usefixtures("c_compiler")

LANES = vector_bytes() // 4


def checked(form: KernelForm, **changes: Any) -> Any:
    return verify_cpu(form, schedule_for(form), replace(host(), **changes))


def test_small_operators_run_whole() -> None:
    form = form_of(op="matmul", m=20, n=40, k=12, epilogue=["relu"])
    check = checked(form)
    assert check.passed and check.reason == "" and check.method == "native"
    assert check.relative_error is not None and check.relative_error < 1e-6
    assert check.axis_sizes == {"m": 20, "n": 40, "k": 12}


def test_large_ones_are_cut_down_to_whole_tiles_and_a_rest() -> None:
    form = form_of(op="matmul", m=513, n=1025, k=64)
    schedule = schedule_for(form)
    assert np.prod(list(form.sizes.values())) > FULL_SIZE_POINTS
    check = checked(form)
    assert check.passed
    block = schedule.block_of["m"]
    assert check.axis_sizes["m"] == 2 * block + 513 % block


def test_rows_keep_whole_vectors_of_columns() -> None:
    check = checked(form_of(op="softmax", shape=[4096, 999]))
    assert check.passed and check.axis_sizes["i1"] >= 2 * LANES


def test_another_processor_has_a_twin() -> None:
    check = checked(form_of(op="matmul", m=20, n=40, k=12), architecture="another", lanes=2 * LANES)
    assert check.passed and check.method == f"native (compiled for {host_architecture()})"


def test_without_a_linker_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "linker", lambda: None)
    check = checked(form_of(op="matmul", m=20, n=40, k=12))
    assert (check.passed, check.method, check.relative_error) == (False, "none", None)
    assert check.reason.startswith("not run: there is no C compiler")


def test_a_kernel_that_leaves_its_blocks_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_in_turn", lambda task, state, count: None)
    check = checked(form_of(op="matmul", m=20, n=40, k=12))
    assert not check.passed and "not written" in check.reason


def test_scratch_memory_beyond_its_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    build = module.cpu_kernel

    def smaller(*arguments: Any, **options: Any) -> BuiltKernel:
        kernel = build(*arguments, **options)
        return replace(kernel, dynamic_shared_bytes=kernel.dynamic_shared_bytes - 256)

    monkeypatch.setattr(module, "cpu_kernel", smaller)
    # One whole block of columns: the second thread fills all of its scratch memory, however wide vectors are.
    check = checked(form_of(op="matmul", m=20, n=4 * LANES, k=12))
    assert not check.passed and check.reason == "written outside the scratch memory"


def test_what_does_not_lower_says_why() -> None:
    form = form_of(op="matmul", m=20, n=40, k=12)
    schedule = schedule_for(form).with_(instruction=Instruction.WMMA)
    check = verify_cpu(form, schedule, host())
    assert not check.passed and "no instruction of a CPU" in check.reason
