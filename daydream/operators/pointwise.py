"""Element-wise operators: functions, comparisons, casts and copies, dropout, and what only writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from daydream.operators.inputs import DTYPES, Inputs, RecordedTensor
from daydream.operators.traffic import (
    Call,
    Repeated,
    Scattered,
    is_dense_like,
    most_repeated,
    moved_bytes,
    scattered,
    tensors_of,
)
from daydream.operators.work import Moved, Work, WorkPart
from sokoban.language.expression import DTYPE_BYTES

#: PyTorch's functions of one tensor to Roller's that streams alike; a copy moves what a negation does.
UNARY = {
    "abs": "abs", "ceil": "ceil", "cos": "cos", "erf": "erf", "exp": "exp", "floor": "floor", "gelu": "gelu",
    "log": "log", "neg": "neg", "relu": "relu", "rsqrt": "rsqrt", "sigmoid": "sigmoid", "silu": "silu", "sin": "sin",
    "sqrt": "sqrt", "tanh": "tanh", "clamp": "relu", "clamp_min": "relu", "clamp_max": "relu", "threshold": "relu",
    "hardtanh": "relu", "leaky_relu": "relu", "dropout": "relu", "nan_to_num": "relu", "copy": "neg", "clone": "neg",
    "_to_copy": "neg", "contiguous": "neg", "fill": "neg", "reciprocal": "sqrt", "square": "relu", "elu": "exp",
    "relu6": "relu", "hardsigmoid": "relu", "hardswish": "relu", "mish": "tanh", "softplus": "exp", "expm1": "exp",
    "log_sigmoid_forward": "exp", "log1p": "exp", "log2": "log", "round": "floor", "trunc": "floor", "sign": "abs",
}  # fmt: skip

BINARY = {
    "add": "add", "sub": "sub", "rsub": "sub", "mul": "mul", "div": "div", "pow": "pow", "minimum": "min",
    "maximum": "max",
}  # fmt: skip

DERIVATIVES = {
    "threshold_backward": "relu", "sigmoid_backward": "sigmoid", "tanh_backward": "tanh", "gelu_backward": "gelu",
    "silu_backward": "silu", "hardtanh_backward": "relu", "leaky_relu_backward": "relu", "elu_backward": "exp",
    "hardswish_backward": "relu", "hardsigmoid_backward": "relu", "mish_backward": "tanh", "softplus_backward": "exp",
}  # fmt: skip

#: Operators that Roller has no function for: instructions per result.
_OTHERS: Mapping[str, float] = {
    "where": 4, "masked_fill": 4, "eq": 4, "ne": 4, "lt": 4, "le": 4, "gt": 4, "ge": 4, "logical_not": 4,
    "logical_and": 4, "logical_or": 4, "logical_xor": 4, "bitwise_not": 4, "bitwise_and": 4, "bitwise_or": 4,
    "bitwise_xor": 4, "isnan": 4, "isinf": 4, "isfinite": 4, "frac": 4, "lerp": 6, "addcmul": 6, "addcdiv": 16,
    "native_dropout": 30, "native_dropout_backward": 6, "floor_divide": 16, "remainder": 20, "fmod": 20, "atan2": 40,
    "logaddexp": 30, "erfinv": 30, "tan": 30, "asin": 30, "acos": 30, "atan": 30, "sinh": 25, "cosh": 25, "erfc": 25,
    "_prelu_kernel": 4, "_prelu_kernel_backward": 6, "prelu": 4, "glu": 20, "glu_backward": 30, "softshrink": 4,
    "huber_loss": 10, "mse_loss": 6, "mse_loss_backward": 6, "smooth_l1_loss": 8, "smooth_l1_loss_backward": 8,
    "huber_loss_backward": 10, "binary_cross_entropy": 30, "binary_cross_entropy_backward": 20,
    "binary_cross_entropy_with_logits": 40, "_thnn_fused_lstm_cell": 90, "_thnn_fused_lstm_cell_backward_impl": 120,
    "_thnn_fused_gru_cell": 90, "_thnn_fused_gru_cell_backward": 120, "log_sigmoid_backward": 20, "triu": 6, "tril": 6,
    "copysign": 6, "polar": 60, "view_as_complex_copy": 2, "clamp_min_backward": 4, "hypot": 20, "celu": 12,
    "isin": 10, "bitwise_left_shift": 4, "bitwise_right_shift": 4, "exp2": 12, "log10": 12, "sgn": 4, "xlogy": 20,
    "special_xlog1py": 20, "lift_fresh_copy": 2, "_efficientzerotensor": 0, "complex": 2, "real": 2, "angle": 40,
    "masked_scale": 6, "_masked_scale": 6, "softshrink_backward": 4, "hardshrink": 4, "logit": 20, "sinc": 30,
}  # fmt: skip

#: Operators that read nothing of the size of what they write: instructions per element; random numbers are Philox's.
FILLS: Mapping[str, float] = {
    "fill": 1, "zero": 1, "zeros": 1, "ones": 1, "full": 1, "zeros_like": 1, "ones_like": 1, "full_like": 1,
    "new_zeros": 1, "new_ones": 1, "new_full": 1, "scalar_tensor": 1, "arange": 4, "linspace": 6, "eye": 4,
    "bernoulli": 30, "uniform": 30, "normal": 45, "rand": 30, "randn": 45, "rand_like": 30, "randn_like": 45,
    "randint": 30, "randperm": 200, "random": 30, "exponential": 45, "randint_like": 30, "normal_functional": 45,
    "tril_indices": 10, "triu_indices": 10,
}  # fmt: skip

#: Losses, whose results may be one number.
_LOSSES = frozenset({
    "huber_loss", "mse_loss", "smooth_l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
})  # fmt: skip

#: Instructions for the offsets of an element where tensors do not lie alike, divisions by each size; from single calls
#: on the P100, the only board whose arithmetic they exceed in float32.
_OFFSETS = 36.0

_INSTRUCTIONS: Mapping[str, float] = {
    "add": 4, "sub": 4, "mul": 4, "min": 4, "max": 4, "div": 16, "pow": 45, "relu": 4, "gelu": 25, "tanh": 20,
    "sigmoid": 20, "silu": 20, "exp": 12, "log": 12, "sqrt": 12, "rsqrt": 12, "erf": 20, "sin": 20, "cos": 20,
    "neg": 2, "abs": 4, "floor": 4, "ceil": 4,
}  # fmt: skip

#: Exponents whose powers are products or roots.
_SIMPLE_POWERS = {2: "mul", 3: "mul", -1: "div", -2: "div", 0.5: "sqrt", -0.5: "rsqrt"}


def main_tensor(inputs: Inputs) -> tuple[RecordedTensor, str] | str:
    """The largest tensor and its type as Roller names it."""
    tensors = [tensor for tensor in inputs.tensors if tensor is not None]
    if not tensors:
        return "no tensor among the recorded inputs"
    largest = max(tensors, key=lambda tensor: tensor.elements)
    dtype = DTYPES.get(largest.dtype)
    if dtype is None:
        return f"elements of type {largest.dtype or 'unknown'}"
    return (largest, dtype) if largest.elements else "an empty tensor"


def streamed(kind: str, elements: int, dtype: str, passes: float, operations: float, *parts: WorkPart) -> Work:
    """Work that moves a tensor of so many elements so many times."""
    moved = passes * elements * DTYPE_BYTES[dtype]
    return Work(kind=kind, parts=parts, flops=operations * elements, bytes=moved, dtype=dtype)


def elementwise(call: Call) -> Work | str:
    """The work of an element-wise operator: as one of Roller's where all tensors have one type and lie alike."""
    if not call.outputs:
        return _recorded(call)
    if call.stem in _LOSSES and len(call.outputs) == 1 and call.outputs[0].elements == 1:
        return _summed_loss(call)
    if call.stem == "copy":
        # What is written over is not read.
        call = call._replace(inputs=Inputs(call.inputs.tensors[1:]))
    output = max(call.outputs, key=lambda tensor: tensor.elements)
    function = _function(call)
    data = _operator(call, output, function) if function else {}
    operands = [tensor for tensor in (*tensors_of(call.inputs), *call.outputs) if tensor.elements > 1]
    is_one_type = all(tensor.dtype == output.dtype for tensor in operands)
    is_dense = all(tensor.dims == output.dims and is_dense_like(tensor, output) for tensor in operands)
    total = moved_bytes(call.inputs, call.outputs)
    moved = None
    if not data or not is_one_type or not is_dense:
        reads = max((scattered(tensor, output) for tensor in operands), default=Scattered(0.0, 0.0, 0.0))
        again, between = max(most_repeated(call, output.dims), Repeated(reads.again, reads.between))
        instructions = _INSTRUCTIONS[function] if function else _OTHERS.get(call.stem, 4.0)
        vector = "vectorized_elementwise_kernel" if is_one_type else "unrolled_elementwise_kernel"
        moved = Moved(
            kernel=vector if is_dense else "elementwise_kernel",
            bytes=total,
            outputs=float(output.elements),
            instructions=instructions + (0.0 if is_dense else _OFFSETS),
            model="element-wise",
            again=again,
            between=between,
            scattered=reads.sectors,
        )
    part = WorkPart(data, "backward" if call.stem in DERIVATIVES else "forward", moved)
    operations = 2.0 if call.stem in DERIVATIVES else 1.0
    dtype = next((DTYPES[each.dtype] for each in (output, *operands) if each.dtype in DTYPES), "float32")
    flops = operations * output.elements
    return Work(kind="element-wise", parts=(part,), flops=flops, bytes=total, dtype=dtype)


def _summed_loss(call: Call) -> Work | str:
    """A loss with a mean or a sum at its end: a kernel writes every element's, and another adds them up."""
    main = main_tensor(call.inputs)
    if isinstance(main, str):
        return main
    tensor, dtype = main
    work = elementwise(call._replace(outputs=(tensor,))) if tensor.elements > 1 else "a single number"
    if isinstance(work, str):
        return work
    axes = list(range(len(tensor.dims)))
    data = {"op": "reduce", "function": "sum", "shape": list(tensor.dims), "axes": axes, "dtype": dtype}
    return replace(work, parts=(*work.parts, WorkPart(data)), bytes=work.bytes + tensor.bytes)


def _function(call: Call) -> str:
    """Roller's function for an operator; empty where it has none."""
    stem = call.stem
    if stem == "pow":
        exponent = call.inputs.value(1)
        is_number = type(exponent) in (int, float)
        return _SIMPLE_POWERS.get(exponent, "pow") if is_number and call.inputs.tensor(1) is None else "pow"
    return UNARY.get(stem) or BINARY.get(stem) or DERIVATIVES.get(stem, "")


def _operator(call: Call, output: RecordedTensor, function: str) -> dict[str, Any]:
    """The operator as in op.json; empty where Roller does not have its type."""
    dtype = DTYPES.get(output.dtype)
    if dtype is None:
        return {}
    data: dict[str, Any] = {"op": "elementwise", "shape": [output.elements], "dtype": dtype, "function": function}
    if call.stem in ("copy", "clone", "_to_copy"):
        return _transpose(call, output, dtype) or data
    if call.stem in BINARY:
        full_operands = [
            each for each in call.inputs.tensors[:2] if each is not None and each.elements * 4 > output.elements
        ]
        if len(full_operands) < 2 and function in BINARY.values():
            data["scalar"] = True
    return data


def _transpose(call: Call, output: RecordedTensor, dtype: str) -> dict[str, Any]:
    """A copy into another order of dimensions as a transposition; empty for one in order or of parts of a tensor."""
    source = call.inputs.tensor(0)
    if source is None or source.dims != output.dims or not source.strides or is_dense_like(source, output):
        return {}
    axes = [axis for axis in range(len(source.dims)) if source.dims[axis] > 1]
    stored = sorted(axes, key=lambda axis: -source.strides[axis])
    written = sorted(axes, key=lambda axis: -output.strides[axis])
    for order, strides in ((stored, source.strides), (written, output.strides)):
        step = 1
        for axis in reversed(order):
            if strides[axis] != step:
                return {}
            step *= source.dims[axis]
    shape = [source.dims[axis] for axis in stored]
    return {"op": "transpose", "shape": shape, "perm": [stored.index(axis) for axis in written], "dtype": dtype}


def _recorded(call: Call) -> Work | str:
    """A recorded operator, whose results the trace does not have: they are as large as the largest input."""
    main = main_tensor(call.inputs)
    if isinstance(main, str):
        return main
    tensor, dtype = main
    stem, count = call.stem, tensor.elements
    data: dict[str, Any] = {"op": "elementwise", "shape": [count], "dtype": dtype}
    if stem in DERIVATIVES:
        part = WorkPart(data | {"function": DERIVATIVES[stem]}, "backward")
        return streamed("element-wise", count, dtype, 3, 2, part)
    if stem in UNARY:
        return streamed("element-wise", count, dtype, 2, 1, WorkPart(data | {"function": UNARY[stem]}))
    if stem not in BINARY:
        return f"no rule for {call.name}"
    others = [other for other in call.inputs.tensors[:2] if other is not None and other.elements * 4 > count]
    data["function"] = BINARY[stem]
    if len(others) < 2:
        data["scalar"] = True
    return streamed("element-wise", count, dtype, 1 + max(len(others), 1), 1, WorkPart(data))


def fill(call: Call) -> Work | str:
    """The work of an operator that only writes."""
    if not call.outputs:
        return _recorded(call) if call.stem in UNARY else f"no rule for {call.name}"
    total = float(sum(tensor.bytes for tensor in call.outputs))
    count = sum(tensor.elements for tensor in call.outputs)
    moved = Moved(
        kernel="vectorized_elementwise_kernel",
        bytes=total,
        outputs=float(count),
        instructions=FILLS[call.stem],
        model="element-wise",
    )
    part = WorkPart({}, moved=moved)
    return Work(kind="element-wise", parts=(part,), flops=0.0, bytes=total, dtype=call.dtype or "float32")


#: Operators that :func:`elementwise` describes.
POINTWISE = frozenset((*UNARY, *BINARY, *DERIVATIVES, *_OTHERS)) - frozenset(FILLS)
