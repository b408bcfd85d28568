"""rTiles: the data tiles of figure 6.4, and of windows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roller.construct.rtile import RTile, TileSpace, data_tile_elements
from sokoban.kernel.regions import data_dimension
from tests.sokoban.schedules import form_of

MATMUL = TileSpace.of(form_of(op="matmul", m=91, n=37, k=23))
CONV = TileSpace.of(form_of(op="conv2d", n=3, c=5, h=33, w=35, f=7, kh=3, kw=4, stride=[2, 3], dilation=[3, 2]))


def test_the_matmul_of_figure_6_4() -> None:
    """[4, 4, 2] along i, j, k: A is 4x2 and B is 2x4."""
    assert [data_tile_elements(access, (4, 4, 2)) for access in MATMUL.inputs] == [4 * 2, 2 * 4]
    assert MATMUL.input_names == ("A", "B")


def test_a_space_has_the_output_s_axes_first() -> None:
    assert (CONV.axes, CONV.spatial_count) == (("n", "f", "oh", "ow", "c", "kh", "kw"), 4)
    sizes = dict(zip(CONV.axes, CONV.sizes, strict=True))
    oh, ow = (33 - 3 * (3 - 1) - 1) // 2 + 1, (35 - 2 * (4 - 1) - 1) // 3 + 1
    assert sizes == {"n": 3, "f": 7, "oh": oh, "ow": ow, "c": 5, "kh": 3, "kw": 4}
    assert CONV.points == 3 * 7 * oh * ow * 5 * 3 * 4
    assert CONV.output_bytes == 4


def test_a_window_reaches_over_its_halo() -> None:
    assert [data_tile_elements(access, (1, 7, 5, 3, 5, 3, 4)) for access in CONV.inputs] == [
        5 * (2 * (5 - 1) + 3 * (3 - 1) + 1) * (3 * (3 - 1) + 2 * (4 - 1) + 1),
        7 * 5 * 3 * 4,
    ]


def test_replacing_an_axis_makes_another_tile() -> None:
    tile = RTile(MATMUL, (4, 8, 2), storage_padding=(1, 0))
    grown = tile.replace(2, 16)
    assert (tile.shape, grown.shape, grown.storage_padding) == ((4, 8, 2), (4, 8, 16), (1, 0))
    assert str(grown) == "[m=4, n=8, k=16]"
    assert grown.sizes == {"m": 4, "n": 8, "k": 16}


@pytest.mark.parametrize("space", [MATMUL, CONV], ids=["matmul", "conv2d"])
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_data_tiles_agree_with_the_interval_algebra(space: TileSpace, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(1, size)) for size in space.sizes)
    tile = dict(zip(space.axes, shape, strict=True))
    for access, load in zip(space.inputs, space.form.body_loads, strict=True):
        expected = tuple(data_dimension(index).extent(tile) for index in load.indices)
        assert data_tile_elements(access, shape) == math.prod(expected)


def test_walking_backwards_needs_as_much() -> None:
    space = TileSpace.of(
        form_of(expr="Y[i] = sum(k, X[20 - 2*i + k] * W[k])", sizes={"i": 8, "k": 5}, shapes={"X": [25]})
    )
    assert [data_tile_elements(access, (3, 2)) for access in space.inputs] == [2 * (3 - 1) + (2 - 1) + 1, 2]
