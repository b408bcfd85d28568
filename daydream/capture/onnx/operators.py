"""ONNX operators on elements, shapes and indices as PyTorch runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from daydream.capture.onnx.registry import Call, numbers, operator

# Element by element

_UNARY: dict[str, Callable[[Any], Any]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "HardSwish": F.hardswish, "Identity": lambda x: x,
    "IsInf": torch.isinf, "IsNaN": torch.isnan, "Log": torch.log, "Mish": F.mish, "Neg": torch.neg,
    "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round,
    "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh, "Softplus": F.softplus,
    "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh, "BitwiseNot": torch.bitwise_not,
    "Silu": F.silu,
}  # fmt: skip

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda a, b: a + b, "Sub": lambda a, b: a - b, "Mul": lambda a, b: a * b, "Equal": lambda a, b: a == b,
    "Greater": lambda a, b: a > b, "GreaterOrEqual": lambda a, b: a >= b, "Less": lambda a, b: a < b,
    "LessOrEqual": lambda a, b: a <= b, "BitwiseAnd": lambda a, b: a & b, "BitwiseOr": lambda a, b: a | b,
    "BitwiseXor": lambda a, b: a ^ b, "Pow": lambda a, b: a**b,
}  # fmt: skip


def _enter_elementwise() -> None:
    for name, unary in _UNARY.items():
        operator(name)(lambda call, x, run=unary: run(x))
    for name, binary in _BINARY.items():
        operator(name, scalars=True)(lambda call, a, b, run=binary: run(a, b))
    for name, logical in (("And", torch.logical_and), ("Or", torch.logical_or), ("Xor", torch.logical_xor)):
        operator(name)(lambda call, a, b, run=logical: run(a, b))


_enter_elementwise()


def _is_floating(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)


@operator("Div", scalars=True)
def _div(call: Call, a: Any, b: Any) -> Any:
    if _is_floating(a) or _is_floating(b):
        return a / b
    tensors = [torch.as_tensor(each, device=call.device) for each in (a, b)]
    return torch.div(*tensors, rounding_mode="trunc")


@operator("Mod", scalars=True)
def _mod(call: Call, a: Any, b: Any) -> Any:
    return torch.fmod(a, b) if call.get("fmod", 0) else torch.remainder(a, b)


@operator("Sum", "Mean", "Max", "Min")
def _variadic(call: Call, *values: Any) -> Any:
    if call.kind in ("Max", "Min"):
        return functools.reduce(torch.maximum if call.kind == "Max" else torch.minimum, values)
    total = functools.reduce(lambda a, b: a + b, values)
    return total / len(values) if call.kind == "Mean" else total


@operator("Clip", known=(1, 2))
def _clip(call: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    least, most = numbers(call.get("min", low)), numbers(call.get("max", high))
    if least == [0] and most == [6]:
        return F.relu6(x)
    return torch.clamp(x, least[0] if least else None, most[0] if most else None) if least or most else x


@operator("Gelu")
def _gelu(call: Call, x: Any) -> Any:
    return F.gelu(x, approximate=call.get("approximate", "none"))


@operator("LeakyRelu")
def _leaky_relu(call: Call, x: Any) -> Any:
    return F.leaky_relu(x, call.get("alpha", 0.01))


@operator("Elu", "Celu")
def _elu(call: Call, x: Any) -> Any:
    return (F.elu if call.kind == "Elu" else F.celu)(x, call.get("alpha", 1.0))


@operator("Selu")
def _selu(call: Call, x: Any) -> Any:
    return F.selu(x)


@operator("Swish")
def _swish(call: Call, x: Any) -> Any:
    alpha = call.get("alpha", 1.0)
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)


@operator("HardSigmoid")
def _hard_sigmoid(call: Call, x: Any) -> Any:
    # PyTorch's has alpha = 1/6; another one is as much work.
    return F.hardsigmoid(x)


@operator("PRelu", weights=(1,))
def _prelu(call: Call, x: Any, slope: Any) -> Any:
    # ONNX has a slope of sizes (channels, 1, 1).
    return F.prelu(x, slope.reshape(-1))


@operator("Where")
def _where(call: Call, condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b)


@operator("Cast")
def _cast(call: Call, x: Any) -> Any:
    return x.to(call.type_of(call.get("to")))


@operator("CastLike")
def _cast_like(call: Call, x: Any, like: Any) -> Any:
    return x.to(like.dtype)


# Sizes


@operator("Shape")
def _shape(call: Call, x: Any) -> Any:
    return torch.tensor(x.shape[call.get("start", 0) : call.get("end", None)], dtype=torch.int64, device="cpu")


@operator("Size")
def _size(call: Call, x: Any) -> Any:
    return torch.tensor(x.numel(), dtype=torch.int64, device="cpu")


@operator("Reshape", known=(1,))
def _reshape(call: Call, x: Any, shape: Any = None) -> Any:
    sizes = numbers(shape if shape is not None else call.get("shape"))
    if not call.get("allowzero", 0):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


@operator("Flatten")
def _flatten(call: Call, x: Any) -> Any:
    axis = call.get("axis", 1) % (x.dim() + 1)
    return x.flatten(1) if axis == 1 and x.dim() > 1 else x.reshape(x.shape[:axis].numel(), -1)


@operator("Squeeze", known=(1,))
def _squeeze(call: Call, x: Any, axes: Any = None) -> Any:
    chosen = numbers(axes if axes is not None else call.get("axes"))
    return x.squeeze(tuple(chosen)) if chosen else x.squeeze()


@operator("Unsqueeze", known=(1,))
def _unsqueeze(call: Call, x: Any, axes: Any = None) -> Any:
    chosen = numbers(axes if axes is not None else call.get("axes"))
    rank = x.dim() + len(chosen)
    for axis in sorted(axis % rank for axis in chosen):
        x = x.unsqueeze(axis)
    return x


@operator("Transpose")
def _transpose(call: Call, x: Any) -> Any:
    return x.permute(call.get("perm", list(reversed(range(x.dim())))))


@operator("Expand", known=(1,))
def _expand(call: Call, x: Any, shape: Any) -> Any:
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(numbers(shape))))


@operator("Tile", known=(1,))
def _tile(call: Call, x: Any, repeats: Any) -> Any:
    return x.repeat(numbers(repeats))


@operator("Concat")
def _concat(call: Call, *values: Any) -> Any:
    return torch.cat(values, call.get("axis", 1))


@operator("Split", known=(1,))
def _split(call: Call, x: Any, sizes: Any = None) -> Any:
    axis = call.get("axis", 0)
    parts = numbers(sizes if sizes is not None else call.get("split"))
    if not parts:
        parts = -(-x.shape[axis] // call.get("num_outputs", call.results))
    return x.split(parts, axis)


@operator("Slice", known=None)
def _slice(call: Call, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None) -> Any:
    begin, end = numbers(call.get("starts", starts)), numbers(call.get("ends", ends))
    chosen = numbers(call.get("axes", axes)) or list(range(len(begin)))
    for position, axis in enumerate(chosen):
        step = numbers(steps)[position] if steps is not None else 1
        if step < 0:
            length = x.shape[axis]
            indices = list(range(length))[slice(begin[position], max(end[position], -length - 1), step)]
            x = x.flip(axis) if len(indices) == length else x.index_select(axis, _long(indices, x.device))
            continue
        x = torch.ops.aten.slice.Tensor(x, axis, begin[position], end[position], step)
    return x


def _long(values: list[int], device: Any) -> Any:
    return torch.tensor(values, dtype=torch.int64, device=device)


@operator("Pad", known=(1, 2, 3))
def _pad(call: Call, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    widths = numbers(call.get("pads", call.get("paddings", pads)))
    chosen = [axis % x.dim() for axis in numbers(axes)] or list(range(x.dim()))
    by_axis = {axis: (widths[i], widths[i + len(chosen)]) for i, axis in enumerate(chosen)}
    mode = call.get("mode", "constant")
    order = [width for axis in reversed(range(x.dim())) for width in by_axis.get(axis, (0, 0))]
    while len(order) > 2 and order[-2:] == [0, 0]:
        order = order[:-2]
    if mode == "constant":
        return F.pad(x, order, value=(numbers(value) or [call.get("value", 0.0)])[0])
    return F.pad(x, order, mode={"edge": "replicate", "reflect": "reflect", "wrap": "circular"}[mode])


@operator("DepthToSpace", "SpaceToDepth")
def _blocks(call: Call, x: Any) -> Any:
    size = call.get("blocksize")
    n, c, h, w = x.shape
    if call.kind == "SpaceToDepth":
        x = x.reshape(n, c, h // size, size, w // size, size).permute(0, 3, 5, 1, 2, 4)
        return x.reshape(n, c * size * size, h // size, w // size)
    if call.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, size)
    x = x.reshape(n, size, size, c // size**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return x.reshape(n, c // size**2, h * size, w * size)


# Constants


@operator("ConstantOfShape", known=(0,))
def _constant_of_shape(call: Call, shape: Any) -> Any:
    value = call.get("value")
    dtype = call.floating(value.dtype) if value is not None else call.floating(torch.float32)
    return torch.full(numbers(shape), value.item() if value is not None else 0.0, dtype=dtype, device=call.device)


@operator("Range", known=(0, 1, 2))
def _range(call: Call, start: Any, limit: Any, delta: Any) -> Any:
    return torch.arange(*(numbers(each)[0] for each in (start, limit, delta)), dtype=start.dtype, device=call.device)


@operator("EyeLike")
def _eye_like(call: Call, x: Any) -> Any:
    return torch.eye(*x.shape, dtype=call.type_of(call.get("dtype", 1)), device=x.device)


@operator("RandomNormalLike", "RandomUniformLike")
def _random_like(call: Call, x: Any) -> Any:
    return (torch.randn_like if call.kind == "RandomNormalLike" else torch.rand_like)(x)


# Indices


@operator("Gather")
def _gather(call: Call, x: Any, indices: Any) -> Any:
    axis = call.get("axis", 0) % x.dim()
    if axis == 0 and x.dim() == 2 and isinstance(x, torch.nn.Parameter):
        return F.embedding(indices, x)
    if indices.dim() == 0 and not indices.is_meta:
        return x.select(axis, int(indices))
    return x[(*([slice(None)] * axis), indices)] if indices.dim() != 1 else x.index_select(axis, indices)


@operator("GatherElements")
def _gather_elements(call: Call, x: Any, indices: Any) -> Any:
    return torch.gather(x, call.get("axis", 0), indices)


@operator("GatherND")
def _gather_nd(call: Call, x: Any, indices: Any) -> Any:
    if call.get("batch_dims", 0):
        raise ValueError("batch_dims is not supported")
    return x[tuple(indices.unbind(-1))]


@operator("ScatterND")
def _scatter_nd(call: Call, x: Any, indices: Any, updates: Any) -> Any:
    return torch.index_put(x, tuple(indices.unbind(-1)), updates)


@operator("ScatterElements", "Scatter")
def _scatter(call: Call, x: Any, indices: Any, updates: Any) -> Any:
    return torch.scatter(x, call.get("axis", 0), indices, updates)


@operator("OneHot", known=(1, 2))
def _one_hot(call: Call, indices: Any, depth: Any, values: Any) -> Any:
    off, on = numbers(values)
    classes = torch.arange(int(numbers(depth)[0]), device=indices.device)
    result = torch.where(indices.unsqueeze(-1) == classes, on, off)
    axis = call.get("axis", -1)
    return result if axis == -1 else result.movedim(-1, axis)


@operator("Trilu", known=(1,))
def _trilu(call: Call, x: Any, k: Any = None) -> Any:
    diagonal = (numbers(k) or [0])[0]
    return torch.triu(x, diagonal) if call.get("upper", 1) else torch.tril(x, diagonal)


@operator("NonZero", known=(0,))
def _non_zero(call: Call, x: Any) -> Any:
    if x.is_meta:
        raise ValueError("the result's sizes depend on data")
    return torch.nonzero(x).t().contiguous()


# Reductions

_REDUCTIONS: dict[str, Callable[[Any, tuple[int, ...], bool], Any]] = {
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keep),
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keep),
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keep),
    "ReduceL1": lambda x, axes, keep: torch.linalg.vector_norm(x, 1, axes, keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep),
    "ReduceSumSquare": lambda x, axes, keep: (x * x).sum(axes, keep),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keep),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keep).log(),
}


@operator(*_REDUCTIONS, known=(1,))
def _reduce(call: Call, x: Any, axes: Any = None) -> Any:
    chosen = tuple(numbers(axes if axes is not None else call.get("axes")))
    if not chosen and call.get("noop_with_empty_axes", 0):
        return x
    return _REDUCTIONS[call.kind](x, chosen or tuple(range(x.dim())), bool(call.get("keepdims", 1)))


@operator("ReduceProd", known=(1,))
def _reduce_prod(call: Call, x: Any, axes: Any = None) -> Any:
    chosen = numbers(axes if axes is not None else call.get("axes")) or list(range(x.dim()))
    for axis in sorted((axis % x.dim() for axis in chosen), reverse=True):
        x = x.prod(axis, bool(call.get("keepdims", 1)))
    return x


@operator("ArgMax", "ArgMin")
def _arg_max(call: Call, x: Any) -> Any:
    find = torch.argmax if call.kind == "ArgMax" else torch.argmin
    return find(x, call.get("axis", 0), bool(call.get("keepdims", 1)))


@operator("TopK", known=(1,))
def _top_k(call: Call, x: Any, k: Any = None) -> Any:
    count = int((numbers(k) or [call.get("k")])[0])
    return torch.topk(x, count, call.get("axis", -1), bool(call.get("largest", 1)), bool(call.get("sorted", 1)))


@operator("CumSum", known=(1,))
def _cumsum(call: Call, x: Any, axis: Any) -> Any:
    return torch.cumsum(x, int(numbers(axis)[0]))


@operator("Softmax", "LogSoftmax")
def _softmax(call: Call, x: Any) -> Any:
    run = torch.softmax if call.kind == "Softmax" else torch.log_softmax
    if call.version >= 13:
        return run(x, call.get("axis", -1))
    # Before version 13 all axes from this one on are one.
    axis = call.get("axis", 1) % x.dim()
    return run(x, axis) if axis == x.dim() - 1 else run(x.flatten(axis), -1).reshape(x.shape)
