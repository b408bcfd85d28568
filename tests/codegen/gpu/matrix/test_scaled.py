"""Products of eight-bit floats with scales of blocks: emulated, and compiled by NVRTC."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from codegen.gpu.matrix.bulk import bulk_problem
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.tensor_map import TensorMap
from codegen.verify.emulator import EmulatorError
from codegen.verify.gpu import verify
from hal.catalog import load_device
from roller.construct.construct import construct
from roller.inspect.disassembly import disassemble, hottest_loop, nvdisasm_path
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule
from tests.codegen.lowering import lower
from tests.codegen.matrix_kernels import assert_right, emulate, needs_emulator, source_of
from tests.codegen.matrix_kernels import schedule_of as warp_schedule
from tests.codegen.matrix_kernels import wgmma_schedule_of as schedule_of

SERIALISED = "wgmma.mma_async instructions are serialized"


def layer_of(m: int, n: int, k: int) -> KernelForm:
    data = {"op": "scaled_matmul", "m": m, "n": n, "k": k, "precision": "fp8-block"}
    return kernel_form(operator_from_data(data))


def blocks_of(scales: str = "S[i,b] * T[c,b]", output: str = "bfloat16", **changes: Any) -> KernelForm:
    sizes = {"i": 70, "c": 3, "n": 64, "b": 3, "k": 128, **changes.pop("sizes", {})}
    dtypes = {name: "float32" for name in "ST" if f"{name}[" in scales}
    data = {
        "expr": f"Y[i,c,n] = sum((b, k), A[i,b,k] * W[c,n,b,k] * {scales})",
        "sizes": sizes, "dtype": "float8_e4m3fn", "dtypes": {**dtypes, "Y": output},
    }  # fmt: skip
    return kernel_form(operator_from_data({**data, **changes}))


def text_of(form: KernelForm, schedule: TileSchedule) -> str:
    return strip_prelude(source_of(form, lower(form, schedule, entry="scaled"), "sm_90a"))


@needs_emulator
@pytest.mark.parametrize(("cluster", "launched"), [(1, 1), (2, 2), (4, 0)])
@pytest.mark.parametrize(("m", "n", "k"), [(100, 384, 640), (33, 128, 384), (130, 256, 128), (70, 128, 128)])
def test_sums_of_blocks_are_scaled_one_by_one(m: int, n: int, k: int, cluster: int, launched: int) -> None:
    """Blocks of columns, of the depth, both or neither; rows of odd number."""
    form = layer_of(m, n, k)
    changes = {"cluster": cluster, "launched": launched, "raster": 2 if launched else 0}
    source = assert_right(form, schedule_of(form, 64, 128, 3, step=128, **changes), strip=True)
    assert source.count("wgmma_64x128x32_e4m3_kk_anew(products") == 1
    assert source.count("wgmma_64x128x32_e4m3_kk(products") == 3


BIASED = {"S": "float32", "T": "float32", "bias": "bfloat16", "Y": "bfloat16"}
GROUPS = kernel_form(operator_from_data({
    "op": "grouped_matmul", "sizes": [70, 0, 30], "tile": 64, "n": 256, "k": 384, "precision": "fp8-block",
}))  # fmt: skip
CASES: dict[str, tuple[KernelForm, int, int]] = {
    "rows_of_scales": (blocks_of(), 128, 64),
    "scales_by_block": (blocks_of("S[b,i] * T[b,c]"), 64, 64),
    "columns_in_tiles": (blocks_of(sizes={"n": 160}), 64, 96),
    "short_blocks": (blocks_of(sizes={"i": 200, "c": 2, "k": 112, "n": 72}), 192, 96),
    "blocks_of_two_steps": (blocks_of(sizes={"b": 2, "c": 2, "k": 256}), 64, 64),
    "other_floats": (blocks_of(dtype="float8_e5m2", output="float16"), 64, 64),
    "scales_of_rows_alone": (blocks_of("S[i,b]"), 64, 64),
    "one_scale_a_block": (blocks_of("T[c,b]", output="float32"), 64, 64),
    "final_statement": (blocks_of(dtypes=BIASED, epilogue=[{"function": "bias_add", "axis": "n"}, "gelu"]), 64, 64),
    "in_groups": (GROUPS, 64, 128),
    "in_a_batch": (
        kernel_form(operator_from_data({
            "expr": "Y[g,i,c,n] = sum((b, k), A[g,i,b,k] * W[g,c,n,b,k] * S[g,i,b] * T[g,c,b])",
            "sizes": {"g": 2, "i": 40, "c": 2, "n": 64, "b": 2, "k": 128}, "dtype": "float8_e4m3fn",
            "dtypes": {"S": "float32", "T": "float32", "Y": "bfloat16"},
        })), 64, 64,
    ),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("name", CASES)
def test_results_are_right_to_the_last_rounding(name: str) -> None:
    form, rows, width = CASES[name]
    for cluster, launched in ((1, 2), (2, 2), (4, 0)):
        schedule = schedule_of(form, rows, width, 3, step=128, cluster=cluster, launched=launched)
        source = assert_right(form, schedule, strip=True)
        assert "products[i], sums[i])" in source


def warps_of(form: KernelForm, block: tuple[int, int], warp: tuple[int, int], **changes: Any) -> TileSchedule:
    """A schedule of ``mma.sync``."""
    given = {"step": 128, "padding": 0, "vector": (), "instruction": Instruction.MMA_16X8X32, "stages": 3, **changes}
    return warp_schedule(form, block, warp, **given)


BY_WARPS: dict[str, tuple[KernelForm, dict[str, Any]]] = {
    "rows_of_scales": (blocks_of(), {}),
    "scales_by_block": (blocks_of("S[b,i] * T[b,c]"), {"stages": 1}),
    "short_blocks": (blocks_of(sizes={"k": 112, "n": 72, "c": 2}), {"step": 64, "stages": 2}),
    "copied_one_by_one": (blocks_of(sizes={"k": 37, "n": 72, "c": 2}), {"step": 64}),
    "neither_blocks": (layer_of(70, 128, 128), {}),
    "final_statement": (blocks_of(dtypes=BIASED, epilogue=[{"function": "bias_add", "axis": "n"}, "gelu"]), {}),
    "in_groups": (GROUPS, {}),
    "weights_by_depth": (
        kernel_form(operator_from_data({
            "expr": "Y[i,c,n] = sum((b, k), A[b,k,i] * W[c,b,k,n] * S[i,b] * T[c,b])",
            "sizes": {"i": 80, "c": 2, "n": 64, "b": 2, "k": 128}, "dtype": "float8_e4m3fn",
            "dtypes": {"S": "float32", "T": "float32", "Y": "bfloat16"},
        })), {},
    ),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("name", BY_WARPS)
def test_single_warps_scale_sums_of_blocks_as_well(name: str) -> None:
    form, changes = BY_WARPS[name]
    source = assert_right(form, warps_of(form, (64, 64), (32, 32), **changes), strip=True)
    assert re.search(r"mma_16x8x32_e\dm\d\w*\(products_ptr", source)


@pytest.mark.skipif(nvdisasm_path() is None, reason="there is no nvdisasm")
def test_machine_code_of_single_warps_has_a_multiply_add_a_sum() -> None:
    form = layer_of(4096, 4096, 4096)
    text = strip_prelude(source_of(form, lower(form, warps_of(form, (128, 128), (64, 32)), entry="mma"), "sm_89"))
    built = compile_cuda(text, "sm_89", name="mma")
    assert (built.spill_bytes, built.stack_bytes) == (0, 0)
    mix = hottest_loop(disassemble(built.cubin).functions[0]).mix
    assert (mix.kind("QMMA"), mix.kind("FFMA"), mix.kind("CS2R", "LDL", "STL")) == (64, 64, 0)


@needs_emulator
def test_programs_verify_in_all_orders() -> None:
    form = layer_of(100, 384, 640)
    emulated = verify(form, schedule_of(form, 64, 128, 4, step=128, cluster=2, launched=4), engine="emulator")
    assert emulated.passed and emulated.method == "cuda, emulated", emulated.reason


@pytest.mark.usefixtures("opencl")
def test_the_scalar_twin_reads_scales_in_place() -> None:
    form = layer_of(100, 256, 384)
    for schedule in (schedule_of(form, 64, 128, 4, step=128, cluster=2), warps_of(form, (64, 64), (32, 32))):
        twin = verify(form, schedule, engine="opencl")
        assert twin.passed and "scalar twin" in twin.method, twin.reason


@needs_emulator
@pytest.mark.parametrize("device", ["v100", "h100-sxm"])
def test_other_numbers_are_multiplied_and_scaled_by_multiply_adds(device: str) -> None:
    form = blocks_of(dtype="float16", output="float32", sizes={"i": 20, "n": 32, "k": 16})
    assert form.roles is None
    schedule = construct(form, load_device(device), 1).programs[0].schedule
    checked = verify(form, schedule, engine="emulator")
    assert checked.passed, checked.reason


#: All that orders the threads and copies of a kernel, and the scaling itself, in its text.
_ORDER = r"barrier_\w+\([^;]*;|warp_group_\w+\([^;]*;|cluster_sync\(\);|copy_tile\w*\([^;]*;|next_upper = [^;]*;"


@needs_emulator
@pytest.mark.slow
def test_nothing_that_orders_threads_and_copies_can_be_missing() -> None:
    form = layer_of(128, 256, 640)
    schedule = schedule_of(form, 64, 128, 2, step=128, cluster=2, launched=2)
    lowered, text = lower(form, schedule, entry="scaled"), text_of(form, schedule)
    calls = [match for match in re.finditer(_ORDER, text) if match.start() > text.index('extern "C" __global__')]
    assert len(calls) >= 15
    for call in calls:
        if call.group().startswith(("barrier_make", "next_upper = scale_of(upper, 0)")):
            continue
        broken = f"{text[: call.start()]};{text[call.end() :]}"
        try:
            result, expected = emulate(form, lowered, broken)
        except EmulatorError:
            continue
        assert not np.allclose(result, expected, rtol=1e-2, atol=1e-2), call.group()


def test_tiles_side_by_side_are_those_of_blocks_of_columns() -> None:
    """Two blocks of columns have rows of A in common, which come by halves; tiles of rows the weights."""
    form = layer_of(512, 512, 640)
    wide = lower(form, schedule_of(form, 192, 128, 3, step=128, cluster=2), entry="scaled")
    assert wide.maps == (
        TensorMap(tensor="X", dtype="float8_e4m3fn", shape=(512, 5, 128), box=(96, 1, 128)),
        TensorMap(tensor="W", dtype="float8_e4m3fn", shape=(4, 128, 5, 128), box=(1, 128, 1, 128)),
    )
    assert wide.grid == (12, 1, 1)
    both = lower(form, schedule_of(form, 128, 128, 3, step=128, cluster=4), entry="scaled")
    assert [seen.box for seen in both.maps] == [(64, 1, 128), (1, 64, 1, 128)]


@pytest.mark.skipif(nvdisasm_path() is None, reason="there is no nvdisasm")
@pytest.mark.parametrize(("rows", "width", "most"), [(64, 192, 232), (128, 128, 232), (128, 192, 232), (192, 128, 160)])
def test_machine_code_keeps_both_sets_of_sums_in_registers(rows: int, width: int, most: int) -> None:
    form = blocks_of(sizes={"i": 4096, "c": 32, "n": width, "b": 16})
    schedule = schedule_of(form, rows, width, 4, step=128, cluster=2, launched=132)
    built = compile_cuda(text_of(form, schedule), "sm_90a", name="scaled")
    assert (built.spill_bytes, built.stack_bytes) == (0, 0)
    assert SERIALISED not in built.log and "setmaxnreg" not in built.log
    function = disassemble(built.cubin).functions[0]
    assert max(int(number) for line in function.instructions for number in re.findall(r"\bR(\d+)\b", line.text)) < most
    mix = hottest_loop(function).mix
    assert (mix.kind("QGMMA"), mix.kind("FFMA"), mix.kind("HGMMA", "HMMA", "BAR", "LDL", "STL")) == (4, width // 2, 0)


@pytest.mark.parametrize(
    ("rows", "width", "problem"),
    [(192, 160, "3 warp groups of 160 columns have too few registers"), (64, 64, None)],
)
def test_tiles_have_registers_for_both_sets_of_sums(rows: int, width: int, problem: str | None) -> None:
    form = blocks_of(sizes={"i": 400, "n": 256})
    assert bulk_problem(form, schedule_of(form, rows, width, 3, step=128)) == problem
