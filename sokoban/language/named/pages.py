"""Pages of a pool in which a serving engine keeps keys and values, and the table that says whose they are.

The layout is FlashInfer's ``HND``: keys and values are ``[pages of the pool, kv_heads, page, head_dim]``, so that the
tokens of one page that one head has lie side by side. Key ``j`` of a sequence is token ``j % page`` of the page that
the table ``[b, pages of a sequence]`` names at ``j // page``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hal.support.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Pages of the keys and values of attention.

    Attributes:
        tokens: of a page.
        pool: pages that there are, of all sequences.
        keys: of a sequence.
    """

    tokens: int
    pool: int
    keys: int

    @property
    def per_sequence(self) -> int:
        """Pages of a sequence, the last one in part where keys end inside it."""
        return -(-self.keys // self.tokens)

    @property
    def are_full(self) -> bool:
        """True if the last page of a sequence has no token behind the last key."""
        return self.keys % self.tokens == 0

    def check(self) -> None:
        """Raises InputError unless the pages of a sequence are of some tokens, and in the pool."""
        if not self.tokens:
            raise InputError("page", "is missing: keys and values of a pool lie in pages", 'add "page": 16')
        if self.pool < self.per_sequence:
            problem = f"{self.pool} pages of {self.tokens} tokens have no room for {self.keys} keys of a sequence"
            raise InputError("pool", problem, f"use at least {self.per_sequence}")
