"""The structure of lowered tiles: no goldens, but what has to hold of any kernel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import cuda_source, opencl_source, static_shared_bytes
from codegen.tir.lowered import KERNEL_SUFFIX, Lowered, LoweringError, identifier
from codegen.tir.reads import padded_sizes
from hal.catalog import load_device
from roller.construct.construct import construct
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.names import fresh_name
from sokoban.language.operators import operator_from_data, operators_from_json
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.addresses import largest_dynamic_byte, vector_accesses
from tests.codegen.lowering import OPENCL, lower

SUITES = Path(__file__).resolve().parents[3] / "bench" / "suites"


def form_of(**data: Any) -> KernelForm:
    return kernel_form(operator_from_data(data))


def names(form: KernelForm) -> list[str]:
    return [tensor.name for tensor in (*form.expr.inputs, form.expr.output)]


def cuda(form: KernelForm, lowered: Lowered, architecture: str = "sm_70") -> str:
    return strip_prelude(cuda_source(lowered, architecture, names(form)))


def body(source: str) -> str:
    """The kernel itself, behind its declaration."""
    return source[source.rindex('extern "C" __global__') :]


def parameters(source: str) -> list[str]:
    """The kernel's parameters, as its first declaration names them."""
    declaration = re.search(rf"{KERNEL_SUFFIX}\(([^)]*)\)", source)
    assert declaration is not None
    return [part.split()[-1].removesuffix("_ptr") for part in declaration.group(1).split(",")]


def matmul_schedule(**changes: Any) -> TileSchedule:
    schedule = TileSchedule(
        block=sizes({"m": 64, "n": 32}), thread=sizes({"m": 4, "n": 4}), vthreads=sizes({"m": 2, "n": 1}),
        step=sizes({"k": 8}), cached=("A", "B"), vector=sizes({"A": 4, "B": 4}),
    )  # fmt: skip
    return schedule.with_(**changes)


def test_launch_and_shared_memory_are_what_the_schedule_says_and_the_compiler_finds() -> None:
    form = form_of(op="matmul", m=130, n=96, k=40)
    schedule = matmul_schedule(padding=sizes({"A": 4}))
    lowered = lower(form, schedule, entry="shape")
    # 130 rows in blocks of 64 and 96 columns in blocks of 32; 8 x 8 threads with 2 x 4 by 4 elements each.
    assert lowered.grid == (3 * 3, 1, 1)
    assert lowered.block == (8 * 8, 1, 1) == (schedule.threads_per_block, 1, 1)
    # A: 64 rows of 8 and 4 of padding; B: 8 rows of 32.
    assert lowered.shared_bytes == 4 * (64 * (8 + 4) + 8 * 32)
    assert lowered.dynamic_shared_bytes == 0
    source = cuda(form, lowered)
    assert static_shared_bytes(source) == lowered.shared_bytes
    compiled = compile_cuda(source, "sm_70", name="shape")
    assert compiled.shared_bytes == lowered.shared_bytes
    assert "__launch_bounds__(64)" in source
    assert f"shape{KERNEL_SUFFIX}(" in source


def test_parameters_are_the_inputs_in_order_then_the_output() -> None:
    data = {"expr": "B[i] = Z[i] * A[i] + M[i]", "sizes": {"i": 77}}
    form = form_of(**data)
    lowered = lower(form, TileSchedule(block=sizes({"i": 32}), thread=sizes({"i": 1})), entry="order")
    for source in (cuda(form, lowered), opencl_source(lowered, names(form))):
        assert parameters(source) == ["Z", "A", "M", "B"]


def test_a_tensor_nothing_depends_on_is_a_parameter_all_the_same() -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        form = form_of(op="softmax", shape=[1, 33], axis=0, dtype=dtype)
        schedule = TileSchedule(block=sizes({form.spatial[0]: 32}), thread=sizes({form.spatial[0]: 1}))
        lowered = lower(form, schedule, entry="unused")
        source = cuda(form, lowered)
        assert parameters(source) == ["X", "Y"]
        compile_cuda(source, "sm_70", name="unused")


def test_parameters_that_are_not_the_operator_s_are_refused() -> None:
    form = form_of(op="matmul", m=64, n=32, k=8)
    lowered = lower(form, matmul_schedule(), entry="foreign")
    with pytest.raises(LoweringError, match=re.escape("parameters ['A_ptr', 'B_ptr', 'C_ptr'] are not")):
        cuda_source(lowered, "sm_70", ["A", "C"])


def test_whole_tiles_have_no_conditions() -> None:
    form = form_of(op="matmul", m=128, n=64, k=32)
    source = body(cuda(form, lower(form, matmul_schedule(), entry="whole")))
    assert "if (" not in source and "?" not in source


def test_only_what_leaves_its_tensor_is_guarded() -> None:
    """64 and 32 wide tiles over 130 rows, 96 columns, 40 steps: rows alone do not divide."""
    form = form_of(op="matmul", m=130, n=96, k=40)
    source = body(cuda(form, lower(form, matmul_schedule(), entry="edge")))
    fetch_b = [line for line in source.splitlines() if "= *(float4*)(B_ptr" in line]
    assert len(fetch_b) == 1 and "?" not in fetch_b[0]
    # Three blocks of columns, so rows follow from blockIdx.x / 3. Rows of A beyond the last are read as the last one,
    # since nothing of them is stored: one condition, on the rows of C; columns have none.
    conditions = re.findall(r"\bif \((.*)\) \{", source)
    assert len(conditions) == 1
    assert "blockIdx.x) / 3)" in conditions[0] and conditions[0].endswith("< 130") and "%" not in conditions[0]
    assert "smaller(" in source[: source.index("__syncthreads();")]
    # The inner loop has none.
    inner = source[source.rindex("__syncthreads();") : source.index("C_ptr +")]
    assert "accumulators_ptr[" in inner and not re.search(r"\?|\bif\b", inner[: inner.index("accumulators_ptr[")])


def test_padded_steps_of_a_sum_of_products_need_no_condition_but_a_maximum_does() -> None:
    schedule = TileSchedule(
        block=sizes({"i": 32, "j": 32}), thread=sizes({"i": 4, "j": 4}), step=sizes({"k": 8}), cached=("A", "B")
    )
    shape = {"sizes": {"i": 32, "j": 32, "k": 19}}
    for text, wanted in (
        ("C[i,j] = sum(k, A[i,k] * B[k,j])", False),
        ("C[i,j] = sum(k, A[i,k] * (B[k,j] * 2))", False),
        ("C[i,j] = max(k, A[i,k] * B[k,j])", True),
        ("C[i,j] = prod(k, A[i,k] * B[k,j])", True),
        ("C[i,j] = sum(k, A[i,k] + B[k,j])", True),
        # Zero times one over zero, or times its logarithm, is not zero.
        ("C[i,j] = sum(k, A[i,k] * (1 / B[k,j]))", True),
        ("C[i,j] = sum(k, A[i,k] * log(B[k,j]))", True),
    ):
        form = form_of(expr=text, **shape)
        assert padded_sizes(form, schedule) == {"i": 32, "j": 32, "k": 24}
        source = body(cuda(form, lower(form, schedule, entry="steps")))
        accumulate = source[source.rindex("__syncthreads();") :]
        assert (re.search(r"< 19|< 3\b", accumulate) is not None) == wanted, (text, accumulate)


def test_a_tensor_longer_than_its_axis_does_not_hide_the_padding() -> None:
    """A has 64 columns of which 19 count: the next ones are data, not zeros."""
    form = form_of(
        expr="C[i,j] = sum(k, A[i,k] * B[k,j])",
        sizes={"i": 32, "j": 32, "k": 19},
        shapes={"A": [32, 64], "B": [64, 32]},
    )
    schedule = TileSchedule(
        block=sizes({"i": 32, "j": 32}), thread=sizes({"i": 4, "j": 4}), step=sizes({"k": 8}), cached=("A", "B")
    )
    source = body(cuda(form, lower(form, schedule, entry="longer")))
    assert re.search(r"< 19|< 3\b", source)


def test_a_block_that_its_threads_do_not_divide_is_refused() -> None:
    form = form_of(op="matmul", m=130, n=96, k=40)
    with pytest.raises(LoweringError) as caught:
        lower(form, matmul_schedule(thread=sizes({"m": 3, "n": 4})), entry="odd")
    assert str(caught.value) == "odd: 6 elements of m per thread do not divide a block of 64"


# Dynamic shared memory


def test_more_than_48_kib_is_given_at_launch_on_cuda_and_declared_elsewhere() -> None:
    form = form_of(op="matmul", m=256, n=256, k=256)
    schedule = matmul_schedule(
        block=sizes({"m": 128, "n": 128}), thread=sizes({"m": 8, "n": 4}), vthreads=sizes({"m": 1, "n": 2}),
        step=sizes({"k": 64}), padding=sizes({"A": 1}), vector=(),
    )  # fmt: skip
    lowered = lower(form, schedule, entry="large")
    assert lowered.shared_bytes == 4 * (128 * (64 + 1) + 64 * 128)
    assert lowered.dynamic_shared_bytes == lowered.shared_bytes > 48 * 1024
    source = cuda(form, lowered)
    assert "extern __shared__" in source
    assert static_shared_bytes(source) == 0
    assert largest_dynamic_byte(source, lowered.grid, lowered.block) <= lowered.dynamic_shared_bytes
    assert compile_cuda(source, "sm_70", name="large").shared_bytes == 0
    static = lower(form, schedule, entry="large", target=OPENCL)
    assert static.dynamic_shared_bytes == 0
    text = opencl_source(static, names(form))
    assert static_shared_bytes(text) == static.shared_bytes == lowered.shared_bytes


def test_shared_memory_of_whole_numbers_is_counted_by_vectors_of_them() -> None:
    assert (
        static_shared_bytes("  __shared__ signed char a[6];\n  __shared__ alignas(16) int4 sums[96];\n") == 16 + 16 * 96
    )


@pytest.mark.parametrize("pad", [1, 3, 5, 8])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dynamic_shared_memory_holds_every_padded_tile(pad: int, dtype: str) -> None:
    form = form_of(op="matmul", m=256, n=256, k=256, dtype=dtype)
    schedule = matmul_schedule(
        block=sizes({"m": 128, "n": 192}), thread=sizes({"m": 8, "n": 4}), vthreads=sizes({"m": 1, "n": 2}),
        step=sizes({"k": 104}), padding=sizes({"A": pad, "B": pad}), vector=sizes({"A": 1, "B": 1}),
    )  # fmt: skip
    lowered = lower(form, schedule, entry="padded")
    assert lowered.dynamic_shared_bytes > 48 * 1024
    source = cuda(form, lowered)
    assert largest_dynamic_byte(source, lowered.grid, lowered.block) <= lowered.dynamic_shared_bytes


# Vector accesses


def suite_sample(name: str, every: int) -> list[Any]:
    data = json.loads((SUITES / name).read_text())
    return data[::every]


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["roller119.json", "modern.json"])
@pytest.mark.parametrize("device_name", ["v100", "a100"])
def test_vector_accesses_of_real_operators_are_aligned(suite: str, device_name: str) -> None:
    device = load_device(device_name)
    vectors = 0
    for data in suite_sample(suite, 9):
        form = kernel_form(operator_from_data(data))
        for program in construct(form, device, 6).programs[::3]:
            lowered = lower(form, program.schedule, entry="aligned")
            source = body(cuda(form, lowered, device.architecture))
            vectors += assert_aligned(source, lowered)
    assert vectors > 50


@pytest.mark.parametrize(
    "data",
    [
        {"op": "matmul", "m": 66, "n": 70, "k": 18},
        {"op": "matmul", "m": 66, "n": 72, "k": 20, "dtype": "float16"},
        {"op": "matmul", "m": 72, "n": 66, "k": 20, "transpose_a": True, "dtype": "bfloat16"},
        {"op": "conv2d", "n": 2, "c": 8, "h": 14, "w": 14, "f": 8, "kh": 3, "kw": 3, "padding": 1, "layout": "NHWC"},
        {"op": "conv2d", "n": 2, "c": 8, "h": 14, "w": 16, "f": 8, "kh": 3, "kw": 3, "padding": [1, 0, 1, 4]},
        {"op": "depthwise_conv2d", "n": 2, "c": 8, "h": 16, "w": 16, "kh": 1, "kw": 5, "padding": [0, 4, 0, 0]},
        {"expr": "C[i,j] = X[i, j + 4] + X[i, j]", "sizes": {"i": 9, "j": 60}, "shapes": {"X": [9, 64]}},
        {"expr": "C[i,j] = X[i, j + 4] + X[i, j]", "sizes": {"i": 9, "j": 60}, "shapes": {"X": [9, 66]}},
        {"expr": "C[i,j] = X[i, j + 2] * Y[j, i]", "sizes": {"i": 64, "j": 64}},
        {"expr": "C[i,j] = X[i + j] * Y[4*i + j]", "sizes": {"i": 64, "j": 64}},
        {"expr": "C[i,j] = A[i,j] + B[i,j]", "sizes": {"i": 64, "j": 96}, "dtypes": {"A": "float16", "B": "float64"}},
        {"op": "softmax", "shape": [33, 1028], "dtype": "float16"},
        {"op": "layer_norm", "shape": [33, 1026]},
        {"op": "transpose", "shape": [64, 6, 40], "perm": [2, 1, 0], "dtype": "float16"},
    ],
    ids=str,
)
def test_vector_accesses_of_odd_operators_are_aligned(data: dict[str, Any]) -> None:
    form = form_of(**data)
    for program in construct(form, load_device("v100"), 8).programs:
        lowered = lower(form, program.schedule, entry="aligned")
        assert_aligned(body(cuda(form, lowered)), lowered)


def assert_aligned(source: str, lowered: Lowered) -> int:
    count = 0
    for access in vector_accesses(source, lowered.grid, lowered.block):
        assert (access.offsets_bytes % access.width_bytes == 0).all(), access.text
        assert access.width_bytes <= 16 or "local" in access.base, access.text
        count += 1
    return count


def test_a_misaligned_access_would_be_seen() -> None:
    source = """extern "C" __global__ void k(float* __restrict__ A_ptr) {
      for (int i = 0; i < 3; ++i) {
        int cse_v1 = (((int)threadIdx.x) * 2);
        *(float4*)(A_ptr + ((cse_v1 * 2) + (i * 4))) = *(float4*)(A_ptr + (cse_v1 + 4));
      }
    }"""
    accesses = list(vector_accesses(source, (1, 1, 1), (32, 1, 1)))
    assert [access.width_bytes for access in accesses] == [16, 16]
    assert [bool(np.all(access.offsets_bytes % 16 == 0)) for access in accesses] == [True, False]


# Names


def test_names_become_identifiers_and_stay_apart() -> None:
    assert identifier("i0.i1") == "i0_i1"
    assert identifier("3x") == "op_3x"
    assert fresh_name("acc", []) == "acc"
    assert fresh_name("acc", ["acc", "acc_1"]) == "acc_2"


def test_sources_are_the_same_every_time() -> None:
    suite = operators_from_json(json.dumps([{"op": "matmul", "m": 65, "n": 33, "k": 17}]).encode(), "op.json")
    form = kernel_form(suite[0])
    schedule = construct(form, load_device("v100"), 1).programs[0].schedule
    first, second = (cuda(form, lower(form, schedule, entry="same")) for _ in range(2))
    assert first == second
