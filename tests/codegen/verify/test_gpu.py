"""Verification has to fail what is wrong; that it passes what is right shows everywhere else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from codegen.gpu import sources
from codegen.target import Target
from codegen.tolerance import relative_error
from codegen.verify import gpu as module
from codegen.verify.gpu import verify
from codegen.verify.result import Verification
from hal.catalog import load_device
from roller.construct.construct import construct
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule, sizes

SCHEDULE = TileSchedule(
    block=sizes({"m": 32, "n": 32}), thread=sizes({"m": 4, "n": 4}), step=sizes({"k": 8}), cached=("A", "B")
)


def form_of(**data: Any) -> KernelForm:
    return kernel_form(operator_from_data(data))


def matmul(m: int = 70, n: int = 45, k: int = 19, **more: Any) -> KernelForm:
    return form_of(op="matmul", m=m, n=n, k=k, **more)


# What is judged


def test_relative_error_is_measured_against_the_element_and_the_rms() -> None:
    expected = np.array([3.0, -4.0, 0.0, 0.0])  # rms: sqrt((9 + 16) / 4) = 2.5
    assert relative_error(expected, expected) == 0.0
    assert relative_error(np.array([3.0, -3.87, 0.0, 0.0]), expected) == pytest.approx(0.13 / (4 + 2.5))
    assert relative_error(np.array([3.0, -4.0, 0.05, 0.0]), expected) == pytest.approx(0.05 / 2.5)
    assert relative_error(expected * np.array([1, 1, np.nan, 1]), expected) == np.inf


def test_infinities_may_be_the_largest_numbers_but_nothing_else() -> None:
    expected = np.array([1.0, np.inf, -np.inf])
    largest = float(np.finfo(np.float32).max)
    assert relative_error(np.array([1.0, np.inf, -largest]), expected) == 0.0
    assert relative_error(np.array([1.0, 65504.0, -65504.0]), expected) == 0.0
    for wrong in ([1.0, 0.0, -np.inf], [1.0, np.inf, np.inf], [1.0, np.nan, -np.inf]):
        assert relative_error(np.array(wrong), expected) == np.inf


# What is caught


def tampered(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]) -> None:
    original = sources.opencl_source

    def opencl_source(*arguments: Any) -> str:
        source = original(*arguments)
        changed = change(source)
        assert changed != source
        return changed

    monkeypatch.setattr(sources, "opencl_source", opencl_source)


@pytest.mark.usefixtures("opencl")
def test_a_right_kernel_passes_and_says_how() -> None:
    result = verify(matmul(), SCHEDULE, engine="opencl")
    assert (result.passed, result.method, result.reason, result.tolerance) == (True, "opencl", "", 1e-4)
    assert result.relative_error is not None and 0 < result.relative_error < 1e-5
    half = verify(matmul(dtype="float16"), SCHEDULE, engine="opencl")
    assert (half.passed, half.method) == (True, "opencl (float32 twin of half-precision storage)")
    double = verify(matmul(dtype="float64"), SCHEDULE)
    assert double.passed and double.tolerance == 1e-9


@pytest.mark.usefixtures("opencl")
def test_a_wrong_operation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, lambda source: re.sub(r"\] \* (B_\w+\[)", r"] - \1", source))
    result = verify(matmul(), SCHEDULE, engine="opencl")
    assert not result.passed
    assert re.fullmatch(r"relative error \S+ is above 0.0001", result.reason)


@pytest.mark.usefixtures("opencl")
def test_an_output_that_is_not_written_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, lambda source: source.replace("C_ptr[", "if (get_local_id(0) != 3) C_ptr[", 1))
    result = verify(matmul(), SCHEDULE, engine="opencl")
    assert not result.passed
    assert "outputs not written" in result.reason


@pytest.mark.usefixtures("opencl")
def test_a_read_behind_an_input_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, lambda source: source.replace("A_ptr[", "A_ptr[70 * 19 + "))
    result = verify(matmul(), SCHEDULE, engine="opencl")
    assert not result.passed and "read outside a tensor" in result.reason


@pytest.mark.usefixtures("opencl")
def test_a_write_behind_the_output_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, lambda source: source.replace("  C_ptr[", "  C_ptr[70 * 45] = 1; C_ptr[", 1))
    result = verify(matmul(), SCHEDULE, engine="opencl")
    assert (result.passed, result.reason) == (False, "written behind the end of the output")


@pytest.mark.usefixtures("opencl")
def test_a_kernel_that_does_not_compile_is_a_failure_with_the_compiler_s_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tampered(monkeypatch, lambda source: source.replace("A_ptr[", "nothing[", 1))
    result = verify(matmul(), SCHEDULE, engine="opencl")
    assert not result.passed and result.relative_error is None
    assert "nothing" in result.reason and "\n" not in result.reason


@pytest.mark.usefixtures("opencl")
def test_a_launch_that_is_too_small_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = sources.lower

    def lower(*arguments: Any, **more: Any) -> Any:
        lowered = original(*arguments, **more)
        return replace(lowered, grid=(lowered.grid[0] - 1, 1, 1))

    monkeypatch.setattr(sources, "lower", lower)
    result = verify(matmul(), SCHEDULE, engine="opencl")
    # 70 rows and 45 columns: the last block holds 6 rows by 13 columns.
    assert result.reason == "78 of 3150 outputs not written, or read outside a tensor"


@pytest.mark.usefixtures("opencl")
def test_a_schedule_that_cannot_be_lowered_is_a_failure_with_its_reason() -> None:
    result = verify(matmul(), SCHEDULE.with_(thread=sizes({"m": 3, "n": 4})))
    assert not result.passed
    assert result.reason == "verify: 3 elements of m per thread do not divide a block of 32"


def test_without_opencl_nothing_passes_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "opencl_available", lambda: "no OpenCL CPU device")
    result = verify(matmul(), SCHEDULE, engine="opencl")
    assert (result.passed, result.method, result.relative_error) == (False, "none", None)
    assert result.reason == "not run: no OpenCL CPU device"


@pytest.mark.usefixtures("opencl")
def test_the_whole_problem_is_held_against_the_operator_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A normalisation that loses an epilogue agrees with itself, not with its source."""
    form = matmul(epilogue=["relu"])
    plain = matmul()
    lost = KernelForm(
        source=form.source,
        expr=plain.expr,
        kind=plain.kind,
        reductions=plain.reductions,
        final=plain.final,
        fused=plain.fused,
    )
    assert verify(lost, SCHEDULE).passed
    result = verify(lost, SCHEDULE, full_size=True)
    assert not result.passed and "relative error" in result.reason


@pytest.mark.usefixtures("opencl")
def test_tensor_core_tilings_are_run_by_a_scalar_twin() -> None:
    form = matmul(m=256, n=256, k=128, dtype="float16")
    programs = construct(form, load_device("v100"), 10).programs
    program = next(p for p in programs if p.schedule.instruction != "fma")
    result = verify(form, program.schedule, engine="opencl")
    assert result.passed, result.reason
    assert "scalar twin of the Tensor Core tiling" in result.method


# The other engine


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("operator", "device"),
    [
        ({"op": "matmul", "m": 70, "n": 52, "k": 37, "dtype": "float16", "epilogue": ["relu"]}, "a100"),
        ({"op": "matmul", "m": 70, "n": 52, "k": 37, "dtype": "bfloat16"}, "a100"),
        ({"op": "softmax", "shape": [9, 100]}, "v100"),
        ({"op": "conv2d", "n": 2, "c": 5, "h": 9, "w": 8, "f": 7, "kh": 3, "kw": 3, "padding": 1}, "v100"),
    ],
    ids=["float16 WMMA", "bfloat16 WMMA", "shuffles", "windows"],
)
def test_the_cuda_text_itself_can_be_run(operator: dict[str, Any], device: str) -> None:
    form = form_of(**operator)
    check = verify(form, construct(form, load_device(device)).programs[0].schedule, engine="emulator")
    assert (check.passed, check.method, check.reason) == (True, "cuda, emulated", "")


@pytest.mark.usefixtures("emulator")
def test_dynamic_shared_memory_holds_tiles_that_fill_no_whole_alignment() -> None:
    text = "Y[i, j] = X[i + 2*j, i - 1 | pad=0] + X[130 - i + 2*j, 129 - i | pad=0]"
    form = form_of(expr=text, sizes={"i": 131, "j": 63}, shapes={"X": [255, 129]})
    schedule = TileSchedule(
        block=sizes({"i": 64, "j": 64}), thread=sizes({"i": 4, "j": 1}), cached=("X",), padding=sizes({"X": 1})
    )
    assert (64 + 2 * 63) * (64 + 1) * 4 % 64
    check = verify(form, schedule, engine="emulator", target=Target.of(load_device("b200")))
    assert check.passed, check.reason


@pytest.mark.usefixtures("emulator")
def test_two_threads_along_an_axis_read_diagonals_where_they_are() -> None:
    text = "Y[i, j] = T[i - j + 6] - X[i, i + j - 1 | pad=1]"
    form = form_of(expr=text, sizes={"i": 15, "j": 7}, shapes={"T": [21], "X": [14, 19]})
    schedule = TileSchedule(
        block=sizes({"i": 15, "j": 8}), thread=sizes({"i": 1, "j": 1}), vthreads=sizes({"i": 1, "j": 4})
    )
    check = verify(form, schedule, engine="emulator")
    assert check.passed, check.reason


def emulated(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str], **more: Any) -> Verification:
    """What verification says of a staged product whose CUDA text was changed."""
    original = sources.cuda_source

    def cuda_source(*arguments: Any) -> str:
        source = original(*arguments)
        changed = change(source)
        assert changed != source
        return changed

    monkeypatch.setattr(sources, "cuda_source", cuda_source)
    return verify(matmul(), SCHEDULE, engine="emulator", **more)


@pytest.mark.usefixtures("emulator")
def test_a_race_is_a_wrong_kernel_and_names_both_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    check = emulated(monkeypatch, lambda source: source.replace("__syncthreads();", "", 1), order_seeds=(5, 6))
    assert not check.passed and check.relative_error == np.inf
    assert (check.engine, check.seeds) == ("emulator", (5, 6)) and "races" in check.checks
    assert "\n" not in check.reason and len(re.findall(r"kernel\.cu:\d+ ", check.reason)) == 2
    assert re.search(r"race on shared .* \(seed [56]\)", check.reason)


@pytest.mark.usefixtures("emulator")
def test_a_barrier_that_orders_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    check = emulated(
        monkeypatch, lambda source: source.replace("__syncthreads();", "__syncthreads();\n__syncthreads();", 1)
    )
    assert check.passed, check.reason
    assert any(re.fullmatch(r"line \d+: __syncthreads\(\);", place) for place in check.needless)


@pytest.mark.usefixtures("emulator")
def test_sums_in_float32_are_rounded_once_for_a_half_precision_output() -> None:
    check = verify(matmul(dtype="float16"), SCHEDULE, engine="emulator")
    assert check.passed and check.tolerance == 1e-4 + 2**-10
    # The rounding itself is half a unit in the last place of eleven bits.
    assert check.relative_error is not None and check.relative_error < 2**-11
