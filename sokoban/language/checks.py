"""Checks of what comes with an expression: sizes, shapes, dtypes and names, and how large each may be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from hal.support.errors import InputError
from sokoban.language.expression import (
    DTYPES,
    INTEGER_DTYPES,
    PLACE_REDUCTIONS,
    RESULT_DTYPE,
    AffineIndex,
    AxisValue,
    Call,
    Constant,
    Load,
    Reduction,
    Scan,
    Statement,
    Value,
    loads,
    walk,
)

#: Largest size of an axis, and largest number of elements of a tensor: indices have 32 bits.
MAX_AXIS_SIZE = 2**31 - 1
MAX_ELEMENTS = 2**31 - 1

#: Most characters of a name of an operator, a tensor or an axis.
MAX_NAME_LENGTH = 100

#: Names of tensors and axes, and words of the language that are none.
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
    """Raises InputError unless ``dtype`` is one of :data:`DTYPES`."""
    if dtype not in DTYPES:
        raise InputError(where, f"unknown dtype {shown(dtype)}", f"use one of {', '.join(DTYPES)}")


def check_accumulate(accumulate: str, widest: str) -> None:
    """Raises InputError unless values of dtype ``widest`` can be computed in ``accumulate``."""
    if accumulate not in ("float32", "float64", "int32"):
        raise InputError("accumulate", f"unknown dtype {accumulate!r}", "use float32 or float64, int32 for integers")
    if accumulate != "float64" and widest == "float64":
        raise InputError("accumulate", f"{accumulate} is narrower than the float64 tensors", "use float64")


#: Smallest and largest normal float32; NVRTC refuses smaller numbers in a text.
_FLOAT32 = (2.0**-126, 2.0**128 - 2.0**104)


def check_numbers(statements: Sequence[Statement], accumulate: str) -> None:
    """Raises InputError unless the arithmetic in ``accumulate`` knows every number that is written."""
    if accumulate == "float64":
        return
    for node in (node for statement in statements for node in walk(statement.value)):
        number = node.value if isinstance(node, Constant) else node.pad if isinstance(node, Load) else None
        if number and math.isfinite(number) and not _FLOAT32[0] <= abs(number) <= _FLOAT32[1]:
            raise InputError(
                "expr", f"{number:g} is beyond the numbers of float32", 'write 0 or inf, or "accumulate": "float64"'
            )


#: Functions whose results are whole numbers, or truth values, where their arguments are whole numbers.
_INTEGER_FUNCTIONS = frozenset(
    {"add", "sub", "mul", "neg", "min", "max", "abs", "relu", "select", "lt", "le", "gt", "ge", "eq", "ne"}
    | {"and", "or", "not"}
)
_INTEGER_REDUCTIONS = frozenset({"sum", "max", "min", *PLACE_REDUCTIONS})


def accumulate_dtype(statements: Sequence[Statement], dtypes: Mapping[str, str], given: str | None, output: str) -> str:
    """The dtype that an operator is computed in.

    That is ``given``, or where it is None int32 for one reduction of integers by functions of integers, float64 where a
    tensor is float64, else float32.

    Args:
        statements: the operator, normalised.
        dtypes: dtypes of the inputs and of the output, by name.
        given: the dtype that the user asks for.
        output: name of the output.

    Raises:
        InputError: values of these dtypes cannot be computed so, or not kept in the output's dtype.
    """
    if dtypes[output] in RESULT_DTYPE:
        problem, remedy = f"{dtypes[output]} is a type of inputs", RESULT_DTYPE[dtypes[output]]
        raise InputError(f"dtypes.{output}", f"{problem}, too narrow for results", f"use {remedy}, or a wider float")
    are_integers = _integer_statements(statements, dtypes)
    reductions = [position for position, statement in enumerate(statements) if not statement.is_pointwise]
    # What follows the sum may be computed in floats.
    is_integral = len(reductions) == 1 and all(are_integers[: reductions[0] + 1])
    if not reductions:
        is_integral = all(are_integers) and dtypes[output] == "int32"
    widest = "float64" if "float64" in dtypes.values() else "float32"
    accumulate = given or ("int32" if is_integral else widest)
    check_accumulate(accumulate, "float32" if accumulate == "int32" and is_integral else widest)
    if accumulate == "int32" and not is_integral:
        raise InputError("accumulate", "int32 takes one reduction of integers by functions of integers", "use float32")
    last = statements[-1].reduction
    is_place = last is not None and last.is_place
    if dtypes[output] == "int32" and not is_place and not (accumulate == "int32" and all(are_integers)):
        raise InputError(f"dtypes.{output}", "int32 keeps none but whole numbers", "use float32")
    return accumulate


def _integer_statements(statements: Sequence[Statement], dtypes: Mapping[str, str]) -> list[bool]:
    """Truth, by statement, of its values being integers, computed from nothing but integers."""
    integer_tensors = {name for name, dtype in dtypes.items() if dtype in INTEGER_DTYPES}
    integer_tensors -= {statement.tensor for statement in statements}
    result = []
    for statement in statements:
        reads_integers = any(load.tensor in integer_tensors for load in loads(statement.value))
        is_integer = reads_integers and all(_is_integer(node, integer_tensors) for node in walk(statement.value))
        if is_integer:
            integer_tensors.add(statement.tensor)
        result.append(is_integer)
    return result


def _is_integer(node: Value, integer_tensors: set[str]) -> bool:
    """True if a node of a value is an integer where its arguments are."""
    if isinstance(node, Constant):
        return float(node.value).is_integer()
    if isinstance(node, Load):
        return node.tensor in integer_tensors and (node.pad is None or float(node.pad).is_integer())
    if isinstance(node, Call):
        return node.function in _INTEGER_FUNCTIONS
    if isinstance(node, Reduction | Scan):
        return node.function in _INTEGER_REDUCTIONS
    return isinstance(node, AxisValue)


def reach(index: AffineIndex, sizes: Mapping[str, int]) -> int:
    """Largest magnitude of any partial sum of ``index``.

    >>> reach(AffineIndex.of({"i": 2, "k": -3}, 5), {"i": 4, "k": 2})  # 5 + 2 * 3 + 3 * 1
    14
    """
    return abs(index.offset) + sum(abs(coefficient) * (sizes[axis] - 1) for axis, coefficient in index.terms)
