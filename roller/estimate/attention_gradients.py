"""The backward pass of attention as operators of ours, from what the forward pass saved.

Both gradients take the row sums of results and their gradients first. Seven products without memory between the kernels
are one way; five, with the slopes of logits between them, another (:mod:`roller.algorithms.flash_gradient`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from hal.spec.parts import DTYPE_BYTES
from sokoban.language.expression import TensorExpr
from sokoban.language.named.attention import Attention, AttentionSizes
from sokoban.language.named.attention_gradient import AttentionGradient, Subject
from sokoban.language.named.expressions import program_expression
from sokoban.language.operators import operator_from_data
from sokoban.schedule.attention_gradient import SLOPE_PIECE

#: Most bytes of slopes at a time: of more, sequences or heads are taken in slices, which use the same memory one after
#: the other. A choice of ours: a fortieth of an A100's memory, under which a slice still fills the board.
SLOPE_BYTES = 2**31


@dataclass(frozen=True)
class Gradient:
    """One gradient, or a part of one: ``label`` says of what, ``expr`` how."""

    label: str
    expr: TensorExpr


def two_kernels(attention: Attention) -> list[Gradient]:
    """Row sums, then either gradient by a kernel that computes logits and slopes anew."""
    return [_row_sums(attention), _gradient(attention, "Q", of="queries"), _gradient(attention, "K and V", of="keys")]


def with_slopes(attention: Attention) -> list[Gradient] | None:
    """Row sums, then slice by slice the gradients of keys and values with slopes, and that of the queries from these.

    None where slopes of one head are more than :data:`SLOPE_BYTES`, or no kernel reads those of so many queries.
    """
    part = _slice(attention)
    if part is None or attention.queries % SLOPE_PIECE or attention.dtype not in ("float16", "bfloat16"):
        return None
    count = attention.b * attention.key_heads // (part.b * part.key_heads)
    places = [f", slice {number} of {count}" if count > 1 else "" for number in range(1, count + 1)]
    pair = (_gradient(part, "K and V", of="keys", slopes=True), _gradient(part, "Q", of="queries", slopes=True))
    return [
        _row_sums(attention),
        *(Gradient(f"{each.label}{place}", each.expr) for place in places for each in pair),
    ]


def _slice(attention: Attention) -> Attention | None:
    """The most sequences, or heads of one, whose slopes fit; None where those of one head do not."""
    group, key_heads = attention.heads // attention.key_heads, attention.key_heads
    head_bytes = group * attention.queries * attention.key_count * DTYPE_BYTES[attention.dtype]
    whole = [(b, key_heads) for b in range(attention.b, 0, -1) if attention.b % b == 0]
    cut = [(1, heads) for heads in range(key_heads - 1, 0, -1) if key_heads % heads == 0]
    for b, heads in (*whole, *cut):
        if b * heads * head_bytes <= SLOPE_BYTES:
            return msgspec.structs.replace(attention, b=b, heads=heads * group, kv_heads=heads)
    return None


def _row_sums(attention: Attention) -> Gradient:
    """The sums of results and their gradients over a row, which the forward pass does not save."""
    rows = attention.b * attention.heads * attention.queries
    return Gradient(
        "gradient of P, summed over keys",
        operator_from_data(
            {
                "expr": "D[r] = sum(e, dY[r,e] * Y[r,e])", "sizes": {"r": rows, "e": attention.value_size},
                "dtype": attention.dtype, "dtypes": {"D": "float32"},
            }
        ),
    )  # fmt: skip


def _gradient(attention: Attention, label: str, *, of: Subject, slopes: bool = False) -> Gradient:
    """One gradient of attention."""
    sizes: dict[str, Any] = msgspec.structs.asdict(attention)
    common = {key: sizes[key] for key in AttentionSizes.__struct_fields__ if key not in ("name", "epilogue")}
    gradient = AttentionGradient(of=of, slopes=slopes, **common)
    return Gradient(f"gradient of {label}", program_expression(gradient, gradient.program().stem))
