"""Data tiles of a tile: interval algebra against walking every point."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sokoban.kernel.regions import compute_workload, data_dimension, data_tile_shape, memory_footprint, subtensor_sizes
from sokoban.language.expression import AffineIndex, Axis, Call, Load, Reduction, Statement, Tensor, TensorExpr, loads
from sokoban.language.operators import operator_from_data
from sokoban.language.parser import parse_program

AXES = ("i", "j", "r", "s")


@st.composite
def indices(draw: st.DrawFn) -> AffineIndex:
    """Up to three axes with strides, dilations and negative coefficients."""
    axes = draw(st.lists(st.sampled_from(AXES), max_size=3, unique=True))
    return AffineIndex.of({axis: draw(st.integers(-4, 4)) for axis in axes}, draw(st.integers(-5, 5)))


@st.composite
def contractions(draw: st.DrawFn) -> TensorExpr:
    """``Y[i, j] = sum([r, s], A[...] * B[...] + A[...])`` with random indices; loads may be outside."""
    shapes = {"A": draw(st.integers(1, 3)), "B": draw(st.integers(1, 2))}

    def load(tensor: str) -> Load:
        return Load(tensor, tuple(draw(indices()) for _ in range(shapes[tensor])), 0.0)

    body = Call("add", (Call("mul", (load("A"), load("B"))), load("A")))
    tensors = tuple(
        Tensor(name, (99,) * rank, dtype)
        for (name, rank), dtype in zip(shapes.items(), ("float16", "float32"), strict=True)
    )
    return TensorExpr(
        name="random",
        axes=tuple(Axis(axis, 99) for axis in AXES),
        tensors=(*tensors, Tensor("Y", (99, 99), "float64")),
        statements=(Statement("Y", ("i", "j"), Reduction("sum", ("r", "s"), body)),),
        accumulate="float32",
    )


TILES = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3, 5]) for axis in AXES})


def points(tile: Mapping[str, int]) -> list[dict[str, int]]:
    return [dict(zip(tile, point, strict=True)) for point in itertools.product(*map(range, tile.values()))]


def value_at(index: AffineIndex, point: Mapping[str, int]) -> int:
    return index.offset + sum(coefficient * point[axis] for axis, coefficient in index.terms)


@settings(max_examples=30, deadline=None)
@given(contractions(), TILES)
def test_subtensors_are_the_hull_of_every_element_that_a_tile_touches(expr: TensorExpr, tile: dict[str, int]) -> None:
    touched: dict[str, list[set[int]]] = {}
    for load in loads(expr.statements[0].value):
        dims = touched.setdefault(load.tensor, [set() for _ in load.indices])
        for point in points(tile):
            for dim, index in zip(dims, load.indices, strict=True):
                dim.add(value_at(index, point))
    hulls = {name: tuple(max(d) - min(d) + 1 for d in dims) for name, dims in touched.items()}
    assert subtensor_sizes(expr, tile) == hulls
    output_bytes = tile["i"] * tile["j"] * 8
    input_bytes = sum(int(np.prod(shape)) * expr.tensor_by_name[name].element_bytes for name, shape in hulls.items())
    assert memory_footprint(expr, tile) == input_bytes + output_bytes
    assert compute_workload(expr, tile) == len(points(tile))


@settings(max_examples=25, deadline=None)
@given(contractions(), st.lists(TILES, min_size=1, max_size=6))
def test_columns_of_tiles_answer_as_each_tile_does(expr: TensorExpr, tiles: list[dict[str, int]]) -> None:
    columns = {axis: np.array([tile[axis] for tile in tiles], dtype=np.int64) for axis in AXES}
    shapes = subtensor_sizes(expr, columns)
    footprints, workloads = memory_footprint(expr, columns), compute_workload(expr, columns)
    for row, tile in enumerate(tiles):
        assert {
            name: tuple(int(np.broadcast_to(extent, len(tiles))[row]) for extent in shape)
            for name, shape in shapes.items()
        } == subtensor_sizes(expr, tile)
        assert int(footprints[row]) == memory_footprint(expr, tile)
        assert int(workloads[row]) == compute_workload(expr, tile)


@settings(max_examples=40, deadline=None)
@given(indices(), TILES)
def test_a_tile_coordinate_counts_from_the_first_element_in_steps_of_the_stride(
    index: AffineIndex, tile: dict[str, int]
) -> None:
    dimension = data_dimension(index)
    values = {value_at(index, point) for point in points(tile)}
    assert (max(values) - min(values)) % dimension.stride == 0
    assert {(value - dimension.offset) % dimension.stride for value in values} == {0}
    assert dimension.extent(tile) == (max(values) - min(values)) // dimension.stride + 1


@pytest.mark.parametrize(
    ("terms", "offset", "stride", "divided"),
    [
        ({"oh": 2, "kh": 4}, -3, 2, {"oh": 1, "kh": 2}),
        ({"oh": 6, "kh": 4}, 1, 2, {"oh": 3, "kh": 2}),
        ({"oh": 3, "kh": 2}, 0, 1, {"oh": 3, "kh": 2}),
        ({"oh": -2}, 7, 2, {"oh": -1}),
        ({}, 5, 1, {}),
    ],
)
def test_the_stride_is_the_greatest_common_divisor(
    terms: dict[str, int], offset: int, stride: int, divided: dict[str, int]
) -> None:
    dimension = data_dimension(AffineIndex.of(terms, offset))
    assert (dimension.stride, dict(dimension.terms), dimension.offset) == (stride, divided, offset)


def test_matmul_tile() -> None:
    expr = operator_from_data({"op": "matmul", "m": 91, "n": 37, "k": 23})
    tile = {"m": 7, "n": 5, "k": 3}
    assert subtensor_sizes(expr, tile) == {"A": (7, 3), "B": (3, 5)}
    assert compute_workload(expr, tile) == 7 * 5 * 3
    assert memory_footprint(expr, tile) == 4 * (7 * 3 + 3 * 5 + 7 * 5)


def test_a_dilated_strided_window_reaches_over_its_halo() -> None:
    data = {"op": "conv2d", "n": 2, "c": 5, "h": 33, "w": 35, "f": 7, "kh": 3, "kw": 4, "stride": 2, "dilation": 3}
    expr = operator_from_data(data)
    tile = {"n": 1, "f": 7, "oh": 5, "ow": 3, "c": 5, "kh": 3, "kw": 4}
    rows, columns = 2 * (5 - 1) + 3 * (3 - 1) + 1, 2 * (3 - 1) + 3 * (4 - 1) + 1
    assert subtensor_sizes(expr, tile) == {"X": (1, 5, rows, columns), "W": (7, 5, 3, 4)}
    x = next(load for load in loads(expr.statements[0].value) if load.tensor == "X")
    assert data_tile_shape(x, tile) == (1, 5, rows, columns)


def test_a_strided_window_of_one_needs_every_second_element_and_spans_all() -> None:
    data = {"op": "conv2d", "n": 1, "c": 3, "h": 21, "w": 17, "f": 5, "kh": 1, "kw": 1, "stride": 2}
    expr = operator_from_data(data)
    tile = {"n": 1, "f": 1, "oh": 4, "ow": 3, "c": 1, "kh": 1, "kw": 1}
    x = next(load for load in loads(expr.statements[0].value) if load.tensor == "X")
    assert subtensor_sizes(expr, tile)["X"] == (1, 1, 2 * (4 - 1) + 1, 2 * (3 - 1) + 1)
    # In the kernel's form the window's axes are gone, and a staged tile holds what is used alone.
    compact = Load("X", tuple(i.substitute({"kh": AffineIndex(), "kw": AffineIndex()}) for i in x.indices))
    assert data_tile_shape(compact, tile) == (1, 1, 4, 3)


def test_a_tensor_read_twice_counts_the_hull_of_both_reads() -> None:
    expr = parse_program("Y[i] = X[i] + X[i + 4] + W[2*i]", {"i": 11}, {}, shapes={"X": [15], "W": [21]})
    tile = {"i": 3}
    assert subtensor_sizes(expr, tile) == {"X": ((3 - 1) + 4 + 1,), "W": (2 * (3 - 1) + 1,)}
    assert memory_footprint(expr, tile) == 4 * (7 + 5 + 3)


def test_every_statement_counts_as_work_and_only_inputs_and_the_output_as_memory() -> None:
    expr = parse_program("C[i,j] = sum(k, A[i,k] * B[k,j]); D[i,j] = relu(C[i,j] + b[j])", {"i": 9, "j": 7, "k": 5}, {})
    tile = {"i": 3, "j": 7, "k": 2}
    assert compute_workload(expr, tile) == 3 * 7 * 2 + 3 * 7
    assert subtensor_sizes(expr, tile) == {"A": (3, 2), "B": (2, 7), "b": (7,)}
    assert memory_footprint(expr, tile) == 4 * (3 * 2 + 2 * 7 + 7 + 3 * 7)
