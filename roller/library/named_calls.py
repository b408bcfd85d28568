"""Named operators as library calls without writing their expressions: re-pricing a trace asks for thousands.

The calls are those that :mod:`roller.library.recognise` finds in the expression, only faster; but a product with a bias
that does not say how its second operand is stored is taken for a linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from roller.library.calls import LibraryCall
from roller.library.parts import attention, convolution, elementwise, product, scan_from, scattered_sum, stream, topk
from sokoban.language.named import NAMED_OPERATORS
from sokoban.language.named.base import BiasAdd, Program, ResidualAdd, Scale, with_epilogue
from sokoban.language.operators import typed_stem


def named_calls(data: Mapping[str, Any]) -> list[LibraryCall] | None:
    """The forward calls for an operator's JSON object; None where it is no valid named operator.

    Raises:
        InputError: its keys contradict each other.
    """
    read = _read(data)
    make = _MAKERS.get(data["op"]) if read is not None else None
    if read is None or make is None:
        return None
    operator, program = read
    calls = make(operator, program)
    outputs = math.prod(program.sizes[axis] for axis in program.axes)
    dtype = program.default_dtype or operator.dtype
    for step in operator.epilogue:
        if isinstance(step, BiasAdd):
            if len(calls) == 1 and calls[0].variant == "matmul" and step.axis == "n":
                # Who says nothing of the layout means a linear layer, whose weights PyTorch stores as [n, k].
                variant = "addmm" if data.get("transpose_b") is False else "linear"
                calls = [replace(calls[0], variant=variant, label="linear")]
                continue
            calls.append(elementwise("add", outputs, dtype, 1))
        elif isinstance(step, ResidualAdd):
            calls.append(elementwise("add", outputs, dtype, 2))
        elif isinstance(step, Scale):
            calls.append(elementwise("mul", outputs, dtype, 1, number=True))
        else:
            calls.append(elementwise(step, outputs, dtype, 1))
    return calls


def named_stem(data: Mapping[str, Any]) -> str | None:
    """The name that a named operator has without one of its own; None where it is no valid one.

    Raises:
        InputError: its keys contradict each other.
    """
    read = _read(data)
    if read is None:
        return None
    operator, program = read
    return typed_stem(with_epilogue(program, operator.epilogue).stem, operator)


def _read(data: Mapping[str, Any]) -> tuple[Any, Program] | None:
    cls = NAMED_OPERATORS.get(data["op"]) if isinstance(data.get("op"), str) else None
    if cls is None or "expr" in data:
        return None
    try:
        operator: Any = msgspec.convert(data, cls)
    except (msgspec.ValidationError, RecursionError):
        return None
    program = operator.program()
    with_epilogue(program, operator.epilogue)  # checks its axes
    return operator, program


def _multiplied(operator: Any) -> str:
    """The type in which a product's operands are multiplied."""
    return "tfloat32" if operator.allow_tf32 and operator.dtype == "float32" else operator.dtype


def _matmul(operator: Any, program: Program) -> list[LibraryCall]:
    batch = program.sizes.get("b")
    dtype = _multiplied(operator)
    return [product(batch or 1, operator.m, operator.n, operator.k, dtype, batched=batch is not None)]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _conv2d(operator: Any, program: Program) -> list[LibraryCall]:
    channels = operator.c
    sizes = {
        "n": operator.n, "c": channels, "f": getattr(operator, "f", channels), "h": operator.h, "w": operator.w,
        "kh": operator.kh, "kw": operator.kw, "stride": math.sqrt(math.prod(_pair(operator.stride))),
        "groups": getattr(operator, "groups", channels),
        "out_h": program.sizes["oh"], "out_w": program.sizes["ow"], "dilation": max(_pair(operator.dilation)),
    }  # fmt: skip
    return [convolution(sizes, _multiplied(operator))]


def _pool(operator: Any, program: Program) -> list[LibraryCall]:
    outputs = operator.n * operator.c * program.sizes["oh"] * program.sizes["ow"]
    points = outputs * operator.kh * operator.kw
    (stride, _), (dilation, _) = _pair(operator.stride), _pair(getattr(operator, "dilation", 1))
    # Strides above the window skip whole rows, but no part of a line.
    share = min(1.0, ((operator.kh - 1) * dilation + 1) / stride)
    if operator.layout == "NHWC":
        # Columns are whole rows of channels there.
        (_, stride), (_, dilation) = _pair(operator.stride), _pair(getattr(operator, "dilation", 1))
        share *= min(1.0, ((operator.kw - 1) * dilation + 1) / stride)
    read = operator.n * operator.c * operator.h * operator.w * share
    kernel = "max_pool_forward_nchw" if operator.kind == "max_pool2d" else "avg_pool2d_out_cuda_frame"
    return [stream("pool", kernel, read, outputs, points, operator.dtype)]


def _reduce(operator: Any, program: Program) -> list[LibraryCall]:
    points = math.prod(operator.shape)
    outputs = math.prod(program.sizes[axis] for axis in program.axes)
    function = "sum" if operator.function == "mean" else operator.function
    return [stream(f"reduce {function}", "reduce_kernel", points, outputs, points, operator.dtype)]


def _scan(operator: Any, program: Program) -> list[LibraryCall]:
    shape, axis = operator.shape, operator.axis % len(operator.shape)
    sides = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
    return scan_from(operator.function, sides, operator.dtype, reverse=operator.reverse, exclusive=operator.exclusive)


def _topk(operator: Any, program: Program) -> list[LibraryCall]:
    columns = operator.shape[operator.axis]
    return [topk(math.prod(operator.shape) // columns, columns, operator.k, operator.dtype)]


def _scatter_add(operator: Any, program: Program) -> list[LibraryCall]:
    return scattered_sum(operator.rows, operator.columns, operator.count, operator.dtype)


def _elementwise(operator: Any, program: Program) -> list[LibraryCall]:
    outputs = math.prod(program.sizes[axis] for axis in program.axes)
    shapes = operator.shapes or (operator.shape,)
    binary = len(shapes) == 1 and not operator.scalar and operator.function in _BINARY
    counts = [math.prod(shape) for shape in shapes] * (2 if binary else 1)
    full = sum(count * 4 > outputs for count in counts)
    return [elementwise(operator.function, outputs, operator.dtype, full, number=operator.scalar)]


_BINARY = ("add", "sub", "mul", "div", "pow", "min", "max")


def _rows(operator: Any, program: Program) -> list[LibraryCall]:
    columns = operator.shape[operator.axis]
    kind = "softmax" if type(operator).__name__ == "Softmax" else "layer_norm"
    sizes = (math.prod(operator.shape) // columns, columns)
    return [LibraryCall(kind=kind, label=kind, sizes=sizes, dtype=operator.dtype)]


def _transpose(operator: Any, program: Program) -> list[LibraryCall]:
    count = math.prod(operator.shape)
    if list(operator.perm) == sorted(operator.perm):
        return [elementwise("copy", count, operator.dtype, 1)]
    return [stream("transpose", "elementwise_kernel", count, count, count, operator.dtype)]


def _attention(operator: Any, program: Program) -> list[LibraryCall]:
    return attention(operator)


_MAKERS: Mapping[str, Callable[[Any, Program], list[LibraryCall]]] = {
    "matmul": _matmul,
    "batch_matmul": _matmul,
    "conv2d": _conv2d,
    "depthwise_conv2d": _conv2d,
    "avg_pool2d": _pool,
    "max_pool2d": _pool,
    "reduce": _reduce,
    "scan": _scan,
    "topk": _topk,
    "scatter_add": _scatter_add,
    "elementwise": _elementwise,
    "softmax": _rows,
    "layer_norm": _rows,
    "transpose": _transpose,
    "attention": _attention,
}
