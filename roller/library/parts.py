"""Parts of an operator as library calls, whichever way the operator was read.

Element-wise functions take the model of the one that is most like them: a kernel that streams does not care whether it
adds or subtracts. The backward pass turns every call into those that PyTorch's autograd makes for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hal.support.errors import InputError
from roller.library.calls import LibraryCall
from roller.library.streaming.elementwise import OPERATORS, Direction
from sokoban.language.expression import DTYPE_BYTES, FLOAT8_DTYPES
from sokoban.language.functions import FUNCTIONS, primitives_of
from sokoban.language.named.attention import Attention

#: Function of the expression language -> the modelled operator whose forward and whose backward kernels it has; ``u``
#: stands for a tensor and a number. An addition passes its gradient on.
ELEMENTWISE: Mapping[str, tuple[str, str]] = {
    "add": ("add", "add"), "sub": ("add", "mulu"), "mul": ("mul", "mul"), "div": ("div", "div"), "pow": ("pow", "pow"),
    "min": ("add", "mul"), "max": ("add", "mul"), "select": ("add", "mul"),
    "neg": ("copy", "copy"), "abs": ("relu", "relu"), "relu": ("relu", "relu"), "gelu": ("gelu", "gelu"),
    "tanh": ("tanh", "tanh"), "sigmoid": ("sigmoid", "sigmoid"), "silu": ("sigmoid", "sigmoid"),
    "exp": ("exp", "exp"), "log": ("exp", "exp"), "sqrt": ("sqrt", "sqrt"), "rsqrt": ("sqrt", "sqrt"),
    "erf": ("tanh", "tanh"), "sin": ("tanh", "tanh"), "cos": ("tanh", "tanh"),
}  # fmt: skip

#: Function of a tensor and a number -> the modelled operator whose forward and whose backward kernels it has.
WITH_NUMBER: Mapping[str, tuple[str, str]] = {
    "add": ("addu", "addu"), "sub": ("addu", "addu"), "mul": ("mulu", "mulu"), "div": ("divu", "divu"),
    "pow": ("powu", "powu"), "min": ("addu", "mulu"), "max": ("addu", "mulu"), "select": ("addu", "mulu"),
}  # fmt: skip

#: Function of a scan -> PyTorch's operator. Those that keep the places of what they find write them in eight bytes.
SCANS: Mapping[str, str] = {"sum": "cumsum", "prod": "cumprod", "max": "cummax", "min": "cummin"}
KEEP_PLACES, PLACE_BYTES = ("cummax", "cummin"), 8

#: CUB's scan of an only dimension.
_CUB_SCAN = "DeviceScanKernel"

#: Points of the model of streams, three instructions each, for an element that CUB scans, one that is joined to others
#: and one that is flipped: 8, 12 and 24 instructions with their indices.
_SCAN_POINTS, _JOIN_POINTS, _FLIP_POINTS = 8 / 3, 4, 8

#: Label of calls that fill a tensor with zeros.
_ZEROS = "zeros"

#: PyTorch's kernel of rows that are added where places say, and its points for an element: 20 instructions.
_INDEX_ADD, _SCATTER_POINTS = "indexFuncLargeIndex", 20 / 3

#: Element types of queries, keys and values that FlashAttention has kernels for.
FLASH_DTYPES = ("float16", "bfloat16", *FLOAT8_DTYPES)

#: What has no gradient, comparisons and rounding, by its number of operands.
WITHOUT_GRADIENT = {1: ("copy", "add"), 2: ("add", "add")}


def elementwise(function: str, elements: int, dtype: str, full_inputs: int, *, number: bool = False) -> LibraryCall:
    """A function of each element; ``full_inputs`` tensors have the size of the result, smaller ones do not count."""
    forward, _ = _variants(function, number)
    inputs = None if full_inputs == OPERATORS[forward].inputs else full_inputs
    # The label carries the function (and whether a number took part) to the backward pass.
    label = f"{function} (number)" if number else function
    return LibraryCall(
        kind="elementwise", label=label, sizes=(float(elements),), dtype=dtype, variant=forward, inputs=inputs
    )


def _variants(function: str, number: bool) -> tuple[str, str]:
    """The modelled operators for a function's forward and backward kernels."""
    if number and function in WITH_NUMBER:
        return WITH_NUMBER[function]
    if function in ELEMENTWISE:
        return ELEMENTWISE[function]
    if function not in FUNCTIONS or FUNCTIONS[function].value is None:
        return WITHOUT_GRADIENT[min(FUNCTIONS[function].arity, 2) if function in FUNCTIONS else 1]
    # A kernel of one function takes what the dearest of its primitives takes, and streams one tensor.
    unary = [each for each in primitives_of(function) if FUNCTIONS[each].arity == 1 and each in ELEMENTWISE]
    return ELEMENTWISE[max(unary, default="relu", key=lambda each: OPERATORS[ELEMENTWISE[each][0]].instructions)]


def product(b: int, m: int, n: int, k: int, dtype: str, *, batched: bool = False, bias: bool = False) -> LibraryCall:
    """A matrix product; ``bias`` makes it a linear layer, ``batched`` one of ``b`` that may be 1."""
    variant = "bmm" if batched else "linear" if bias else "matmul"
    label = {"bmm": "batch_matmul"}.get(variant, variant)
    return LibraryCall(kind="gemm", label=label, sizes=(b, m, n, k), dtype=dtype, variant=variant)


def convolution(sizes: Mapping[str, float], dtype: str) -> LibraryCall:
    """A convolution, ``sizes`` by the names of ``calls.KINDS``; double precision has no model but the roofline."""
    n, c, f, h, w = (sizes[name] for name in ("n", "c", "f", "h", "w"))
    groups, window = sizes["groups"], sizes["kh"] * sizes["kw"]
    label = "depthwise_conv2d" if groups == c > 1 else "conv2d"
    if dtype == "float64":
        outputs = n * f * sizes["out_h"] * sizes["out_w"]
        moved = DTYPE_BYTES[dtype] * (n * c * h * w + f * c // groups * window + outputs)
        work = 2 * outputs * c // groups * window
        return LibraryCall(kind="roofline", label=label, sizes=(moved, outputs, work), dtype=dtype)
    names = ("n", "c", "f", "h", "w", "kh", "kw", "stride", "groups", "out_h", "out_w", "dilation")
    return LibraryCall(kind="convolution", label=label, sizes=(*(sizes[name] for name in names), 0), dtype=dtype)


def stream(label: str, kernel: str, read: float, written: int, points: float, dtype: str) -> LibraryCall:
    """A kernel that reads ``read`` elements and writes ``written`` ones, in ``points`` evaluations."""
    moved = (read + written) * DTYPE_BYTES[dtype]
    return LibraryCall(kind="stream", label=label, sizes=(moved, written, points, 0, 0, 0), dtype=dtype, variant=kernel)


def scan(function: str, sides: tuple[int, int, int], dtype: str) -> list[LibraryCall]:
    """A cumulative function along one dimension of a contiguous tensor.

    CUB scans an only dimension unless places are kept (``scan_dim``, ``scan_dim_with_indices`` of PyTorch's
    ``ScanUtils.cuh``), and sets its tiles' states in a kernel before.

    Args:
        function: ``sum``, ``prod``, ``max`` or ``min``.
        sides: elements of all dimensions before the one that is scanned, its own, and those of all after it.
        dtype: type of the elements.
    """
    name, count, label = SCANS[function], math.prod(sides), f"scan {function}"
    if count == sides[1] and name not in KEEP_PLACES:
        states = stream("states of a scan", "DeviceScanInitKernel", 0, 0, 0, dtype)
        return [states, stream(label, _CUB_SCAN, count, count, _SCAN_POINTS * count, dtype)]
    moved = count * (2 * DTYPE_BYTES[dtype] + PLACE_BYTES * (name in KEEP_PLACES))
    return [LibraryCall(kind="scan", label=label, sizes=(*sides, moved), dtype=dtype, variant=name)]


def topk(rows: int, columns: int, k: int, dtype: str) -> LibraryCall:
    """Values by rank of contiguous rows, and their places."""
    return LibraryCall(kind="topk", label="topk", sizes=(rows, columns, k), dtype=dtype)


def scattered_sum(rows: int, columns: int, count: int, dtype: str) -> list[LibraryCall]:
    """``count`` rows that are added to those of zeros (``index_add_``): each element by an atomic addition, which reads
    and writes a row of the result as often as one is added."""
    touched = count * columns
    added = stream("add rows", _INDEX_ADD, 2 * touched, touched, _SCATTER_POINTS * touched, dtype)
    return [_zeros(rows * columns, dtype), added]


def _zeros(elements: int, dtype: str) -> LibraryCall:
    """A tensor before something is added to it, which has no gradient."""
    return replace(elementwise("copy", elements, dtype, 0), label=_ZEROS)


def scan_from(
    function: str, sides: tuple[int, int, int], dtype: str, *, reverse: bool, exclusive: bool
) -> list[LibraryCall]:
    """A scan that begins at the end, where the tensor is flipped before and after, or that leaves an element out of its
    own result, where a first one is joined to all but the last: PyTorch has kernels for neither."""
    count = math.prod(sides)
    flips = [flip(count, dtype)] * reverse
    joined = [stream("join", "CatArrayBatchedCopy", count, count, _JOIN_POINTS * count, dtype)] * exclusive
    return [*flips, *joined, *scan(function, sides, dtype), *flips]


def flip(count: int, dtype: str) -> LibraryCall:
    """Elements in the other order along a dimension, which scans from the end take before and after."""
    return stream("flip", "flip_kernel", count, count, _FLIP_POINTS * count, dtype)


def attention(operator: Attention) -> list[LibraryCall]:
    """The calls of an attention: one of FlashAttention, or those of one written out.

    Raises:
        InputError: FlashAttention has no kernel for the type.
    """
    if operator.algorithm == "eager":
        return _eager_attention(operator)
    dtype = operator.dtype
    if dtype not in FLASH_DTYPES:
        remedy = 'use "dtype": "bfloat16" or "algorithm": "eager"'
        raise InputError("dtype", f"FlashAttention has no kernel for {dtype}", remedy)
    sizes = (
        operator.b, operator.heads, operator.key_heads, operator.queries, operator.key_count, operator.head_dim,
        operator.value_size, int(operator.causal), operator.window, operator.page_tokens,
    )  # fmt: skip
    return [LibraryCall(kind="attention", label="attention", sizes=sizes, dtype=dtype)]


def _eager_attention(operator: Attention) -> list[LibraryCall]:
    """Attention written out in PyTorch, as models have it that ask for no fused kernel.

    Keys and values are repeated for the heads that share them; the products are scaled, a mask made beforehand is added
    to them, and the softmax is written out before the second product.
    """
    b, heads, queries, keys = operator.b, operator.heads, operator.queries, operator.key_count
    dtype, count = operator.dtype, b * heads
    calls = []
    if operator.key_heads != heads:
        for name, width in (("keys", operator.head_dim), ("values", operator.value_size)):
            read, written = b * operator.key_heads * keys * width, count * keys * width
            calls.append(stream(f"repeat {name}", "elementwise_kernel", read, written, written, dtype))
    calls.append(product(count, queries, keys, operator.head_dim, dtype, batched=True))
    calls.append(elementwise("mul", count * queries * keys, dtype, 1, number=True))
    if operator.causal:
        # The mask is one for all heads, too small to count.
        calls.append(elementwise("add", count * queries * keys, dtype, 1))
    calls.append(LibraryCall(kind="softmax", label="softmax", sizes=(count * queries, keys), dtype=dtype))
    calls.append(product(count, queries, operator.value_size, keys, dtype, batched=True))
    return calls


def directed(calls: Sequence[LibraryCall], direction: Direction) -> list[LibraryCall]:
    """Forward calls as they are, or the calls of their backward pass, last call first.

    >>> [call.sizes for call in directed([product(1, 64, 32, 16, "float32")], "backward")]
    [(1, 64, 16, 32), (1, 16, 32, 64)]
    """
    if direction == "forward":
        return list(calls)
    return [back for call in reversed(calls) for back in _backward(call)]


def _backward(call: LibraryCall) -> list[LibraryCall]:
    if call.kind == "gemm":
        b, m, n, k = (int(size) for size in call.sizes)
        batched = call.variant == "bmm"
        gradients = [
            replace(product(b, m, k, n, call.dtype, batched=batched), label="gradient of the first operand"),
            replace(product(b, k, n, m, call.dtype, batched=batched), label="gradient of the second operand"),
        ]
        if call.variant in ("linear", "addmm"):
            gradients.append(stream("gradient of the bias", "reduce_kernel", m * n, n, m * n, call.dtype))
        return gradients
    label = f"gradient of {call.label}"
    if call.label == _ZEROS:
        return []
    if call.kind == "elementwise":
        function, _, number = call.label.partition(" ")
        _, backward = _variants(function, bool(number))
        return [replace(call, label=label, variant=backward, direction="backward")]
    if call.kind == "attention" and call.dtype in FLOAT8_DTYPES:
        raise InputError("dtype", f"FlashAttention has no backward pass in {call.dtype}", 'use "dtype": "bfloat16"')
    if call.kind == "attention":
        # A key cache is for generation; what is trained reads contiguous keys.
        *sizes, _ = call.sizes
        return [replace(call, label=label, sizes=(*sizes, 0), direction="backward")]
    if call.kind == "scan" or call.variant.startswith("DeviceScan"):
        return _scan_backward(call)
    if call.kind == "topk":
        # Zeros, and what came from where a place says: `value_selecting_reduction_backward`.
        rows, columns, k = (int(size) for size in call.sizes)
        read = rows * k * (1 + PLACE_BYTES / DTYPE_BYTES[call.dtype])
        at = stream("gradients at places", "scatter_gather_elementwise_kernel", read, rows * k, rows * k, call.dtype)
        return [_zeros(rows * columns, call.dtype), at]
    if call.variant == _INDEX_ADD:
        count = int(call.sizes[1])
        return [stream("rows by number", "indexSelectLargeIndex", count, count, _SCATTER_POINTS * count, call.dtype)]
    if call.kind in ("convolution", "softmax", "layer_norm"):
        return [replace(call, label=label, direction="backward")]
    moved, _, work, *others = call.sizes
    if call.kind == "roofline":
        # Every operand's gradient costs about what the operator did, and there are two as a rule.
        return [replace(call, label=label, sizes=(2 * moved, call.sizes[1], 2 * work))]
    elements = moved / DTYPE_BYTES[call.dtype]
    return [replace(call, label=label, variant=f"{call.variant} (backward)", sizes=(moved, elements, work, *others))]


def _scan_backward(call: LibraryCall) -> list[LibraryCall]:
    """Gradients of PyTorch's scans: that of a sum is a sum from the end; that of a product sums what the results and
    their gradients multiply to, by the operand, which has no zeros (``cumprod_backward``); and those of the largest and
    smallest elements go where these were found (``cummaxmin_backward``)."""
    if call.variant == "DeviceScanInitKernel":
        return []
    function, dtype = call.label.split()[1], call.dtype
    count = int(call.sizes[1]) if call.kind == "stream" else math.prod(int(side) for side in call.sizes[:3])
    if SCANS[function] in KEEP_PLACES:
        zeros = elementwise("copy", count, dtype, 0)
        read = count * (2 + PLACE_BYTES / DTYPE_BYTES[dtype])
        return [zeros, stream("gradients at places", "scatter_gather_elementwise_kernel", read, count, count, dtype)]
    sides = (1, count, 1) if call.kind == "stream" else (int(call.sizes[0]), int(call.sizes[1]), int(call.sizes[2]))
    summed = [flip(count, dtype), *scan("sum", sides, dtype), flip(count, dtype)]
    if function == "sum":
        return summed
    without_zeros = [
        elementwise("floor", count, dtype, 1),
        stream("reduce max", "reduce_kernel", count, 1, count, dtype),
    ]
    return [elementwise("mul", count, dtype, 2), *without_zeros, *summed, elementwise("div", count, dtype, 2)]
