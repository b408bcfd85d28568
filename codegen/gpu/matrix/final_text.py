"""Point-wise statements as CUDA C, for kernels whose text no TVM module stands behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import cast

import numpy as np

from codegen.tir.lowered import identifier
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import makes_16_bits
from sokoban.language.expression import AffineIndex, AxisValue, Call, Constant, GatheredIndex, Load, Tensor, Value
from sokoban.language.functions import FUNCTIONS, expanded

_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=", "and": "&&", "or": "||",
}  # fmt: skip

#: Functions of one float or two, as the kernels that TVM prints have them.
_FUNCTIONS = {
    "min": "smaller", "max": "larger", "abs": "fabsf", "exp": "__expf", "log": "__logf", "sqrt": "sqrtf",
    "tanh": "tanhf", "erf": "erff", "sin": "__sinf", "cos": "__cosf", "floor": "floorf", "ceil": "ceilf",
    "pow": "powf",
}  # fmt: skip

#: Other functions by their text.
WRITTEN = {"neg": "(- {0})", "not": "(!{0})", "select": "({0} ? {1} : {2})"}

#: The same and some more where what they make is rounded to 16 bits, by functions that are near enough for that.
NEAR_WRITTEN = WRITTEN | {
    "erf": "near_erf({0})",
    "sigmoid": "near_sigmoid({0})",
    "silu": "({0} * near_sigmoid({0}))",
    "tanh": "fmaf(2.0f, near_sigmoid(2.0f * {0}), -1.0f)",
}

_LARGEST = float(np.finfo(np.float32).max)

#: Elements beyond which their number does not fit into an ``int``.
MOST_INT = 2**31 - 1

#: By element type: how an element is declared, and read as a float.
POINTERS = {"float16": "unsigned short", "bfloat16": "unsigned short", "float32": "float", "int32": "int"}
READ = {"float16": "float_of_f16({})", "bfloat16": "float_of_bf16({})", "float32": "{}", "int32": "(float){}"}


def affine_text(index: AffineIndex, axes: Mapping[str, str]) -> str:
    """An affine index over axes by the names of their variables."""
    terms = [axes[axis] if factor == 1 else f"{factor} * {axes[axis]}" for axis, factor in index.terms]
    terms += [str(index.offset)] * (index.offset != 0 or not terms)
    return " + ".join(terms)


def place_text(index: AffineIndex, axes: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """An index over axes by the names of their variables; one that is read from one of ``tensors`` within its
    dimension, or one outside where that is the pad."""
    if not isinstance(index, GatheredIndex):
        return affine_text(index, axes)
    indices = [affine_text(inner, axes) for inner in index.place.indices]
    return f"max(min({element_text(tensors[index.place.tensor], indices)}, {index.high}), {index.low})"


def element_text(tensor: Tensor, indices: list[str]) -> str:
    """An element of a tensor by its indices: ``C_ptr[(m) * 72 + (n)]``."""
    wide = "(long long)" if tensor.element_count > MOST_INT else ""
    terms, stride = [], 1
    for size, index in zip(reversed(tensor.shape), reversed(indices), strict=True):
        terms.append(f"{wide}({index})" if stride == 1 else f"{wide}({index}) * {stride}")
        stride *= size
    return f"{identifier(tensor.name)}_ptr[{' + '.join(reversed(terms)) or '0'}]"


def product_of(factors: Sequence[Load]) -> Value:
    """The product of several reads.

    >>> from sokoban.language.expression import value_text
    >>> value_text(product_of([Load("S", ()), Load("T", ())]))
    '(S[] * T[])'
    """
    return reduce(lambda product, factor: Call("mul", (product, factor)), factors[1:], cast(Value, factors[0]))


def final_text(form: KernelForm, axes: Mapping[str, str], result: str) -> str:
    """The final statement at one element of the output, in float32; near enough where it is rounded to 16 bits.

    Args:
        form: the operator.
        axes: the names of the variables that hold its place.
        result: of the variable with what was summed.
    """
    results = {form.reductions[0].tensor: result}
    written = NEAR_WRITTEN if makes_16_bits(form.expr) else WRITTEN
    return value_text(form.final.value, form.expr.tensor_by_name, axes, results, written)


def value_text(
    value: Value,
    tensors: Mapping[str, Tensor],
    axes: Mapping[str, str],
    results: Mapping[str, str],
    written: Mapping[str, str] = WRITTEN,
) -> str:
    """A point-wise value at one element, in float32.

    Args:
        tensors: what it reads, by name.
        axes: the names of the variables that hold the element's place.
        results: by tensors that lie nowhere, the variables that hold their element.
        written: texts of functions that are no operator and no function of CUDA; what is missing in all of these is
            written as it is defined.
    """

    def text(value: Value) -> str:
        if isinstance(value, Constant):
            number = float(np.clip(np.float32(value.value), -_LARGEST, _LARGEST))
            return f"{number!r}f"
        if isinstance(value, AxisValue):
            return f"(float)({affine_text(value.index, axes)})"
        if isinstance(value, Load):
            if value.tensor in results:
                return results[value.tensor]
            tensor = tensors[value.tensor]
            element = element_text(tensor, [place_text(index, axes, tensors) for index in value.indices])
            return READ[tensor.dtype].format(element)
        assert isinstance(value, Call)
        if value.function not in written and FUNCTIONS[value.function].value is not None:
            return text(expanded(value))
        return _call(value, [text(argument) for argument in value.arguments], written)

    return text(value)


def _call(call: Call, arguments: list[str], written: Mapping[str, str]) -> str:
    if call.function == "pow" and call.arguments[1] == Constant(2.0):
        return f"({arguments[0]} * {arguments[0]})"
    if call.function in _BINARY:
        return f"({arguments[0]} {_BINARY[call.function]} {arguments[1]})"
    if call.function in written:
        return written[call.function].format(*arguments)
    return f"{_FUNCTIONS[call.function]}({', '.join(arguments)})"
