"""The backward pass of an operator as operators of ours: one expression per gradient.

The gradient of an operand of ``Y[s] = sum([r], A * B)`` is again such a sum, of the other operand and the gradient of
Y, over the axes that the operand lacks. Where an operand is read through a window, its element h belongs to the output
``h - k``; with a stride of s only every s-th element meets a given tap, so that the gradient falls apart into s kernels
per dimension, one for each phase of h. Point-wise values have the derivatives of :mod:`roller.estimate.derivative`;
softmax, layer norm and attention theirs in closed form, from what the forward pass saved; so have values by rank, from
their places. What scattered rows gather is the row of the result that each was added to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hal.support.errors import InputError
from roller.estimate.attention_gradients import Gradient, two_kernels, with_slopes
from roller.estimate.derivative import derivative
from roller.library.recognise import recognise
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import product_factors
from sokoban.kernel.normalize import substitute_axes
from sokoban.language.expression import FLOAT_DTYPES, AffineIndex, Call, Load, TensorExpr, Value, loads, value_text
from sokoban.language.functions import ONE, ZERO
from sokoban.language.named.attention import Attention
from sokoban.language.names import unused_name
from sokoban.language.operators import operator_from_data
from sokoban.language.scatter import Scatter, scatter_of

#: Kernels that the gradient of one operand may fall into.
MOST_PHASES = 64


def gradients(expr: TensorExpr) -> list[Gradient]:
    """The kernels of the backward pass. Gradients that are only passed on, as those of an addition, need none.

    Raises:
        InputError: the gradient is no operator that we can build (of a maximum over many, for instance).
    """
    places = {place.tensor for each in expr.statements for load in loads(each.value) for place in load.places}
    scattered = [scatter_of(each, expr.tensor_by_name) for each in expr.statements]
    places |= {scatter.place.tensor for scatter in scattered if scatter is not None}
    narrow = next((each for each in expr.inputs if each.dtype not in FLOAT_DTYPES and each.name not in places), None)
    if narrow is not None:
        raise _refused(expr, f"{narrow.name} is {narrow.dtype}, which no gradient fits into")
    attention = _attention_of(expr)
    if attention is not None:
        return two_kernels(attention)
    form = kernel_form(expr, fuse=False)
    if form.is_rows:
        return _of_rows(form)
    if form.is_line:
        return _of_line(form)
    return [*_of_final(form), *(_of_sum(form) if form.reductions else [])]


def backward_ways(expr: TensorExpr) -> list[list[Gradient]]:
    """The kernels of the backward pass in every way that there is: the first one is :func:`gradients`. Attention's
    gradients share the slopes of logits in the second, where they fit.

    Raises:
        InputError: as :func:`gradients`.
    """
    attention = _attention_of(expr)
    shared = None if attention is None else with_slopes(attention)
    return [gradients(expr), *([] if shared is None else [shared])]


def _attention_of(expr: TensorExpr) -> Attention | None:
    """The attention that an operator is, with nothing behind it."""
    return None if expr.epilogue else expr.operator_as(Attention)


def _of_rows(form: KernelForm) -> list[Gradient]:
    call, dy = recognise(form.source)[0], _incoming(form)
    if call.kind not in ("softmax", "layer_norm"):
        raise _refused(form, "its gradient is known for softmax and layer norm alone")
    rows, columns = (int(size) for size in call.sizes)
    indices = "i,j" if form.final.axes[-1] in form.columns else "j,i"
    sizes = {"i": rows, "j": columns}
    if call.kind == "softmax":
        text = f"S[i] = sum(j, {dy}[{indices}] * Y[{indices}]); dX[{indices}] = Y[{indices}] * ({dy}[{indices}] - S[i])"
        return [_gradient(form, "X", text, sizes)]
    normal, scaled = f"(X[{indices}] - Mean[i]) * Rstd[i]", f"{dy}[{indices}] * gamma[j]"
    text = (
        f"S[i] = sum(j, {scaled}); T[i] = sum(j, {scaled} * {normal})\n"
        f"dX[{indices}] = Rstd[i] * ({scaled} - S[i] / {columns} - {normal} * T[i] / {columns})"
    )
    return [
        _gradient(form, "X", text, sizes),
        _gradient(form, "gamma", f"dgamma[j] = sum(i, {dy}[{indices}] * {normal})", sizes),
        _gradient(form, "beta", f"dbeta[j] = sum(i, {dy}[{indices}])", sizes),
    ]


def _of_line(form: KernelForm) -> list[Gradient]:
    kernel = form.line_kernel
    if not isinstance(form.final.value, Load):
        raise _refused(form, "something is computed of what goes along an axis")
    if kernel.scatter is not None:
        return _of_scatter(form, kernel.scatter)
    body, indices = kernel.body, [index.axes for index in getattr(kernel.body, "indices", ())]
    is_sum, is_ranked = kernel.is_scan and kernel.walk.function == "sum", kernel.walk.function in ("max", "min")
    if not is_sum and (not is_ranked or kernel.rank_axis is None):
        raise _refused(form, "of what goes along an axis it is known for cumulative sums and values by rank")
    if not isinstance(body, Load) or body.pad is not None:
        raise _refused(form, "its gradient is known for one tensor by itself")
    wanted = [*kernel.row_axes, kernel.axis]
    if sorted(indices) != sorted((axis,) for axis in wanted) or not all(i.is_plain_axis for i in body.indices):
        raise _refused(form, "it reads a tensor otherwise than element by element")
    places, given = ",".join(axis for (axis,) in indices), ",".join(form.final.axes)
    incoming, read = f"{_incoming(form)}[{given}]", f"d{body.tensor}[{places}]"
    if is_sum:
        options = "" if kernel.is_reversed else ", reverse"
        options += ", exclusive" if kernel.is_exclusive else ""
        return [_gradient(form, body.tensor, f"{read} = cumsum({kernel.axis}, {incoming}{options})", dict(form.sizes))]
    saved = unused_name("Places", {tensor.name for tensor in form.source.tensors})
    text = f"{read} = sum({kernel.rank_axis}, select({kernel.axis} == {saved}[{given}], {incoming}, 0))"
    return [_gradient(form, body.tensor, text, dict(form.sizes), {saved: "int32"})]


def _of_scatter(form: KernelForm, scatter: Scatter) -> list[Gradient]:
    """Gradients of what scattered rows are made of: that of the row of the result, where a place names one."""
    axis, final, place = form.line_kernel.axis, form.final, scatter.place
    at = ",".join(f"{place.tensor}[{axis}]" if each == scatter.row else each for each in final.axes)
    incoming = f"{_incoming(form)}[{at} | pad=0]"
    gradients = []
    for load in loads(scatter.value):
        slope, axes = derivative(scatter.value, load), _axes_read_directly(form, load)
        text = incoming if slope == ONE else f"{incoming} * {value_text(slope)}"
        summed = [each for each in (axis, *scatter.columns) if each not in axes]
        value = f"sum([{','.join(summed)}], {text})" if summed else text
        sizes = {each: size for each, size in form.sizes.items() if each != scatter.row}
        shapes = {_incoming(form): form.expr.output.shape}
        types = {place.tensor: "int32"}
        gradients.append(
            _gradient(form, load.tensor, f"d{load.tensor}[{','.join(axes)}] = {value}", sizes, types, shapes)
        )
    return gradients


# The final statement: point-wise


def _of_final(form: KernelForm) -> list[Gradient]:
    """Gradients of the tensors that the final statement reads, the reduction's result among them."""
    final = form.final
    read = loads(final.value)
    if len({load.tensor for load in read}) < len(read):
        raise _refused(form, "it reads a tensor at several places")
    results = [load for load in read if any(load.tensor == statement.tensor for statement in form.reductions)]
    # What comes before the final statement has a gradient of its own by now, which a bias just sums.
    before = derivative(final.value, results[0]) if results else ONE
    operands = [load for load in read if load not in results]
    gradients = [_of_operand(form, load, derivative(final.value, load), "the sum") for load in results]
    for load in operands:
        slope = derivative(final.value, load)
        gradients.append(_of_operand(form, load, slope, load.tensor, is_computed=slope == before))
    return [gradient for gradient in gradients if gradient is not None]


def _of_operand(
    form: KernelForm, load: Load, slope: Value, label: str, *, is_computed: bool = False
) -> Gradient | None:
    """The gradient of what the final statement reads, with its derivative ``slope``; None where it takes no kernel.

    ``is_computed`` says that the incoming gradient times ``slope`` exists already.
    """
    final = form.final
    if load.places:
        return None if slope == ZERO else _of_gather(form, load, slope)
    axes = _axes_read_directly(form, load)
    if slope == ZERO or (slope == ONE and axes == list(final.axes)):
        return None
    incoming = Load(_incoming(form), tuple(AffineIndex.axis(axis) for axis in final.axes))
    value: Value = incoming if slope == ONE or is_computed else Call("mul", (incoming, slope))
    text = _summed_text(value, [axis for axis in final.axes if axis not in axes])
    sizes = {axis: form.sizes[axis] for axis in final.axes} | ({} if axes else {"one": 1})
    return _gradient(form, label, f"grad_{load.tensor}[{','.join(axes) or 'one'}] = {text}", sizes)


def _of_gather(form: KernelForm, load: Load, slope: Value) -> Gradient:
    """The gradient of a tensor of which rows are read by number: scattered rows, added up. Numbers of several axes that
    lie side by side in the result are numbers of one."""
    final, (place, *_) = form.final, load.places
    others = [index.axes[0] for index in load.indices if index.is_plain_axis]
    given = [index.axes[0] for index in place.indices if index.is_plain_axis]
    first = final.axes.index(given[0]) if given else 0
    is_row = len(given) == len(place.indices) and list(final.axes[first : first + len(given)]) == given
    if len(others) != len(load.indices) - 1 or not is_row or sorted([*others, *given]) != sorted(final.axes):
        raise _refused(form, f"it reads {load.tensor} otherwise than in whole rows")
    if len(given) > 1 and slope != ONE:
        raise _refused(form, f"what is read of {load.tensor} is multiplied along several axes of numbers")
    along = given[0] if len(given) == 1 else unused_name("place", set(form.sizes))
    axes = [*final.axes[:first], along, *final.axes[first + len(given) :]]
    row = unused_name("row", {*form.sizes, along})
    at = ",".join(index.axes[0] if index.is_plain_axis else row for index in load.indices)
    value: Value = Load(_incoming(form), tuple(map(AffineIndex.axis, axes)))
    value = value if slope == ONE else Call("mul", (value, slope))
    (position,) = (number for number, index in enumerate(load.indices) if not index.is_plain_axis)
    count = math.prod(form.sizes[axis] for axis in given)
    sizes = {axis: form.sizes[axis] for axis in others} | {along: count}
    sizes[row] = form.expr.tensor_by_name[load.tensor].shape[position]
    text = f"grad_{load.tensor}[{at}] = sum({along}, select({row} == {place.tensor}[{along}], {value_text(value)}, 0))"
    shapes = {_incoming(form): [sizes[axis] for axis in axes], place.tensor: [count]}
    return _gradient(form, load.tensor, text, sizes, {place.tensor: "int32"}, shapes)


def _summed_text(value: Value, axes: Sequence[str]) -> str:
    """``sum([i,j], A[i,j] * B[j])``; the value itself where there is nothing to sum over."""
    text = value_text(value)
    return f"sum([{','.join(axes)}], {text})" if axes else text


def _axes_read_directly(form: KernelForm, load: Load) -> list[str]:
    axes = [index.axes[0] for index in load.indices if index.is_plain_axis]
    constant = [index for index in load.indices if not index.axes]
    if len(axes) + len(constant) < len(load.indices) or len(set(axes)) < len(axes):
        raise _refused(form, f"it reads {load.tensor} at shifted or scaled indices")
    return axes


# The sum of products


def _of_sum(form: KernelForm) -> list[Gradient]:
    """Gradients of the tensors whose products the reduction sums."""
    reduction = form.reduction
    assert reduction is not None
    factors = product_factors(reduction.body)
    if reduction.function != "sum" or factors is None:
        raise _refused(form, f"only sums of products have one here, it is the {reduction.function} of something else")
    if len({load.tensor for load in factors}) < len(factors):
        raise _refused(form, "it multiplies a tensor with itself")
    return [
        gradient
        for position, load in enumerate(factors)
        for gradient in _of_factor(form, load, [*factors[:position], *factors[position + 1 :]])
    ]


@dataclass(frozen=True)
class _Dimension:
    """One dimension of a gradient (or of one phase of it).

    Attributes:
        axis, size: its axis.
        output: the output axis that a window hides, and where it lies; None for a plain dimension.
        taps: the reduced axis of the window, how it is read, and how many taps are left in this phase.
    """

    axis: str
    size: int
    output: tuple[str, AffineIndex] | None = None
    taps: tuple[str, AffineIndex, int] | None = None


def _of_factor(form: KernelForm, load: Load, others: Sequence[Load]) -> Iterator[Gradient]:
    tensor = form.expr.tensor_by_name[load.tensor]
    sides = [
        list(_dimensions(form, index, extent, f"h{position}"))
        for position, (index, extent) in enumerate(zip(load.indices, tensor.shape, strict=True))
    ]
    phases = list(product(*sides))
    if len(phases) > MOST_PHASES:
        raise _refused(form, f"the gradient of {load.tensor} falls into {len(phases)} kernels")
    for number, dimensions in enumerate(phases, start=1):
        label = load.tensor + (f", phase {number} of {len(phases)}" if len(phases) > 1 else "")
        yield _phase(form, label, load, others, dimensions)


def _dimensions(form: KernelForm, index: AffineIndex, extent: int, axis: str) -> Iterator[_Dimension]:
    """The dimension of a plain index, or the phases of one that reads through a window (or just a stride)."""
    if index.is_plain_axis:
        yield _Dimension(index.axes[0], form.sizes[index.axes[0]])
        return
    output = [name for name in index.axes if name not in form.reduced]
    taps = [name for name in index.axes if name in form.reduced]
    if len(output) != 1 or len(taps) > 1 or any(index.coefficient(name) < 0 for name in index.axes):
        raise _refused(form, f"it reads through the index {index}")
    stride = index.coefficient(output[0])
    dilation = index.coefficient(taps[0]) if taps else 1
    count = form.sizes[taps[0]] if taps else 1
    if stride > 1 and dilation > 1:
        raise _refused(form, "its window has a stride and a dilation")
    for phase in range(min(stride, extent)):
        first = (phase - index.offset) % stride
        tap_count = -(-(count - first) // stride)
        if tap_count <= 0:
            continue  # nothing reads these elements: their gradient is the zero that they are filled with
        terms = {axis: 1} | ({taps[0]: -dilation} if taps else {})
        where = AffineIndex.of(terms, (phase - index.offset - first) // stride)
        tap = (taps[0], AffineIndex.of({taps[0]: stride}, first), tap_count) if taps else None
        yield _Dimension(axis, -(-(extent - phase) // stride), (output[0], where), tap)


def _phase(
    form: KernelForm, label: str, load: Load, others: Sequence[Load], dimensions: Sequence[_Dimension]
) -> Gradient:
    """One phase of the gradient of ``load``, a factor of the sum, as ``others`` are."""
    places = _places(dimensions)
    hidden = {dimension.output[0] for dimension in dimensions if dimension.output is not None}
    if any(axis in hidden for other in others for index in other.indices for axis in index.axes):
        raise _refused(form, f"{load.tensor}'s window is shared with another operand")
    axes = [dimension.axis for dimension in dimensions]
    result = form.reductions[0].axes
    # Outputs beyond either end do not exist, and those taps of a phase are numbered anew where the others are read.
    at_result = tuple(places.get(axis, AffineIndex.axis(axis)) for axis in result)
    reaches_out = not hidden.isdisjoint(result)
    value: Value = Load(_incoming(form), at_result, 0.0 if reaches_out else None)
    for other in others:
        renamed = substitute_axes(other, {axis: place for axis, place in places.items() if axis not in hidden})
        value = Call("mul", (value, renamed))
    summed = [axis for axis in (*result, *form.reduced) if axis not in axes and axis not in hidden]
    sizes = _phase_sizes(form, dimensions)
    text = f"grad_{load.tensor}[{','.join(axes)}] = {_summed_text(value, summed)}"
    return _gradient(form, label, text, {axis: sizes[axis] for axis in (*axes, *summed)})


def _places(dimensions: Sequence[_Dimension]) -> dict[str, AffineIndex]:
    """Where the output axes that windows hide lie in a phase, and how it reads its taps."""
    outputs = {each.output[0]: each.output[1] for each in dimensions if each.output is not None}
    return outputs | {each.taps[0]: each.taps[1] for each in dimensions if each.taps is not None}


def _phase_sizes(form: KernelForm, dimensions: Sequence[_Dimension]) -> dict[str, int]:
    """The form's sizes with those of the phase: its own axes, and the taps that are left in it."""
    extents = {each.axis: each.size for each in dimensions}
    return {**form.sizes, **extents, **{each.taps[0]: each.taps[2] for each in dimensions if each.taps is not None}}


def _gradient(
    form: KernelForm,
    label: str,
    text: str,
    sizes: dict[str, int],
    dtypes: Mapping[str, str] | None = None,
    given: Mapping[str, Sequence[int]] | None = None,
) -> Gradient:
    """The text as an operator with the forward operator's shapes and types, but for those that are ``given``."""
    tensors = {tensor.name: tensor for tensor in form.expr.tensors}
    output = form.expr.output
    result = form.reductions[0].axes if form.reductions and form.is_tile else form.final.axes
    shapes = {name: list(shape) for name, shape in (given or {}).items()}
    if form.is_tile:
        read = set(re.findall(r"(\w+)\[", text.partition("=")[2]))
        tensors[_incoming(form)] = replace(output, shape=tuple(form.sizes[axis] for axis in result))
        shapes = {name: list(tensors[name].shape) for name in read} | shapes
    data: dict[str, Any] = {
        "expr": text,
        "sizes": sizes,
        "shapes": shapes,
        "dtype": output.dtype,
        "dtypes": dict(dtypes or {}),
        "accumulate": form.expr.accumulate,
        "allow_tf32": form.expr.allow_tf32,
    }
    return Gradient(f"gradient of {label}", operator_from_data(data))


def _incoming(form: KernelForm) -> str:
    """A name for the gradient of the output."""
    return unused_name("grad", {tensor.name for tensor in form.source.tensors})


def _refused(operator: KernelForm | TensorExpr, why: str) -> InputError:
    name = operator.name if isinstance(operator, TensorExpr) else operator.source.name
    return InputError(name, f"has no backward pass of ours: {why}", "use --implementation library")
