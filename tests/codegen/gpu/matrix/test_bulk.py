"""Products whose tiles are copied in bulk (TMA): compiled by NVRTC for sm_90a, executed by the CUDA emulator."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from codegen.compile.build import build_kernel
from codegen.compile.request import BuildRequest
from codegen.gpu.matrix.bulk import bulk_problem
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import specific_architecture
from codegen.target import Target
from codegen.tensor_map import TensorMap
from codegen.verify.emulator import EmulatorError, run_cuda_on_cpu
from codegen.verify.gpu import verify
from roller.inspect.disassembly import disassemble, hottest_loop, nvdisasm_path
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.tile import TileSchedule
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
    "operands_longer_than_the_output": (
        {
            "expr": "C[m,n] = sum(k, A[m,k] * B[k,n])",
            "sizes": {"m": 70, "n": 72, "k": 72},
            "shapes": {"A": [90, 72], "B": [72, 96]},
        },
        64, 64, 3,
    ),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize(("cluster", "launched"), [(1, 1), (2, 2), (4, 0), (4, 4)])
@pytest.mark.parametrize("name", OPERATORS)
def test_results_are_right_to_the_last_rounding(name: str, cluster: int, launched: int) -> None:
    operator, rows, width, stages = OPERATORS[name]
    form = form_of(**operator)
    if not form.roles.is_turned(form.roles.b) and cluster == 4:
        width = 96 if width < 128 else 160  # panels of B are as wide as it likes
    changes = {"cluster": cluster, "launched": launched, "raster": 2 if launched else 0}
    source = assert_right(form, schedule_of(form, rows, width, stages, **changes), strip=True)
    assert "cp.async.bulk.tensor" in source
    assert ("multicast" in source) == (cluster > 1)


@needs_emulator
@pytest.mark.parametrize(("cluster", "launched"), [(1, 1), (2, 2), (4, 0)])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_floats_of_eight_bits_are_multiplied_as_they_are(dtype: str, cluster: int, launched: int) -> None:
    form = form_of(op="matmul", m=200, n=264, k=272, dtype=dtype, transpose_b=True)
    schedule = schedule_of(form, 64, 96, 3, cluster=cluster, launched=launched, step=128)
    source = assert_right(form, schedule, strip=True)
    assert f"m64n96k32.f32.{dtype[7:11]}.{dtype[7:11]}" in source
    assert [seen.box[-1] for seen in lower(form, schedule, entry="bulk").maps] == [128, 128]


@needs_emulator
@pytest.mark.parametrize(("cluster", "launched"), [(1, 1), (2, 2), (4, 0)])
def test_integers_are_multiplied_and_summed_exactly(cluster: int, launched: int) -> None:
    form = form_of(op="matmul", m=200, n=264, k=272, dtype="int8", transpose_b=True)
    source = assert_right(form, schedule_of(form, 64, 96, 3, cluster=cluster, launched=launched, step=128), strip=True)
    assert "m64n96k32.s32.s8.s8" in source and "int sums[48];" in source


@needs_emulator
def test_sums_of_integers_become_floats_before_the_final_statement() -> None:
    scaled = {"output_dtype": "float16", "epilogue": [{"function": "scale", "value": 0.01}]}
    form = form_of(op="matmul", m=70, n=72, k=144, dtype="int8", transpose_b=True, **scaled)
    assert_right(form, schedule_of(form, 64, 64, 2, step=128), strip=True)


@needs_emulator
@pytest.mark.parametrize(("cluster", "launched"), [(1, 1), (2, 2), (4, 0)])
def test_copies_round_to_tensorfloat_32(cluster: int, launched: int) -> None:
    """The emulated product refuses numbers that were not rounded."""
    form = form_of(op="matmul", m=200, n=264, k=68, dtype="float32", allow_tf32=True, transpose_b=True)
    schedule = schedule_of(form, 64, 96, 3, cluster=cluster, launched=launched, step=32)
    assert [seen.dtype for seen in lower(form, schedule, entry="bulk").maps] == ["tfloat32", "tfloat32"]
    emulated = verify(form, schedule, engine="emulator")
    assert emulated.passed and 1e-5 < (emulated.relative_error or 0) < 8 * 2**-10, emulated.reason


@needs_emulator
def test_verification_walks_over_several_tiles() -> None:
    form = form_of(op="matmul", m=300, n=200, k=1160, epilogue=["relu"])
    emulated = verify(form, schedule_of(form, 64, 64, cluster=2, launched=132), engine="emulator")
    assert emulated.passed, emulated.reason
    assert emulated.method == "cuda, emulated"
    assert verify(form, schedule_of(form, 64, 64, cluster=2, launched=132), engine="opencl").passed


#: All that orders the threads and copies of a kernel, in its text.
_ORDER = r"barrier_\w+\([^;]*;|warp_group_\w+\([^;]*;|cluster_sync\(\);|__syncthreads\(\);|copy_tile\w*\([^;]*;"


@needs_emulator
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_nothing_that_orders_threads_and_copies_can_be_missing(cluster: int) -> None:
    """Without any one of them the kernel breaks a rule, waits without end, or computes something else."""
    form = form_of(op="matmul", m=128, n=256, k=256)
    schedule = schedule_of(form, 64, 64, 3, cluster=cluster, launched=cluster)
    lowered, text = lower(form, schedule, entry="wgmma"), text_of(form, schedule)
    calls = [match for match in re.finditer(_ORDER, text) if match.start() > text.index('extern "C" __global__')]
    assert len(calls) >= 15
    for call in calls:
        if call.group().startswith("barrier_make"):
            continue
        broken = f"{text[: call.start()]};{text[call.end() :]}"
        try:
            result, expected = emulate(form, lowered, broken)
        except EmulatorError:
            continue
        assert not np.allclose(result, expected, rtol=1e-2, atol=1e-2), call.group()


@needs_emulator
@pytest.mark.parametrize(
    ("right", "wrong", "reason"),
    [
        ("parity ^ 1)", "parity)", "a wait without end: 128 threads, thread 0 of block 0 among them, .* parity 0 of"),
        ("STAGE_BYTES);", "STAGE_BYTES + 16);", "lacks 0 of 1 arrivals and 16 bytes"),
        ("FULL + 16 * stage, 1);", "FULL + 16 * stage, 2);", "lacks 1 of 2 arrivals"),
        ("warp_group_wait_1();", ";", "a product of warp . at .* is under way, when it is written"),
        ("FULL + 16 * stage, parity);", "FULL + 16 * before, parity);", "race on shared"),
        ("barrier_fence();", ";", "no fence has followed its making"),
        ("stage * STAGE_BYTES + 8192", "stage * STAGE_BYTES + 8192 + 64", "not aligned to 128 bytes"),
    ],
)
def test_what_is_wrong_is_said(right: str, wrong: str, reason: str) -> None:
    form = form_of(op="matmul", m=64, n=64, k=640)
    schedule = schedule_of(form, 64, 64, 3)
    text = text_of(form, schedule)
    place = text.index(right, text.index('extern "C" __global__'))
    with pytest.raises(EmulatorError, match=reason):
        emulate(form, lower(form, schedule, entry="wgmma"), text[:place] + wrong + text[place + len(right) :])


def test_tensor_maps_say_what_a_block_copies() -> None:
    """B, which blocks of a cluster have in common, comes to each by halves."""
    form = form_of(op="batch_matmul", b=3, m=512, n=512, k=320)
    lowered = lower(form, schedule_of(form, 128, 256, cluster=2), entry="bulk")
    assert lowered.maps == (
        TensorMap(tensor="A", dtype="float16", shape=(3, 512, 320), box=(1, 128, 64)),
        TensorMap(tensor="B", dtype="float16", shape=(3, 320, 512), box=(1, 32, 64)),
    )
    assert (lowered.grid, lowered.block) == ((24, 1, 1), (384, 1, 1))
    both = lower(form, schedule_of(form, 128, 256, cluster=4), entry="bulk")
    assert [seen.box for seen in both.maps] == [(1, 64, 64), (1, 32, 64)]


@pytest.mark.skipif(nvdisasm_path() is None, reason="there is no nvdisasm")
@pytest.mark.parametrize(
    ("rows", "width", "stages", "cluster", "a", "b", "dtype"),
    [
        (128, 256, 4, 2, False, False, "bfloat16"),
        (192, 192, 4, 2, True, True, "float16"),
        (64, 256, 5, 1, False, True, "bfloat16"),
        (128, 224, 5, 4, True, True, "bfloat16"),
    ],
)
def test_machine_code_copies_in_bulk_and_spills_nothing(
    rows: int, width: int, stages: int, cluster: int, a: bool, b: bool, dtype: str
) -> None:
    form = form_of(op="matmul", m=4096, n=4104, k=4096, transpose_a=a, transpose_b=b, dtype=dtype, epilogue=["relu"])
    schedule = schedule_of(form, rows, width, stages, cluster=cluster, launched=132)
    built = compile_cuda(text_of(form, schedule), "sm_90a", name="bulk")
    assert (built.spill_bytes, built.stack_bytes) == (0, 0)
    assert SERIALISED not in built.log
    assert "setmaxnreg" not in built.log  # it says where it ignores that
    assert built.registers * schedule.threads_per_block <= 65536
    function = disassemble(built.cubin).functions[0]
    names = [line.text.split()[0] for line in function.instructions]
    copies = [name for name in names if name.startswith("UTMALDG")]
    products = [name for name in names if name.startswith("HGMMA")]
    assert any("MULTICAST" in name for name in copies) == (cluster > 1)
    assert len(set(products)) == 1  # the first step stands by itself
    assert len(products) in (4, 8)
    assert not [name for name in names if name.startswith(("LDL", "STL", "LDGSTS", "HMMA"))]
    # Nothing in a step but the products, their descriptors, two barriers and the counter.
    mix = hottest_loop(function).mix
    assert (mix.kind("HGMMA"), mix.kind("BAR", "MEMBAR", "CCTL")) == (4, 0)
    assert mix.total < 110


@pytest.mark.skipif(nvdisasm_path() is None, reason="there is no nvdisasm")
def test_machine_code_multiplies_eight_bits() -> None:
    form = form_of(op="matmul", m=4096, n=4096, k=4096, transpose_b=True, dtype="float8_e4m3fn")
    built = compile_cuda(text_of(form, schedule_of(form, 128, 256, 4, cluster=2, step=128)), "sm_90a", name="bulk")
    assert (built.spill_bytes, built.stack_bytes) == (0, 0)
    assert SERIALISED not in built.log
    mix = hottest_loop(disassemble(built.cubin).functions[0]).mix
    assert (mix.kind("QGMMA"), mix.kind("HGMMA", "HMMA", "F2FP")) == (4, 0)


@needs_emulator
def test_a_descriptor_has_its_fields_where_the_ptx_manual_puts_them() -> None:
    """Bits 0 to 13, 16 to 29 and 32 to 45 without the lowest four of each; 1 in 62 and 63 for 128 bytes; no others."""
    form = form_of(op="matmul", m=64, n=64, k=64)
    functions = text_of(form, schedule_of(form, 64, 64, 3)).split('extern "C"', maxsplit=1)[0]
    body = """
      extern __shared__ __align__(1024) float s[];
      if (threadIdx.x) return;
      D[0] = matrix_descriptor(s, 0, 16, 1024);
      D[1] = matrix_descriptor(s, 8192 + 96, 8192, 1024);
      D[2] = matrix_descriptor(s, 0x2FC00, 32768, 1024);
    """
    kernel = 'extern "C" __global__ void f(unsigned long long* __restrict__ D)'
    given = np.zeros(3, np.uint64)
    (found,) = run_cuda_on_cpu(f"{functions}\n{kernel} {{ {body} }}", "f", [given], [1], [128], [0], 1 << 18).outputs
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


def test_the_compiler_says_where_it_serialises_products() -> None:
    """What the test above would find: sums that are touched while products are under way."""
    form = form_of(op="matmul", m=4096, n=4096, k=4096)
    text = text_of(form, schedule_of(form, 128, 256))
    broken = text.replace("warp_group_commit();", "sums[0] += 1.0f; warp_group_commit();")
    assert broken != text
    assert SERIALISED in compile_cuda(broken, "sm_90a", name="wgmma").log


def test_the_kernel_is_compiled_for_sm_90a_alone() -> None:
    form = form_of(op="matmul", m=256, n=256, k=256)
    group, warp = schedule_of(form), wmma_schedule(form, padding=0, instruction=Instruction.MMA_16X8X16, stages=3)
    assert specific_architecture(group, "sm_90") == "sm_90a"
    assert specific_architecture(group, "sm_90a") is None
    assert specific_architecture(warp, "sm_90") is None
    target = Target("cuda", "sm_90", 32)
    request = BuildRequest(form=form, schedule=group, entry="wgmma", target=target)
    built = build_kernel(request)
    assert (built.error, built.architecture, built.spill_bytes) == ("", "sm_90a", 0)
    assert built.binary is not None
    assert build_kernel(BuildRequest(form=form, schedule=warp, entry="mma", target=target)).architecture is None


@pytest.mark.parametrize(
    ("operator", "changes", "problem"),
    [
        (
            {"dtype": "int8", "transpose_b": True, "epilogue": ["relu"]},
            {"step": 128},
            "the final statement computes with integers",
        ),
        (
            {"dtype": "float8_e5m2"},
            {"step": 128},
            "B has its depth down the rows: elements of 8 bits are multiplied along them",
        ),
        (
            {"dtype": "float32", "allow_tf32": True},
            {"step": 32},
            "B has its depth down the rows: elements of 32 bits are multiplied along them",
        ),
        ({}, {"rows": 96}, "block 96 of axis m: warp groups take multiples of 64, 16 rows a warp"),
        ({}, {"width": 112}, "block 112 of axis n: a warp group has all of 64, 96, 128, 160, 192, 224, 256 columns"),
        ({}, {"step": 32}, "step 32 of axis k: warp groups take multiples of 64"),
        ({}, {"padding": 8}, "padding: tiles of warp groups are swizzled instead"),
        ({}, {"stages": 1}, "1 pipeline stages: bulk copies take 2 to 8"),
        ({}, {"rows": 192, "width": 256}, "3 warp groups of 256 columns have too few registers"),
        ({}, {"rows": 256}, "4 warp groups of 128 columns have too few registers"),
        ({}, {"cluster": 3}, "clusters of 3 blocks: kernels have 1, 2, 4"),
        ({}, {"width": 160}, "rows of B are copied by 64 columns"),
        ({"transpose_b": True}, {"width": 160}, None),
        ({}, {"cluster": 2, "launched": 133}, "133 blocks are no clusters of 2"),
        ({"k": 260}, {}, "rows of an operand are no multiples of 16 bytes"),
        ({"n": 260, "transpose_b": True}, {}, None),
    ],
)
def test_what_does_not_fit_is_said(operator: dict[str, Any], changes: dict[str, Any], problem: str | None) -> None:
    form = form_of(**{"op": "matmul", "m": 256, "n": 256, "k": 256, **operator})
    found = bulk_problem(form, schedule_of(form, **changes))
    assert (found is None) if problem is None else (problem in str(found))
    if problem is not None:
        with pytest.raises(ValueError, match=re.escape(problem)):
            lower(form, schedule_of(form, **changes), entry="bulk")


def test_convolutions_of_larger_windows_are_left_to_threads() -> None:
    form = form_of(op="conv2d", n=2, c=64, h=16, w=16, f=64, kh=3, kw=3, layout="NHWC")
    assert bulk_problem(form, schedule_of(form, 64, 64)) is not None
