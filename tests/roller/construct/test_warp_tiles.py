"""Blocks of the largest warp tiles, which make fewer rounds."""

from __future__ import annotations

import pytest

from hal.catalog import load_device
from roller.construct import construct as construction
from roller.construct.construct import construct
from roller.construct.rtile import TileSpace
from roller.construct.warp_tiles import WARP_TILES_POLICY, warp_tile_candidates
from roller.explain.page import explain
from roller.programs import find_programs
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data

A100 = load_device("a100")


def product(dtype: str = "float16", **sizes: int) -> KernelForm:
    return kernel_form(operator_from_data({"op": "matmul", "m": 2048, "n": 2048, "k": 2048, "dtype": dtype, **sizes}))


def candidates(form: KernelForm, board: str) -> int:
    return len(list(warp_tile_candidates(TileSpace.of(form), PlacedForm(form, load_device(board)), 0.0)))


def test_a_last_round_that_is_almost_empty_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    best = construct(product(), A100, 1).programs[0]
    assert best.policy == WARP_TILES_POLICY
    block, roles = best.schedule.block_of, product().roles
    assert roles is not None
    assert {block[roles.m], block[roles.n]} == {128, 192}
    monkeypatch.setattr(construction, "warp_tile_candidates", lambda space, placed, epsilon: [])
    assert construct(product(), A100, 1).programs[0].estimate.seconds > 1.2 * best.estimate.seconds


def test_every_element_type_of_the_instruction_has_them() -> None:
    counts = {dtype: candidates(product(dtype), "a100") for dtype in ("float16", "bfloat16", "int8")}
    assert set(counts.values()) == {54}
    # Steps are as long in bytes.
    form = product("int8")
    steps = {c.schedule.step for c in warp_tile_candidates(TileSpace.of(form), PlacedForm(form, A100), 0.0)}
    assert sorted(size for step in steps for _, size in step) == [128, 256]


@pytest.mark.parametrize(("board", "dtype"), [("v100", "float16"), ("a100", "float32"), ("h100", "bfloat16")])
def test_other_instructions_have_tiles_of_their_own(board: str, dtype: str) -> None:
    assert candidates(product(dtype), board) == 0


def test_blocks_are_no_larger_than_the_product() -> None:
    assert candidates(product(m=127, n=4096), "a100") == 3 * 3  # 96 rows, of two warps
    assert candidates(product(k=32), "a100") == 0


def test_a_page_says_how_they_were_found() -> None:
    page = explain(find_programs(product(), A100, 1, "roller"), 1)
    assert f"How rank 1 was constructed: {WARP_TILES_POLICY}" in page
    assert "48 by 64 a warp" in page and "4 by 2 warps of the block (3 buffers of a step of 64)" in page
