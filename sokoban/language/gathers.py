"""Indices that are read from tensors: what is checked of them, and what stands for them where places are counted.

``Y[t,d] = E[I[t], d]`` reads rows of ``E`` at places that the integer tensor ``I`` holds. A place outside of the tensor
is the pad where the read has one; otherwise the nearest place that there is stands for it, so that nothing beyond a
tensor is ever read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hal.support.errors import InputError
from sokoban.language.expression import (
    AffineIndex,
    GatheredIndex,
    Load,
    Statement,
    Tensor,
    TensorExpr,
    Value,
    loads,
    rewrite,
)

#: Least bytes that memory gives for one element (a sector): so far apart, elements of a row are read by themselves.
SECTOR_BYTES = 32


def gathers(expr: TensorExpr) -> tuple[Load, ...]:
    """The distinct reads of an operator whose places are read themselves."""
    return tuple(load for statement in expr.statements for load in loads(statement.value) if load.places)


def index_tensors(statements: Sequence[Statement]) -> dict[str, str]:
    """Tensor of places -> the tensor that is read there, for the first such read of each.

    Raises:
        InputError: either is no input.
    """
    written = {statement.tensor for statement in statements}
    result: dict[str, str] = {}
    for statement in statements:
        for load in loads(statement.value):
            for place in load.places:
                for name, remedy in (
                    (place.tensor, "read places from an input"),
                    (load.tensor, "gather from an input"),
                ):
                    if name in written:
                        problem = f"{load.tensor} is read at places of {place.tensor}, and a statement defines {name}"
                        raise InputError("expr", f"statement {statement.tensor}: {problem}", remedy)
                result.setdefault(place.tensor, load.tensor)
    return result


def check_places(places: Mapping[str, str], dtypes: Mapping[str, str]) -> None:
    """Raises InputError unless every tensor of places is of int32.

    Args:
        places: tensor of places -> a tensor that is read there.
        dtypes: of all tensors, by name.
    """
    for name, tensor in places.items():
        if dtypes[name] != "int32":
            problem = f"{tensor} is read at places of {name}, which is {dtypes[name]}"
            raise InputError(f"dtypes.{name}", problem, "use int32")


def with_extents(statement: Statement, sizes: Mapping[str, int], tensors: Mapping[str, Tensor]) -> Statement:
    """A statement whose gathered indices know the dimensions that they are in."""
    changed: dict[Value, Value] = {
        load: replace(
            load,
            indices=tuple(
                within(index, dimension, load, sizes, tensors[load.tensor])
                if isinstance(index, GatheredIndex)
                else index
                for dimension, index in enumerate(load.indices)
            ),
        )
        for load in loads(statement.value)
        if load.places
    }
    return replace(statement, value=rewrite(statement.value, changed)) if changed else statement


def within(index: GatheredIndex, dimension: int, load: Load, sizes: Mapping[str, int], tensor: Tensor) -> GatheredIndex:
    """A gathered index of ``load`` in one dimension of its tensor.

    Rows are counted as if they were read in order, each once; those that are shorter than a sector, and elements of the
    innermost dimension, as if each lay in a sector by itself.
    """
    row_bytes = math.prod(tensor.shape[dimension + 1 :]) * tensor.element_bytes
    apart = max(2 if dimension == len(load.indices) - 1 else 1, SECTOR_BYTES // row_bytes)
    terms: dict[str, int] = {}
    for axis in reversed(index.axes):
        terms[axis] = apart
        apart *= sizes[axis]
    outside = load.pad is not None
    counted = AffineIndex.of(terms)
    return replace(index, terms=counted.terms, low=-outside, high=tensor.shape[dimension] - 1 + outside)
