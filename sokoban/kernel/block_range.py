"""Rows of the other side that a block walks, of attention and its gradients: those that some row of its own meets.

Queries see the keys up to their own place, ``ahead`` further where there are more keys than queries, under a causal
mask, and of those a window's last ones. Either side of a gradient is walked so; FlashAttention has the same in its
``block_info``. Kernels write the bounds as text, the model counts the steps between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One end of a walk: a row of the block's own, moved, cut where the other side ends, or all there is.

    Sizes have names, those that kernels have for them.

    Attributes:
        option: the size that is not zero where a mask sets the bound.
        terms: signs and sizes that are added to the row, 1 for one.
        limit: where it is cut: above at a size, below at 0.
        scale: what it is multiplied by; empty for nothing.
        otherwise: the bound without the mask; 0 for the first row.
    """

    option: str
    terms: tuple[tuple[str, str], ...]
    limit: str
    scale: str = ""
    otherwise: str

    def offset(self, sizes: Mapping[str, int]) -> int:
        """What is added to the row."""
        return sum(int(f"{sign}1") * sizes[name] for sign, name in self.terms)

    def value(self, row: NDArray[np.int64], sizes: Mapping[str, int]) -> NDArray[np.int64]:
        """The bound of blocks by their rows."""
        if not sizes[self.option]:
            return np.full_like(row, sizes[self.otherwise])
        cut = np.maximum if self.limit == "0" else np.minimum
        return cut(row + self.offset(sizes), sizes[self.limit]) * (sizes[self.scale] if self.scale else 1)


#: Both ends of the keys that queries see, by a block's first and last query.
KEYS_OF_QUERIES = (
    Bound(option="WINDOW", terms=(("+", "AHEAD"), ("-", "WINDOW"), ("+", "1")), limit="0", otherwise="0"),
    Bound(option="CAUSAL", terms=(("+", "AHEAD"), ("+", "1")), limit="KEYS_ALL", otherwise="KEYS_ALL"),
)
#: Both ends of the queries, of all heads of a group, that see keys, by a block's first and last key.
QUERIES_OF_KEYS = (
    Bound(option="CAUSAL", terms=(("-", "AHEAD"),), limit="0", scale="GROUP", otherwise="0"),
    Bound(
        option="WINDOW", terms=(("-", "AHEAD"), ("+", "WINDOW")), limit="QUERIES_ALL", scale="GROUP",
        otherwise="WALKED_ALL",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BlockRange:
    """What blocks of rows walk.

    Attributes:
        is_of_keys: whether rows are keys that walk queries, not queries that walk keys.
        queries, keys, group: queries of a head, its keys, and heads that share keys, whose queries are rows of one
            problem.
        is_causal, window: the mask; 0 for no window.
    """

    is_of_keys: bool
    queries: int
    keys: int
    group: int
    is_causal: bool
    window: int

    @property
    def bounds(self) -> tuple[Bound, Bound]:
        """Where walks begin and end."""
        return QUERIES_OF_KEYS if self.is_of_keys else KEYS_OF_QUERIES

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Sizes by the names that bounds have for them."""
        return {
            "0": 0, "1": 1, "AHEAD": self.keys - self.queries, "WINDOW": self.window, "CAUSAL": int(self.is_causal),
            "GROUP": self.group, "KEYS_ALL": self.keys, "QUERIES_ALL": self.queries, "WALKED_ALL": self.walked_rows,
        }  # fmt: skip

    @property
    def rows(self) -> int:
        """Rows of one problem that blocks have for their own."""
        return self.keys if self.is_of_keys else self.queries * self.group

    @property
    def walked_rows(self) -> int:
        """Rows of one problem that they walk."""
        return self.queries * self.group if self.is_of_keys else self.keys

    def steps(self, rows: int, step: int) -> NDArray[np.int64]:
        """Steps of every block of ``rows`` rows, ``step`` rows of the other side at a time.

        >>> causal = BlockRange(is_of_keys=False, queries=256, keys=256, group=1, is_causal=True, window=0)
        >>> causal.steps(64, 64).tolist()
        [1, 2, 3, 4]
        """
        first = np.arange(0, self.rows, rows)
        last = np.minimum(first + rows, self.rows) - 1
        units = 1 if self.is_of_keys else self.group
        begin, end = self.bounds
        steps = -(-end.value(last // units, self.sizes) // step) - begin.value(first // units, self.sizes) // step
        return np.maximum(0, steps)

    def edges(self, rows: int, step: int) -> int:
        """Steps of a block that are masked element by element, where it has so many."""
        side = rows * self.group if self.is_of_keys else -(-rows // self.group)
        edges = math.ceil(side / step) if self.is_causal else int(self.walked_rows % step != 0)
        return edges + (math.ceil((side + 1) / step) if self.window else 0)
