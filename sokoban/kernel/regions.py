"""Tile -> data tiles: what a tile reads, holds and computes, by interval algebra on the affine indices (thesis 5.5.1).

Every function takes the tile as a mapping from axis name to size. A size is an int, or an integer array with one entry
per candidate: the same arithmetic then answers for many tiles at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sokoban.language.expression import AffineIndex, Load, Statement, Tensor, TensorExpr, loads

IntArray = NDArray[np.int64]
Size = TypeVar("Size", int, IntArray)


@dataclass(frozen=True, slots=True)
class DataDimension:
    """One dimension of a data tile: tensor index = ``stride * u + offset`` with u >= 0 the coordinate in the tile.

    ``stride`` is the greatest common divisor of the index's coefficients: a 1x1 window walked in steps of two touches
    every second column, and only those belong to the tile.
    """

    terms: tuple[tuple[str, int], ...]
    stride: int
    offset: int

    def extent(self, tile: Mapping[str, Size]) -> Size:
        """Number of coordinates a tile touches: ``1 + sum(|c| * (size - 1))``."""
        total: Size = 1  # type: ignore[assignment]
        for axis, coefficient in self.terms:
            total = total + abs(coefficient) * (tile[axis] - 1)
        return total


@lru_cache(maxsize=4096)
def data_dimension(index: AffineIndex) -> DataDimension:
    """The tile coordinate of an index.

    >>> dimension = data_dimension(AffineIndex.of({"oh": 2, "kh": 4}, -3))  # 2*oh + 4*kh - 3
    >>> dimension.stride, dimension.terms, dimension.offset
    (2, (('kh', 2), ('oh', 1)), -3)
    >>> dimension.extent({"oh": 8, "kh": 3})  # 1 + 7 + 2 * 2
    12
    """
    stride = math.gcd(*(c for _, c in index.terms)) if index.terms else 1
    return DataDimension(tuple((a, c // stride) for a, c in index.terms), stride, index.offset)


def storage_order(load: Load, outputs: Collection[str], batch: Collection[str] = ()) -> tuple[int, ...]:
    """The dimensions of a staged tile that is turned, innermost last.

    The last dimension that an output axis walks comes behind all others; where that is the innermost one already,
    nothing is turned.

    >>> turned = Load("A", (AffineIndex.axis("m"), AffineIndex.axis("k")))  # the sum over k walks A's rows
    >>> storage_order(turned, outputs=("m", "n"))
    (1, 0)

    Args:
        load: the operand's access.
        outputs: axes of the output.
        batch: output axes that every operand has, along which no tile grows; they count only where no other does.
    """
    order = tuple(range(len(load.indices)))
    last = last_of_batch = None
    for position, index in enumerate(load.indices):
        for axis, _ in index.terms:
            if axis in outputs and axis in batch:
                last_of_batch = position
            elif axis in outputs:
                last = position
    innermost = last_of_batch if last is None else last
    if innermost is None or innermost == order[-1]:
        return order
    return (*order[:innermost], *order[innermost + 1 :], innermost)


def data_tile_shape(load: Load, tile: Mapping[str, Size]) -> tuple[Size, ...]:
    """Extent of every dimension of the data tile that ``load`` needs for ``tile`` (Subtensor_Sizes).

    >>> row = AffineIndex.of({"oh": 2, "kh": 1})
    >>> data_tile_shape(Load("X", (row,)), {"oh": 8, "kh": 3})  # 2 * 7 + 2 + 1
    (17,)
    """
    return tuple(data_dimension(index).extent(tile) for index in load.indices)


def subtensor_sizes(expr: TensorExpr, tile: Mapping[str, Size]) -> dict[str, tuple[Size, ...]]:
    """Subtensor_Sizes (5.5.1): input tensor -> shape of the sub-tensor that a tile of all axes needs.

    A tensor read through several accesses gets the hull of them, dimension by dimension. Nothing is clipped to the
    tensor, so that the answer holds for an interior tile.

    >>> from sokoban.language.parser import parse_program
    >>> product = parse_program("C[i,j] = sum(k, A[i,k] * B[k,j])", {"i": 512, "j": 512, "k": 512}, {})
    >>> subtensor_sizes(product, {"i": 64, "j": 32, "k": 8})
    {'A': (64, 8), 'B': (8, 32)}
    """
    spans: dict[str, list[tuple[Size, Size]]] = {}
    for statement in expr.statements:
        for load in loads(statement.value):
            for position, index in enumerate(load.indices):
                low: Size = index.offset  # type: ignore[assignment]
                high: Size = index.offset  # type: ignore[assignment]
                for axis, coefficient in index.terms:
                    reach = coefficient * (tile[axis] - 1)
                    low, high = (low, high + reach) if coefficient > 0 else (low + reach, high)
                dims = spans.setdefault(load.tensor, [])
                if position == len(dims):
                    dims.append((low, high))
                else:
                    lowest, highest = dims[position]
                    dims[position] = (np.minimum(lowest, low), np.maximum(highest, high))
    inputs = {tensor.name for tensor in expr.inputs}
    return {name: tuple(high - low + 1 for low, high in dims) for name, dims in spans.items() if name in inputs}


def read_bytes(expr: TensorExpr, tensor: Tensor) -> int:
    """Bytes of a tensor that an operator needs at least: all of them; of one that is read at places alone
    (:class:`sokoban.language.expression.GatheredIndex`) as many rows as are named, each its own.

    >>> from sokoban.language.parser import parse_program
    >>> expr = parse_program("Y[t,d] = E[I[t], d]", {"t": 3, "d": 8}, {}, shapes={"E": [100, 8]})
    >>> [read_bytes(expr, tensor) for tensor in expr.inputs]  # three rows of 32 bytes; three places
    [96, 12]
    """
    read = [load for statement in expr.statements for load in loads(statement.value) if load.tensor == tensor.name]
    if not read or not all(load.places for load in read):
        return tensor.size_bytes
    boxes = (zip(data_tile_shape(load, expr.sizes), tensor.shape, strict=True) for load in read)
    return max(math.prod(min(extent, size) for extent, size in box) for box in boxes) * tensor.element_bytes


def compute_workload(expr: TensorExpr, tile: Mapping[str, Size]) -> Size:
    """Compute_Workload (5.5.1): how many times the bodies of all statements are evaluated for a tile.

    One multiply-add of a contraction is one evaluation. ``tile`` gives a size for every axis.

    >>> from sokoban.language.parser import parse_program
    >>> product = parse_program("C[i,j] = sum(k, A[i,k] * B[k,j])", {"i": 512, "j": 512, "k": 512}, {})
    >>> compute_workload(product, {"i": 64, "j": 32, "k": 8})  # 64 * 32 * 8
    16384
    """
    total: Size = 0  # type: ignore[assignment]
    for statement in expr.statements:
        total = total + _points(statement, tile)
    return total


def _points(statement: Statement, tile: Mapping[str, Size]) -> Size:
    count: Size = 1  # type: ignore[assignment]
    axes = statement.axes + (statement.reduction.axes if statement.reduction else ())
    for axis in axes:
        count = count * tile[axis]
    return count


def memory_footprint(expr: TensorExpr, tile: Mapping[str, Size]) -> Size:
    """Memory_Footprint (5.5.1) in bytes: every input's sub-tensor plus the output's tile, each held once.

    >>> from sokoban.language.parser import parse_program
    >>> product = parse_program("C[i,j] = sum(k, A[i,k] * B[k,j])", {"i": 512, "j": 512, "k": 512}, {})
    >>> memory_footprint(product, {"i": 64, "j": 32, "k": 8})  # 4 * (64 * 8 + 8 * 32 + 64 * 32)
    11264
    """
    total: Size = 0  # type: ignore[assignment]
    for name, shape in subtensor_sizes(expr, tile).items():
        total = total + _product(shape) * expr.tensor_by_name[name].element_bytes
    output = expr.statements[-1]
    return total + _product(tuple(tile[axis] for axis in output.axes)) * expr.output.element_bytes


def _product(shape: tuple[Size, ...]) -> Size:
    total: Size = 1  # type: ignore[assignment]
    for extent in shape:
        total = total * extent
    return total
