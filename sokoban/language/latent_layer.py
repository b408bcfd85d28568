"""Multi-head latent attention as JSON data (DeepSeek-AI, *DeepSeek-V2*, 2024, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from hal.support.errors import InputError, listed

#: Numbers of the cache and of attention itself.
NUMBERS = ("bfloat16", "fp8")


class LatentAttention(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The module of a layer: products, attention over a cache of latent vectors, and the product of its results.

    Attributes:
        op: ``latent_attention``.
        batch: sequences.
        tokens: new ones of each.
        heads: of queries, on this board.
        context: cached tokens of each sequence.
        hidden: elements of a token.
        query_rank: elements of the latent vector of queries; 0 where queries are made at once.
        latent: elements of the cached vector.
        rope: elements of the rotated key, cached as well.
        key_dim: of a head, without the rotated elements.
        value_dim: of a head.
        precision: of the products of weights.
        cache: numbers of the cache, one of :data:`NUMBERS`.
        attention: numbers that attention multiplies, one of :data:`NUMBERS`.
        name: a name of its own.
    """

    precisions: ClassVar[tuple[str, ...]] = ("bfloat16", "fp8-tensorwise", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")

    op: str
    batch: int
    tokens: int
    heads: int
    context: int = 0
    hidden: int = 7168
    query_rank: int = 1536
    latent: int = 512
    rope: int = 64
    key_dim: int = 128
    value_dim: int = 128
    precision: str = "bfloat16"
    cache: str = "bfloat16"
    attention: str = "bfloat16"
    name: str | None = None

    @property
    def stem(self) -> str:
        """The name that it has without one of its own."""
        narrow = "_fp8cache" * (self.cache == "fp8") + "_fp8attention" * (self.attention == "fp8")
        sizes = f"{self.batch}x{self.tokens}+{self.context}_{self.heads}heads"
        return f"latent_attention_{sizes}_{self.precision}{narrow}"

    @property
    def counts(self) -> Mapping[str, int]:
        """Sizes that must be positive, by field."""
        names = ("batch", "tokens", "heads", "hidden", "latent", "rope", "key_dim", "value_dim")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raises InputError where a size is negative or there are no such numbers."""
        for field in ("context", "query_rank"):
            if getattr(self, field) < 0:
                raise InputError(field, f"got {getattr(self, field)}, expected 0 or more", "write a size")
        for field in ("cache", "attention"):
            if getattr(self, field) not in NUMBERS:
                problem = f"there is no {getattr(self, field)!r}"
                raise InputError(field, problem, f"use one of {listed(NUMBERS)}")
