"""One schedule to one kernel, for every generator."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.built import BuiltKernel
from codegen.compile.build import build_kernel, verify_schedule
from codegen.compile.request import BuildRequest
from codegen.generators import linker
from codegen.gpu.source.text import static_shared_bytes
from codegen.target import Target
from hal.microbench.cpu.native import host_architecture
from hal.spec.parts import CodeGenerator
from sokoban.kernel.form import kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule, sizes

FORM = kernel_form(operator_from_data({"op": "matmul", "m": 70, "n": 64, "k": 24}))
SCHEDULE = TileSchedule(
    block=sizes({"m": 32, "n": 32}), thread=sizes({"m": 4, "n": 4}), step=sizes({"k": 8}), cached=("A", "B"),
    vector=sizes({"A": 4, "B": 4}),
)  # fmt: skip


def build(generator: CodeGenerator, architecture: str, lanes: int = 32, **changes: Any) -> BuiltKernel:
    request = {
        "form": FORM, "schedule": SCHEDULE, "entry": "roller_m", "target": Target(generator, architecture, lanes),
    }  # fmt: skip
    return build_kernel(BuildRequest(**(request | changes)))


def test_cuda_gives_a_cubin_and_what_the_compiler_says_of_it() -> None:
    kernel = build("cuda", "sm_70")
    assert kernel.error == ""
    assert kernel.entry == "roller_m_kernel" and kernel.entry in kernel.source
    assert kernel.binary is not None and kernel.binary[:4] == b"\x7fELF"
    assert kernel.registers is not None and 16 <= kernel.registers <= 255
    assert kernel.spill_bytes == 0
    # Shared tiles of 32 x 8 and 8 x 32 floats; 3 x 2 blocks of 8 x 8 threads.
    assert (kernel.shared_bytes, kernel.dynamic_shared_bytes) == (4 * (32 * 8 + 8 * 32), 0)
    assert (kernel.grid, kernel.block) == ((6, 1, 1), (64, 1, 1))


def test_an_old_board_gets_source_alone() -> None:
    kernel = build("cuda-source", "sm_37")
    assert kernel.error == ""
    assert (kernel.binary, kernel.registers, kernel.spill_bytes) == (None, None, None)
    assert 'extern "C" __global__' in kernel.source
    assert kernel.shared_bytes == 4 * (32 * 8 + 8 * 32) == static_shared_bytes(kernel.source)


def test_amd_gets_opencl_c_with_all_shared_memory_declared() -> None:
    kernel = build("opencl-source", "gfx906", lanes=64)
    assert kernel.error == ""
    assert (kernel.binary, kernel.registers, kernel.spill_bytes) == (None, None, None)
    assert "__kernel void roller_m_kernel(__global float* restrict A_ptr" in kernel.source
    assert "__global__" not in kernel.source
    assert kernel.shared_bytes == static_shared_bytes(kernel.source)
    large = SCHEDULE.with_(
        block=sizes({"m": 128, "n": 128}), thread=sizes({"m": 8, "n": 8}), step=sizes({"k": 64}), vector=()
    )
    kernel = build("opencl-source", "gfx906", lanes=64, schedule=large)
    assert (kernel.shared_bytes, kernel.dynamic_shared_bytes) == (4 * 2 * 128 * 64, 0)


def test_llvm_gives_a_shared_library_and_its_assembly() -> None:
    if linker() is None:
        pytest.skip("there is no C compiler to link with")
    schedule = TileSchedule(
        block=sizes({"m": 35, "n": 32}), thread=sizes({"m": 5, "n": 32}), step=sizes({"k": 8}), cached=("B",)
    )
    kernel = build("llvm", host_architecture(), schedule=schedule, lanes=8)
    assert kernel.error == "" and kernel.entry == "roller_m"
    assert kernel.binary is not None and kernel.binary[:4] == b"\x7fELF" and b"roller_m" in kernel.binary
    assert "roller_m_blocks:" in kernel.source
    # Two by two blocks of one thread each, which packs 8 x 32 elements of B.
    assert (kernel.grid, kernel.block) == ((4, 1, 1), (1, 1, 1))
    assert kernel.shared_bytes == kernel.dynamic_shared_bytes >= 4 * 8 * 32
    assert (kernel.registers, kernel.spill_bytes) == (None, None)
    assert verify_schedule(FORM, schedule, Target("llvm", host_architecture(), 8)).passed
    refused = build("llvm", host_architecture(), schedule=schedule.with_(thread=sizes({"m": 4, "n": 32})), lanes=8)
    assert "do not divide a block" in refused.error and refused.binary is None


def test_dynamic_shared_memory_counts_among_all() -> None:
    large = SCHEDULE.with_(
        block=sizes({"m": 128, "n": 128}), thread=sizes({"m": 8, "n": 8}), step=sizes({"k": 64}), vector=()
    )
    kernel = build("cuda", "sm_70", schedule=large)
    assert kernel.error == ""
    assert kernel.shared_bytes == kernel.dynamic_shared_bytes == 4 * 2 * 128 * 64


def test_rows_report_the_shared_memory_they_use_with_and_without_a_compiler() -> None:
    form = kernel_form(operator_from_data({"op": "softmax", "shape": [33, 500]}))
    schedule = TileSchedule(block=sizes({"i0": 1}), thread=sizes({"i0": 1}), reduce_threads=sizes({"i1": 128}))
    compiled = build("cuda", "sm_70", form=form, schedule=schedule)
    source = build("cuda-source", "sm_70", form=form, schedule=schedule)
    assert compiled.shared_bytes == source.shared_bytes > 0


def test_spilling_is_reported() -> None:
    form = kernel_form(operator_from_data({"op": "matmul", "m": 512, "n": 512, "k": 64}))
    greedy = TileSchedule(
        block=sizes({"m": 256, "n": 256}), thread=sizes({"m": 32, "n": 16}), step=sizes({"k": 8}), cached=("A", "B"),
        unroll=512,
    )  # fmt: skip
    kernel = build("cuda", "sm_70", form=form, schedule=greedy)
    assert kernel.error == ""
    assert kernel.spill_bytes is not None and kernel.spill_bytes > 0


@pytest.mark.parametrize(
    "schedule",
    [
        SCHEDULE.with_(thread=sizes({"m": 5, "n": 4})),
        SCHEDULE.with_(instruction=Instruction.WMMA, block=sizes({"m": 24, "n": 24}), thread=sizes({"m": 8, "n": 8})),
    ],
    ids=["odd threads", "no tensor cores"],
)
def test_what_does_not_build_says_why_in_one_line(schedule: TileSchedule) -> None:
    kernel = build("cuda", "sm_70", schedule=schedule)
    assert kernel.error and "\n" not in kernel.error
    assert (kernel.source, kernel.binary) == ("", None)


@pytest.mark.usefixtures("emulator")
def test_kernels_for_nvidia_are_checked_by_the_emulator() -> None:
    check = verify_schedule(FORM, SCHEDULE, Target("cuda", "sm_70", 32))
    assert check.passed
    assert (check.engine, check.seeds) == ("emulator", (0, 1, 2))
