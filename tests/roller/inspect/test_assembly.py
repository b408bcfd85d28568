"""The hottest loop of assembly, by hand."""

from __future__ import annotations

import pytest

from codegen.cpu.shared_object import without_debugging
from roller.inspect.assembly import hottest_loop

TEXT = """
other:
.LBB0_9:
	vfmadd231ps	%zmm0, %zmm1, %zmm2
	vfmadd231ps	%zmm0, %zmm1, %zmm3
	jne	.LBB0_9
.Lfunc_end0:
op_blocks:
	.cfi_startproc
	vmovups	(%rdi), %ymm9
.LBB1_1:
	vmulps	%xmm0, %xmm0, %xmm0
.LBB1_2:
	vbroadcastss	(%rsi,%rax,4), %ymm0
	vfmadd231ps	(%rdi,%rax), %ymm0, %ymm1
	vaddps	%ymm1, %ymm2, %ymm3
	vmovaps	%ymm3, 64(%rsp)
	leaq	(%rax,%rax), %rcx
	# a remark
	addq	$1, %rax
	jne	.LBB1_2
	jne	.LBB1_1
	je	.LBB1_3
.LBB1_3:
	ret
.Lfunc_end1:
"""


def test_the_innermost_loop_counts() -> None:
    loop = hottest_loop(TEXT, "op_blocks")
    assert loop is not None
    assert (loop.instructions, loop.multiply_adds, loop.arithmetic) == (7, 1, 2)
    assert (loop.memory, loop.spills, loop.vector_bits) == (3, 1, 256)
    assert loop.multiply_add_share == pytest.approx(1 / 7)


def test_what_has_no_loop_has_no_hottest_one() -> None:
    assert hottest_loop("op_blocks:\n\tret\n", "op_blocks") is None
    assert hottest_loop(TEXT, "missing") is None


def test_what_is_for_debuggers_is_left_out() -> None:
    program = """	.file	"TVMMod"
	.text
op_blocks:
	.file	1 "." "source"
	.loc	1 0 0
.Ltmp1:
	leaq	.Ltmp2(%rip), %rax
.Ltmp2:
	ret
	.section	.debug_loc,"",@progbits
	.quad	.Ltmp1
	.section	".note.GNU-stack","",@progbits
	.section	.debug_line,"",@progbits
.Lline_table_start0:
"""
    assert without_debugging(program).splitlines() == [
        "\t.text",
        "op_blocks:",
        "\tleaq\t.Ltmp2(%rip), %rax",
        ".Ltmp2:",
        "\tret",
        '\t.section\t".note.GNU-stack","",@progbits',
    ]
