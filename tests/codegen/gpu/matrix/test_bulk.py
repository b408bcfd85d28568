"""Products whose tiles are copied in bulk (TMA): compiled by NVRTC for sm_90a, executed by the CUDA emulator."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from codegen.gpu.matrix.bulk import bulk_problem
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.tensor_map import TensorMap
from codegen.verify.emulator import EmulatorError
from codegen.verify.gpu import verify
from roller.inspect.disassembly import disassemble, hottest_loop, nvdisasm_path
from tests.codegen.gpu.matrix.test_wgmma import OPERATORS, SERIALISED, text_of
from tests.codegen.lowering import lower
from tests.codegen.matrix_kernels import assert_right, emulate, form_of, needs_emulator
from tests.codegen.matrix_kernels import bulk_schedule_of as schedule_of


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
