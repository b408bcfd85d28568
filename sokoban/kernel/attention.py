"""Attention as kernels see it: the products of queries, keys and values, whole or by slices of the keys.

The queries of all heads that share a key head are rows of one product: row ``r`` is query ``r // group`` of the head
``r % group`` of its group, so that a tile of keys is read once for all of them (grouped heads, decoding). Slices let
several blocks share the keys of the same rows; what each of them makes is brought together by :class:`SliceSum`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sokoban.kernel.block_range import BlockRange
from sokoban.kernel.kernel import Kernel
from sokoban.language.expression import Tensor
from sokoban.language.named.attention import Attention, AttentionSizes

#: Numbers of a partial result behind the sums of its values: the largest logit in powers of two, and the sum of
#: exponentials.
SLICE_NUMBERS = 2


class GroupedHeads:
    """The heads of attention as products: those that share a head of keys are rows of one.

    Attributes:
        attention: its sizes, mask and scale.
    """

    attention: AttentionSizes

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys."""
        return self.attention.heads // self.attention.key_heads

    @property
    def query_rows(self) -> int:
        """Queries of all heads of a group."""
        return self.attention.queries * self.group

    @property
    def problems(self) -> int:
        """Heads of keys of all sequences, each with products of its own."""
        return self.attention.b * self.attention.key_heads

    @property
    def ahead(self) -> int:
        """Keys before those of the first query."""
        return self.attention.key_count - self.attention.queries

    @property
    def is_of_keys(self) -> bool:
        """True if blocks have keys for their own and walk queries."""
        return False

    @property
    def block_range(self) -> BlockRange:
        """Range that blocks walk."""
        attention = self.attention
        return BlockRange(
            is_of_keys=self.is_of_keys, queries=attention.queries, keys=attention.key_count, group=self.group,
            is_causal=attention.causal, window=attention.window_size,
        )  # fmt: skip

    @property
    def scale(self) -> float:
        """Factor of the products."""
        return self.attention.factor

    @property
    def mask_text(self) -> str:
        """Which keys a query sees, as text behind a comma; empty for all."""
        attention = self.attention
        window = f", the last {attention.window_size} keys" if attention.window_size else ""
        return f", causal{window}" if attention.causal else ""


@dataclass(frozen=True, kw_only=True)
class AttentionKernel(GroupedHeads, Kernel):
    """``softmax(Q K^T scale) V``, or its parts over ``slices`` slices of the keys.

    Attributes:
        name: of the operator.
        attention: its sizes, mask and scale.
        slices: blocks that share the keys of the same rows.
        inputs: queries ``[b, heads, queries, head_dim]``, keys and values ``[b, kv_heads, keys, ...]``; of a pool keys
            and values ``[pool, kv_heads, page, ...]`` and the table of pages ``[b, pages of a sequence]``; lengths
            ``[b]`` where sequences have their own.
        output: the result ``[b, heads, queries, value_dim]``; with several slices partial results in float32,
            ``[slices, b * heads * queries, value_dim + 2]``: values weighted by exponentials that are not divided by
            their sum, the largest logit in powers of two, the sum.
    """

    name: str
    attention: Attention
    slices: int
    inputs: tuple[Tensor, ...]
    output: Tensor

    @property
    def rows(self) -> int:
        """Queries of all heads of a group."""
        return self.query_rows

    @property
    def table(self) -> Tensor | None:
        """The table of pages; None where keys are contiguous."""
        return None if self.attention.pages is None else self.inputs[3]

    @property
    def lengths(self) -> Tensor | None:
        """Number of keys of each sequence; None where all have all of them."""
        return None if self.attention.least_keys is None else self.inputs[-1]

    @property
    def walked_bytes(self) -> int:
        """Bytes of the keys and values of all sequences, as many as they have at most, and of what says where they
        lie."""
        rows = self.problems * self.attention.key_count
        _, keys, values, *numbers = self.inputs
        row_bytes = sum(tensor.shape[-1] * tensor.element_bytes for tensor in (keys, values))
        return rows * row_bytes + sum(tensor.size_bytes for tensor in numbers)

    @property
    def schedule_numbers(self) -> Mapping[str, int]:
        """The slices of the keys."""
        return {"slices": self.slices}

    @property
    def sizes(self) -> Mapping[str, int]:
        """Elements along every axis."""
        attention = self.attention
        return {
            "problem": self.problems, "row": self.rows, "key": attention.key_count,
            "width": attention.head_dim + attention.value_size,
        }  # fmt: skip

    def statement_text(self) -> str:
        """Computation of the kernel, as text."""
        names = ", ".join(f"{tensor.name}{list(tensor.shape)}" for tensor in self.inputs)
        pages = self.attention.pages
        names += "" if pages is None else f" in pages of {pages.tokens} tokens"
        names += "" if self.lengths is None else f", the first {self.lengths.name}[b] keys of each sequence"
        slices = f", in {self.slices} slices of the keys" if self.slices > 1 else ""
        return f"{self.output.name} = softmax(Q K^T * {self.scale:.4g}) V of {names}{self.mask_text}{slices}"


@dataclass(frozen=True, kw_only=True)
class SliceSum(Kernel):
    """The result of attention from what the slices of its keys made.

    Attributes:
        name: of the operator.
        source: the partial results, see :attr:`AttentionKernel.output`.
        output: the result.
    """

    name: str
    source: Tensor
    output: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The partial results."""
        return (self.source,)

    @property
    def slices(self) -> int:
        """Number of slices of every row."""
        return self.source.shape[0]

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return self.source.shape[1]

    @property
    def width(self) -> int:
        """Elements of a row of the result."""
        return self.source.shape[2] - SLICE_NUMBERS

    @property
    def sizes(self) -> Mapping[str, int]:
        """Elements along every axis."""
        return {"slice": self.slices, "row": self.rows, "element": self.width}

    def statement_text(self) -> str:
        """Computation of the kernel, as text."""
        return (
            f"{self.output.name}[row, e] = sum(s, w[s, row] {self.source.name}[s, row, e]) / sum(s, w[s, row] total), "
            f"w = exp2(peak[s, row] - max(s, peak)), {self.slices} slices"
        )


def seen_pairs(attention: AttentionSizes) -> int:
    """Pairs of a query and a key that it sees, of one head of one sequence.

    >>> seen_pairs(Attention(b=1, heads=1, queries=3, keys=4, head_dim=8, causal=True))
    9
    >>> seen_pairs(Attention(b=1, heads=1, queries=3, keys=4, head_dim=8, causal=True, window=2))
    6
    """
    queries, keys = attention.queries, attention.key_count
    if not attention.causal:
        return queries * keys
    ahead, window = keys - queries, attention.window_size or keys
    # Query i sees min(i + ahead + 1, window) keys.
    growing = max(0, min(queries, window - ahead))
    return growing * (ahead + 1) + growing * (growing - 1) // 2 + (queries - growing) * window


def attention_flops(attention: Attention) -> float:
    """Operations of both products: two for every pair of a query and a key, and element of a head."""
    width = attention.head_dim + attention.value_size
    return 2.0 * attention.b * attention.heads * seen_pairs(attention) * width
