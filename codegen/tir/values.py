"""Tensor-expression values as TVM expressions, with one meaning for every target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from tvm import te, tirx
from tvm.ir.expr import TensorLoad

from sokoban.language.expression import (
    REDUCTION_IDENTITY,
    AffineIndex,
    AxisValue,
    Call,
    Constant,
    GatheredIndex,
    Load,
    Reduction,
    Scan,
    Value,
)
from sokoban.language.functions import FUNCTIONS, place_of

#: The type of bfloat16's bits, where a kernel holds numbers of it as such.
BFLOAT16_BITS = "uint16"

#: A TVM expression; its classes differ between versions and carry no useful type here.
Expr = Any

_COMPARISONS: Mapping[str, Callable[[Expr, Expr], Expr]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: tirx.EQ(a, b),
    "ne": lambda a, b: tirx.NE(a, b),
    "and": lambda a, b: tirx.all(a, b),
    "or": lambda a, b: tirx.any(a, b),
}

#: The larger (``max``) and the smaller (``min``) of two numbers.
Choices = Mapping[str, Callable[[Expr, Expr], Expr]]
#: Those that texts have functions for.
CHOICES: Choices = {"max": tirx.max, "min": tirx.min}

_ARITHMETIC: Mapping[str, Callable[..., Expr]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "not": lambda a: tirx.Not(a),
    **CHOICES,
    "abs": tirx.abs,
    "exp": tirx.exp,
    "log": tirx.log,
    "sqrt": tirx.sqrt,
    "tanh": tirx.tanh,
    "erf": tirx.erf,
    "sin": tirx.sin,
    "cos": tirx.cos,
    "floor": tirx.floor,
    "ceil": tirx.ceil,
}


def affine(index: AffineIndex, axes: Mapping[str, Expr]) -> Expr:
    """The integer expression of an affine index.

    Raises:
        TypeError: the index is read from a tensor (:func:`codegen.tir.reads.places`).
    """
    if isinstance(index, GatheredIndex):
        raise TypeError(f"{index} is no affine index")
    total: Expr = tirx.const(index.offset, "int32")
    for axis, coefficient in index.terms:
        term = axes[axis] if coefficient == 1 else axes[axis] * coefficient
        total = total + term
    return total


def remainder(number: Expr, count: int) -> Expr:
    """``number % count``, for numbers from 0 on.

    TVM makes ``(x + 1) // 2`` of ``x // 2 + x % 2``, and then takes it for ``x // 2`` in one index with that: a mask
    stays what it is.
    """
    return tirx.bitwise_and(number, 1) if count == 2 else tirx.floormod(number, count)


def identity(function: str, dtype: str) -> Expr:
    """The constant that changes nothing under a reduction, within the dtype's finite range for max and min."""
    if function == "max":
        return tirx.min_value(dtype)
    if function == "min":
        return tirx.max_value(dtype)
    return tirx.const(REDUCTION_IDENTITY[function], dtype)


def constant(value: float, dtype: str) -> Expr:
    """A constant; an infinity of integers is their extreme."""
    if math.isinf(value) and "int" in str(dtype):
        return tirx.max_value(dtype) if value > 0 else tirx.min_value(dtype)
    return tirx.const(value, dtype)


def stored_constant(value: float, dtype: str) -> Expr:
    """A constant as memory holds it, which may be bits (:data:`BFLOAT16_BITS`)."""
    if dtype != BFLOAT16_BITS:
        return constant(value, dtype)
    return tirx.const(int(np.float32(value).view(np.uint32)) >> 16, dtype)


def as_number(element: Expr, stored: str, dtype: str) -> Expr:
    """An element that memory holds as ``stored``, as a number of ``dtype``: bits of bfloat16 are the upper half of a
    float32's."""
    if stored != BFLOAT16_BITS:
        return element.astype(dtype)
    word = tirx.shift_left(element.astype("uint32"), tirx.const(16, "uint32"))
    return tirx.reinterpret("float32", word).astype(dtype)


def evaluate(
    value: Value,
    axes: Mapping[str, Expr],
    read: Callable[[Load], Expr],
    dtype: str,
    instead: Mapping[str, Callable[..., Expr]] = MappingProxyType({}),
) -> Expr:
    """``value`` over axis variables ``axes``.

    Args:
        value: what is computed.
        axes: variables or numbers by axis.
        read: gives the element of a load, already in ``dtype``.
        dtype: what is computed in.
        instead: functions that are computed otherwise, by name.
    """
    if isinstance(value, Constant):
        return constant(value.value, dtype)
    if isinstance(value, AxisValue):
        return affine(value.index, axes).astype(dtype)
    if isinstance(value, Load):
        return read(value)
    if isinstance(value, Reduction | Scan):
        raise TypeError("a reduction or scan has no point-wise value")
    if value.function == "pow" and value.arguments[1] == Constant(2.0):
        base = evaluate(value.arguments[0], axes, read, dtype, instead)
        return base * base
    arguments = [evaluate(argument, axes, read, dtype, instead) for argument in value.arguments]
    if value.function in instead:
        return instead[value.function](*arguments)
    definition = FUNCTIONS[value.function].value
    if definition is not None:
        return evaluate(definition, {}, lambda parameter: arguments[place_of(parameter)], dtype, instead)
    return _call(value, arguments, dtype)


def _call(call: Call, arguments: list[Expr], dtype: str) -> Expr:
    if call.function in _COMPARISONS:
        return _COMPARISONS[call.function](*arguments)
    if call.function == "select":
        # if_then_else evaluates one side only, so that a guarded load never leaves its tensor.
        return tirx.if_then_else(*arguments)
    if call.function == "pow":
        # Not tirx.power, which prints a warning for every exponent from 3 up.
        return tirx.call_intrin(dtype, "tirx.pow", *arguments)
    return _ARITHMETIC[call.function](*arguments)


def combine(function: str, total: Expr, value: Expr, choices: Choices = CHOICES) -> Expr:
    """``total`` with one more value under a reduction function; ``choices`` has the larger and the smaller of two."""
    if function == "sum":
        return total + value
    if function == "prod":
        return total * value
    return choices[function](total, value)


def chosen(function: str, first: Expr, second: Expr) -> Expr:
    """The larger (``max``) or the smaller (``min``) of two numbers, by LLVM: NaN where one of them is, as in NumPy and
    PyTorch. TVM's own are the second one then, and a sum that has diverged would be 0 behind a ReLU.

    Texts of GPUs have functions of that meaning.
    """
    is_max, dtype = function == "max", str(first.ty)
    if not dtype.startswith("float"):
        return CHOICES[function](first, second)
    for number, limit in ((first, second), (second, first)):
        if isinstance(limit, tirx.FloatImm):
            # False of NaN, and one instruction of x86.
            return tirx.Select(number < limit if is_max else number > limit, limit, number)
    if isinstance(first, TensorLoad) and isinstance(second, TensorLoad) and dtype == "float32":
        # Half of the instructions of LLVM's own function, which tells -0 from 0. Each order takes the second where one
        # is NaN; the bits of NaN and of any other number together are those of NaN.
        orders = [(first, second), (second, first)]
        choices = [tirx.Select(one > other if is_max else one < other, one, other) for one, other in orders]
        bits = tirx.bitwise_or(*(tirx.reinterpret("int32", choice) for choice in choices))
        return tirx.reinterpret(dtype, bits)
    return tirx.call_llvm_pure_intrin(dtype, f"llvm.{function}imum", first, second)


def reducer(function: str) -> Callable[..., Expr]:
    """TVM's reducer of a reduction function."""
    if function == "prod":
        return te.comm_reducer(lambda a, b: a * b, lambda dtype: tirx.const(1.0, dtype), name="prod")
    return {"sum": te.sum, "max": te.max, "min": te.min}[function]
