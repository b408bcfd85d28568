"""Launch order in bands: every tile once, band after band, in kernels of every kind."""

from __future__ import annotations

import pytest
from tvm import sym, tirx

from codegen.gpu.raster import block_places
from codegen.tir.bounds import Bounds
from codegen.verify.gpu import verify
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule, sizes


def product(m: int, n: int, dtype: str = "float32") -> KernelForm:
    return kernel_form(operator_from_data({"op": "matmul", "m": m, "n": n, "k": 32, "dtype": dtype}))


def schedule(raster: int) -> TileSchedule:
    return TileSchedule(
        block=sizes({"m": 16, "n": 16}), thread=sizes({"m": 4, "n": 4}), step=sizes({"k": 8}), cached=("A", "B"),
        raster=raster,
    )  # fmt: skip


@pytest.mark.parametrize("raster", [0, 1, 2, 3, 5, 9])
def test_blocks_visit_every_tile_once_and_band_after_band(raster: int) -> None:
    form, rows, columns = product(16 * 4, 16 * 5), 4, 5
    analyzer = sym.Analyzer()
    visited = []
    for number in range(rows * columns):
        places = block_places(tirx.const(number, "int32"), form, schedule(raster), Bounds(form))
        visited.append(tuple(int(analyzer.simplify(places[axis])) for axis in ("m", "n")))
    width = min(raster or columns, columns)
    bands = [range(first, min(first + width, columns)) for first in range(0, columns, width)]
    assert visited == [(m, n) for band in bands for m in range(rows) for n in band]


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize("raster", [2, 3])
def test_a_kernel_in_bands_agrees_with_the_reference(raster: int) -> None:
    form = product(60, 72)
    for stages in (1, 2):
        result = verify(form, schedule(raster).with_(stages=stages), full_size=True)
        assert result.passed, result.reason


@pytest.mark.usefixtures("emulator")
def test_matrix_instructions_in_bands_agree_with_the_reference() -> None:
    form = product(96, 80, "float16")
    tiles = TileSchedule(
        block=sizes({"m": 32, "n": 16}), thread=sizes({"m": 16, "n": 16}), step=sizes({"k": 16}), cached=("A", "B"),
        instruction=Instruction.MMA_16X8X16, stages=2, raster=2,
    )  # fmt: skip
    result = verify(form, tiles, full_size=True, engine="emulator")
    assert result.passed, result.reason
