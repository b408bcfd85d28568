"""Attention: two matrix products with a softmax between them, masked or not, heads sharing keys or not."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta

from hal.support.errors import InputError
from sokoban.language.checks import MAX_AXIS_SIZE
from sokoban.language.expression import FLOAT8_DTYPES
from sokoban.language.named.base import Operator, Program, Size
from sokoban.language.named.pages import Pages

#: A number of keys or tokens, 0 for none.
Count = Annotated[int, Meta(ge=0, le=MAX_AXIS_SIZE)]
#: Tokens of a page of the key cache that measured servers (vLLM) have.
SERVED_PAGE = 64
#: Element types of queries, keys and values.
AttentionDType = Literal["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


class AttentionSizes(Operator, kw_only=True, frozen=True):
    """Common keys of attention and its gradients: tensors ``[b, heads, queries or keys, head_dim]`` and a mask.

    Attributes:
        b: sequences.
        heads: heads of the queries.
        kv_heads: heads of keys and values, each shared by ``heads / kv_heads`` heads of queries; None for ``heads``.
        queries: queries of a sequence.
        keys: keys of a sequence; None for ``queries``.
        head_dim: elements of a query and of a key.
        value_dim: elements of a value and of a result; None for ``head_dim``.
        causal: query i sees the keys up to ``i + keys - queries``: the last one sees all.
        window: query i sees the last ``window`` of those keys alone; 0 for all of them.
        scale: what products are multiplied by; None for ``1 / sqrt(head_dim)``.
    """

    b: Size
    heads: Size
    kv_heads: Size | None = None
    queries: Size
    keys: Size | None = None
    head_dim: Size
    value_dim: Size | None = None
    causal: bool = False
    window: Count = 0
    scale: float | None = None

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def key_count(self) -> int:
        """Keys of a sequence."""
        return self.keys or self.queries

    @property
    def value_size(self) -> int:
        """Elements of a value."""
        return self.value_dim or self.head_dim

    @property
    def window_size(self) -> int:
        """Keys that a query sees at most; 0 where the window leaves none out."""
        return self.window if self.window < self.key_count else 0

    @property
    def factor(self) -> float:
        """Factor of the products."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def shares_keys(self) -> bool:
        """True if several heads of queries read the same keys."""
        return self.key_heads != self.heads

    @property
    def pages(self) -> Pages | None:
        """Pages in which keys and values lie; None where they are contiguous."""
        return None

    @property
    def least_keys(self) -> int | None:
        """Keys of a sequence at least, where sequences have lengths of their own; None where all have all keys."""
        return None

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Elements along every axis of the text."""
        group, pages = self.heads // self.key_heads, self.pages
        heads = {"g": self.key_heads, "h": group} if self.shares_keys else {"h": self.heads}
        keys = {"j": self.key_count} if pages is None else {"p": pages.per_sequence, "s": pages.tokens}
        return {"b": self.b, **heads, "i": self.queries, **keys, "d": self.head_dim, "e": self.value_size}

    @property
    def axes(self) -> tuple[str, str]:
        """Axes of a query with its head, and of the head of keys: ``b,g,h,i`` and ``g``."""
        return ("b,g,h,i", "g") if self.shares_keys else ("b,h,i", "h")

    @property
    def key_axes(self) -> str:
        """Axes of a key: ``j``, or ``p,s`` for token s of page p."""
        return "j" if self.pages is None else "p,s"

    @property
    def key_rows(self) -> str:
        """Indices of a row of keys or values, without that of its elements."""
        key_head = self.axes[1]
        return f"b,{key_head},j" if self.pages is None else f"Table[b,p],{key_head},s"

    def logits(self) -> str:
        """The statements of the scaled and masked products of queries and keys."""
        row, seen = self.axes[0], self.seen()
        cell = f"{row},{self.key_axes}"
        scaled = f"Scores[{cell}] * {self.factor!r}"
        return (
            f"Scores[{cell}] = sum(d, Q[{row},d] * K[{self.key_rows},d])\n"
            f"Logits[{cell}] = {f'select({seen}, {scaled}, -inf)' if seen else scaled}\n"
        )

    def smaller(self, *, b: int, key_heads: int, queries: int, keys: int, **widths: int) -> Self:
        """The operator of other sizes, with as many heads to a head of keys and the same factor; no more queries than
        keys where a mask is counted from the last key, and a window that still leaves some out."""
        return msgspec.structs.replace(
            self, b=b, heads=self.heads // self.key_heads * key_heads, kv_heads=key_heads,
            queries=min(queries, keys) if self.causal else queries, keys=keys,
            window=self.window_size and min(self.window_size, max(1, keys // 2)), scale=self.factor, **widths,
        )  # fmt: skip

    def check_sizes(self) -> None:
        """Raise what keys contradict each other."""
        if self.heads % self.key_heads:
            raise InputError(
                "kv_heads", f"{self.heads} heads are no multiple of {self.key_heads}", "use a divisor of heads"
            )
        if self.causal and self.queries > self.key_count:
            raise InputError(
                "causal", f"{self.queries} queries, but only {self.key_count} keys: the first would see none",
                "use at least as many keys as queries",
            )  # fmt: skip
        if self.window and not self.causal:
            raise InputError("window", "ends at a query's own key, which causal alone tells", 'add "causal": true')
        if self.scale is not None and not math.isfinite(self.scale):
            raise InputError("scale", f"{self.scale} is no finite number")

    def stem(self, operator: str) -> list[str]:
        """Parts of a derived name, that of the operator first."""
        parts = [f"{operator}_{self.b}x{self.heads}x{self.queries}x{self.key_count}x{self.head_dim}"]
        parts += [f"kv{self.key_heads}"] if self.shares_keys else []
        parts += [f"v{self.value_size}"] if self.value_size != self.head_dim else []
        parts += ["causal"] if self.causal else []
        parts += [f"w{self.window}"] if self.window else []
        return parts + ([f"scale{self.scale:g}".replace("+", "")] if self.scale is not None else [])

    def seen(self) -> str:
        """Condition under which query i sees a key, both counted from 0; empty where each sees all that there are."""
        last, pages = self.key_count - self.queries, self.pages
        key = "j" if pages is None else f"{pages.tokens}*p + s"
        if self.least_keys is not None:
            return self._seen_of_lengths(key, f"min(max(Lengths[b], {self.least_keys}), {self.key_count})")
        if not self.causal:
            return "" if pages is None or pages.are_full else f"{key} < {self.key_count}"
        end = f"{key} <= i + {last}"
        return f"{end} and {key} > i + {last - self.window_size}" if self.window_size else end

    def _seen_of_lengths(self, key: str, length: str) -> str:
        """The condition where each sequence has a length of its own."""
        if not self.causal:
            return f"{key} < {length}"
        end = f"{key} <= i + {length} - {self.queries}"
        before = self.queries + self.window_size
        return f"{end} and {key} > i + {length} - {before}" if self.window_size else end


class Attention(AttentionSizes, tag="attention", kw_only=True, frozen=True):
    """``softmax(Q * K^T * scale) * V`` for every head, of tensors ``[b, heads, queries or keys, head_dim]``.

    Attributes:
        page: tokens of a page where keys and values lie in pages, 0 where they are contiguous. Without a ``pool`` it
            changes the time of a library's call alone. None is what servers do: pages of :data:`SERVED_PAGE` tokens
            where attention is causal or a sequence has a single query, contiguous keys elsewhere and in ``eager``
            attention.
        pool: pages that keys and values of all sequences lie in, ``[pool, kv_heads, page, head_dim]``, at the places
            that the int32 input ``Table`` ``[b, pages of a sequence]`` names; 0 for tensors of contiguous keys.
        lengths: the int32 input ``Lengths`` ``[b]`` says how many of its ``keys`` each sequence has, and masks count
            from the last of those: as servers decode sequences together that have come to different lengths. A number
            below 1, or below ``queries`` under a causal mask, stands for that, and one above ``keys`` for ``keys``.
        algorithm: ``flash``, one kernel that keeps the products on chip, or ``eager``, which writes them out.
        dtype: of queries, keys and values, and of the result, which is bfloat16 where those have eight bits.
    """

    page: Count | None = None
    pool: Count = 0
    lengths: bool = False
    algorithm: Literal["flash", "eager"] = "flash"
    dtype: AttentionDType = "float32"  # type: ignore[assignment]

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, 0 where keys and values are contiguous."""
        if self.page is not None:
            return self.page
        return SERVED_PAGE if self.algorithm == "flash" and (self.causal or self.queries == 1) else 0

    @property
    def pages(self) -> Pages | None:
        """Pages in which keys and values lie; None where they are contiguous."""
        return Pages(tokens=self.page or 0, pool=self.pool, keys=self.key_count) if self.pool else None

    @property
    def least_keys(self) -> int | None:
        """Keys of a sequence at least, where sequences have lengths of their own; None where all have all keys."""
        if not self.lengths:
            return None
        return self.queries if self.causal else 1

    @property
    def output_dtype(self) -> str:
        """Element type of the result."""
        return "bfloat16" if self.dtype in FLOAT8_DTYPES else self.dtype

    def smaller(self, *, b: int, key_heads: int, queries: int, keys: int, **widths: int) -> Attention:
        """The operator of other sizes, with a pool of a page more than all sequences have where there is one."""
        small = AttentionSizes.smaller(self, b=b, key_heads=key_heads, queries=queries, keys=keys, **widths)
        pages = small.pages
        if pages is None:
            return small
        return msgspec.structs.replace(small, pool=min(self.pool, b * pages.per_sequence + 1))

    def check_sizes(self) -> None:
        """Raise what keys contradict each other."""
        AttentionSizes.check_sizes(self)
        if self.pages is not None:
            self.pages.check()

    def program(self) -> Program:
        self.check_sizes()
        if self.algorithm == "eager" and self.page:
            raise InputError("page", "eager attention reads contiguous keys", 'remove it, or "algorithm"')
        if self.algorithm == "eager" and self.dtype in FLOAT8_DTYPES:
            raise InputError("dtype", f"eager attention has no products of {self.dtype}", "use bfloat16")
        row, keys = self.axes[0], self.key_axes
        cell = f"{row},{keys}"
        text = (
            f"{self.logits()}"
            f"Peak[{row}] = max([{keys}], Logits[{cell}])\n"
            f"E[{cell}] = exp(Logits[{cell}] - Peak[{row}])\n"
            f"Total[{row}] = sum([{keys}], E[{cell}])\n"
            f"P[{cell}] = E[{cell}] / Total[{row}]\n"
            f"Y[{row},e] = sum([{keys}], P[{cell}] * V[{self.key_rows},e])"
        )
        external = {
            "Q": (self.b, self.heads, self.queries, self.head_dim),
            "Y": (self.b, self.heads, self.queries, self.value_size),
        }
        stem = self.stem("attention")
        stem += [f"page{self.page}"] if self.page is not None else []
        stem += [f"pool{self.pool}"] if self.pool else []
        stem += ["lengths"] if self.lengths else []
        stem += ["eager"] if self.algorithm == "eager" else []
        return Program(
            text=text,
            sizes=self.axis_sizes,
            output="Y",
            axes=tuple(f"{row},e".split(",")),
            stem="_".join(stem),
            shapes=self._pool_shapes(),
            external_shapes=external if self.shares_keys else {},
            bias_axes={"h": ("g", "h"), "g": ()} if self.shares_keys else {},
            dtypes=dict.fromkeys(("Q", "K", "V"), self.dtype) | dict.fromkeys(self.integer_inputs, "int32"),
            default_dtype=self.output_dtype,
        )

    @property
    def integer_inputs(self) -> tuple[str, ...]:
        """Names of the inputs behind queries, keys and values: of the table of pages, and of lengths."""
        return ("Table",) * bool(self.pool) + ("Lengths",) * self.lengths

    def _pool_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of keys and values of a pool, which no index tells."""
        if self.pages is None:
            return {}
        heads = (self.pool, self.key_heads, self.pages.tokens)
        return {"K": (*heads, self.head_dim), "V": (*heads, self.value_size)}
