"""SASS: instructions, blocks, loops, classes, the hottest loop; and one kernel from source to its hottest loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from codegen.gpu.source.nvrtc import compile_cuda
from hal.support.errors import InputError
from roller.inspect import disassembly
from roller.inspect.disassembly import disassemble, hottest_loop, nvdisasm_path, readable_architecture
from roller.inspect.mix import CLASSES, class_of, kind_of, mix_of
from roller.inspect.sass import Instruction, SassFunction, architecture_of, parse_sass

ROOT = Path(__file__).resolve().parents[3]

needs_nvdisasm = pytest.mark.skipif(nvdisasm_path() is None, reason="nvdisasm is not installed: roller[inspect]")

#: As nvdisasm 13.3 prints an image for sm_80: two loops, the trap behind the end, padding, shared memory.
NESTED = """
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_SM80 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM80)"
	.elftype	@"ET_EXEC"

//--------------------- .nv.info                  --------------------------
	.section	.nv.info,"",@"SHT_CUDA_INFO"
	//----- nvinfo : EIATTR_REGCOUNT
	.align		4
        /*0000*/ 	.byte	0x04, 0x2f
        /*0002*/ 	.short	(.L_1 - .L_0)
	.align		4
.L_0:
        /*0004*/ 	.word	index@(nested)
        /*0008*/ 	.word	0x00000072

//--------------------- .text.nested --------------------------
	.section	.text.nested,"ax",@progbits
	.align	128
        .global         nested
nested:
.text.nested:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   ISETP.GE.AND P0, PT, R0, c[0x0][0x178], PT ;
        /*0020*/               @P0 EXIT ;
.L_x_1:
        /*0030*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0050*/                   STS.128 [R8], R4 ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_0:
        /*0070*/                   LDS.128 R12, [R9] ;
        /*0080*/                   FFMA R16, R12.reuse, R13, R16 ;
        /*0090*/                   FFMA R17, R12, R14, R17 ;
        /*00a0*/                   IADD3 R9, R9, 0x10, RZ ;
        /*00b0*/                   ISETP.NE.AND P1, PT, R9, 0x400, PT ;
        /*00c0*/               @P1 BRA `(.L_x_0) ;
        /*00d0*/              @!P2 BRA `(.L_x_1) ;
        /*00e0*/                   STG.E [R10.64], R16 ;
        /*00f0*/                   EXIT ;
.L_x_2:
        /*0100*/                   BRA `(.L_x_2);
        /*0110*/                   NOP;
.L_x_3:

//--------------------- .nv.shared.nested --------------------------
	.section	.nv.shared.nested,"aw",@nobits
	.align	64
.nv.shared.nested:
	.zero		4096
"""

#: How ptxas leaves a long loop from sm_80 on: a call that does not come back; and a subroutine that does.
CALLS = """
        /*0000*/                   MOV R1, RZ ;
.L_x_1:
        /*0010*/                   FFMA R4, R5, R6, R4 ;
        /*0020*/                   MOV R2, 0x40 ;
        /*0030*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath) ;
        /*0040*/                   ISETP.GE.AND P0, PT, R3, 0x40, PT ;
        /*0050*/               @P0 CALL.REL.NOINC `(.L_x_0) ;
        /*0060*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0070*/                   EXIT ;
$__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath:
        /*0080*/                   MUFU.RCP R5, R5 ;
        /*0090*/                   RET.REL.NODEC R2 `(kernel) ;
"""

#: Two ways back to one header, and a branch that an operand makes conditional.
CONTINUE = """
.L_x_0:
        /*0000*/                   FADD R4, R4, R5 ;
        /*0010*/               @P0 BRA `(.L_x_0) ;
        /*0020*/                   BRA.DIV UR4, `(.L_x_1) ;
        /*0030*/                   FADD R4, R4, R6 ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0050*/                   EXIT ;
"""


def function_of(text: str) -> SassFunction:
    (function,) = parse_sass(text)
    return function


def instruction(text: str) -> Instruction:
    """``"@P0 LDS.128 R4, [R8]"`` as it is parsed."""
    return function_of(f"        /*0000*/    {text} ;").instructions[0]


# Reading


def test_a_function_is_read_with_its_registers_and_shared_memory() -> None:
    nested = function_of(NESTED)
    assert (nested.name, nested.registers, nested.shared_bytes) == ("nested", 0x72, 4096)
    assert len(nested.instructions) == 18
    assert nested.instructions[2] == Instruction(0x20, "EXIT", "", "P0", ())
    assert nested.instructions[13] == Instruction(0xD0, "BRA", "`(.L_x_1)", "!P2", (".L_x_1",))
    assert nested.instructions[7].text == "LDS.128 R12, [R9]"
    assert architecture_of(NESTED) == 80
    assert architecture_of(CALLS) is None


def test_registers_next_to_the_code_are_read_too() -> None:
    text = NESTED.partition("//--------------------- .text.nested")[2]
    text = "//--------------------- .text.nested" + text.replace(
        "	.align	128", '	.sectioninfo	@"SHI_REGISTERS=127"\n	.align	128'
    )
    assert function_of(text).registers == 127


def test_several_functions_are_kept_apart() -> None:
    other = NESTED.partition("//--------------------- .text.nested")[2].replace("nested", "other")
    first, second = parse_sass(NESTED + "//--------------------- .text.other" + other)
    assert (first.name, second.name) == ("nested", "other")
    assert len(first.instructions) == len(second.instructions) == 18


def test_text_without_code_has_no_functions() -> None:
    assert parse_sass("") == []
    assert parse_sass(NESTED.partition("//--------------------- .text")[0]) == []


# Blocks and loops


def test_blocks_end_at_jumps_and_begin_at_labels() -> None:
    nested = function_of(NESTED)
    spans = [(block.first, block.last) for block in nested.blocks]
    assert spans == [(0, 3), (3, 7), (7, 13), (13, 14), (14, 16), (16, 17), (17, 18)]
    assert [block.successors for block in nested.blocks] == [(1,), (2,), (2, 3), (1, 4), (), (5,), ()]


def test_loops_are_nested() -> None:
    nested = function_of(NESTED)
    outer, inner = nested.loops
    assert (outer.depth, outer.parent, outer.inner) == (1, None, (1,))
    assert (inner.depth, inner.parent, inner.inner) == (2, 0, ())
    assert [i.address for i in nested.body(inner)] == [0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0]
    assert len(nested.body(outer)) == 11
    assert [i.base for i in nested.own(outer)] == ["BAR", "LDG", "STS", "BAR", "BRA"]


def test_the_trap_behind_the_end_is_no_loop_and_padding_is_not_executed() -> None:
    nested = function_of(NESTED)
    assert [i.address for i in nested.reachable][-1] == 0xF0
    assert all(nested.blocks[loop.header].first < 16 for loop in nested.loops)


def test_a_call_may_leave_a_loop_or_come_back() -> None:
    kernel = function_of(CALLS)
    (loop,) = kernel.loops
    assert [i.address for i in kernel.body(loop)] == [0x10, 0x20, 0x30, 0x40, 0x50, 0x60]
    assert "MUFU" in {i.base for i in kernel.reachable}


def test_back_edges_to_one_header_are_one_loop() -> None:
    kernel = function_of(CONTINUE)
    (loop,) = kernel.loops
    assert [i.address for i in kernel.body(loop)] == [0x00, 0x10, 0x20, 0x30, 0x40]


def test_a_jump_into_the_middle_is_no_natural_loop() -> None:
    text = """
        /*0000*/               @P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0010*/                   FADD R4, R4, R5 ;
.L_x_1:
        /*0020*/               @P1 BRA `(.L_x_0) ;
        /*0030*/                   EXIT ;
"""
    assert function_of(text).loops == ()


# Classes


@pytest.mark.parametrize(
    ("text", "name", "kind"),
    [
        ("FFMA R1, R2, R3, R4", "multiply-adds", "FFMA"),
        ("HMMA.16816.F32 R4, R8, R12, R4", "multiply-adds", "HMMA"),
        ("IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4", "multiply-adds", "IMMA"),
        ("HGMMA.64x128x16.F32 R24, gdesc[UR4], R24, gsb0", "multiply-adds", "HGMMA"),
        ("HFMA2.BF16_V2 R1, R2, R3, R4", "multiply-adds", "HFMA2"),
        ("HFMA2.MMA R4, -RZ, RZ, 0, 0", "moves", "HFMA2"),
        ("IMAD.MOV.U32 R15, RZ, RZ, 0x2", "moves", "IMAD"),
        ("IMAD.WIDE R132, R132, R15, c[0x0][0x160]", "integer", "IMAD"),
        ("ULEA UR4, UR5, UR4, 0x18", "integer", "ULEA"),
        ("FADD.FTZ R1, R2, R3", "arithmetic", "FADD"),
        ("MUFU.EX2 R1, R2", "arithmetic", "MUFU"),
        ("LDS.U.128 R108, [R26]", "shared loads", "LDS.128"),
        ("LDS.U16 R1, [R2]", "shared loads", "LDS.16"),
        ("LDS R85, [R82]", "shared loads", "LDS.32"),
        ("LDSM.16.M88.4 R128, [R27]", "shared loads", "LDSM.x4"),
        ("LDSM.16.MT88.2 R128, [R27]", "shared loads", "LDSM.x2"),
        ("LDSM.16.M88 R128, [R27]", "shared loads", "LDSM.x1"),
        ("LDG.E.LTC128B.CONSTANT R1, [R2.64]", "global loads", "LDG.32"),
        ("LDG.E.64.CONSTANT.SYS R1, [R2]", "global loads", "LDG.64"),
        ("LDG.E.U8 R1, [R2.64]", "global loads", "LDG.8"),
        ("LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2.64]", "async copies", "LDGSTS.128"),
        ("UTMALDG.2D [UR8], [UR4]", "async copies", "UTMALDG"),
        ("STS.64 [R1], R2", "stores", "STS.64"),
        ("STG.E.128 desc[UR6][R2.64], R64", "stores", "STG.128"),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R2.64], R5", "stores", "RED"),
        ("STL.64 [R1+0x8], R2", "local memory", "STL.64"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "barriers", "BAR"),
        ("LDGDEPBAR", "barriers", "LDGDEPBAR"),
        ("DEPBAR.LE SB0, 0x1", "barriers", "DEPBAR"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", "barriers", "SYNCS"),
        ("SHFL.BFLY PT, R5, R4, 0x10, 0x1f", "shuffles", "SHFL"),
        ("ISETP.GE.AND P0, PT, R0, 0x4, PT", "predicates", "ISETP"),
        ("@P0 BRA `(.L_x_0)", "branches", "BRA"),
        ("LDC.64 R88, c[0x0][0x210]", "constants", "LDC"),
        ("NOP", "other", "NOP"),
        ("@!PT LDS RZ, [RZ]", "other", "LDS never executed"),
        ("QUUX R1", "other", "QUUX"),
    ],
)
def test_an_instruction_has_one_class_and_kind(text: str, name: str, kind: str) -> None:
    assert name in CLASSES
    assert (class_of(instruction(text)), kind_of(instruction(text))) == (name, kind)


def test_a_mix_counts_every_instruction_once() -> None:
    nested = function_of(NESTED)
    mix = mix_of(nested.body(nested.loops[1]))
    assert mix.total == 6
    assert mix.counts == {
        "multiply-adds": 2, "shared loads": 1, "integer": 1, "predicates": 1, "branches": 1,
    }  # fmt: skip
    assert mix.kinds["shared loads"] == {"LDS.128": 1}
    assert (mix.share("multiply-adds"), mix.density, mix.matrix) == (2 / 6, 3.0, 0)
    assert (mix.kind("LDS.128", "FFMA"), mix.count("stores", "integer")) == (3, 1)


def test_a_mix_of_nothing_has_no_density() -> None:
    mix = mix_of(())
    assert (mix.total, mix.density, mix.share("integer")) == (0, None, 0.0)


# The hottest loop


def test_the_inner_loop_is_the_hottest_where_it_computes() -> None:
    hot = hottest_loop(function_of(NESTED))
    assert (hot.depth, hot.address, hot.code_bytes) == (2, 0x70, 6 * 16)
    assert [i.base for i in hot.around] == ["BAR", "LDG", "STS", "BAR", "BRA"]


def test_an_inner_loop_that_only_copies_is_not_the_hottest() -> None:
    """A loop whose body of multiply-adds is unrolled, over a rolled copy to shared memory."""
    multiply_adds = "\n".join(f"        /*{0x60 + 16 * i:04x}*/  FFMA R4, R5, R6, R4 ;" for i in range(16))
    text = f"""
.L_x_1:
        /*0000*/                   BAR.SYNC 0x0 ;
.L_x_0:
        /*0010*/                   LDG.E R4, [R2.64] ;
        /*0020*/                   STS [R8], R4 ;
        /*0030*/               @P1 BRA `(.L_x_0) ;
{multiply_adds}
        /*0200*/               @P2 BRA `(.L_x_1) ;
        /*0210*/                   EXIT ;
"""
    hot = hottest_loop(function_of(text))
    assert (hot.depth, hot.address, hot.mix.count("multiply-adds"), hot.around) == (1, 0, 16, ())


def test_one_matrix_instruction_outweighs_a_few_multiply_adds() -> None:
    text = """
.L_x_0:
        /*0000*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0010*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   FFMA R4, R5, R6, R4 ;
        /*0030*/                   FFMA R4, R5, R6, R4 ;
        /*0040*/               @P2 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
"""
    assert hottest_loop(function_of(text)).address == 0


def test_without_multiply_adds_other_arithmetic_decides_and_without_that_the_length() -> None:
    assert hottest_loop(function_of(CONTINUE)).mix.counts["arithmetic"] == 2
    copies = NESTED.replace("FFMA", "MOV")
    assert hottest_loop(function_of(copies)).depth == 2


def test_without_a_loop_the_piece_is_the_whole_kernel() -> None:
    text = """
        /*0000*/                   FADD R4, R4, R5 ;
        /*0010*/                   EXIT ;
        /*0020*/                   NOP ;
"""
    hot = hottest_loop(function_of(text))
    assert (hot.loop, hot.depth, hot.mix.total, hot.around) == (None, 0, 2, ())


# The disassembler


KERNEL = """
extern "C" __global__ void __launch_bounds__(64) product(
    const float4* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int steps) {
  __shared__ float4 staged[64];
  float sum = 0;
  for (int step = 0; step < steps; ++step) {
    __syncthreads();
    staged[threadIdx.x] = a[step * 64 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; ++i) {
      float4 v = staged[i];
      float x = b[threadIdx.x];
      sum = fmaf(v.x, x, fmaf(v.y, x, fmaf(v.z, x, fmaf(v.w, x, sum))));
    }
  }
  c[blockIdx.x * 64 + threadIdx.x] = sum;
}
"""


@pytest.mark.usefixtures("device_compiler")
@needs_nvdisasm
@pytest.mark.parametrize("architecture", ("sm_75", "sm_80", "sm_90"))
def test_a_kernel_from_source_to_its_hottest_loop(architecture: str) -> None:
    compiled = compile_cuda(KERNEL, architecture, name="product")
    image = disassemble(compiled.cubin)
    (function,) = image.functions
    assert (image.architecture, function.name, function.registers) == (architecture, "product", compiled.registers)
    assert function.shared_bytes - compiled.shared_bytes in (0, 1024)
    hot = hottest_loop(function)
    assert hot.mix.kind("FFMA") == 256
    assert hot.mix.kind("LDS.128") == 64
    assert hot.mix.kind("LDG.128") == hot.mix.kind("STS.128") == 1
    assert hot.mix.count("barriers") == 2
    assert hot.mix.count("local memory") == 0
    assert hot.mix.total == len(hot.instructions)


@pytest.mark.usefixtures("device_compiler")
@needs_nvdisasm
def test_asynchronous_copies_are_seen() -> None:
    source = """
    #include <cuda_pipeline.h>
    extern "C" __global__ void copy(const float4* a, float4* c, int steps) {
      __shared__ float4 staged[64];
      float4 sum = make_float4(0, 0, 0, 0);
      for (int step = 0; step < steps; ++step) {
        __pipeline_memcpy_async(&staged[threadIdx.x], &a[step * 64 + threadIdx.x], 16);
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncthreads();
        sum.x += staged[threadIdx.x ^ 1].x;
        __syncthreads();
      }
      c[threadIdx.x] = sum;
    }
    """
    hot = hottest_loop(disassemble(compile_cuda(source, "sm_80", name="copy").cubin).functions[0])
    assert hot.mix.kinds["async copies"] == {"LDGSTS.128": hot.mix.count("async copies")}
    assert {"BAR", "DEPBAR", "LDGDEPBAR"} <= set(hot.mix.kinds["barriers"])


@pytest.mark.usefixtures("device_compiler")
@needs_nvdisasm
def test_what_cannot_be_read_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"junk\.cubin: nvdisasm cannot read it: .*source"):
        disassemble(b"no cubin", "junk.cubin")
    old = compile_cuda(KERNEL, "sm_70", name="product").cubin
    with pytest.raises(InputError, match=r"SM70.*give the kernel's source"):
        disassemble(old, "old.cubin")


@needs_nvdisasm
def test_an_architecture_that_is_not_read_gives_way_to_the_next() -> None:
    assert readable_architecture("sm_70") == "sm_75"
    assert readable_architecture("sm_80") == "sm_80"
    assert readable_architecture("sm_90a") == "sm_90a"
    for wrong in ("sm_999", "volta"):
        with pytest.raises(InputError, match="--arch"):
            readable_architecture(wrong)


def test_a_missing_disassembler_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembly, "nvdisasm_path", lambda: None)
    with pytest.raises(InputError, match=r"nvdisasm: is not installed; pip install 'roller\[inspect\]'"):
        disassemble(b"")


def test_neither_tvm_nor_sympy_is_imported() -> None:
    code = "import sys, roller.inspect.disassembly; print(sorted({'tvm', 'sympy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
