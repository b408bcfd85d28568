"""Vectors of neighbours in memory and in registers, and squares of elements transposed in registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.cpu.cuts import vectors
from codegen.tir.statements import local_buffer
from codegen.tir.values import Expr


def vector_at(buffer: Any, place: Expr, lanes: int, dtype: str) -> Expr:
    """``lanes`` neighbours in a buffer from ``place`` on, converted to ``dtype``."""
    return buffer[_neighbours(place, lanes)].astype(f"{dtype}x{lanes}" if lanes > 1 else dtype)


def store_vector(buffer: Any, place: Expr, value: Expr, lanes: int) -> None:
    """Write ``lanes`` neighbours to a buffer from ``place`` on."""
    T.buffer_store(buffer, value, [_neighbours(place, lanes)])


def _neighbours(place: Expr, lanes: int) -> Expr:
    return tirx.Ramp(place, tirx.const(1, "int32"), lanes) if lanes > 1 else place


def register_vector(name: str, lanes: int, dtype: str, value: Expr) -> Any:
    """A vector in a register: a local buffer that was set to a ``value``."""
    buffer = local_buffer(name, lanes, dtype)
    store_vector(buffer, tirx.const(0, "int32"), value, lanes)
    return buffer


def value_of_buffer(buffer: Any) -> Expr:
    """The vector that a local buffer holds."""
    return vector_at(buffer, tirx.const(0, "int32"), int(buffer.shape[0]), buffer.dtype)


def transposed(rows: Sequence[Any]) -> list[Any]:
    """Squares side by side, each transposed.

    In turn 1, 2, 4, ... rows apart, two rows swap halves of all groups of elements twice as long: n log2(n) shuffles
    for n rows, where reading the elements one by one would take a load and a shuffle for each.

    Args:
        rows: local buffers, a power of two, and of as many elements as there are rows or a multiple.

    Returns:
        Local buffers: of every n elements that n of them have in one place, the columns that ``rows`` have there.
    """
    lanes, count = int(rows[0].shape[0]), len(rows)
    columns = list(rows)
    distance = 1
    while distance < count:
        low = [place if not place & distance else lanes + place - distance for place in range(lanes)]
        high = [place + distance if not place & distance else lanes + place for place in range(lanes)]
        turned = list(columns)
        for number in range(count):
            if not number & distance:
                pair = [value_of_buffer(columns[number]), value_of_buffer(columns[number + distance])]
                for place, order in ((number, low), (number + distance, high)):
                    value = shuffled(pair, order)
                    turned[place] = register_vector(f"turned_{distance}_{place}", lanes, columns[number].dtype, value)
        columns, distance = turned, 2 * distance
    return columns


@dataclass(frozen=True)
class ResultVector:
    """Some results of a register tile in a vector register.

    Attributes:
        buffer: the local buffer.
        row: place of the results in the tile, along all axes but that of the vector.
        start: place of the first result along the vector's axis.
        width: elements of the vector.
    """

    buffer: Any
    row: Mapping[str, int]
    start: int
    width: int


def along_rows(results: Sequence[ResultVector], axis: str, last: str, extent: int) -> list[ResultVector]:
    """Results that are held in vectors along ``axis``, turned into vectors along ``last``: the axis, of ``extent``
    elements, along which they are neighbours in memory."""
    turned = []
    places = {(tuple(sorted({**result.row, last: 0}.items())), result.start): result for result in results}
    by_row = {(tuple(sorted(result.row.items())), result.start): result for result in results}
    for corner in places.values():
        other_axes = {other: place for other, place in corner.row.items() if other != last}
        for start, count in vectors(extent, corner.width):
            rows = [
                by_row[tuple(sorted({**other_axes, last: start + offset}.items())), corner.start]
                for offset in range(count)
            ]
            for number, result in enumerate(transposed([result.buffer for result in rows])):
                for group in range(0, corner.width, count):
                    column = corner.start + group + number
                    value = value_of_buffer(result)
                    if count < corner.width:
                        value = shuffled([value], range(group, group + count))
                    name = f"result_{column}_{start}"
                    buffer = register_vector(name, count, result.dtype, value)
                    turned.append(ResultVector(buffer, {**other_axes, axis: column}, start, count))
    return turned


def shuffled(values: Sequence[Expr], order: Sequence[int]) -> Expr:
    """A vector of elements of others; ``order`` numbers them through all vectors, from the first element of the first
    vector on."""
    return tirx.Shuffle(list(values), [tirx.const(element, "int32") for element in order])
