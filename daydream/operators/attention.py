"""Recorded attention operators of PyTorch as Roller's ``attention``, whichever library's kernels they launched.

Memory-efficient attention runs where a board has no FlashAttention: before Ampere, and in float32. PyTorch then runs
CUTLASS kernels (``fmha_cutlassF``, ``fmha_cutlassB``) that keep the scores on chip as FlashAttention does, with the
products at a stated share of the board's rate for the type: there are no measurements to fit. Tensors are read and
written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from daydream.operators.inputs import DTYPES, Inputs, RecordedTensor
from daydream.operators.work import Work, WorkPart
from hal.support.errors import InputError
from sokoban.language.expression import DTYPE_BYTES

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec
    from roller.library import LibraryCall

#: Share of the sustained rate that the products reach, forward and backward: between two products comes a softmax, and
#: backward the blocks add up the gradient of the queries in memory.
EFFICIENCY, BACKWARD_EFFICIENCY = 0.5, 0.4

#: Products of the backward pass over those of the forward pass: the scores once more, and four gradients.
BACKWARD_PRODUCTS = 2.5

#: Names of the kernels.
FORWARD, BACKWARD = "fmha_cutlassF", "fmha_cutlassB"


class _Arguments(NamedTuple):
    """Where an operator has what: positions of its arguments.

    Attributes:
        query: of the queries, which keys and values follow.
        causal: of the mask: true, or a number other than 0, for a causal one.
        heads_first: whether tensors are ``[b, heads, length, width]``, else ``[b, length, heads, width]``.
        starts: of the offsets at which sequences start that lie one behind the other; None where none do.
        left: of the number of keys before its own that a query sees, negative for all; None where there is none.
    """

    query: int
    causal: int
    heads_first: bool
    starts: int | None = None
    left: int | None = None


_FORWARD = {
    "aten::_scaled_dot_product_flash_attention": _Arguments(0, 4, True),
    "aten::_flash_attention_forward": _Arguments(0, 8, False, 3, 11),
    "aten::_scaled_dot_product_efficient_attention": _Arguments(0, 6, True),
    "aten::_efficient_attention_forward": _Arguments(0, 9, False, 4),
    "aten::_scaled_dot_product_cudnn_attention": _Arguments(0, 6, True),
    "aten::_cudnn_attention_forward": _Arguments(0, 10, True),
}

_BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_backward": _Arguments(1, 11, True),
    "aten::_flash_attention_backward": _Arguments(1, 11, False, 6, 15),
    "aten::_scaled_dot_product_efficient_attention_backward": _Arguments(1, 11, True),
    "aten::_efficient_attention_backward": _Arguments(1, 15, False, 6),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Arguments(1, 14, True),
    "aten::_cudnn_attention_backward": _Arguments(1, 14, True),
}

#: Operators whose kernels are memory-efficient where there is no FlashAttention.
_EFFICIENT = frozenset(name for name in (*_FORWARD, *_BACKWARD) if "efficient" in name)


def is_attention(name: str) -> bool:
    """True if an operator of this name is fused attention or its backward pass."""
    return name in _FORWARD or name in _BACKWARD


@lru_cache(maxsize=65536)
def describe_attention(name: str, inputs: Inputs) -> Work | str:
    """The work of an attention operator, or in words why it is unknown.

    Sequences that lie one behind the other are taken to be equally long. Without recorded values there is no mask.
    """
    backward = name in _BACKWARD
    at = (_BACKWARD if backward else _FORWARD)[name]
    tensors = [inputs.tensor(at.query + position) for position in range(3)]
    query, key, value = (_sides(tensor, at.heads_first) for tensor in tensors)
    if query is None or key is None or value is None:
        return "sizes of its operands not recorded"
    assert tensors[0] is not None  # it has sides
    dtype = DTYPES.get(tensors[0].dtype)
    if dtype is None:
        return f"elements of type {tensors[0].dtype or 'unknown'}"
    if not all((*query, *key, *value)):
        return "an empty tensor"
    packed = _sequences(inputs, at)
    if packed:
        query, key = (side._replace(b=packed, length=-(-side.b * side.length // packed)) for side in (query, key))
    mask = inputs.value(at.causal)
    causal = type(mask) in (bool, int) and bool(mask)
    data: dict[str, Any] = {
        "op": "attention", "b": query.b, "heads": query.heads, "kv_heads": key.heads, "queries": query.length,
        "keys": key.length, "head_dim": query.width, "value_dim": value.width, "causal": causal, "page": 0,
        "dtype": dtype,
    }  # fmt: skip
    window = window_of(name, inputs)
    if window:
        data["window"] = window
    reason = _contradiction(query, key, causal)
    if reason:
        return reason
    pairs = query.b * query.heads * seen_pairs(query.length, key.length, data.get("window", 0), causal=causal)
    elements = query.b * (query.heads * query.length + key.heads * key.length) * (query.width + value.width)
    guesses = ["whether attention has a mask is not recorded, taken for none"] if mask is None else []
    guesses += ["sequences of attention taken to be equally long"] if packed else []
    return Work(
        kind="attention",
        parts=(WorkPart(data, "backward" if backward else "forward", efficient=name in _EFFICIENT),),
        flops=2.0 * pairs * (query.width + value.width) * (BACKWARD_PRODUCTS if backward else 1.0),
        bytes=float(elements * DTYPE_BYTES[dtype] * (2 if backward else 1)),
        dtype=dtype,
        assumed="; ".join(guesses),
    )


class _Sides(NamedTuple):
    b: int
    heads: int
    length: int
    width: int


class Sides(NamedTuple):
    """Sizes of an attention operator, whether keys are masked causally, and whether it makes gradients."""

    b: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    causal: bool
    backward: bool


def window_of(name: str, inputs: Inputs) -> int:
    """Number of keys that a query of a causal operator sees, its own among them; 0 for all."""
    at = (_BACKWARD if name in _BACKWARD else _FORWARD)[name]
    left = inputs.value(at.left) if at.left is not None and inputs.value(at.causal) else None
    return left + 1 if type(left) is int and left >= 0 else 0


def attention_sides(name: str, inputs: Inputs) -> Sides | None:
    """The sizes of an attention operator; None where they were not recorded."""
    backward = name in _BACKWARD
    at = (_BACKWARD if backward else _FORWARD)[name]
    query, key, value = (_sides(inputs.tensor(at.query + place), at.heads_first) for place in range(3))
    if query is None or key is None or value is None:
        return None
    return Sides(
        query.b, query.heads, key.heads, query.length, key.length, query.width, value.width,
        bool(inputs.value(at.causal)), backward,
    )  # fmt: skip


def resized(
    name: str, inputs: Inputs, *, queries: int | None = None, keys: int | None = None, parts: int = 1,
    causal: bool | None = None,
) -> Inputs:  # fmt: skip
    """The arguments of an attention operator with other lengths, a part of the heads, or another mask.

    Args:
        name: of the operator.
        inputs: its arguments.
        queries: their length.
        keys: length of keys and values.
        parts: of the heads, of which one is left.
        causal: whether there is a causal mask.
    """
    at = (_BACKWARD if name in _BACKWARD else _FORWARD)[name]
    length_at, heads_at = (-2, -3) if at.heads_first else (-3, -2)
    tensors = list(inputs.tensors)
    for place, length in ((0, queries), (1, keys), (2, keys)):
        tensor = tensors[at.query + place]
        assert tensor is not None  # it has sides
        dims = list(tensor.dims)
        dims[length_at] = length or dims[length_at]
        dims[heads_at] = max(dims[heads_at] // parts, 1)
        tensors[at.query + place] = RecordedTensor(tuple(dims), tensor.dtype)
    values = list(inputs.values)
    if causal is not None and at.causal < len(values):
        values[at.causal] = str(causal)
    return Inputs(tuple(tensors), tuple(values), inputs.lists)


def _sides(tensor: RecordedTensor | None, heads_first: bool) -> _Sides | None:
    """The sides of queries, keys or values; those without a batch lie one behind the other."""
    if tensor is None or len(tensor.dims) not in (3, 4):
        return None
    b, first, second, width = tensor.dims if len(tensor.dims) == 4 else (1, *tensor.dims)
    return _Sides(b, first, second, width) if heads_first else _Sides(b, second, first, width)


def _sequences(inputs: Inputs, at: _Arguments) -> int:
    """Number of sequences that lie one behind the other; 0 where each has its own place."""
    starts = inputs.tensor(at.starts) if at.starts is not None else None
    return starts.elements - 1 if starts is not None and starts.elements > 1 else 0


def _contradiction(query: _Sides, key: _Sides, causal: bool) -> str:
    """Why these sizes make no attention; empty where they do."""
    if (query.b, query.width) != (key.b, key.width) or query.heads % key.heads:
        return f"queries of {list(query)} and keys of {list(key)} do not make attention"
    return "fewer keys than queries under a causal mask" if causal and query.length > key.length else ""


def counted_flops(work: Work) -> float:
    """Arithmetic of products as PyTorch's ``FlopCounterMode`` counts it: what masks of attention leave out, too."""
    if work.kind != "attention":
        return work.flops if work.kind in PRODUCT_KINDS else 0.0
    data = work.parts[0].data
    seen = seen_pairs(data["queries"], data["keys"], data.get("window", 0), causal=data["causal"])
    return work.flops * data["queries"] * data["keys"] / seen


#: Kinds of work that are products: what :func:`counted_flops` counts.
PRODUCT_KINDS = ("matrix product", "convolution", "attention", "recurrent layer")


# Memory-efficient


def efficient_attention_call(data: Mapping[str, Any], direction: str, device: DeviceSpec) -> LibraryCall:
    """The call of an attention operator (as in op.json) as arithmetic and traffic.

    Raises:
        InputError: the kernels have no such type, or the board no rate for it.
    """
    from roller.library.calls import LibraryCall

    dtype, backward = data["dtype"], direction != "forward"
    if dtype not in ("float32", "float16", "bfloat16"):
        raise InputError("dtype", f"memory-efficient attention has no kernel for {dtype}", "use float32 or float16")
    b, heads, kv_heads = data["b"], data["heads"], data["kv_heads"]
    queries, keys, width, value_width = data["queries"], data["keys"], data["head_dim"], data["value_dim"]
    pairs = b * heads * seen_pairs(queries, keys, data.get("window", 0), causal=data["causal"])
    flops = 2.0 * pairs * (width + value_width) * (BACKWARD_PRODUCTS if backward else 1.0)
    outputs = b * heads * queries * value_width
    elements = b * (heads * queries + kv_heads * keys) * (width + value_width)
    moved = float(elements * DTYPE_BYTES[dtype] * (2 if backward else 1))
    instruction = device.best_matrix_instruction(dtype) if dtype != "float32" else None
    rate = instruction.sustained_flops if instruction is not None else device.sustained_flops("float32")
    share = BACKWARD_EFFICIENCY if backward else EFFICIENCY
    # A roofline call computes at the sustained rate of float32.
    arithmetic = flops * device.sustained_flops("float32") / (rate * share)
    return LibraryCall(kind="roofline", label=BACKWARD if backward else FORWARD, sizes=(moved, outputs, arithmetic))


def seen_pairs(queries: int, keys: int, window: int, *, causal: bool) -> int:
    """Pairs of a query and a key that it sees, of one head.

    >>> seen_pairs(3, 4, 0, causal=True), seen_pairs(3, 4, 2, causal=True), seen_pairs(3, 4, 0, causal=False)
    (9, 6, 12)
    """
    if not causal:
        return queries * keys
    most = min(window or keys, keys)
    # Query i sees keys - queries + i + 1 keys, or the most: so many queries see fewer.
    fewer = min(max(most - (keys - queries) - 1, 0), queries)
    return queries * most - fewer * (fewer + 1) // 2
