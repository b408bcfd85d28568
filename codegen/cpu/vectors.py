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
    """So many neighbours in a buffer, as numbers of a type."""
    return buffer[_neighbours(place, lanes)].astype(f"{dtype}x{lanes}" if lanes > 1 else dtype)


def store_vector(buffer: Any, place: Expr, value: Expr, lanes: int) -> None:
    """Write a vector of so many neighbours."""
    T.buffer_store(buffer, value, [_neighbours(place, lanes)])


def _neighbours(place: Expr, lanes: int) -> Expr:
    return tirx.Ramp(place, tirx.const(1, "int32"), lanes) if lanes > 1 else place


def held_vector(name: str, lanes: int, dtype: str, value: Expr) -> Any:
    """A vector in a register: a local buffer that was set to a ``value``."""
    held = local_buffer(name, lanes, dtype)
    store_vector(held, tirx.const(0, "int32"), value, lanes)
    return held


def whole_vector(held: Any) -> Expr:
    """The vector that a local buffer holds."""
    return vector_at(held, tirx.const(0, "int32"), int(held.shape[0]), held.dtype)


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
    found = list(rows)
    apart = 1
    while apart < count:
        low = [place if not place & apart else lanes + place - apart for place in range(lanes)]
        high = [place + apart if not place & apart else lanes + place for place in range(lanes)]
        turned = list(found)
        for number in range(count):
            if not number & apart:
                pair = [whole_vector(found[number]), whole_vector(found[number + apart])]
                for place, order in ((number, low), (number + apart, high)):
                    value = shuffled(pair, order)
                    turned[place] = held_vector(f"turned_{apart}_{place}", lanes, found[number].dtype, value)
        found, apart = turned, 2 * apart
    return found


@dataclass(frozen=True)
class Held:
    """Some results of a register tile in a vector register.

    Attributes:
        buffer: the local buffer, of ``width`` elements.
        row: where they are along all axes of the tile but one; start: where the first one is along that.
    """

    buffer: Any
    row: Mapping[str, int]
    start: int
    width: int


def along_rows(found: Sequence[Held], axis: str, last: str, extent: int) -> list[Held]:
    """The same results in vectors along ``last``, the axis of ``extent`` in which they are neighbours in memory, where
    they were held in vectors along ``axis``."""
    turned = []
    places = {(tuple(sorted({**held.row, last: 0}.items())), held.start): held for held in found}
    at = {(tuple(sorted(held.row.items())), held.start): held for held in found}
    for first in places.values():
        rest = {each: place for each, place in first.row.items() if each != last}
        for start, count in vectors(extent, first.width):
            rows = [at[tuple(sorted({**rest, last: start + one}.items())), first.start] for one in range(count)]
            for number, held in enumerate(transposed([one.buffer for one in rows])):
                for group in range(0, first.width, count):
                    column = first.start + group + number
                    value = whole_vector(held)
                    if count < first.width:
                        value = shuffled([value], range(group, group + count))
                    name = f"result_{column}_{start}"
                    buffer = held_vector(name, count, held.dtype, value)
                    turned.append(Held(buffer, {**rest, axis: column}, start, count))
    return turned


def shuffled(values: Sequence[Expr], order: Sequence[int]) -> Expr:
    """A vector of elements of others, as one by one they are numbered from the first one's first."""
    return tirx.Shuffle(list(values), [tirx.const(one, "int32") for one in order])
