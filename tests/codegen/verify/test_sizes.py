"""Kernels that take a size at launch, proved for several sizes: those that are right, and what the proof notices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from codegen.launch_shape import LaunchShape
from codegen.target import Target
from codegen.tir.bounds import Bounds
from codegen.verify.chain import Step
from codegen.verify.sizes import SizesCheck, sizes_to_run, verify_sizes
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.language.launch_size import at_size
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule

#: Multiply-adds over staged tiles, of float32.
STAGED = TileSchedule(
    block=(("m", 16), ("n", 32)), thread=(("m", 2), ("n", 4)), step=(("k", 8),), cached=("A", "B"), stages=2
)

#: ``mma.sync`` with bands of tiles.
MMA = TileSchedule(
    block=(("m", 32), ("n", 32)), thread=(("m", 16), ("n", 32)), step=(("k", 32),), cached=("A", "B"), stages=2,
    instruction=Instruction.MMA_16X8X16, raster=2,
)  # fmt: skip

#: Warp groups with bulk copies, in clusters, whose blocks have several tiles.
WGMMA = TileSchedule(
    block=(("m", 64), ("n", 64)), thread=(("m", 16), ("n", 64)), step=(("k", 64),), cached=("A", "B"), stages=2,
    instruction=Instruction.WGMMA, cluster=2, launched=2, raster=2,
)  # fmt: skip

KERNELS = [
    (STAGED, "float32", "sm_70", {"n": 64, "k": 20}),
    (MMA, "bfloat16", "sm_80", {"n": 96, "k": 64}),
    (WGMMA, "float16", "sm_90", {"n": 128, "k": 128}),
]


def checked(schedule: TileSchedule, dtype: str, sizes: dict[str, int], multiple: int = 1) -> SizesCheck:
    expr = operator_from_data({"op": "matmul", "m": {"up to": 128, "multiple": multiple}, "dtype": dtype, **sizes})
    assert expr.launch_size is not None
    tile = schedule.block_of["m"]
    most = expr.launch_size.reach(tile + 1)
    form = kernel_form(at_size(expr, most)).launched("m")
    return SizesCheck(form, (Step(form, schedule),), "m", multiple, sizes_to_run([tile], multiple, most))


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("schedule", "dtype", "architecture", "sizes"), KERNELS, ids=["staged", "mma", "wgmma"])
def test_one_text_is_right_for_every_size(
    schedule: TileSchedule, dtype: str, architecture: str, sizes: dict[str, int]
) -> None:
    check = checked(schedule, dtype, sizes)
    verification = verify_sizes(check, Target("cuda", architecture, 32))
    assert verification.passed, verification.reason
    assert verification.sizes == check.sizes and {1, schedule.block_of["m"] + 1} <= set(check.sizes)


@pytest.mark.usefixtures("emulator")
def test_rows_at_places_are_right_for_every_size() -> None:
    data = {"expr": "Y[t,d] = E[I[t], d] * X[t,d]", "sizes": {"t": {"up to": 40}, "d": 24}, "shapes": {"E": [7, 24]}}
    form = kernel_form(at_size(operator_from_data(data), 23)).launched("t")
    schedule = TileSchedule(block=(("t", 8), ("d", 24)), thread=(("t", 2), ("d", 1)))
    check = SizesCheck(form, (Step(form, schedule),), "t", 1, (1, 7, 8, 9, 13, 23))
    verification = verify_sizes(check, Target("cuda", "sm_70", 32))
    assert verification.passed, verification.reason


@pytest.mark.usefixtures("emulator")
def test_sizes_that_are_multiples_need_fewer_guards() -> None:
    verification = verify_sizes(checked(STAGED, "float32", {"n": 64, "k": 20}, 16), Target("cuda", "sm_70", 32))
    assert verification.passed, verification.reason


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("schedule", "dtype", "architecture", "sizes"), KERNELS[:2], ids=["staged", "mma"])
def test_a_kernel_that_ends_where_it_was_written_for_is_noticed(
    schedule: TileSchedule, dtype: str, architecture: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def constant_extent(bounds: Bounds, tensor: str, position: int, extent: int) -> Any:
        return extent

    monkeypatch.setattr(Bounds, "extent", constant_extent)
    verification = verify_sizes(checked(schedule, dtype, sizes), Target("cuda", architecture, 32))
    assert not verification.passed and verification.reason.startswith("m = ")


@pytest.mark.usefixtures("emulator")
def test_a_grid_of_too_few_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Bounds.shape

    def fewer(bounds: Bounds, schedule: TileSchedule) -> LaunchShape | None:
        shape = original(bounds, schedule)
        return None if shape is None else replace(shape, tile=2 * shape.tile)

    monkeypatch.setattr(Bounds, "shape", fewer)
    verification = verify_sizes(checked(STAGED, "float32", {"n": 64, "k": 20}), Target("cuda", "sm_70", 32))
    assert not verification.passed and verification.reason.startswith("m = ")


def test_fused_axes_have_their_share_of_elements() -> None:
    expr = operator_from_data({"expr": "Y[i,j] = relu(X[i,j])", "sizes": {"i": {"up to": 9}, "j": 3}})
    form: KernelForm = kernel_form(at_size(expr, 9)).launched("i")
    assert form.launch_axis is not None and (form.launch_axis.name, form.launch_axis.elements) == ("i.j", 3)
