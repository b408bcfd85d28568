"""Tensor Core kernels beyond halves: TensorFloat-32, bytes and eight-bit floats, executed by the CUDA emulator."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from codegen.gpu.matrix.base import product_problem
from codegen.gpu.matrix.mma import MmaKernel
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.tir.lowered import LoweringError
from codegen.verify.emulator import run_cuda_on_cpu
from codegen.verify.gpu import verify
from hal.catalog import load_device
from roller.inspect.disassembly import disassemble, hottest_loop, nvdisasm_path
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.matrix import MATRIX_TYPES
from sokoban.model.gpu.banks import busiest_bank
from sokoban.model.gpu.occupancy import shared_bytes
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from sokoban.search.search import search
from tests.codegen.addresses import warp_offsets
from tests.codegen.lowering import lower
from tests.codegen.matrix_kernels import emulate, form_of, needs_emulator, source_of
from tests.codegen.matrix_kernels import schedule_of as wmma_schedule

TYPES = {
    "tf32": {"dtype": "float32", "allow_tf32": True},
    "int8": {"dtype": "int8"},
    "e4m3": {"dtype": "float8_e4m3fn"},
    "e5m2": {"dtype": "float8_e5m2"},
}
LAYOUTS = [(False, False), (False, True), (True, False), (True, True)]


def typed(kind: str, **operator: Any) -> KernelForm:
    return form_of(**{"op": "matmul", **operator, **TYPES[kind]})


def schedule_of(
    form: KernelForm, block: tuple[int, int] = (64, 64), warp: tuple[int, int] = (32, 32), depths: int = 2,
    stages: int = 3,
) -> TileSchedule:  # fmt: skip
    roles = form.roles
    assert roles is not None
    instruction = MATRIX_TYPES[roles.dtype].mma
    return wmma_schedule(
        form, block, warp, depths * roles.depth, 0, instruction=instruction, stages=stages, vector=()
    )  # fmt: skip


def assert_right(form: KernelForm, schedule: TileSchedule) -> str:
    """Integers exactly, sums of eight-bit floats to float32's rounding, those of TensorFloat-32 to its ten bits."""
    lowered = lower(form, schedule, entry="kernel")
    source = strip_prelude(source_of(form, lowered))
    result, expected = emulate(form, lowered, source)
    scale = np.sqrt(np.mean(np.square(expected)))
    rounding = {"float16": 2.0**-10, "float32": 1e-5, "int32": 0.0}[form.expr.output.dtype]
    allowed = max(rounding, 2.0**-10 if form.expr.allow_tf32 else 0.0)
    assert np.max(np.abs(result - expected) / (np.abs(expected) + scale)) <= allowed
    return source


@needs_emulator
@pytest.mark.parametrize(("transpose_a", "transpose_b"), LAYOUTS)
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_in_every_layout(kind: str, transpose_a: bool, transpose_b: bool) -> None:
    """Sizes that are no multiples of a tile; 37 bytes of a row no asynchronous copy takes."""
    form = typed(kind, m=130, n=68, k=37, transpose_a=transpose_a, transpose_b=transpose_b)
    source = assert_right(form, schedule_of(form))
    assert "mma.sync.aligned.m16n8k" in source
    assert ("round_to_tf32(a_fragments" in source) == (kind == "tf32")


@needs_emulator
@pytest.mark.parametrize(
    ("block", "warp", "depths", "stages"),
    [((16, 16), (16, 16), 1, 1), ((48, 96), (48, 16), 3, 2), ((32, 48), (16, 48), 2, 4)],
)
@pytest.mark.parametrize("kind", ["tf32", "int8", "e5m2"])
def test_tilings(kind: str, block: tuple[int, int], warp: tuple[int, int], depths: int, stages: int) -> None:
    for transposed in (False, True):
        form = typed(kind, m=72, n=112, k=144, transpose_a=transposed, transpose_b=transposed)
        assert_right(form, schedule_of(form, block, warp, depths, stages))


@needs_emulator
@pytest.mark.parametrize("kind", TYPES)
def test_batches_and_epilogues(kind: str) -> None:
    epilogue = [{"function": "bias_add", "axis": "n"}, {"function": "scale", "value": 2.0**-6}, "gelu"]
    form = typed(
        kind, op="batch_matmul", b=2, m=33, n=40, k=64, epilogue=epilogue, output_dtype="float16"
    )  # fmt: skip
    assert_right(form, schedule_of(form))


@needs_emulator
def test_an_integer_epilogue_stays_exact() -> None:
    form = typed("int8", m=65, n=72, k=100, epilogue=[{"function": "residual_add"}, "relu"])
    assert form.expr.output.dtype == "int32"
    assert_right(form, schedule_of(form))


@needs_emulator
def test_extremes_of_bytes_do_not_overflow() -> None:
    form = typed("int8", m=16, n=16, k=64)
    schedule = schedule_of(form, (16, 16), (16, 16))
    lowered = lower(form, schedule, entry="kernel")
    source = strip_prelude(source_of(form, lowered))
    least = np.full((16, 64), -128, dtype=np.int8)
    arguments = [least, np.ascontiguousarray(least.T), np.zeros((16, 16), dtype=np.int32)]
    (result,) = run_cuda_on_cpu(
        source, "kernel_kernel", arguments, lowered.grid, lowered.block, [2], lowered.dynamic_shared_bytes
    ).outputs  # fmt: skip
    assert (result == 64 * 128 * 128).all()


@needs_emulator
def test_operands_of_tensorfloat_that_are_not_rounded_are_noticed() -> None:
    form = typed("tf32", m=32, n=32, k=32)
    lowered = lower(form, schedule_of(form, (32, 32), (16, 32)), entry="kernel")
    source = strip_prelude(source_of(form, lowered))
    broken = re.sub(r"^\s*round_to_tf32\(b_fragments.*$", "", source, flags=re.MULTILINE)
    assert broken != source
    with pytest.raises(Exception, match="not rounded to TensorFloat-32"):
        emulate(form, lowered, broken)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("engine", ["opencl", "emulator"])
def test_verification_takes_the_types(kind: str, engine: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(engine)
    form = typed(kind, m=300, n=200, k=160, epilogue=["relu"])
    found = verify(form, schedule_of(form), engine=engine)
    assert found.passed, found.reason
    exact = {"int8": 0.0, "tf32": 1e-4 if engine == "opencl" else 8 * 2.0**-10}
    assert found.tolerance == exact.get(kind, 1e-4)


@pytest.mark.parametrize(
    "operator",
    [
        {
            "op": "matmul",
            "m": 100,
            "n": 67,
            "k": 36,
            "transpose_a": True,
            "output_dtype": "float16",
            "epilogue": ["gelu"],
        },
        {"expr": "M[i] = max(k, A[i,k])\nC[i,k] = A[i,k] - M[i]", "sizes": {"i": 30, "k": 65}},
        {"expr": "C[i,k] = A[i,k] * 0.5", "sizes": {"i": 30, "k": 64}, "dtypes": {"C": "float32"}},
    ],
    ids=["matmul", "rows", "pointwise"],
)
@pytest.mark.parametrize("engine", ["opencl", "emulator"])
def test_boards_without_an_instruction_for_bytes_compute_them_by_ordinary_arithmetic(
    operator: dict[str, Any], engine: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(engine)
    form = form_of(**operator, dtype="int8")
    schedule = search(form, load_device("t4"), 1).schedules[0]
    assert schedule.instruction == "fma"
    found = verify(form, schedule, engine=engine)
    assert found.passed, found.reason


def test_eight_bit_floats_are_lowered_to_nothing_but_matrix_instructions() -> None:
    form = typed("e4m3", m=64, n=64, k=64)
    scalar = schedule_of(form).scalar_twin(form)
    with pytest.raises(LoweringError, match="matrix instructions alone"):
        lower(form, scalar, entry="kernel")


@pytest.mark.parametrize(("transpose_a", "transpose_b"), LAYOUTS)
@pytest.mark.parametrize("kind", ["tf32", "int8"])
@pytest.mark.parametrize(("block", "warp", "depths"), [((128, 256), (64, 64), 2), ((64, 128), (32, 64), 4)])
def test_no_bank_serves_twice(
    kind: str, block: tuple[int, int], warp: tuple[int, int], depths: int, transpose_a: bool, transpose_b: bool
) -> None:
    """The addresses in the text: eight rows of ``ldmatrix`` or 32 words, and eight pieces of a copy, in one pass."""
    form = typed(kind, m=4096, n=4096, k=4096, transpose_a=transpose_a, transpose_b=transpose_b)
    lowered = lower(form, schedule_of(form, block, warp, depths), entry="mma")
    text = strip_prelude(source_of(form, lowered))
    body = text[text.index('extern "C"') :]
    for function, argument in (
        ("load_matrix_x4", 3), ("load_bytes_[ab]", 3), ("copy_async_16(?:_guarded)?", 1),
    ):  # fmt: skip
        if not re.search(rf"\b{function}\(", body):
            continue
        offsets = warp_offsets(body, function, argument, lowered.grid, lowered.block)
        words = offsets.reshape(-1, 8)[:, :, None] // 4 + np.arange(4)
        assert (busiest_bank(words.reshape(-1, 32), 32) == 1).all(), function
    for argument in (3, 4):
        if "load_words_" in body:
            offsets = warp_offsets(body, "load_words_[ab]", argument, lowered.grid, lowered.block)
            assert (busiest_bank(offsets.reshape(-1, 32) // 4, 32) == 1).all()


@pytest.mark.parametrize("kind", TYPES)
def test_shared_memory_is_what_is_generated(kind: str) -> None:
    for transposed in (False, True):
        form = typed(kind, m=4096, n=4096, k=4096, transpose_b=transposed)
        for schedule in (schedule_of(form), schedule_of(form, (128, 256), (64, 64)), schedule_of(form, stages=1)):
            assert shared_bytes(ScheduleTable.of(form, [schedule])).tolist() == [
                MmaKernel.shared_bytes(schedule, form.roles)
            ]


def test_the_instruction_follows_the_type() -> None:
    form = typed("int8", m=64, n=64, k=64)
    schedule = schedule_of(form).with_(instruction=Instruction.MMA_16X8X16)
    assert product_problem(MmaKernel, form, schedule) == "instruction mma_16x8x16: int8 takes mma_16x8x32"
    assert product_problem(MmaKernel, form, schedule_of(form).with_(step=(("k", 16),))) == (
        "step 16 of axis k: the product's depth takes multiples of 32, others one"
    )


@pytest.mark.skipif(nvdisasm_path() is None, reason="there is no nvdisasm")
@pytest.mark.parametrize(
    ("kind", "board", "instruction"),
    [
        ("tf32", "a100", "HMMA.1688.F32.TF32"),
        ("int8", "a100", "IMMA.16832.S8.S8"),
        ("int8", "h200", "IMMA.16832.S8.S8"),
        ("e4m3", "l4", "QMMA.16832.F32.E4M3.E4M3"),
        # Without an instruction of its own sm_90 multiplies halves.
        ("e5m2", "h200", "HMMA.16816.F32"),
    ],
)
def test_machine_code_of_the_best_schedule(kind: str, board: str, instruction: str) -> None:
    device = load_device(board)
    form = typed(kind, m=4096, n=4096, k=4096)
    schedule = search(form, device, 1).schedules[0]
    assert schedule.instruction.startswith("mma")
    lowered = lower(form, schedule, entry="gemm")
    source = strip_prelude(source_of(form, lowered, device.architecture))
    kernel = compile_cuda(source, device.architecture, name="gemm")
    assert kernel.spill_bytes == 0
    function = disassemble(kernel.cubin).functions[0]
    loop = hottest_loop(function)
    assert loop is not None
    opcodes = {line.opcode for line in function.instructions}
    assert instruction in opcodes
    assert any(opcode.startswith("LDGSTS.E.BYPASS") for opcode in opcodes)
    assert loop.mix.matrix > 0
