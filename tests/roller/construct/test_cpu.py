"""Construction for devices whose lanes are elements of vectors."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hal.catalog import load_device
from roller.construct.construct import construct
from roller.construct.cpu import FOLLOWED_STEP, REGISTER_TILES, SMALLEST_BLOCK, CpuScaleUp
from roller.construct.program import Candidate, Construction
from roller.construct.rtile import TileSpace
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from sokoban.schedule.cpu_tiles import vector_axis

DEVICE = load_device("xeon-platinum-8375c")
LANES = 16

OPERATORS = {
    "matmul": {"op": "matmul", "m": 512, "n": 512, "k": 512},
    "odd": {"op": "matmul", "m": 333, "n": 77, "k": 101},
    "few rows": {"op": "matmul", "m": 3, "n": 1000, "k": 512},
    "few columns": {"op": "matmul", "m": 1000, "n": 3, "k": 512},
    "batch": {"op": "batch_matmul", "b": 12, "m": 128, "n": 128, "k": 64, "transpose_b": True},
    "nchw": {"op": "conv2d", "n": 1, "c": 64, "h": 56, "w": 56, "f": 64, "kh": 3, "kw": 3, "stride": 1, "padding": 1,
             "layout": "NCHW"},
    "nhwc": {"op": "conv2d", "n": 1, "c": 64, "h": 14, "w": 14, "f": 64, "kh": 3, "kw": 3, "stride": 1, "padding": 1,
             "layout": "NHWC"},
    "depthwise": {"op": "depthwise_conv2d", "n": 1, "c": 32, "h": 20, "w": 20, "kh": 3, "kw": 3, "stride": 2,
                  "padding": 1, "layout": "NCHW"},
    "pool": {"op": "max_pool2d", "n": 1, "c": 64, "h": 56, "w": 56, "kh": 3, "kw": 3, "stride": 2, "padding": 1,
             "layout": "NCHW"},
    "sum of rows": {"op": "reduce", "function": "sum", "shape": [4096, 1024], "axes": [1]},
    "mean of columns": {"op": "reduce", "function": "mean", "shape": [4096, 1024], "axes": [0]},
    "sum of all": {"op": "reduce", "function": "sum", "shape": [64, 32], "axes": [0, 1]},
    "softmax": {"op": "softmax", "shape": [12, 128, 128]},
    "layer norm": {"op": "layer_norm", "shape": [512, 768]},
    "add": {"op": "elementwise", "function": "add", "shape": [2048, 2048]},
    "transpose": {"op": "transpose", "shape": [2048, 1024], "perm": [1, 0]},
}  # fmt: skip


def form_of(fields: dict[str, Any]) -> KernelForm:
    return kernel_form(operator_from_data({"name": "op", "dtype": "float32", **fields}))


def tiles_of(form: KernelForm) -> list[Candidate]:
    """What is proposed by tiles; not by rows."""
    found = CpuScaleUp(TileSpace.of(form), PlacedForm(form, DEVICE), 0.1).candidates()
    return [candidate for candidate in found if candidate.policy == "scale up"]


def constructed(name: str, top_k: int = 10) -> Construction:
    return construct(form_of(OPERATORS[name]), DEVICE, top_k)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_kind_of_operator_has_programs(name: str) -> None:
    found = constructed(name)
    assert found.programs
    times = [program.estimate.seconds for program in found.programs]
    assert times == sorted(times)
    assert all(math.isfinite(seconds) for seconds in times)
    assert len({program.schedule for program in found.programs}) == len(times)
    assert all(program.reasons for program in found.programs)


@pytest.mark.parametrize("name", ["matmul", "odd", "few rows", "nchw", "nhwc", "depthwise", "pool"])
def test_tiles_fit_registers_and_divide_their_blocks(name: str) -> None:
    form = form_of(OPERATORS[name])
    for program in constructed(name).programs:
        schedule = program.schedule
        tile = {axis: min(size, form.sizes[axis]) for axis, size in schedule.register_tile.items()}
        axis = vector_axis(form.final.axes, tile, LANES)
        vectors = tile[axis] // LANES + (tile[axis] % LANES).bit_count()
        rows = math.prod(size for other, size in tile.items() if other != axis)
        assert rows * vectors <= 31
        assert all(
            size % schedule.register_tile[axis] == 0 or size >= form.sizes[axis] for axis, size in schedule.block
        )
        assert not schedule.vthreads
        assert schedule.stages == 1
        assert not schedule.padding, "what a cache holds has no padding of its own"


@pytest.mark.parametrize("device", ["epyc-7763", "xeon-platinum-8375c"])
@pytest.mark.parametrize("columns", [7 * 120, 4 * 261, 1630])
def test_a_row_of_an_odd_number_of_columns_has_programs(device: str, columns: int) -> None:
    """Larger blocks seem to move more there, since the last one is hardly used."""
    form = kernel_form(operator_from_data({"op": "matmul", "m": 1, "n": columns, "k": 2 if columns == 1630 else 70}))
    assert construct(form, load_device(device), 1).programs


def test_a_product_takes_many_vectors_of_sums_and_packs_columns() -> None:
    best = constructed("matmul").programs[0]
    tile = best.schedule.register_tile
    assert tile["n"] % LANES == 0
    assert tile["m"] * tile["n"] // LANES >= 16
    assert math.prod(-(-512 // size) for _, size in best.schedule.block) >= 16, "a block for most of 32 cores"


def test_borders_are_copied() -> None:
    for program in constructed("nchw").programs:
        assert "X" in program.schedule.cached


def test_what_nothing_shares_is_never_copied() -> None:
    for name in ("mean of columns", "sum of rows"):
        assert all(not program.schedule.cached for program in constructed(name).programs)


def test_partial_sums_rest_in_outputs_of_their_own_type_only() -> None:
    for dtype, expected in (("float32", {512, 256, 128, 64, 16}), ("float16", {512})):
        form = form_of({**OPERATORS["matmul"], "dtype": dtype})
        assert {dict(candidate.schedule.step)["k"] for candidate in tiles_of(form)} == expected


def test_few_candidates_are_enough() -> None:
    candidates = tiles_of(form_of(OPERATORS["matmul"]))
    assert len({candidate.tiles and candidate.tiles[0] for candidate in candidates}) <= REGISTER_TILES
    assert len(candidates) < 2000
    for candidate in candidates:
        tiles = math.prod(size // dict(candidate.schedule.thread)[axis] for axis, size in candidate.schedule.block)
        assert tiles >= SMALLEST_BLOCK


def test_reasons_tell_the_walk() -> None:
    reasons = constructed("matmul").programs[0].reasons
    actions = [reason.action for reason in reasons]
    assert any(action.endswith("vectors along n") for action in actions)
    assert "grow m" in actions
    assert actions[-1].startswith("pack")
    scores = [dict(reason.numbers)["score"] for reason in reasons if reason.action.startswith("grow")]
    assert all(score > 0 for score in scores)


@pytest.mark.parametrize(
    ("columns", "has_short_steps"), [(64, False), (256, False), (512, True), (4096, True)], ids=str
)
def test_short_steps_are_for_rows_on_different_pages(columns: int, has_short_steps: bool) -> None:
    """Prefetchers follow rows on different pages one by one; within a page they go on from row to row."""
    sizes = {"m": 8, "p": 4096 // columns, "n": columns, "k": 1000}
    form = form_of({"expr": "Y[m,p,n] = sum(k, A[m,k] * B[p,k,n])", "sizes": sizes})
    steps = {dict(tile.schedule.step).get("k", sizes["k"]) for tile in tiles_of(form)}
    assert (FOLLOWED_STEP in steps) == has_short_steps
    assert {250, 500, 1000} <= steps
