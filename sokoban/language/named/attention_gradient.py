"""Gradients of attention: of the queries, or of keys and values, from what the forward pass saved."""

from __future__ import annotations

from typing import Literal

from sokoban.language.named.attention import AttentionSizes
from sokoban.language.named.base import Program

#: What a gradient is of.
Subject = Literal["queries", "keys"]


class AttentionGradient(AttentionSizes, tag="attention_gradient", kw_only=True, frozen=True):
    """The gradient of ``Y = softmax(Q * K^T * scale) * V`` after its queries, or after keys and values.

    Its inputs are Q, K, V, the gradient ``dY`` of the result, and two float32 numbers of every query, ``[b, heads,
    queries]``: ``L``, the logarithm of its sum of exponentials of scaled logits, which attention saves for this, and
    ``D``, the sum of ``dY * Y`` over a row (T. Dao, "FlashAttention-2", 2023, algorithm 2).

    Attributes:
        of: ``queries``: the result is dQ ``[b, heads, queries, head_dim]``; ``keys``: one tensor with dK in front of
            dV, ``[b, kv_heads, keys, head_dim + value_dim]``, summed over the heads that share them.
    """

    of: Subject

    def program(self) -> Program:
        self.check_sizes()
        row, key_head = self.axes
        cell = f"{row},j"
        text = (
            f"{self.logits()}"
            f"P[{cell}] = exp(Logits[{cell}] - L[{row}])\n"
            f"dP[{cell}] = sum(e, dY[{row},e] * V[b,{key_head},j,e])\n"
            f"dS[{cell}] = P[{cell}] * (dP[{cell}] - D[{row}]) * {self.factor!r}\n"
        )
        sizes = self.axis_sizes
        of_keys, head = self.of == "keys", f"b,{key_head},j"
        if of_keys:
            summed = "[h,i]" if self.shares_keys else "[i]"
            sizes["w"] = self.head_dim + self.value_size
            text += (
                f"dK[{head},d] = sum({summed}, dS[{cell}] * Q[{row},d])\n"
                f"dV[{head},e] = sum({summed}, P[{cell}] * dY[{row},e])\n"
                f"dKV[{head},w] = dK[{head},w | pad=0] + dV[{head},w - {self.head_dim} | pad=0]"
            )
        else:
            text += f"dQ[{row},d] = sum(j, dS[{cell}] * K[b,{key_head},j,d])"
        queries = (self.b, self.heads, self.queries)
        external = {
            "Q": (*queries, self.head_dim), "dY": (*queries, self.value_size), "L": queries, "D": queries,
        }  # fmt: skip
        if not of_keys:
            external["dQ"] = (*queries, self.head_dim)
        return Program(
            text=text,
            sizes=sizes,
            output="dKV" if of_keys else "dQ",
            axes=tuple((f"{head},w" if of_keys else f"{row},d").split(",")),
            stem="_".join([*self.stem("attention_gradient"), f"of_{self.of}"]),
            external_shapes=external if self.shares_keys else {},
            bias_axes={"h": ("g", "h"), "g": ()} if self.shares_keys and not of_keys else {},
            dtypes={"L": "float32", "D": "float32"},
        )
