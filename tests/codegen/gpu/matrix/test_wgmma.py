"""Tensor Core kernels by warp groups (wgmma): compiled by NVRTC for sm_90a, executed by the CUDA emulator."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from codegen.compile.build import build_kernel
from codegen.compile.request import BuildRequest
from codegen.gpu.matrix.base import product_problem
from codegen.gpu.matrix.wgmma import WarpGroupKernel
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import own_architecture
from codegen.target import Target
from codegen.verify.emulator import EmulatorError, run_cuda_on_cpu
from codegen.verify.gpu import verify
from roller.inspect.disassembly import disassemble, hottest_loop, nvdisasm_path
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.model.gpu.banks import busiest_bank
from sokoban.schedule.tile import TileSchedule
from tests.codegen.addresses import warp_offsets
from tests.codegen.lowering import lower
from tests.codegen.matrix_kernels import assert_right, emulate, form_of, needs_emulator, source_of
from tests.codegen.matrix_kernels import schedule_of as wmma_schedule
from tests.codegen.matrix_kernels import wgmma_schedule_of as schedule_of

SERIALISED = "wgmma.mma_async instructions are serialized"


def text_of(form: KernelForm, schedule: TileSchedule) -> str:
    return strip_prelude(source_of(form, lower(form, schedule, entry="wgmma"), "sm_90a"))


ODD = {"op": "matmul", "m": 136, "n": 200, "k": 328}
OPERATORS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "rows": ({**ODD, "m": 131}, 128, 128, 4),
    "transposed_a": ({**ODD, "transpose_a": True}, 64, 256, 3),
    "transposed_b": ({**ODD, "transpose_b": True, "n": 203}, 64, 192, 5),
    "both_bfloat16": ({**ODD, "transpose_a": True, "transpose_b": True, "dtype": "bfloat16"}, 192, 64, 6),
    "one_step": ({"op": "matmul", "m": 70, "n": 72, "k": 40}, 64, 64, 3),
    "batch": ({"op": "batch_matmul", "b": 3, "m": 65, "n": 40, "k": 136}, 64, 64, 3),
    "conv_1x1_nhwc": (
        {"op": "conv2d", "n": 2, "c": 40, "h": 8, "w": 9, "f": 72, "kh": 1, "kw": 1, "layout": "NHWC"}, 64, 128, 3
    ),
    "epilogue": (
        {"op": "matmul", "m": 130, "n": 72, "k": 64, "epilogue": [{"function": "bias_add", "axis": "n"}, "gelu"]},
        64, 128, 4,
    ),
    "residual": (
        {
            "expr": "acc[m,n] = sum(k, A[m,k] * B[k,n])\nC[m,n] = max(acc[m,n] + bias[n] + R[m,n], 0.0)",
            "sizes": {"m": 70, "n": 72, "k": 200},
        },
        64, 64, 3,
    ),
    "float32_output": (
        {
            "expr": "acc[m,n] = sum(k, A[m,k] * B[k,n])\nC[m,n] = max(acc[m,n], 0.0)",
            "sizes": {"m": 50, "n": 72, "k": 64},
            "dtypes": {"C": "float32"},
        },
        64, 128, 3,
    ),
    "two_depths": (
        {"expr": "C[m,n] = sum((j, k), A[j,m,k] * B[j,k,n])", "sizes": {"j": 3, "m": 40, "n": 40, "k": 72}}, 64, 64, 4
    ),
    "column_axis_first": (
        {"expr": "C[n,m] = sum(k, A[m,k] * B[k,n])", "sizes": {"m": 40, "n": 72, "k": 72}}, 64, 64, 3
    ),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("name", OPERATORS)
def test_results_are_right_to_the_last_rounding(name: str) -> None:
    operator, rows, width, stages = OPERATORS[name]
    form = form_of(**operator)
    source = assert_right(form, schedule_of(form, rows, width, stages), strip=True)
    assert f"wgmma.mma_async.sync.aligned.m64n{width}k16" in source


@needs_emulator
def test_verification_runs_the_text_itself_or_its_twin() -> None:
    form = form_of(op="matmul", m=300, n=200, k=160, epilogue=["relu"])
    emulated = verify(form, schedule_of(form), engine="emulator")
    assert emulated.passed
    assert emulated.method == "cuda, emulated"


#: What orders a step, by the text that stands for it in the kernel.
ORDER = (
    r"copy_async_wait_1\(\);",
    r"async_proxy_fence\(\);",
    r"__syncthreads\(\);",
    r"warp_group_arrive\(\);",
    r"warp_group_wait_1\(\);",
    r"warp_group_finish_64\(\w+\);",
)


@needs_emulator
@pytest.mark.parametrize("call", ORDER)
def test_every_wait_and_fence_of_the_steps_is_needed(call: str) -> None:
    """Without any one of them the kernel breaks a rule, or computes something else in one of two blocks."""
    form = form_of(op="matmul", m=64, n=128, k=640)
    schedule = schedule_of(form, 64, 64, 4)
    lowered, text = lower(form, schedule, entry="wgmma"), text_of(form, schedule)
    steps = text.index("for (int step")
    place = re.compile(call).search(text, steps)
    assert place is not None
    broken = text[: place.start()] + ";" + text[place.end() :]
    try:
        result, expected = emulate(form, lowered, broken)
    except EmulatorError:
        return
    assert not np.allclose(result, expected, rtol=1e-2, atol=1e-2)


@needs_emulator
def test_a_descriptor_has_its_fields_where_the_ptx_manual_puts_them() -> None:
    """Bits 0 to 13, 16 to 29 and 32 to 45 without the lowest four of each; 1 in 62 and 63 for 128 bytes; no others."""
    form = form_of(op="matmul", m=64, n=64, k=64)
    functions = text_of(form, schedule_of(form, 64, 64, 3)).split('extern "C"', maxsplit=1)[0]
    body = """
      extern __shared__ __align__(1024) float s[];
      D[0] = matrix_descriptor(s, 0, 16, 1024);
      D[1] = matrix_descriptor(s, 8192 + 96, 8192, 1024);
      D[2] = matrix_descriptor(s, 0x2FC00, 32768, 1024);
    """
    kernel = 'extern "C" __global__ void f(unsigned long long* __restrict__ D)'
    given = np.zeros(3, np.uint64)
    (found,) = run_cuda_on_cpu(f"{functions}\n{kernel} {{ {body} }}", "f", [given], [1], [1], [0], 1 << 18).outputs
    swizzle, stride = 1 << 62, (1024 >> 4) << 32
    assert found.tolist() == [
        swizzle | stride | 1 << 16,
        swizzle | stride | (8192 >> 4) << 16 | (8192 + 96) >> 4,
        swizzle | stride | (32768 >> 4) << 16 | 0x2FC0,
    ]


@needs_emulator
@pytest.mark.parametrize(
    ("shift", "reason"),
    [("1ULL << 62", "another swizzle"), ("2ULL << 49", "a base offset"), ("1ULL << 14", "bits where it has no field")],
)
def test_other_descriptors_are_refused(shift: str, reason: str) -> None:
    form = form_of(op="matmul", m=64, n=64, k=64)
    schedule = schedule_of(form, 64, 64, 3)
    text = text_of(form, schedule)
    broken = text.replace("| 1ULL << 62", f"| (1ULL << 62 ^ {shift})")
    assert broken != text
    with pytest.raises(EmulatorError, match=reason):
        emulate(form, lower(form, schedule, entry="wgmma"), broken)


@pytest.mark.parametrize("transposed", [False, True])
def test_copies_meet_in_no_bank(transposed: bool) -> None:
    """The addresses in the text: eight pieces of a copy, of all banks once, inside the block's memory."""
    form = form_of(op="matmul", m=4096, n=4096, k=4096, transpose_a=transposed, transpose_b=transposed)
    schedule = schedule_of(form, 128, 256)
    lowered = lower(form, schedule, entry="wgmma")
    offsets = warp_offsets(text_of(form, schedule), "copy_async_16", 1, lowered.grid, lowered.block)
    assert len(offsets) >= 4
    assert not (offsets % 16).any()
    assert 0 <= offsets.min() <= offsets.max() < lowered.shared_bytes
    words = offsets.reshape(-1, 8)[:, :, None] // 4 + np.arange(4)
    assert (busiest_bank(words.reshape(-1, 32), 32) == 1).all()


@pytest.mark.skipif(nvdisasm_path() is None, reason="there is no nvdisasm")
def test_the_hot_loop_multiplies_without_waiting_between_products() -> None:
    """A step of 128x256x64: four products a group, twelve copies of 16 bytes a thread, one barrier, no spills."""
    form = form_of(op="matmul", m=4096, n=4096, k=4096)
    built = compile_cuda(text_of(form, schedule_of(form, 128, 256)), "sm_90a", name="wgmma")
    assert (built.spill_bytes, built.stack_bytes) == (0, 0)
    assert SERIALISED not in built.log
    function = disassemble(built.cubin).functions[0]
    mix = hottest_loop(function).mix
    assert (mix.kind("HGMMA"), mix.kind("LDGSTS.128"), mix.kind("BAR")) == (4, 12, 1)
    assert mix.kind("HMMA", "LDSM", "LDSM.x4", "STL", "LDL") == 0
    products = [line.text for line in function.instructions if line.text.startswith("HGMMA")]
    assert all(text.startswith("HGMMA.64x256x16.F32 ") for text in products)
    assert len({text.split()[1] for text in products}) == 1  # the same sums throughout


def test_the_compiler_says_where_it_serialises_products() -> None:
    """What the test above would find: sums that are touched while products are under way."""
    form = form_of(op="matmul", m=4096, n=4096, k=4096)
    text = text_of(form, schedule_of(form, 128, 256))
    broken = text.replace("warp_group_commit();", "sums_ptr[0] += 1.0f; warp_group_commit();")
    assert broken != text
    assert SERIALISED in compile_cuda(broken, "sm_90a", name="wgmma").log


@pytest.mark.parametrize(
    ("rows", "width", "stages", "a", "b", "dtype"),
    [
        (64, 64, 3, True, False, "float16"),
        (192, 256, 4, True, True, "float16"),
        (256, 192, 4, False, True, "bfloat16"),
        (256, 128, 4, False, False, "bfloat16"),
    ],
)
def test_every_width_and_layout_compiles_without_spills(
    rows: int, width: int, stages: int, a: bool, b: bool, dtype: str
) -> None:
    form = form_of(op="matmul", m=4000, n=4008, k=1000, transpose_a=a, transpose_b=b, dtype=dtype, epilogue=["relu"])
    schedule = schedule_of(form, rows, width, stages)
    built = compile_cuda(text_of(form, schedule), "sm_90a", name="wgmma")
    assert built.spill_bytes == 0
    assert built.registers * schedule.threads_per_block <= 65536
    assert SERIALISED not in built.log


def test_the_kernel_is_compiled_for_sm_90a_alone() -> None:
    form = form_of(op="matmul", m=256, n=256, k=256)
    group, warp = schedule_of(form), wmma_schedule(form, padding=0, instruction=Instruction.MMA_16X8X16, stages=3)
    assert own_architecture(group, "sm_90") == "sm_90a"
    assert own_architecture(group, "sm_90a") is None
    assert own_architecture(warp, "sm_90") is None
    target = Target("cuda", "sm_90", 32)
    request = BuildRequest(form=form, schedule=group, entry="wgmma", target=target)
    built = build_kernel(request)
    assert (built.error, built.architecture, built.spill_bytes) == ("", "sm_90a", 0)
    assert built.binary is not None
    assert build_kernel(BuildRequest(form=form, schedule=warp, entry="mma", target=target)).architecture is None


@pytest.mark.parametrize(
    ("operator", "changes", "problem"),
    [
        ({}, {"stages": 2}, "2 pipeline stages: warp groups take 3 to 8"),
        ({}, {"rows": 96}, "block 96 of axis m: warp groups take multiples of 64, 16 rows a warp"),
        ({}, {"width": 96}, "block 96 of axis n: a warp group has all of 64, 128, 192, 256 columns"),
        ({}, {"step": 32}, "step 32 of axis k: warp groups take multiples of 64"),
        ({}, {"padding": 8}, "padding: tiles of warp groups are swizzled instead"),
        ({"k": 260}, {}, "rows of an operand are no multiples of 16 bytes"),
        ({"n": 260, "transpose_b": True}, {}, None),
        ({"n": 260}, {}, "rows of an operand are no multiples of 16 bytes"),
        ({"dtype": "int8"}, {}, "takes float16 and bfloat16, not int8"),
    ],
)
def test_what_does_not_fit_is_said(operator: dict[str, Any], changes: dict[str, Any], problem: str | None) -> None:
    form = form_of(**{"op": "matmul", "m": 256, "n": 256, "k": 256, **operator})
    found = product_problem(WarpGroupKernel, form, schedule_of(form, **changes))
    assert (found is None) if problem is None else (problem in str(found))
    if problem is not None:
        with pytest.raises(ValueError, match=re.escape(problem)):
            lower(form, schedule_of(form, **changes), entry="wgmma")
