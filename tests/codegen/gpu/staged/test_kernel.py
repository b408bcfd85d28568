"""Kernels that stage every operand: the right results, one barrier per step, wide accesses, nothing spilled."""

from __future__ import annotations

import re
from typing import Any

import pytest

from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import cuda_source
from codegen.gpu.staged import kernel as staged_kernels
from codegen.target import Target
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import LoweringRequest
from codegen.verify.gpu import verify
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.pipelines import BODY_STATEMENTS, turned_tensors
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.lowering import CUDA, lower

AMPERE = Target("cuda", "sm_80", 32)
GEMM = {"op": "matmul", "m": 256, "n": 256, "k": 128}
OPERATORS: tuple[dict[str, Any], ...] = (
    {"op": "matmul", "m": 100, "n": 96, "k": 70},
    {"op": "matmul", "m": 96, "n": 100, "k": 64, "transpose_a": True},
    {"op": "matmul", "m": 96, "n": 100, "k": 68, "transpose_b": True, "epilogue": ["relu"]},
    {"op": "matmul", "m": 64, "n": 64, "k": 64, "dtype": "float64"},
    {"op": "batch_matmul", "b": 6, "m": 64, "n": 48, "k": 40},
    {"op": "conv2d", "n": 4, "c": 8, "h": 14, "w": 14, "f": 32, "kh": 3, "kw": 3, "padding": 1},
    {"op": "conv2d", "n": 2, "c": 3, "h": 23, "w": 23, "f": 16, "kh": 7, "kw": 7, "stride": 2, "padding": 3},
    {"op": "conv2d", "n": 2, "c": 16, "h": 14, "w": 14, "f": 32, "kh": 1, "kw": 1, "stride": 2},
    {"op": "conv2d", "n": 2, "c": 8, "h": 14, "w": 14, "f": 8, "kh": 3, "kw": 3, "padding": 1, "layout": "NHWC"},
    {"expr": "C[i,j] = max(k, A[i,k] * B[k,j])", "sizes": {"i": 33, "j": 40, "k": 19}},
    {"expr": "C[i,j] = sum(k, A[i,15 - k] * B[k,j])", "sizes": {"i": 33, "j": 40, "k": 16}},
)


def form_of(**data: Any) -> KernelForm:
    return kernel_form(operator_from_data(data))


def gemm_schedule(**changes: Any) -> TileSchedule:
    schedule = TileSchedule(
        block=sizes({"m": 128, "n": 128}), thread=sizes({"m": 4, "n": 4}), vthreads=sizes({"m": 2, "n": 2}),
        step=sizes({"k": 8}), cached=("A", "B"), padding=sizes({"A": 4}), unroll=BODY_STATEMENTS, stages=2,
        turned=("A",),
    )  # fmt: skip
    return schedule.with_(**changes)


def source_of(form: KernelForm, schedule: TileSchedule) -> str:
    names = [tensor.name for tensor in (*form.expr.inputs, form.expr.output)]
    return strip_prelude(cuda_source(lower(form, schedule, entry="staged"), "sm_70", names))


def test_results_of_functions_without_vectors_leave_as_vectors() -> None:
    form = form_of(**GEMM, epilogue=[{"function": "bias_add", "axis": "n"}, "gelu"])
    text = source_of(form, gemm_schedule())
    assert "erff(" in text
    assert re.search(r"\*\(float4\*\)\(Out_ptr \+ ", text) and re.search(r"\*\(float4\*\)\(bias_ptr \+ ", text)
    assert verify(form, gemm_schedule(), engine="emulator").passed


def staged_schedule(form: KernelForm, most: int) -> TileSchedule:
    """Everything staged: blocks of up to ``most`` along the last axes, whole windows, and other reductions in steps."""
    last = form.spatial[-3:]
    block = {axis: min(most, form.sizes[axis]) if axis in last else 1 for axis in form.spatial}
    thread = {
        axis: next(n for n in (4, 2, 1) if (size % n == 0 and axis in last[1:]) or n == 1)
        for axis, size in block.items()
    }
    step = {axis: form.sizes[axis] if form.sizes[axis] <= 7 else 8 for axis in form.reduced}
    staged = tuple(dict.fromkeys(load.tensor for load in form.body_loads))
    schedule = TileSchedule(
        block=sizes(block), thread=sizes(thread), step=sizes(step), cached=staged, unroll=BODY_STATEMENTS
    )
    assert staged_kernels.takes(LoweringRequest(form, schedule, "staged", CUDA))
    return schedule


@pytest.mark.slow
@pytest.mark.usefixtures("opencl", "emulator")
@pytest.mark.parametrize(("most", "stages"), [(8, 1), (8, 2), (8, 3), (5, 2)])
@pytest.mark.parametrize("data", OPERATORS, ids=lambda data: str(data)[:60])
def test_every_layout_and_depth_agrees_with_the_reference(data: dict[str, Any], most: int, stages: int) -> None:
    form = form_of(**data)
    schedule = staged_schedule(form, most).with_(stages=stages, asynchronous=stages == 3)
    for turned in ((), turned_tensors(form))[stages != 2 :]:
        result = verify(form, schedule.with_(turned=turned), engine="opencl" if stages == 1 else "emulator")
        assert result.passed, (turned, result.reason)


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_cuda_text_itself_agrees(stages: int, dtype: str) -> None:
    form = form_of(op="matmul", m=70, n=72, k=40, dtype=dtype)
    schedule = gemm_schedule(
        block=sizes({"m": 32, "n": 32}), vthreads=sizes({"m": 1, "n": 1}), stages=stages, padding=sizes({"A": 8})
    )
    result = verify(form, schedule, engine="emulator")
    assert result.passed, result.reason


#: Values of axes inside a reduction: compared with each other, selecting either arm, as factors, outside loads too.
AXIS_VALUES = (
    "Y[i,j] = sum(k, select(k <= i, A[i,k], 0) * B[k,j])",
    "Y[i,j] = sum(k, A[i,k] * B[k,j] * (k + 1))",
    "Y[i,j] = max(k, select(k < j and i != k, A[i,k] + B[k,j], (2*j - 3*k)))",
)


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("text", AXIS_VALUES)
def test_the_value_of_an_axis_is_its_place_in_the_operator(text: str, stages: int) -> None:
    form = form_of(expr=text, sizes={"i": 21, "j": 20, "k": 19})
    schedule = staged_schedule(form, 8).with_(stages=stages, asynchronous=stages == 3, turned=turned_tensors(form))
    result = verify(form, schedule, engine="emulator", full_size=True)
    assert result.passed, result.reason


#: Copies at the border of a tensor: of windows, whose steps stay at it; of steps that move along it; of the last rows,
#: which only results beyond the output's end are made of; of a reduction that no step divides.
BORDERS: tuple[tuple[dict[str, Any], dict[str, int]], ...] = (
    ({"op": "conv2d", "n": 2, "c": 6, "h": 9, "w": 9, "f": 12, "kh": 3, "kw": 3, "padding": 1}, {"c": 2}),
    ({"op": "conv2d", "n": 1, "c": 4, "h": 8, "w": 8, "f": 8, "kh": 3, "kw": 3, "padding": 1}, {"c": 4, "kh": 1}),
    ({"op": "matmul", "m": 37, "n": 44, "k": 30}, {"k": 8}),
)


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("data", "steps"), BORDERS, ids=lambda value: str(value)[:50])
def test_asynchronous_copies_are_waited_for(data: dict[str, Any], steps: dict[str, int], stages: int) -> None:
    form = form_of(**data)
    plain = staged_schedule(form, 8)
    schedule = plain.with_(
        step=sizes({axis: steps.get(axis, size) for axis, size in plain.step}), stages=stages, asynchronous=True,
        turned=turned_tensors(form), padding=sizes(dict.fromkeys(turned_tensors(form), 4)),
    )  # fmt: skip
    # Late copies: a kernel that reads before it has waited finds old data there.
    result = verify(form, schedule, engine="emulator", full_size=True)
    assert result.passed, result.reason


def test_an_asynchronous_pipeline_loads_nothing_into_registers() -> None:
    source = source_of(form_of(**GEMM), gemm_schedule(stages=3, asynchronous=True))
    steps = source[source.index("for (int step") : source.index("C_ptr +")]
    assert "values" not in source and steps.count("__syncthreads();") == 1
    assert "copy_async_wait_1();" in steps and steps.count("copy_async_commit();") == 1
    assert steps.count("copy_async_16_apart(") == 1 and steps.count("copy_async_4_apart(") == 4


def test_the_border_of_a_convolution_costs_steps_no_checks() -> None:
    form = form_of(op="conv2d", n=4, c=16, h=14, w=14, f=32, kh=3, kw=3, padding=1)
    schedule = TileSchedule(
        block=sizes({"n": 1, "f": 32, "oh": 7, "ow": 14}), thread=sizes({"n": 1, "f": 4, "oh": 1, "ow": 2}),
        step=sizes({"c": 4, "kh": 3, "kw": 3}), cached=("X", "W"), unroll=BODY_STATEMENTS, stages=2, turned=("W",),
        padding=sizes({"W": 4}),
    )  # fmt: skip
    source = source_of(form, schedule)
    steps = source[source.index("for (int step") : source.rindex("Y_ptr")]
    # What is left is whether there is a step to fetch.
    assert re.findall(r"if \((.*)\) \{", steps) == ["step < 2"]
    # Before the steps one question per access says what is read, where to and whether a pad value goes there.
    accesses = int(re.findall(r"int X_fetch_from_ptr\[(\d+)\]", source)[0])
    assert len(re.findall(r"if \((.*)\) \{", source[: source.index("for (int step")])) == accesses
    # Without a place that nobody reads every access is checked.
    checked = source_of(form, schedule.with_(padding=()))
    assert "X_fetch_from_ptr" in "".join(re.findall(r"if \((.*)\) \{", checked[checked.index("for (int step") :]))


def test_a_pipelined_product_has_one_barrier_per_step_and_reads_vectors_only() -> None:
    source = source_of(form_of(**GEMM), gemm_schedule())
    steps = source[source.index("for (int step") : source.index("C_ptr +")]
    assert steps.count("__syncthreads();") == 1
    reads = [line for line in steps.splitlines() if "_operands_ptr +" in line and "staged_ptr" in line]
    assert len(reads) == 2 and all("*(float4*)(staged_ptr" in line for line in reads)
    loads = [line for line in steps.splitlines() if "_ptr + " in line and re.search(r"\*\)\([AB]_ptr", line)]
    assert len(loads) == 2 and all("*(float4*)" in line for line in loads)


def test_one_buffer_needs_two_barriers_and_half_the_memory() -> None:
    form = form_of(**GEMM)
    one, two = (lower(form, gemm_schedule(stages=stages), entry="staged") for stages in (1, 2))
    assert one.shared_bytes == 4 * (8 * (128 + 4) + 8 * 128) == two.shared_bytes // 2
    steps = source_of(form, gemm_schedule(stages=1)).split("for (int step")[1]
    assert steps.count("__syncthreads();") == 2


def test_a_single_step_is_no_pipeline() -> None:
    form = form_of(op="matmul", m=128, n=128, k=8)
    lowered = lower(form, gemm_schedule(), entry="staged")
    assert lowered.shared_bytes == 4 * (8 * (128 + 4) + 8 * 128)


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
def test_a_product_of_64_sums_per_thread_spills_nothing(architecture: str) -> None:
    compiled = compile_cuda(source_of(form_of(**GEMM), gemm_schedule()), architecture, name="staged")
    assert compiled.spill_bytes == 0 and compiled.registers <= 128


def test_guards_that_no_step_changes_are_worked_out_before_all_steps() -> None:
    form = form_of(op="conv2d", n=4, c=16, h=14, w=14, f=32, kh=3, kw=3, padding=1)
    schedule = TileSchedule(
        block=sizes({"n": 1, "f": 32, "oh": 7, "ow": 14}), thread=sizes({"n": 1, "f": 4, "oh": 1, "ow": 2}),
        step=sizes({"c": 4, "kh": 3, "kw": 3}), cached=("X", "W"), unroll=BODY_STATEMENTS, stages=2, turned=("W",),
    )  # fmt: skip
    source = source_of(form, schedule)
    steps = source[source.index("for (int step") : source.rindex("Y_ptr")]
    conditions = re.findall(r"if \((.*)\) \{", steps)
    # What is left are whether there is a step to fetch, and whether an element exists.
    assert conditions and all("%" not in condition and "/" not in condition for condition in conditions)
    assert any("X_fetch_from_ptr" in condition for condition in conditions)


def test_pipelines_need_every_operand_staged() -> None:
    for change in ({"stages": 2}, {"stages": 1, "turned": ("A",)}, {"stages": 1, "raster": 4}):
        with pytest.raises(LoweringError, match="need every operand of a reduction staged"):
            lower(form_of(**GEMM), gemm_schedule(cached=("A",), **{"turned": ()} | change), entry="staged")


def test_what_cannot_be_copied_past_the_registers_is_refused() -> None:
    form = form_of(**GEMM, dtype="float16")
    with pytest.raises(LoweringError, match="elements of A are smaller than the 4 bytes of a copy"):
        lower(form, gemm_schedule(asynchronous=True), entry="staged")


def test_a_thread_that_copies_a_whole_tensor_is_refused() -> None:
    form = form_of(expr="Y[i] = sum(k, X[2*k,2*k] * Z[k,i])", sizes={"i": 1, "k": 512})
    schedule = TileSchedule(block=sizes({"i": 1}), thread=sizes({"i": 1}), step=sizes({"k": 64}), cached=("X", "Z"))
    with pytest.raises(
        LoweringError, match="a thread copies 4096 pieces of X a step, and 1024 are written out at most"
    ):
        lower(form, schedule, entry="staged")


@pytest.mark.usefixtures("emulator")
def test_buffers_of_two_types_sized_at_launch_lie_behind_each_other() -> None:
    """TVM would begin the second one at a multiple of 64 bytes, and the launch would have too few."""
    form = form_of(
        expr="C[i,j] = sum(k, A[i,k] * B[k,j] * t[j])", sizes={"i": 64, "j": 38, "k": 192}, dtypes={"t": "float16"}
    )
    schedule = TileSchedule(
        block=sizes({"i": 64, "j": 38}), thread=sizes({"i": 4, "j": 2}), vthreads=sizes({"i": 1, "j": 1}),
        step=sizes({"k": 64}), cached=("A", "B", "t"), padding=sizes({"A": 4}), stages=2, turned=("A",),
    )  # fmt: skip
    lowered = lower(form, schedule, entry="staged", target=AMPERE)
    assert lowered.dynamic_shared_bytes > 48 * 1024 and lowered.dynamic_shared_bytes % 64
    checked = verify(form, schedule, engine="emulator", target=AMPERE)
    assert checked.passed, checked.reason


@pytest.mark.usefixtures("emulator")
def test_bfloat16_is_staged_as_bits_where_a_board_has_no_arithmetic_of_it() -> None:
    """TVM would stage every element as a float32, in twice as much shared memory as the schedule counts."""
    conv = {"op": "conv2d", "n": 1, "c": 8, "h": 9, "w": 9, "f": 16, "kh": 3, "kw": 3, "padding": 1}
    for operator in ({"op": "matmul", "m": 50, "n": 40, "k": 36}, conv):
        form, volta = form_of(**operator, dtype="bfloat16"), Target("cuda", "sm_70", 32)
        schedule = staged_schedule(form, 16)
        lowered = lower(form, schedule, entry="staged", target=volta)
        names = [tensor.name for tensor in (*form.expr.inputs, form.expr.output)]
        text = strip_prelude(cuda_source(lowered, "sm_70", names))
        (count,) = re.findall(r"__shared__ alignas\(\d+\) ushort staged_ptr\[(\d+)\]", text)
        assert 2 * int(count) == lowered.shared_bytes
        checked = verify(form, schedule, engine="emulator", target=volta)
        assert checked.passed, checked.reason
