"""Checks of what comes with an expression: sizes, shapes, dtypes and names, and how large each may be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hal import InputError
from sokoban.expression import FLOAT_DTYPES, AffineIndex

MAX_AXIS_SIZE = 2**31 - 1
MAX_ELEMENTS = 2**31 - 1
MAX_NAME_LENGTH = 100

NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED_NAMES = frozenset({"and", "or", "not", "inf"})


def shown(value: object) -> str:
    """A value of decoded JSON for a message; lists and objects, which may be deep, by their kind alone."""
    if isinstance(value, dict):
        return "an object"
    return "an array" if isinstance(value, list | tuple) else repr(value)


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raises InputError unless every key is a usable axis name and every value a positive 32-bit integer."""
    for axis, size in sizes.items():
        check_name(axis, f"sizes.{axis}")
        if isinstance(size, bool) or not isinstance(size, int):
            raise InputError(f"sizes.{axis}", f"expected a whole number, got {shown(size)}", "")
        if not 0 < size <= MAX_AXIS_SIZE:
            raise InputError(f"sizes.{axis}", f"{size} is not between 1 and {MAX_AXIS_SIZE}", "")


def check_shape(tensor: str, shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` as a tuple; raises InputError unless every extent is a positive 32-bit integer."""
    for extent in shape:
        if isinstance(extent, bool) or not isinstance(extent, int) or not 0 < extent <= MAX_AXIS_SIZE:
            raise InputError(f"shapes.{tensor}", f"{shown(extent)} is not between 1 and {MAX_AXIS_SIZE}", "")
    return tuple(shape)


def check_name(name: str, where: str) -> None:
    """An axis or tensor name: letters, digits and underscore, not a reserved word."""
    if not NAME_PATTERN.fullmatch(name) or name in RESERVED_NAMES:
        raise InputError(where, f"{name!r} is not a usable name", "use letters, digits and _, starting with a letter")
    if len(name) > MAX_NAME_LENGTH:
        raise InputError(where, f"a name of {len(name)} characters; at most {MAX_NAME_LENGTH} are read", "shorten it")


def check_dtype(dtype: object, where: str) -> None:
    """Raises InputError unless ``dtype`` is one of :data:`FLOAT_DTYPES`."""
    if dtype not in FLOAT_DTYPES:
        raise InputError(where, f"unknown dtype {shown(dtype)}", f"use one of {', '.join(FLOAT_DTYPES)}")


def check_accumulate(accumulate: str, widest: str) -> None:
    """Raises InputError unless values of dtype ``widest`` can be computed in ``accumulate``."""
    if accumulate not in ("float32", "float64"):
        raise InputError("accumulate", f"unknown dtype {accumulate!r}", "use float32 or float64")
    if (accumulate, widest) == ("float32", "float64"):
        raise InputError("accumulate", "float32 is narrower than the float64 tensors", "use float64")


def reach(index: AffineIndex, sizes: Mapping[str, int]) -> int:
    """No partial sum of ``index`` is larger than this in magnitude."""
    return abs(index.offset) + sum(abs(coefficient) * (sizes[axis] - 1) for axis, coefficient in index.terms)
