"""Tensor Core kernels by ``ldmatrix`` and ``mma.sync``: compiled by NVRTC, executed by the CUDA emulator."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from codegen.gpu.matrix.base import product_problem
from codegen.gpu.matrix.mma import MmaKernel
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.verify.emulator import EmulatorError
from codegen.verify.gpu import verify
from roller.inspect.disassembly import disassemble, hottest_loop, nvdisasm_path
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.model.gpu.banks import busiest_bank
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.addresses import warp_offsets
from tests.codegen.lowering import lower
from tests.codegen.matrix_kernels import OPERATORS, assert_right, emulate, form_of, needs_emulator, source_of
from tests.codegen.matrix_kernels import schedule_of as wmma_schedule


def schedule_of(
    form: KernelForm, block: tuple[int, int] = (64, 64), warp: tuple[int, int] = (32, 32), step: int = 32,
    stages: int = 3, **changes: Any,
) -> TileSchedule:  # fmt: skip
    return wmma_schedule(form, block, warp, step, 0, instruction=Instruction.MMA_16X8X16, stages=stages, **changes)


def text_of(form: KernelForm, schedule: TileSchedule, architecture: str = "sm_80") -> str:
    return strip_prelude(source_of(form, lower(form, schedule, entry="mma"), architecture))


@needs_emulator
@pytest.mark.parametrize("name", OPERATORS)
def test_results_are_right_to_the_last_rounding(name: str) -> None:
    form = form_of(**OPERATORS[name])
    source = assert_right(form, schedule_of(form), strip=True)
    assert "mma.sync.aligned.m16n8k16" in source
    assert "ldmatrix" in source


@needs_emulator
@pytest.mark.parametrize(
    ("block", "warp", "step", "stages"),
    [
        ((16, 16), (16, 16), 16, 1),
        ((16, 32), (16, 16), 64, 2),
        ((48, 32), (48, 16), 16, 4),
        ((32, 64), (16, 16), 48, 3),
        ((32, 96), (16, 96), 96, 2),
        ((80, 16), (16, 16), 32, 5),
        ((128, 128), (64, 32), 64, 3),
        ((128, 256), (64, 64), 32, 3),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_tiling_gives_the_same(
    block: tuple[int, int], warp: tuple[int, int], step: int, stages: int, transposed: bool
) -> None:
    form = form_of(
        op="matmul", m=104, n=300, k=72, transpose_a=transposed, transpose_b=transposed, epilogue=["relu"]
    )  # fmt: skip
    assert_right(form, schedule_of(form, block, warp, step, stages), strip=True)


@needs_emulator
@pytest.mark.parametrize(
    "epilogue",
    [
        [{"function": "bias_add", "axis": "n"}, "gelu"],
        [{"function": "bias_add", "axis": "n"}, "relu"],
        ["tanh"],
    ],
)
def test_epilogues_follow_the_product(epilogue: list[object]) -> None:
    form = form_of(op="matmul", m=130, n=72, k=64, epilogue=epilogue)
    assert_right(form, schedule_of(form), strip=True)


@pytest.mark.parametrize("function", ["gelu", "silu", "sigmoid", "tanh"])
def test_what_is_rounded_to_16_bits_is_computed_nearly_and_leaves_as_vectors(function: str) -> None:
    epilogue = [{"function": "bias_add", "axis": "n"}, function]
    halves = form_of(op="matmul", m=130, n=72, k=64, epilogue=epilogue)
    text = text_of(halves, schedule_of(halves))
    called = "near_erf" if function == "gelu" else "near_sigmoid"
    assert text.count(f"float {called}(float x)") == 1 and f"{called}(" in text.split('extern "C"')[-1]
    assert re.search(r"\*\(half4\*\)\(Out_ptr \+ ", text) and re.search(r"\*\(half4\*\)\(bias_ptr \+ ", text)
    floats = form_of(op="matmul", m=130, n=72, k=64, output_dtype="float32", epilogue=epilogue)
    text = text_of(floats, schedule_of(floats))
    assert "near_" not in text and re.search(r"\*\(float4\*\)\(Out_ptr \+ ", text)


@needs_emulator
def test_a_residual_is_added_before_the_cast() -> None:
    form = form_of(
        expr="acc[m,n] = sum(k, A[m,k] * B[k,n])\nC[m,n] = max(acc[m,n] + bias[n] + R[m,n], 0.0)",
        sizes={"m": 70, "n": 72, "k": 64},
    )
    assert_right(form, schedule_of(form), strip=True)


@needs_emulator
def test_verification_runs_the_text_itself_or_its_twin() -> None:
    form = form_of(op="matmul", m=300, n=200, k=160, epilogue=["relu"])
    schedule = schedule_of(form)
    twin = schedule.scalar_twin(form)
    assert (twin.instruction, twin.threads_per_block) == ("fma", schedule.threads_per_block)
    emulated = verify(form, schedule, engine="emulator")
    assert emulated.passed
    assert emulated.method == "cuda, emulated"


@needs_emulator
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("depths", [1, 2])
def test_every_barrier_and_wait_of_the_steps_is_needed(stages: int, depths: int) -> None:
    """Without any one of them the kernel computes something else: the emulator sees races and late copies."""
    form = form_of(op="matmul", m=64, n=64, k=160)
    schedule = schedule_of(form, step=16 * depths, stages=stages)
    lowered = lower(form, schedule, entry="mma")
    text = text_of(form, schedule)
    body = text.index("for (int step")
    end = text.index("for (int row")
    waits = list(re.finditer(r"__syncthreads\(\);|copy_async_wait_\d\(\);", text[body:end]))
    assert len(waits) >= 2
    for wait in waits[: 2 if stages > 1 else 3]:
        broken = text[: body + wait.start()] + ";" + text[body + wait.end() :]
        try:
            result, expected = emulate(form, lowered, broken)
        except EmulatorError:
            continue
        assert not np.allclose(result, expected, rtol=1e-2, atol=1e-2), wait.group()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("block", "warp", "step"),
    [((128, 256), (64, 64), 64), ((128, 128), (64, 32), 32), ((48, 96), (16, 48), 16), ((80, 144), (80, 48), 48)],
)
def test_no_bank_serves_twice(block: tuple[int, int], warp: tuple[int, int], step: int, transposed: bool) -> None:
    """The addresses in the text: eight rows of ``ldmatrix``, eight pieces of a copy, each of all banks once."""
    form = form_of(op="matmul", m=4096, n=4096, k=4096, transpose_a=transposed, transpose_b=transposed)
    lowered = lower(form, schedule_of(form, block, warp, step), entry="mma")
    text = strip_prelude(source_of(form, lowered))
    for function, argument in (("load_matrix_x4(?:_trans)?", 3), ("copy_async_16(?:_guarded)?", 1)):
        offsets = warp_offsets(text, function, argument, lowered.grid, lowered.block)
        assert len(offsets) >= 4
        assert not (offsets % 16).any()
        assert 0 <= offsets.min() <= offsets.max() < lowered.shared_bytes
        words = offsets.reshape(-1, 8)[:, :, None] // 4 + np.arange(4)
        assert (busiest_bank(words.reshape(-1, 32), 32) == 1).all()


@pytest.mark.skipif(nvdisasm_path() is None, reason="there is no nvdisasm")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_hot_loop_is_made_of_matrix_instructions(architecture: str) -> None:
    """A step: 8 warps multiply 64x64x64 each, by 4x8 products of 4 depths, and copy 128x64 and 64x256 halves."""
    form = form_of(op="matmul", m=4096, n=4096, k=4096)
    schedule = schedule_of(form, (128, 256), (64, 64), 64)
    kernel = compile_cuda(text_of(form, schedule, architecture), architecture, name="mma")
    assert kernel.spill_bytes == 0
    mix = hottest_loop(disassemble(kernel.cubin).functions[0]).mix
    assert (mix.kind("HMMA"), mix.kind("LDSM.x4"), mix.kind("LDGSTS.128")) == (4 * 8 * 4, 8 * 4, 12)
    assert mix.kind("LDS.32", "LDS.64", "LDS.128", "LDG.128", "STS.128", "LDL.32", "STL.32") == 0
    assert mix.kind("BAR") == 1
    assert mix.matrix / mix.total > 0.5


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_90"])
def test_kernels_compile_without_spills(architecture: str) -> None:
    form = form_of(op="matmul", m=4096, n=4096, k=4096, epilogue=["relu"])
    for block, warp, step, stages in (((64, 64), (32, 32), 64, 4), ((128, 128), (64, 64), 32, 3)):
        schedule = schedule_of(form, block, warp, step, stages)
        lowered = lower(form, schedule, entry="mma")
        kernel = compile_cuda(text_of(form, schedule, architecture), architecture, name="mma")
        assert kernel.spill_bytes == 0
        assert kernel.stack_bytes == 0
        assert kernel.shared_bytes + lowered.dynamic_shared_bytes == lowered.shared_bytes


def test_brain_floats_and_narrow_copies_compile() -> None:
    for m, n, k, copy in ((200, 200, 200, 16), (200, 196, 196, 8), (200, 198, 198, 4)):
        form = form_of(op="matmul", m=m, n=n, k=k, epilogue=["relu"], dtype="bfloat16")
        text = text_of(form, schedule_of(form))
        assert f"copy_async_{copy}_guarded" in text
        assert compile_cuda(text, "sm_80", name="mma").spill_bytes == 0


def test_the_whole_pipeline_lies_in_one_allocation() -> None:
    form = form_of(op="matmul", m=512, n=512, k=512)
    small = lower(form, schedule_of(form), entry="mma")
    assert (small.shared_bytes, small.dynamic_shared_bytes) == (3 * 2 * 32 * (64 + 64), 0)
    large = lower(form, schedule_of(form, (128, 128), (64, 32), 64), entry="mma")
    assert large.shared_bytes == large.dynamic_shared_bytes == 3 * 2 * 64 * (128 + 128)
    assert large.block == (32, 8, 1)
    strip = lower(form, schedule_of(form, (128, 128), (16, 128), 16, 1), entry="mma")
    assert strip.shared_bytes == 4 * 8 * 16 * (128 + 8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block": sizes({"m": 40, "n": 64})}, "multiples of 16"),
        ({"step": sizes({"k": 8})}, "multiples of 16"),
        ({"cached": ("A",)}, "both operands"),
        ({"padding": sizes({"A": 8})}, "swizzled instead"),
        ({"stages": 9}, "1 to 8"),
        ({"block": sizes({"m": 512, "n": 512})}, "8192 threads"),
    ],
)
def test_illegal_schedules_are_named(changes: dict[str, Any], reason: str) -> None:
    form = form_of(op="matmul", m=512, n=512, k=64)
    schedule = schedule_of(form).with_(**changes)
    problem = product_problem(MmaKernel, form, schedule)
    assert problem is not None
    assert reason in problem
    with pytest.raises(ValueError, match="matmul"):
        lower(form, schedule, entry="mma")
