"""Attention from tiles: what is proposed on which board, how it is ranked, and that what is ranked first is right."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from codegen.target import Target
from codegen.verify.gpu import verify_chain
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.algorithms.chain import ChainProgram
from roller.algorithms.flash import consider
from roller.explain.attention import attention_origin
from roller.explain.page import explain
from roller.programs import find_programs
from sokoban.kernel.attention import AttentionKernel
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from sokoban.schedule.attention import AttentionSchedule, shared_bytes

A100, V100, H100 = (load_device(name) for name in ("a100", "v100", "h100"))

PREFILL = {"op": "attention", "b": 4, "heads": 16, "queries": 2048, "head_dim": 128, "causal": True, "dtype": "float16"}
DECODE = PREFILL | {"b": 1, "heads": 32, "kv_heads": 8, "queries": 1, "keys": 8192}


def form_of(operator: dict[str, Any], **changes: Any) -> KernelForm:
    return kernel_form(operator_from_data(operator | changes))


def programs(form: KernelForm, device: DeviceSpec = A100, top_k: int = 10) -> tuple[ChainProgram, ...]:
    return consider(PlacedForm(form, device), top_k).programs


def best(form: KernelForm, device: DeviceSpec = A100) -> tuple[AttentionKernel, AttentionSchedule, float]:
    program = programs(form, device, 1)[0]
    kernel, schedule = program.parts[0].problem, program.parts[0].schedule
    assert isinstance(kernel, AttentionKernel) and isinstance(schedule, AttentionSchedule)
    return kernel, schedule, program.estimate.seconds


def test_programs_are_ranked_and_fit() -> None:
    found = programs(form_of(PREFILL))
    assert len(found) == 10
    assert all(one.estimate.seconds <= other.estimate.seconds for one, other in pairwise(found))
    for program in found:
        kernel, schedule = program.parts[0].problem, program.parts[0].schedule
        assert isinstance(kernel, AttentionKernel) and isinstance(schedule, AttentionSchedule)
        assert shared_bytes(kernel, schedule) <= A100.limits.shared_bytes_per_block_opt_in
        assert program.parts[0].estimate.registers <= A100.limits.registers_per_thread


def test_each_board_multiplies_by_what_it_has() -> None:
    instructions = {
        (device.name, dtype): best(form_of(PREFILL, dtype=dtype), device)[1].instruction
        for device in (V100, A100, load_device("mi50"))
        for dtype in ("float16", "float32")
    }
    matrix = [key for key, instruction in instructions.items() if instruction is not Instruction.FMA]
    assert matrix == [(A100.name, "float16")]


def test_masks_windows_and_shared_heads_save_what_they_leave_out() -> None:
    whole, causal = (best(form_of(PREFILL, causal=flag))[2] for flag in (False, True))
    assert 1.6 < whole / causal < 2.1
    assert best(form_of(PREFILL, window=256))[2] < 0.5 * causal
    decoded = best(form_of(DECODE, b=16))[2]
    # Keys of eight heads are read, not of 32.
    assert 2.5 < best(form_of(DECODE, b=16, kv_heads=32))[2] / decoded < 4.5


def test_a_few_queries_share_their_keys_among_blocks() -> None:
    kernel, schedule, seconds = best(form_of(DECODE))
    assert kernel.slices > 1 and kernel.group == 4 and schedule.rows == 16
    assert schedule.blocks(kernel) >= 0.5 * A100.unit_count
    alone = [p for p in programs(form_of(DECODE), top_k=200) if len(p.parts) == 1]
    assert all(program.estimate.seconds > 1.5 * seconds for program in alone)
    # Prefill has rows enough.
    assert best(form_of(PREFILL))[0].slices == 1


def test_the_matrix_units_are_half_busy_on_long_sequences() -> None:
    """FlashAttention 2 reaches 50 to 73 % of an A100's peak (T. Dao, 2023, section 4)."""
    form = form_of(PREFILL, queries=16384, causal=False, b=1)
    rate = form.flops / best(form)[2]
    assert 0.5 < rate / A100.matrix_instruction("float16").peak_flops < 0.8


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("operator", "device"),
    [
        (PREFILL | {"queries": 333}, A100),
        (PREFILL | {"dtype": "bfloat16", "head_dim": 80, "kv_heads": 4, "window": 50}, H100),
        (DECODE, A100),
        (PREFILL | {"dtype": "float32", "head_dim": 64}, V100),
        (DECODE | {"dtype": "float16"}, V100),
    ],
    ids=["odd length", "window", "decode", "float32", "decode by multiply-adds"],
)
def test_the_first_is_right(operator: dict[str, Any], device: DeviceSpec) -> None:
    check = programs(form_of(operator), device, 1)[0].check()
    assert check is not None
    result = verify_chain(check, engine="emulator", target=Target.of(device))
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.parametrize(
    ("changes", "device", "problem"),
    [
        ({"dtype": "float64"}, A100, "no kernels of ours for float64"),
        ({"head_dim": 36}, A100, "rows of 36 elements are no multiple of 16 bytes; use a multiple of 8"),
        ({"head_dim": 34}, V100, "rows of 34 elements are no multiple of 8 bytes; use a multiple of 4"),
    ],
)
def test_what_no_kernel_takes_is_refused(changes: dict[str, Any], device: DeviceSpec, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        consider(PlacedForm(form_of(PREFILL, **changes), device), 1)


def test_warp_groups_multiply_where_a_board_has_them() -> None:
    form = form_of(PREFILL)
    _, schedule, seconds = best(form, H100)
    assert schedule.instruction is Instruction.WGMMA and schedule.rows == 16 * schedule.warps
    by_warps = next(
        program.estimate.seconds
        for program in programs(form, H100, 1000)
        if program.parts[0].schedule.instruction is Instruction.MMA_16X8X16
    )
    assert 1.2 * seconds < by_warps < 2.0 * seconds
    assert best(form_of(DECODE), H100)[1].instruction is Instruction.MMA_16X8X16
    assert best(form, load_device("b200"))[1].instruction is Instruction.MMA_16X8X16


IN_PAGES = {"page": 16, "pool": 3000}


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("operator", "device"),
    [
        (PREFILL | {"queries": 333}, A100),
        (DECODE | {"b": 3, "dtype": "bfloat16", "page": 64}, H100),
        (PREFILL | {"dtype": "float32", "head_dim": 64, "kv_heads": 4}, V100),
        (DECODE | {"dtype": "float16", "keys": 4099}, V100),
    ],
    ids=["odd length", "decode", "float32", "decode by multiply-adds"],
)
def test_the_first_in_pages_is_right(operator: dict[str, Any], device: DeviceSpec) -> None:
    check = programs(form_of(IN_PAGES | operator), device, 1)[0].check()
    assert check is not None
    attention = check.form.attention
    assert attention.pages is not None and attention.pages.per_sequence > 1
    result = verify_chain(check, engine="emulator", target=Target.of(device))
    assert result.passed, result.reason


@pytest.mark.parametrize(
    ("changes", "instruction"),
    [
        ({"page": 16}, Instruction.WGMMA),
        ({"page": 64}, Instruction.WGMMA),
        ({"page": 4, "pool": 9000}, Instruction.MMA_16X8X16),
        ({"page": 16, "queries": 2047}, Instruction.MMA_16X8X16),
    ],
    ids=["several pages a step", "longer pages", "pages shorter than a panel", "keys that end within a page"],
)
def test_warp_groups_multiply_where_copies_in_bulk_take_pages(
    changes: dict[str, Any], instruction: Instruction
) -> None:
    assert best(form_of(PREFILL | IN_PAGES, **changes), H100)[1].instruction is instruction


@pytest.mark.parametrize(
    ("operator", "device", "line"),
    [
        (DECODE, A100, "pages of 16 tokens: a thread reads the table 2 times a step, and copies when it knows"),
        (PREFILL, H100, "pages of 16 tokens: a copy in bulk brings 16 rows, whose page its thread looks up"),
    ],
)
def test_a_page_tells_how_keys_are_looked_up(operator: dict[str, Any], device: DeviceSpec, line: str) -> None:
    kernel, schedule, _ = best(form_of(operator | IN_PAGES), device)
    assert line in " ".join(" ".join(attention_origin(kernel, schedule)).split())


@pytest.mark.parametrize(("head_dim", "has_ones"), [(64, True), (128, False)])
def test_a_page_names_columns_of_ones_where_there_are_any(head_dim: int, has_ones: bool) -> None:
    found = find_programs(form_of(PREFILL | {"head_dim": head_dim}), H100, 1)
    page = " ".join(explain(found, 1, found.ranked(1)).split())
    assert ("8 columns of ones behind the values: their product" in page) is has_ones
    assert f"{head_dim // 2 + 4 * has_ones} sums, " in page
