"""Gradients of attention from tiles: what is proposed on which board, and that what is ranked first is right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from codegen.target import Target
from codegen.verify.gpu import verify_chain
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.algorithms import composed_programs
from roller.algorithms.chain import ChainProgram
from roller.algorithms.flash_gradient import WholeGradient, gradient_kernel, program_of
from roller.explain.page import explain
from roller.programs import find_programs
from sokoban.kernel.attention_gradient import SlopeProduct
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from sokoban.model.gpu.kinds.attention_gradient import gradient_walks, slope_walks
from sokoban.schedule.attention_gradient import GradientSchedule

A100, V100, H100 = (load_device(name) for name in ("a100", "v100", "h100"))
TRAINING = {
    "op": "attention_gradient", "of": "keys", "b": 4, "heads": 16, "queries": 2048, "head_dim": 128, "causal": True,
    "dtype": "float16",
}  # fmt: skip


def form_of(**changes: Any) -> KernelForm:
    return kernel_form(operator_from_data(TRAINING | changes))


def programs(form: KernelForm, device: DeviceSpec = A100, top_k: int = 10) -> tuple[ChainProgram, ...]:
    return composed_programs(PlacedForm(form, device), top_k).programs


def best(form: KernelForm, device: DeviceSpec = A100) -> tuple[GradientSchedule, float]:
    program = programs(form, device, 1)[0]
    schedule = program.parts[0].schedule
    assert isinstance(schedule, GradientSchedule)
    return schedule, program.estimate.seconds


def test_programs_are_ranked_and_fit() -> None:
    found = programs(form_of())
    assert len(found) == 10
    assert all(one.estimate.seconds <= other.estimate.seconds for one, other in pairwise(found))
    for program in found:
        assert program.estimate.shared_bytes <= A100.limits.shared_bytes_per_block_opt_in
        assert program.estimate.registers <= A100.limits.registers_per_thread
        assert len(program.parts) == 1 and not program.workspace


def test_each_board_multiplies_by_what_it_has() -> None:
    found = {
        (device.name, dtype): best(form_of(dtype=dtype, head_dim=64), device)[0].instruction
        for device in (V100, A100, H100)
        for dtype in ("float16", "float32")
    }
    matrix = {key: instruction for key, instruction in found.items() if instruction is not Instruction.FMA}
    by_warps, by_groups = Instruction.MMA_16X8X16, Instruction.WGMMA
    assert matrix == {(A100.name, "float16"): by_warps, (H100.name, "float16"): by_groups}


def test_masks_save_what_they_leave_out_and_wide_heads_are_divided() -> None:
    whole, causal = (best(form_of(causal=flag))[1] for flag in (False, True))
    assert 1.6 < whole / causal < 2.1
    assert best(form_of(window=256))[1] < 0.5 * causal
    assert best(form_of(head_dim=256))[0].columns > 1 and best(form_of())[0].columns == 1
    assert best(form_of(head_dim=256), H100)[0].shares == 2 and best(form_of(), H100)[0].shares == 1


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("changes", "device"),
    [
        ({"queries": 333}, A100),
        ({"queries": 333, "of": "queries", "head_dim": 256}, A100),
        ({"dtype": "bfloat16", "head_dim": 80, "kv_heads": 4, "window": 50}, H100),
        ({"dtype": "float32", "head_dim": 64, "keys": 2500}, V100),
        ({"slopes": True, "kv_heads": 8, "queries": 1000}, A100),
        ({"slopes": True, "kv_heads": 8, "queries": 1000, "of": "queries"}, A100),
        ({"slopes": True, "dtype": "bfloat16", "window": 200}, H100),
        ({"slopes": True, "dtype": "bfloat16", "window": 200, "of": "queries"}, H100),
    ],
    ids=["odd length", "wide heads", "window", "float32", "slopes", "product", "slopes of a window", "their product"],
)
def test_the_first_is_right(changes: dict[str, Any], device: DeviceSpec) -> None:
    check = programs(form_of(**changes), device, 1)[0].check()
    assert check is not None
    result = verify_chain(check, engine="emulator", target=Target.of(device))
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.parametrize("changes", [{}, {"window": 300}, {"causal": False}, {"kv_heads": 4}, {"slopes": True}])
@pytest.mark.parametrize("of", ["keys", "queries"])
def test_proofs_use_a_buffer_again(of: str, changes: dict[str, Any]) -> None:
    """Without more steps than buffers no proof would notice that a buffer is overwritten while it is read."""
    form = form_of(of=of, **changes)
    schedule = GradientSchedule(rows=128, step=32, warps=8, stages=4, instruction=Instruction.WGMMA)
    small, _ = WholeGradient().cut_down(form, [schedule])
    kernel = gradient_kernel(small)
    walk = slope_walks if isinstance(kernel, SlopeProduct) else gradient_walks
    assert walk(kernel, schedule).longest > schedule.stages  # type: ignore[operator]


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize("of", ["queries", "keys"])
def test_by_matrix_instructions_it_has_a_scalar_twin(of: str) -> None:
    program = programs(form_of(of=of, head_dim=64, queries=129, b=1), A100, 1)[0]
    schedule = program.parts[0].schedule
    assert isinstance(schedule, GradientSchedule) and schedule.instruction is not Instruction.FMA
    result = verify_chain(program.check(), engine="opencl")
    assert result.passed, result.reason
    assert result.method == "opencl (scalar twin of the Tensor Core tiling)"


def test_a_page_tells_why() -> None:
    form = form_of(kv_heads=4, head_dim=256)
    programs = find_programs(form, A100, 3)
    page = explain(programs, 1, programs.ranked(3))
    for line in (
        "two runs agree to the bit", "4 warps have the same rows", "heads that share keys are walked head by head",
        "the mask leaves 50 % of all pairs", "as many gradients of them", "% of the peak of mma_16x8x16",
    ):  # fmt: skip
        assert line in " ".join(page.split())


def test_slopes_cost_memory_and_save_two_products() -> None:
    plain, sloped = ([best(form_of(of=of, slopes=flag))[1] for of in ("queries", "keys")] for flag in (False, True))
    assert sloped[0] < 0.55 * plain[0] and plain[1] < sloped[1] < 1.1 * plain[1]
    for of, line in (("keys", "slopes alone, 537 MB, pass"), ("queries", "one product that reads them once")):
        found = find_programs(form_of(of=of, slopes=True), A100, 1)
        assert line in " ".join(explain(found, 1, found.ranked(1)).split())


def test_what_no_kernel_takes_is_refused() -> None:
    with pytest.raises(InputError, match="slopes of 2044 are no multiple of 16 bytes; use a multiple of 8"):
        programs(form_of(slopes=True, queries=2044))
    with pytest.raises(InputError, match="slopes have no kernels of ours in float16 on v100"):
        programs(form_of(slopes=True), V100)
    with pytest.raises(InputError, match="no kernels of ours for float64"):
        programs(form_of(dtype="float64"))
    with pytest.raises(InputError, match="rows of 36 elements are no multiple of 16 bytes"):
        programs(form_of(head_dim=36))
    schedule = GradientSchedule(rows=64, step=64, warps=4, stages=1, instruction=Instruction.MMA_16X8X16)
    with pytest.raises(InputError, match="2 shares by mma_16x8x16, whose warps divide columns instead; score"):
        program_of(form_of(), replace(schedule, shares=2), A100)
    with pytest.raises(InputError, match="2 warps to a row of a product of slopes, which passes nothing on; score"):
        program_of(form_of(slopes=True, of="queries"), replace(schedule, columns=2), A100)
    with pytest.raises(InputError, match="4 warps do not divide 80 columns into fragments of 16; score"):
        program_of(form_of(head_dim=80), replace(schedule, columns=4), A100)
    with pytest.raises(InputError, match="no kernels of ours for epyc-7763"):
        program_of(form_of(), schedule, load_device("epyc-7763"))
