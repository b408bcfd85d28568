"""Memory-efficient attention where a board has no FlashAttention: before Ampere, and in float32.

PyTorch then runs CUTLASS kernels (``fmha_cutlassF``, ``fmha_cutlassB``) that keep the scores on chip as FlashAttention
does, with the products at a stated share of the board's rate for the type: there are no measurements to fit. Tensors
are read and written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
