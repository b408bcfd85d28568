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

    With ``slopes`` both gradients take five products in place of seven: that of keys and values also gives the
    gradients of the scaled logits, ``P * (dY * V^T - D)``, and that of queries reads them, in place of everything else
    but K.

    Attributes:
        of: ``queries``: the result is dQ ``[b, heads, queries, head_dim]``; ``keys``: one tensor with dK in front of
            dV, ``[b, kv_heads, keys, head_dim + value_dim]``, summed over the heads that share them.
        slopes: the tensor of keys has the slopes of a key's logits behind its dV, those of a head's queries side by
            side, ``[b, kv_heads, keys, head_dim + value_dim + heads / kv_heads * queries]``, 0 for queries that do not
            see the key. The gradient of queries takes this tensor and K alone.
    """

    of: Subject
    slopes: bool = False

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Elements of dK, of dV and, with ``slopes``, of those, which lie side by side in a row of the tensor of
        keys."""
        of_slopes = (self.heads // self.key_heads * self.queries,) if self.slopes else ()
        return (self.head_dim, self.value_size, *of_slopes)

    @property
    def row_size(self) -> int:
        """Elements of a row of the tensor of keys."""
        return sum(self.row_widths)

    def program(self) -> Program:
        self.check_sizes()
        of_keys, (row, key_head) = self.of == "keys", self.axes
        head = f"b,{key_head},j"
        sizes = self.axis_sizes
        is_product = self.slopes and not of_keys
        if of_keys:
            sizes["w"] = self.row_size
        if is_product:
            del sizes["e"]
        queries = (self.b, self.heads, self.queries)
        external = {} if is_product else {
            "Q": (*queries, self.head_dim), "dY": (*queries, self.value_size), "L": queries, "D": queries,
        }  # fmt: skip
        if not of_keys:
            external["dQ"] = (*queries, self.head_dim)
        return Program(
            text=self._product()
            if is_product
            else self._slopes() + (self._of_keys() if of_keys else self._of_queries()),
            sizes=sizes,
            output=self.output,
            axes=tuple((f"{head},w" if of_keys else f"{row},d").split(",")),
            stem="_".join([*self.stem("attention_gradient"), f"of_{self.of}"] + ["slopes"] * self.slopes),
            external_shapes=external if self.shares_keys else {},
            bias_axes={"h": ("g", "h"), "g": ()} if self.shares_keys and not of_keys else {},
            dtypes={} if is_product else {"L": "float32", "D": "float32"},
        )

    @property
    def output(self) -> str:
        """Name of the result."""
        return ("dKVS" if self.slopes else "dKV") if self.of == "keys" else "dQ"

    def _slopes(self) -> str:
        """The statements of probabilities and of gradients of logits, those of the scaled ones by themselves where they
        are a result."""
        row, key_head = self.axes
        cell = f"{row},j"
        slope = f"P[{cell}] * (dP[{cell}] - D[{row}])"
        scaled = f"S[{cell}] = {slope}\ndS[{cell}] = S[{cell}]" if self.slopes else f"dS[{cell}] = {slope}"
        return (
            f"{self.logits()}"
            f"P[{cell}] = exp(Logits[{cell}] - L[{row}])\n"
            f"dP[{cell}] = sum(e, dY[{row},e] * V[b,{key_head},j,e])\n"
            f"{scaled} * {self.factor!r}\n"
        )

    def _of_keys(self) -> str:
        """The statements of dK and dV, and of the tensor that has both."""
        row, key_head = self.axes
        cell, head, before = f"{row},j", f"b,{key_head},j", self.head_dim + self.value_size
        summed = "[h,i]" if self.shares_keys else "[i]"
        text = (
            f"dK[{head},d] = sum({summed}, dS[{cell}] * Q[{row},d])\n"
            f"dV[{head},e] = sum({summed}, P[{cell}] * dY[{row},e])\n"
        )
        both = f"dK[{head},w | pad=0] + dV[{head},w - {self.head_dim} | pad=0]"
        if not self.slopes:
            return f"{text}dKV[{head},w] = {both}"
        if not self.shares_keys:
            return f"{text}dKVS[{head},w] = {both} + S[b,h,w - {before},j | pad=0]"
        # Queries of a head lie behind those of the head before; outside of its own, a head adds nothing.
        return (
            f"{text}Sg[{head},w] = sum(h, S[b,g,h,w - {before} - {self.queries}*h,j | pad=0])\n"
            f"dKVS[{head},w] = {both} + Sg[{head},w]"
        )

    def _of_queries(self) -> str:
        """The statement of dQ."""
        row, key_head = self.axes
        return f"dQ[{row},d] = sum(j, dS[{row},j] * K[b,{key_head},j,d])"

    def _product(self) -> str:
        """The statements of dQ from the tensor of keys."""
        row, key_head = self.axes
        place = f"i + {self.head_dim + self.value_size}" + (f" + {self.queries}*h" if self.shares_keys else "")
        read, seen = f"dKVS[b,{key_head},j,{place}]", self.seen()
        return f"dS[{row},j] = {f'select({seen}, {read}, 0)' if seen else read} * {self.factor!r}\n{self._of_queries()}"
