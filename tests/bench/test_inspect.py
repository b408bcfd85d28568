"""``python -m bench.inspect``: rank 1 of a suite as a table of hot loops, and what falls short of the bars."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from bench.inspect import FEW, KINDS, InspectedKernel, main, shortfalls, summary, table_of
from roller.inspect.disassembly import hottest_loop, nvdisasm_path
from roller.inspect.inspection import Inspection, Resources
from roller.inspect.model import BankUse, ModelView
from roller.inspect.sass import parse_sass
from sokoban.language.operators import operator_from_data

needs_nvdisasm = pytest.mark.skipif(nvdisasm_path() is None, reason="nvdisasm is not installed: roller[inspect]")


def row(
    operator: str, *opcodes: str, architecture: str = "sm_80", spills: int = 0, conflicts: float = 0.0
) -> InspectedKernel:
    """A kernel whose hottest loop is these instructions and a branch."""
    code = [f"        /*{16 * i:04x}*/  {opcode} ;" for i, opcode in enumerate((*opcodes, "@P0 BRA `(.L_x_0)", "EXIT"))]
    (function,) = parse_sass("\n".join([".L_x_0:", *code]))
    model = ModelView(None, None, "none", (BankUse("A", 16, 1.0 + conflicts, 1),))
    found = Inspection(
        name=operator,
        architecture=architecture,
        in_place_of=None,
        function=function,
        hot=hottest_loop(function),
        registers=64,
        shared_bytes=0,
        spill_bytes=spills,
        model=model,
        model_reason="",
    )
    return InspectedKernel(operator, "a100", found)


FFMA, HMMA = "FFMA R4, R5, R6, R4", "HMMA.16816.F32 R4, R8, R12, R4"
LDSM, LDGSTS = "LDSM.16.M88.4 R128, [R27]", "LDGSTS.E.BYPASS.128 [R1], [R2.64]"


def test_a_kernel_over_the_bars_has_no_shortfall() -> None:
    assert list(shortfalls(row("gemm_fp32", *[FFMA] * 64, *["LDS.128 R8, [R9]"] * 4))) == []
    assert list(shortfalls(row("gemm_fp16", HMMA, HMMA, LDSM, LDGSTS))) == []


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (row("gemm_fp32", FFMA, "IADD3 R1, R1, 0x1, RZ"), "33.3% multiply-adds, at least 85% wanted"),
        (row("gemm_fp32", *[FFMA] * 64, "LDS.64 R8, [R9]"), "1 of 1 shared loads are narrower than 128 bits"),
        (row("gemm_fp32", *[FFMA] * 64, conflicts=3.0), "3 passes too many per shared read of A"),
        (row("gemm_fp16", FFMA, LDSM, LDGSTS), "no matrix instructions"),
        (row("gemm_fp16", HMMA, "LDS.32 R8, [R9]", LDGSTS, LDSM), "1 operand reads are not ldmatrix"),
        (row("gemm_fp16", HMMA, LDGSTS), "operands are not read by ldmatrix"),
        (row("gemm_fp16", HMMA, LDSM, "LDG.E.128 R8, [R2.64]"), "no asynchronous copies, 1 loads through registers"),
        (row("other", FFMA, spills=8), "8 bytes spilled, 0 instructions on local memory"),
        (row("other", FFMA, "LDL R1, [R2]"), "0 bytes spilled, 1 instructions on local memory"),
    ],
)
def test_a_shortfall_is_reported(kernel: InspectedKernel, message: str) -> None:
    assert list(shortfalls(kernel)) == [message]


def test_spills_are_those_of_the_kernel_as_it_is() -> None:
    kernel = row("other", FFMA, "LDL R1, [R2]", architecture="sm_75", spills=8)
    inspection = replace(kernel.found, in_place_of="sm_70", as_built=Resources(64, 0))
    assert list(shortfalls(replace(kernel, found=inspection))) == []


def test_boards_before_sm_80_need_no_asynchronous_copies() -> None:
    assert list(shortfalls(row("gemm_fp16", HMMA, "LDS.32 R8, [R9]", architecture="sm_75"))) == []


def test_warp_group_instructions_read_shared_memory_themselves() -> None:
    wgmma = "HGMMA.64x128x16.F32 R24, gdesc[UR4], R24, gsb0"
    assert list(shortfalls(row("gemm_fp16", wgmma, "UTMALDG.2D [UR8], [UR4]", architecture="sm_90"))) == []


def test_the_summary_counts_local_memory_and_names_every_shortfall() -> None:
    lines = list(summary([row("other", FFMA), row("gemm_fp32", FFMA, "LDL R1, [R2]")]))
    assert lines[0] == "1 of 2 kernels use local memory"
    assert all(line.startswith("gemm_fp32 on a100: ") for line in lines[1:])
    assert len(lines) == 3
    assert table_of([row("other", FFMA)]).row_count == 1


def test_the_suites_are_operators() -> None:
    names = [operator_from_data(data).name for data in KINDS]
    assert len(set(names)) == len(names)
    assert {"gemm_fp32", "gemm_fp16"} == {data["name"] for data in FEW["gemm"]}


@pytest.mark.usefixtures("device_compiler")
@needs_nvdisasm
def test_the_command_builds_and_inspects() -> None:
    arguments = ["--name", "avg_pool", "--device", "a100", "--search", "roller", "--jobs", "1"]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    assert (record["name"], record["architecture"]) == ("avg_pool", "sm_80")
    table = CliRunner().invoke(main, [*arguments, "--arch", "sm_90"])
    assert table.output.splitlines()[1].split()[:3] == ["avg_pool", "a100", "sm_90"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "nothing"], "--name: none of nothing is in kinds; try gemm_fp32"),
        (["--device", "mi50"], "has no machine code that nvdisasm reads"),
        (["--device", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.splitlines()) == 1
