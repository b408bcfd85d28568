"""Matrix products, and recurrent layers, which are products step after step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from daydream.operators.inputs import DTYPES, Dims, Inputs, RecordedTensor
from daydream.operators.traffic import Call, moved_bytes
from daydream.operators.work import EVEN, GROUPED, Moved, Work, WorkPart
from sokoban.language.expression import DTYPE_BYTES

#: Operators whose main kernel is a matrix product.
PRODUCTS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "_addmm_activation", "linear", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr")
)

#: Products whose first input is added to the result.
_BIASED = ("addmm", "_addmm_activation", "baddbmm", "addbmm", "addmv")

#: Variant of batched products whose second operand is one matrix, repeated.
SHARED_WEIGHTS = "shared weights"

_BATCHED = ("bmm", "baddbmm", "addbmm")


class _ProductSizes(NamedTuple):
    """Rows, columns and summands of a matrix product, and how many of them there are (None: one, without a batch)."""

    m: int
    n: int
    k: int
    batch: int | None


def product(call: Call) -> Work | str:
    """The work of a matrix product."""
    stem, inputs = call.stem, call.inputs
    biased = stem in _BIASED
    a, b = inputs.tensor(int(biased)), inputs.tensor(int(biased) + 1)
    if a is None or b is None:
        return "sizes of its operands not recorded"
    dtype = DTYPES.get(a.dtype)
    if dtype is None:
        return f"elements of type {a.dtype or 'unknown'}"
    sizes = _product_sizes(stem, a.dims, b.dims)
    if sizes is None:
        return f"operands of {list(a.dims)} and {list(b.dims)} do not make a product"
    m, n, k, batch = sizes
    count = 1 if batch is None else batch
    if not m * n * k * count:
        return "an empty tensor"
    data: dict[str, Any] = {"op": "matmul"} if batch is None else {"op": "batch_matmul", "b": batch}
    data |= {"m": m, "n": n, "k": k, "dtype": dtype}
    if _column_major(a):
        data["transpose_a"] = True
    if stem == "linear" or _column_major(b):
        data["transpose_b"] = True
    if batch is None and _has_bias(stem, inputs, n):
        data["epilogue"] = [{"function": "bias_add", "axis": "n"}]
        if b.strides and "transpose_b" not in data:
            # Who says nothing means the weights of a linear layer.
            data["transpose_b"] = False
    # PyTorch repeats a layer's weights for a batch by a stride of 0 where it does not fold the batch into rows.
    is_shared = count > 1 and len(b.strides) == 3 and b.strides[0] == 0
    moved = (count * (m * k + m * n) + (1 if is_shared else count) * k * n) * DTYPE_BYTES[dtype]
    part = WorkPart(data, variant=SHARED_WEIGHTS if is_shared else "")
    return Work(kind="matrix product", parts=(part,), flops=2.0 * count * m * n * k, bytes=float(moved), dtype=dtype)


def _product_sizes(stem: str, left: Dims, right: Dims) -> _ProductSizes | None:
    """The sizes of a product of tensors of these dimensions, None where they do not fit each other."""
    if stem == "linear" and len(left) >= 1 and len(right) == 2:
        left, right = (math.prod(left[:-1]), left[-1]), right[::-1]
    elif stem in ("mv", "addmv") and len(left) == 2 and len(right) == 1:
        right = (right[0], 1)
    elif stem == "dot" and len(left) == len(right) == 1:
        left, right = (1, left[0]), (right[0], 1)
    batched = stem in _BATCHED
    rank = 3 if batched else 2
    if len(left) != rank or len(right) != rank or left[-1] != right[-2] or left[:-2] != right[:-2]:
        return None
    return _ProductSizes(left[-2], right[-1], left[-1], left[0] if batched else None)


def _has_bias(stem: str, inputs: Inputs, columns: int) -> bool:
    """True if a product adds a vector with an element for each of its columns."""
    if stem not in _BIASED and stem != "linear":
        return False
    bias = inputs.tensor(0 if stem in _BIASED else 2)
    return bias is not None and bias.elements == columns > 1


def _column_major(tensor: RecordedTensor) -> bool:
    """True if a matrix is the transpose of how it is stored."""
    strides = tensor.strides
    return len(strides) >= 2 and strides[-2] == 1 and strides[-1] >= tensor.dims[-2] > 1 and tensor.dims[-1] > 1


def grouped_product(call: Call) -> Work | str:
    """The work of ``_grouped_mm``, a product per expert: rows, or summands, are taken to be spread evenly over them."""
    a, b = call.inputs.tensor(0), call.inputs.tensor(1)
    if a is None or b is None or not call.outputs:
        return "sizes of its operands not recorded"
    dtype = DTYPES.get(a.dtype)
    if dtype is None:
        return f"elements of type {a.dtype or 'unknown'}"
    offsets = call.inputs.tensor(2)
    experts = next((each.dims[0] for each in (a, b) if len(each.dims) == 3), offsets.elements if offsets else 1)
    sides = [a.dims[-2], b.dims[-1], a.dims[-1]]
    # The side that the offsets cut: rows of the left operand, columns of the right one, or what both sum over.
    cut = {(2, 3): 0, (3, 2): 1, (2, 2): 2}.get((len(a.dims), len(b.dims)))
    if cut is not None:
        sides[cut] = -(-sides[cut] // experts)
    m, n, k = sides
    if not m * n * k * experts:
        return "an empty tensor"
    data = {"op": "batch_matmul", "b": experts, "m": m, "n": n, "k": k, "dtype": dtype}
    part = WorkPart(data, variant=GROUPED)
    total = moved_bytes(call.inputs, call.outputs)
    flops = 2.0 * experts * m * n * k
    return Work(kind="matrix product", parts=(part,), flops=flops, bytes=total, dtype=dtype, assumed=EVEN)


# Recurrent layers

#: Where ``_cudnn_rnn`` and its backward pass have the mode and what follows it: hidden size, size of projections,
#: layers, whether the batch comes first, dropout, training, both directions.
_MODE_AT = {"_cudnn_rnn": 6, "_cudnn_rnn_backward": 10}

#: Products per step and element of the hidden state by cuDNN's mode: ReLU, tanh, LSTM, GRU.
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}

#: Instructions per gate and element of a step.
_GATE_INSTRUCTIONS = 30.0


def recurrent(call: Call) -> Work | str:
    """The work of cuDNN's recurrent layers: one product for all inputs of a layer, then one per step.

    The backward pass goes through the steps once more and then makes the gradients of inputs and weights in one product
    each.
    """
    inputs, backward = call.inputs, call.stem.endswith("_backward")
    mode, hidden, _, layers, batch_first, _, _, bidirectional = (
        inputs.value(_MODE_AT[call.stem] + position) for position in range(8)
    )
    data = inputs.tensor(0)
    if data is None or len(data.dims) != 3 or mode not in _GATES or type(hidden) is not int or type(layers) is not int:
        return "sizes of a recurrent layer not recorded"
    dtype = DTYPES.get(data.dtype)
    if dtype is None:
        return f"elements of type {data.dtype or 'unknown'}"
    steps, b = data.dims[:2][::-1] if batch_first is True else data.dims[:2]
    ways = 2 if bidirectional is True else 1
    gates = _GATES[mode] * hidden
    parts: list[WorkPart] = []
    flops = 0.0
    for layer in range(layers):
        width = data.dims[2] if layer == 0 else hidden * ways
        # m, n, k and how often.
        products = [(steps * b, gates, width, 1), (b, gates, hidden, steps)]
        if backward:
            products = [(b, hidden, gates, steps), (steps * b, width, gates, 1)]
            products += [(gates, width, steps * b, 1), (gates, hidden, steps * b, 1)]
        for m, n, k, times in products:
            matmul = {"op": "matmul", "m": m, "n": n, "k": k, "dtype": dtype}
            parts.append(WorkPart(matmul, times=times * ways))
            flops += 2.0 * m * n * k * times * ways
        count = float(steps * b * gates * ways)
        passes = 4.0 if backward else 2.0
        pointwise = Moved(
            kernel="elementWise_bp" if backward else "elementWise_fp",
            bytes=count * passes * DTYPE_BYTES[dtype],
            outputs=count,
            instructions=_GATE_INSTRUCTIONS,
            launches=steps * ways,
        )
        parts.append(WorkPart({}, moved=pointwise))
    total = moved_bytes(inputs, call.outputs)
    return Work(kind="recurrent layer", parts=tuple(parts), flops=flops, bytes=total, dtype=dtype)
