"""What an operator computes: its input sizes and types as operators that Roller can price, those of attention and
convolutions aside."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from daydream.operators.inputs import DTYPES, Dims, Inputs, RecordedTensor, pair
from daydream.operators.work import Direction, Work, WorkPart
from sokoban.language.expression import DTYPE_BYTES

#: Operators whose main kernel is a matrix product.
PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "_addmm_activation", "linear", "bmm", "baddbmm", "mv", "addmv")
)

#: PyTorch's functions of one tensor to Roller's that streams alike; a copy moves what a negation does.
_UNARY = {
    "abs": "abs", "ceil": "ceil", "cos": "cos", "erf": "erf", "exp": "exp", "floor": "floor", "gelu": "gelu",
    "log": "log", "neg": "neg", "relu": "relu", "rsqrt": "rsqrt", "sigmoid": "sigmoid", "silu": "silu", "sin": "sin",
    "sqrt": "sqrt", "tanh": "tanh", "clamp": "relu", "clamp_min": "relu", "clamp_max": "relu", "threshold": "relu",
    "hardtanh": "relu", "leaky_relu": "relu", "dropout": "relu", "nan_to_num": "relu", "copy": "neg", "clone": "neg",
    "_to_copy": "neg", "contiguous": "neg", "fill": "neg", "reciprocal": "sqrt", "square": "relu",
}  # fmt: skip

_BINARY = {
    "add": "add", "sub": "sub", "rsub": "sub", "mul": "mul", "div": "div", "pow": "pow", "minimum": "min",
    "maximum": "max",
}  # fmt: skip

_DERIVATIVES = {
    "threshold_backward": "relu", "sigmoid_backward": "sigmoid", "tanh_backward": "tanh", "gelu_backward": "gelu",
    "silu_backward": "silu", "hardtanh_backward": "relu", "leaky_relu_backward": "relu",
}  # fmt: skip

_SOFTMAX = {"_softmax": "forward", "_log_softmax": "forward", "softmax": "forward", "log_softmax": "forward",
            "_softmax_backward_data": "backward", "_log_softmax_backward_data": "backward"}  # fmt: skip

_NORMS = ("cudnn_batch_norm", "native_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit", "batch_norm")
_POOLS = ("max_pool2d_with_indices", "max_pool2d", "avg_pool2d")


@lru_cache(maxsize=65536)
def describe(name: str, inputs: Inputs) -> Work | str:
    """The work of any operator but a convolution, or in words why it is unknown.

    Names are those of the operators that launch kernels (``aten::addmm``), in place or not. Assumptions: what is
    written has the size of the largest input; log-softmax costs what softmax costs; batch norm reads its input twice
    forward and five times over in all backward; integer tensors have no price.
    """
    stem = name.removeprefix("aten::").removesuffix("_")
    if name in PRODUCTS:
        return _product(stem, inputs)
    if stem in _UNARY or stem in _BINARY or stem in _DERIVATIVES:
        return _elementwise(stem, inputs)
    if stem in _SOFTMAX:
        way: Direction = "backward" if _SOFTMAX[stem] == "backward" else "forward"
        return _along_rows("softmax", inputs, 2 if stem.endswith("backward_data") else 1, way)
    if stem in ("native_layer_norm", "layer_norm"):
        return _along_rows("layer_norm", inputs, None, "forward")
    if stem == "native_layer_norm_backward":
        return _along_rows("layer_norm", inputs, None, "backward")
    if stem in _NORMS or stem.removesuffix("_backward") in _NORMS:
        return _batch_norm(inputs, backward=stem.endswith("_backward"))
    if stem in _POOLS or stem.removesuffix("_backward") in _POOLS:
        return _pool(stem, inputs)
    if stem in ("sum", "mean"):
        return _reduction(stem, inputs)
    if stem == "embedding":
        return _embedding(inputs)
    return f"no rule for {name}"


def _main(inputs: Inputs) -> tuple[RecordedTensor, str] | str:
    """The largest tensor and its type as Roller names it."""
    tensors = [tensor for tensor in inputs.tensors if tensor is not None]
    if not tensors:
        return "no tensor among the recorded inputs"
    largest = max(tensors, key=lambda tensor: tensor.elements)
    dtype = DTYPES.get(largest.dtype)
    if dtype is None:
        return f"elements of type {largest.dtype or 'unknown'}"
    return (largest, dtype) if largest.elements else "an empty tensor"


class _ProductSizes(NamedTuple):
    """Rows, columns and summands of a matrix product, and how many of them there are (None: one, without a batch)."""

    m: int
    n: int
    k: int
    batch: int | None


#: Products whose first input is added to the result.
_BIASED = ("addmm", "_addmm_activation", "baddbmm", "addmv")

_BATCHED = ("bmm", "baddbmm")


def _product(stem: str, inputs: Inputs) -> Work | str:
    biased = stem in _BIASED
    left, right = inputs.tensor(int(biased)), inputs.tensor(int(biased) + 1)
    if left is None or right is None:
        return "sizes of its operands not recorded"
    dtype = DTYPES.get(left.dtype)
    if dtype is None:
        return f"elements of type {left.dtype or 'unknown'}"
    sizes = _product_sizes(stem, left.dims, right.dims)
    if sizes is None:
        return f"operands of {list(left.dims)} and {list(right.dims)} do not make a product"
    m, n, k, batch = sizes
    count = 1 if batch is None else batch
    if not m * n * k * count:
        return "an empty tensor"
    data: dict[str, Any] = {"op": "matmul"} if batch is None else {"op": "batch_matmul", "b": batch}
    data |= {"m": m, "n": n, "k": k, "dtype": dtype}
    if _column_major(left):
        data["transpose_a"] = True
    if stem == "linear" or _column_major(right):
        data["transpose_b"] = True
    if batch is None and _has_bias(stem, inputs, n):
        data["epilogue"] = [{"function": "bias_add", "axis": "n"}]
    moved = count * (m * k + k * n + m * n) * DTYPE_BYTES[dtype]
    return Work(
        kind="matrix product", parts=(WorkPart(data),), flops=2.0 * count * m * n * k, bytes=float(moved), dtype=dtype
    )


def _product_sizes(stem: str, left: Dims, right: Dims) -> _ProductSizes | None:
    """The sizes of a product of tensors of these dimensions, None where they do not fit each other."""
    if stem == "linear" and len(left) >= 1 and len(right) == 2:
        left, right = (math.prod(left[:-1]), left[-1]), right[::-1]
    elif stem in ("mv", "addmv") and len(left) == 2 and len(right) == 1:
        right = (right[0], 1)
    batched = stem in _BATCHED
    rank = 3 if batched else 2
    if len(left) != rank or len(right) != rank or left[-1] != right[-2] or left[:-2] != right[:-2]:
        return None
    return _ProductSizes(left[-2], right[-1], left[-1], left[0] if batched else None)


def _has_bias(stem: str, inputs: Inputs, columns: int) -> bool:
    """Whether a product adds a vector with an element for each of its columns."""
    if stem not in _BIASED and stem != "linear":
        return False
    bias = inputs.tensor(0 if stem in _BIASED else 2)
    return bias is not None and bias.elements == columns > 1


def _column_major(tensor: RecordedTensor) -> bool:
    """Whether a matrix is the transpose of how it is stored."""
    strides = tensor.strides
    return len(strides) >= 2 and strides[-2] == 1 and strides[-1] >= tensor.dims[-2] > 1 and tensor.dims[-1] > 1


def _streamed(kind: str, shape: Dims, dtype: str, passes: float, operations: float, *parts: WorkPart) -> Work:
    """Work that moves a tensor of this shape so many times."""
    count = math.prod(shape)
    return Work(
        kind=kind, parts=parts, flops=operations * count, bytes=passes * count * DTYPE_BYTES[dtype], dtype=dtype
    )


def _flat(shape: Dims) -> list[int]:
    # One dimension is as good as many to a kernel that streams, and cheaper to read.
    return [math.prod(shape)]


def _elementwise(stem: str, inputs: Inputs) -> Work | str:
    main = _main(inputs)
    if isinstance(main, str):
        return main
    tensor, dtype = main
    data: dict[str, Any] = {"op": "elementwise", "shape": _flat(tensor.dims), "dtype": dtype}
    if stem in _DERIVATIVES:
        part = WorkPart(data | {"function": _DERIVATIVES[stem]}, "backward")
        return _streamed("element-wise", tensor.dims, dtype, 3, 2, part)
    if stem in _UNARY:
        return _streamed("element-wise", tensor.dims, dtype, 2, 1, WorkPart(data | {"function": _UNARY[stem]}))
    others = [other for other in inputs.tensors[:2] if other is not None and other.elements * 4 > tensor.elements]
    data["function"] = _BINARY[stem]
    if len(others) < 2:
        data["scalar"] = True
    return _streamed("element-wise", tensor.dims, dtype, 1 + max(len(others), 1), 1, WorkPart(data))


def _along_rows(op: str, inputs: Inputs, axis_at: int | None, direction: Direction) -> Work | str:
    main = _main(inputs)
    if isinstance(main, str):
        return main
    tensor, dtype = main
    axis = inputs.value(axis_at) if axis_at is not None else None
    position = axis if type(axis) is int and -len(tensor.dims) <= axis < len(tensor.dims) else -1
    columns = tensor.dims[position] if tensor.dims else 1
    if op == "layer_norm":
        # Gamma has the shape of what is normalised.
        trailing = {tensor.dims[start:] for start in range(1, len(tensor.dims))}
        gammas = [each.elements for each in inputs.tensors if each is not None and each.dims in trailing]
        columns = gammas[0] if gammas else columns
    data = {"op": op, "shape": [tensor.elements // columns, columns], "dtype": dtype}
    passes = 2 if direction == "forward" else 3
    return _streamed(op.replace("_", " "), tensor.dims, dtype, passes, 8, WorkPart(data, direction))


def _batch_norm(inputs: Inputs, *, backward: bool) -> Work | str:
    main = _main(inputs)
    if isinstance(main, str):
        return main
    tensor, dtype = main
    if len(tensor.dims) < 2:
        return "an input of fewer than two dimensions"
    n, c, pixels = tensor.dims[0], tensor.dims[1], math.prod(tensor.dims[2:])
    reduce = WorkPart({"op": "reduce", "function": "sum", "shape": [n, c, pixels], "axes": [0, 2], "dtype": dtype})
    apply = {"op": "elementwise", "shape": _flat(tensor.dims), "dtype": dtype}
    if not backward:
        scale = WorkPart(apply | {"function": "mul", "scalar": True})
        return _streamed("batch norm", tensor.dims, dtype, 3, 6, reduce, scale)
    return _streamed(
        "gradient of batch norm", tensor.dims, dtype, 5, 10, reduce, reduce, WorkPart(apply | {"function": "add"})
    )


def _pool(stem: str, inputs: Inputs) -> Work | str:
    backward = stem.endswith("_backward")
    tensor = inputs.tensor(int(backward))
    if tensor is None or len(tensor.dims) != 4:
        return "sizes of its operands not recorded"
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        return f"elements of type {tensor.dtype or 'unknown'}"
    window, stride, padding = (pair(inputs.value(1 + backward + i)) for i in range(3))
    if window is None:
        return "its window was not recorded"
    stride = stride or window
    op = "avg_pool2d" if stem.startswith("avg") else "max_pool2d"
    n, c, h, w = tensor.dims
    rows, columns = padding or (0, 0)
    data = {
        "op": op, "n": n, "c": c, "h": h, "w": w, "kh": window[0], "kw": window[1], "stride": list(stride),
        "padding": [rows, columns, rows, columns], "dtype": dtype,
    }  # fmt: skip
    passes = 1 + 1 / (stride[0] * stride[1])
    return _streamed("pooling", tensor.dims, dtype, passes, 1, WorkPart(data, "backward" if backward else "forward"))


def _reduction(stem: str, inputs: Inputs) -> Work | str:
    main = _main(inputs)
    if isinstance(main, str):
        return main
    tensor, dtype = main
    axes = inputs.value(1)
    rank = len(tensor.dims)
    positions = [axis % rank for axis in axes if type(axis) is int] if isinstance(axes, list) and rank else []
    if not tensor.dims:
        return "a single number"
    data = {"op": "reduce", "function": stem, "shape": list(tensor.dims), "axes": positions or list(range(rank))}
    return _streamed("reduction", tensor.dims, dtype, 1, 1, WorkPart(data | {"dtype": dtype}))


def _embedding(inputs: Inputs) -> Work | str:
    table, index = inputs.tensor(0), inputs.tensor(1)
    if table is None or index is None or len(table.dims) != 2:
        return "sizes of its operands not recorded"
    dtype = DTYPES.get(table.dtype)
    if dtype is None or not table.elements * index.elements:
        return f"elements of type {table.dtype or 'unknown'}" if dtype is None else "an empty tensor"
    shape = (index.elements, table.dims[1])
    part = WorkPart({"op": "elementwise", "function": "neg", "shape": _flat(shape), "dtype": dtype})
    return _streamed("embedding", shape, dtype, 2, 0, part)
