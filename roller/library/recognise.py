"""Tensor expressions as library calls, by what they compute: a product of matrices is one however it was written.

Sums of products are matrix products or convolutions by the roles of their axes, other reductions and element-wise
values are the kernels that an eager framework launches for them one by one. What remains is a *roofline* call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from hal.support.errors import InputError
from roller.library.calls import LibraryCall
from roller.library.parts import attention, convolution, elementwise, product, scan_from, scattered_sum, stream, topk
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.expression import (
    DTYPE_BYTES,
    AffineIndex,
    Call,
    Constant,
    Load,
    TensorExpr,
    Value,
    loads,
    rewrite,
    walk,
)
from sokoban.language.named.attention import Attention
from sokoban.language.named.attention_gradient import AttentionGradient

#: How many times smaller than the result a tensor may be and still count as read for every element.
BROADCAST = 4


def recognise(expr: TensorExpr) -> list[LibraryCall]:
    """The forward calls for an operator, in order; a single roofline call where it fits no library operator.

    Raises:
        InputError: the operator is attention in a type that the library has no kernel for, or one of its gradients.
    """
    fused = expr.operator_as(Attention)
    if fused is not None:
        return [*attention(fused), *_epilogue(expr)]
    if expr.operator_as(AttentionGradient) is not None:
        problem = "libraries compute all gradients of attention in one call"
        raise InputError(expr.name, problem, 'ask for "op": "attention" with "direction": "backward"')
    try:
        form = kernel_form(expr, fuse=False)
    except InputError:
        # More than one of our kernels, but arithmetic and tensors are known all the same.
        return [_roofline_of_statements(expr)]
    if form.is_rows:
        return [_rows(form)]
    if form.is_line:
        return _line(form)
    if form.reduction is None:
        return _pointwise(form, form.final.value)
    main = _contraction(form) or _reduction(form)
    return main if main is not None else [_roofline(form)]


def _epilogue(expr: TensorExpr) -> list[LibraryCall]:
    """The calls of the statements behind the result of a named operator."""
    statements = expr.epilogue
    if not statements:
        return []
    used = {load.tensor for statement in statements for load in loads(statement.value)}
    used |= {statement.tensor for statement in statements}
    tensors = tuple(tensor for tensor in expr.tensors if tensor.name in used)
    return recognise(expr.rewritten(statements=statements, tensors=tensors))


# Products


def _contraction(form: KernelForm) -> list[LibraryCall] | None:
    """A matrix product or a convolution, and what follows it; None where it is neither."""
    operands = multiplied(form)
    if operands is None:
        return None
    is_direct = [all(index.is_plain_axis for index in load.indices) for load in operands]
    if all(is_direct):
        return _matrix_product(form, *operands)
    if any(is_direct) and len(operands) == 2:
        data, weights = operands if is_direct[1] else operands[::-1]
        call = _convolution(form, data, weights)
        return None if call is None else [call, *_pointwise(form, form.final.value)]
    return None


def multiplied(form: KernelForm) -> tuple[Load, Load] | None:
    """The two tensors whose products a ``tile`` sums, or None."""
    reduction = form.reduction
    if reduction is None or reduction.function != "sum" or not isinstance(reduction.body, Call):
        return None
    if reduction.body.function != "mul":
        return None
    first, second = reduction.body.arguments
    return (first, second) if isinstance(first, Load) and isinstance(second, Load) else None


def _matrix_product(form: KernelForm, first: Load, second: Load) -> list[LibraryCall] | None:
    in_first, in_second = _axes(first), _axes(second)
    output = form.reductions[0].axes
    shared = [axis for axis in output if axis in in_first and axis in in_second]
    rows = [axis for axis in output if axis in in_first and axis not in in_second]
    columns = [axis for axis in output if axis in in_second and axis not in in_first]
    if not rows and not columns:
        return None
    if not all(axis in in_first and axis in in_second for axis in form.reduced):
        return None
    if rows and columns and output.index(columns[0]) < output.index(rows[0]):
        rows, columns = columns, rows
    b, m, n, k = (_size(form, axes) for axes in (shared, rows, columns, form.reduced))
    value, bias = form.final.value, False
    if not shared:
        value, bias = _without_bias(form, columns)
    call = product(b, m, n, k, _multiplied(form, first), batched=bool(shared), bias=bias)
    # Whichever operand came to be the one of the columns: are its elements contiguous along k?
    weights = second if set(columns) <= set(in_second) else first
    if bias and _axes(weights)[-1] not in form.reduced:
        call = replace(call, variant="addmm")
    return [call, *_pointwise(form, value)]


def _without_bias(form: KernelForm, columns: list[str]) -> tuple[Value, bool]:
    """The final value with the addition of a vector along the columns taken into the product, which does it itself."""
    accumulated = form.reductions[0].tensor
    for node in walk(form.final.value):
        if not isinstance(node, Call) or node.function != "add":
            continue
        for result, vector in (node.arguments, node.arguments[::-1]):
            if not isinstance(result, Load) or not isinstance(vector, Load) or result.tensor != accumulated:
                continue
            if columns and set(_axes(vector)) == set(columns):
                return rewrite(form.final.value, {node: result}), True
    return form.final.value, False


def _convolution(form: KernelForm, data: Load, weights: Load) -> LibraryCall | None:
    """The call of a sum over windows of ``data``; None where there are no or more than two window dimensions."""
    tensor = form.expr.tensor_by_name[data.tensor]
    windows = [pair for pair in zip(data.indices, tensor.shape, strict=True) if len(pair[0].axes) == 2]
    data_axes = [index.axes[0] for index in data.indices if index.is_plain_axis]
    if not 1 <= len(windows) <= 2 or len(windows) + len(data_axes) != len(data.indices):
        return None
    sides = [_side(form, index, extent) for index, extent in windows]
    window_sides = [side for side in sides if side is not None]
    if len(window_sides) < len(sides) or not _is_summed_over_windows(form, [index for index, _ in windows], weights):
        return None
    # Windows along one dimension are those of images of one row.
    return _convolution_call(form, data_axes, weights, [_WindowSide(), *window_sides][-2:], _multiplied(form, data))


def _is_summed_over_windows(form: KernelForm, windows: Iterable[AffineIndex], weights: Load) -> bool:
    """True if the weights have every reduced axis, and none along which the windows lie."""
    in_weights = _axes(weights)
    along = {axis for index in windows for axis in index.axes if axis in form.reductions[0].axes}
    return along.isdisjoint(in_weights) and all(axis in in_weights for axis in form.reduced)


def _convolution_call(
    form: KernelForm, data_axes: Sequence[str], weights: Load, sides: Sequence[_WindowSide], dtype: str
) -> LibraryCall:
    """The call whose axes have their roles by where they occur: ``data_axes`` in the data, in the weights, in the
    output."""
    in_weights, output = _axes(weights), form.reductions[0].axes
    rows, columns = sides
    groups = _size(form, [axis for axis in output if axis in data_axes and axis in in_weights])
    channels = _size(form, [axis for axis in form.reduced if axis in data_axes])
    filters = _size(form, [axis for axis in output if axis in in_weights and axis not in data_axes])
    images = _size(form, [axis for axis in output if axis in data_axes and axis not in in_weights])
    sizes = {
        "n": images, "c": channels * groups, "f": filters * groups, "h": rows.extent, "w": columns.extent,
        "kh": rows.taps, "kw": columns.taps, "stride": math.sqrt(rows.stride * columns.stride), "groups": groups,
        "out_h": rows.outputs, "out_w": columns.outputs, "dilation": max(rows.dilation, columns.dilation),
    }  # fmt: skip
    return convolution(sizes, dtype)


class _WindowSide(NamedTuple):
    """One dimension of a window: elements read, taps, results, and steps of the window and within it."""

    extent: int = 1
    taps: int = 1
    outputs: int = 1
    stride: int = 1
    dilation: int = 1


def _side(form: KernelForm, index: AffineIndex, extent: int) -> _WindowSide | None:
    """The dimension of an index of an output axis and a reduced one; None for any other."""
    output = [axis for axis in index.axes if axis not in form.reduced]
    taps = [axis for axis in index.axes if axis in form.reduced]
    if len(output) != 1 or len(taps) != 1:
        return None
    return _WindowSide(
        extent,
        form.sizes[taps[0]],
        form.sizes[output[0]],
        abs(index.coefficient(output[0])),
        abs(index.coefficient(taps[0])),
    )


# Reductions of one tensor, softmax and layer norm


def _reduction(form: KernelForm) -> list[LibraryCall] | None:
    """Pooling, or a plain reduction after the kernels that make what it reduces."""
    reduction = form.reduction
    assert reduction is not None
    inputs = [load for load in form.body_loads if load.indices]
    if not inputs:
        return None
    windowed = any(not index.is_plain_axis for load in inputs for index in load.indices)
    if windowed and not isinstance(reduction.body, Load):
        return None
    dtype = _dtype(form, inputs[0])
    outputs = form.expr.output.element_count
    read = sum(_touched(form, load) for load in inputs)
    before = [] if isinstance(reduction.body, Load) else _pointwise(form, reduction.body, form.points)
    if before:
        read = form.points
    label, kernel = (
        ("pool", "max_pool_forward_nchw" if reduction.function == "max" else "avg_pool2d_out_cuda_frame")
        if windowed
        else (f"reduce {reduction.function}", "reduce_kernel")
    )
    main = stream(label, kernel, read, outputs, form.points, dtype)
    return [*before, main, *_after_reduction(form)]


def _after_reduction(form: KernelForm) -> list[LibraryCall]:
    """Element-wise kernels on the result; the division that makes a sum a mean belongs to the reduction."""
    value = form.final.value
    if isinstance(value, Call) and value.function == "div":
        sum_, count = value.arguments
        if isinstance(sum_, Load) and not loads(count):
            return []
    return _pointwise(form, value)


def _touched(form: KernelForm, load: Load) -> float:
    """Elements of a tensor whose memory is read: strides above the window skip whole rows, but no part of a line."""
    tensor = form.expr.tensor_by_name[load.tensor]
    share = 1.0
    for index in load.indices[:-1]:
        side = _side(form, index, 1) if len(index.axes) == 2 else None
        if side is not None:
            share *= min(1.0, ((side.taps - 1) * side.dilation + 1) / side.stride)
    return tensor.element_count * share


def _rows(form: KernelForm) -> LibraryCall:
    functions = [statement.reduction.function for statement in form.reductions if statement.reduction]
    applied = {node.function for node in walk(form.final.value) if isinstance(node, Call)}
    inside = {node.function for each in form.reductions for node in walk(each.value) if isinstance(node, Call)}
    sizes = (_size(form, form.spatial), _size(form, form.reduced))
    dtype = form.expr.inputs[0].dtype
    if functions == ["max", "sum"] and "exp" in inside and len(form.expr.inputs) == 1 and form.columns:
        return LibraryCall(kind="softmax", label="softmax", sizes=sizes, dtype=dtype)
    if functions == ["sum", "sum"] and "mul" in inside and applied & {"rsqrt", "sqrt", "pow"} and form.columns:
        return LibraryCall(kind="layer_norm", label="layer_norm", sizes=sizes, dtype=dtype)
    return _roofline(form)


def _line(form: KernelForm) -> list[LibraryCall]:
    """A scan, values or places by rank, rows that are added where places say, or the place of the largest or smallest
    value, a reduction of PyTorch's."""
    kernel, output = form.line_kernel, form.expr.output
    points, dtype = kernel.lines * kernel.length, _dtype(form, kernel.reads[0]) if kernel.reads else output.dtype
    before = [] if isinstance(kernel.body, Load) else _pointwise(form, kernel.body, points)
    if kernel.scatter is not None:
        rows = math.prod(kernel.sizes[axis] for axis in kernel.row_axes)
        before = []
        main = scattered_sum(rows, kernel.columns, kernel.length, output.dtype)
    elif kernel.rank_axis is not None:
        main = [topk(kernel.lines, kernel.length, kernel.ranks, dtype)]
    elif kernel.is_scan:
        axes = kernel.final.axes
        inner = _size(form, axes[axes.index(kernel.axis) + 1 :])
        sides = (kernel.lines // inner, kernel.length, inner)
        main = scan_from(kernel.walk.function, sides, dtype, reverse=kernel.is_reversed, exclusive=kernel.is_exclusive)
    else:
        label = f"reduce {kernel.walk.function}"
        main = [stream(label, "reduce_kernel", points, output.element_count, points, dtype)]
    return [*before, *main, *([] if isinstance(form.final.value, Load) else _pointwise(form, form.final.value))]


# Element-wise kernels


def _pointwise(form: KernelForm, value: Value, elements: int | None = None) -> list[LibraryCall]:
    """One call per function, as an eager framework runs them; a plain copy or a transposition if there is none."""
    count = form.expr.output.element_count if elements is None else elements
    functions = [node for node in dict.fromkeys(walk(value)) if isinstance(node, Call) and loads(node)]
    dtype = form.expr.output.dtype
    if not functions and form.reduction is None:
        return [_copy(form, value, count, dtype)]
    return [_applied(form, node, count, dtype) for node in reversed(functions)]


def _applied(form: KernelForm, node: Call, count: int, dtype: str) -> LibraryCall:
    tensors = [argument for argument in node.arguments if loads(argument)]
    full = sum(not isinstance(each, Load) or _is_full(form, each, count) for each in tensors)
    number = len(node.arguments) > 1 and any(isinstance(each, Constant) for each in node.arguments)
    return elementwise(node.function, count, dtype, full, number=number)


def _is_full(form: KernelForm, load: Load, count: int) -> bool:
    return form.expr.tensor_by_name[load.tensor].element_count * BROADCAST > count


def _copy(form: KernelForm, value: Value, count: int, dtype: str) -> LibraryCall:
    in_order = isinstance(value, Load) and [index.axes for index in value.indices] == [
        (axis,) for axis in form.final.axes
    ]
    read = min(count, sum(tensor.element_count for tensor in form.expr.inputs))
    if in_order or not isinstance(value, Load):
        return elementwise("copy", count, dtype, 1 if loads(value) else 0)
    return stream("transpose", "elementwise_kernel", read, count, count, dtype)


# Rooflines


def _roofline(form: KernelForm) -> LibraryCall:
    return _roofline_call(form.expr, form.flops)


def _roofline_of_statements(expr: TensorExpr) -> LibraryCall:
    flops = 0.0
    for statement in expr.statements:
        axes = statement.axes + (statement.reduction.axes if statement.reduction else ())
        operations = sum(isinstance(node, Call) for node in walk(statement.value)) + (statement.reduction is not None)
        flops += operations * math.prod(expr.sizes[axis] for axis in axes)
    return _roofline_call(expr, flops)


def _roofline_call(expr: TensorExpr, flops: float) -> LibraryCall:
    tensors = (*expr.inputs, expr.output)
    moved = sum(tensor.element_count * DTYPE_BYTES[tensor.dtype] for tensor in tensors)
    dtype = expr.inputs[0].dtype if expr.inputs else expr.output.dtype
    sizes = (moved, expr.output.element_count, flops)
    return LibraryCall(kind="roofline", label="expression", sizes=sizes, dtype=dtype)


def _axes(load: Load) -> tuple[str, ...]:
    return tuple(axis for index in load.indices for axis in index.axes)


def _size(form: KernelForm, axes: Iterable[str]) -> int:
    return math.prod(form.sizes[axis] for axis in axes)


def _multiplied(form: KernelForm, load: Load) -> str:
    """The type in which a product's operands are multiplied."""
    dtype = _dtype(form, load)
    return "tfloat32" if dtype == "float32" and form.expr.allow_tf32 else dtype


def _dtype(form: KernelForm, load: Load) -> str:
    return form.expr.tensor_by_name[load.tensor].dtype
