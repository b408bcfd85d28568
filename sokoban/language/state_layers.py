"""Layers that keep a state for each sequence, as JSON data: gated delta networks and Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from hal.support.errors import InputError, listed

#: Parts of a layer: the causal convolution, and the rule by which its state moves.
PARTS = ("both", "convolution", "rule")

#: Many tokens of every sequence at once, or one.
PHASES = ("prefill", "decode")


def check_part(part: str, phase: str, tokens: int) -> None:
    """Raises InputError unless the part and the phase exist and the phase has so many tokens."""
    if part not in PARTS:
        raise InputError("part", f"there is none called {part!r}", f"use one of {listed(PARTS)}")
    if phase not in PHASES:
        raise InputError("phase", f"there is none called {phase!r}", f"use one of {listed(PHASES)}")
    if phase == "decode" and tokens != 1:
        raise InputError("tokens", f"got {tokens} while decoding", "a sequence gets one token at a time: write 1")


class DeltaNet(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A gated delta network without its products: causal convolution and gated delta rule (Yang et al., ICLR 2025).

    Attributes:
        op: ``delta_net``.
        batch: sequences.
        tokens: new ones of each.
        key_heads: heads of queries and of keys.
        value_heads: heads of values, a multiple of them.
        key_dim: elements of a query and of a key.
        value_dim: elements of a value.
        part: one of :data:`PARTS`.
        phase: one of :data:`PHASES`.
        precision: of activations; states are float32.
        name: a name of its own.
    """

    precisions: ClassVar[tuple[str, ...]] = ("bfloat16",)

    op: str
    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    part: str = "both"
    phase: str = "prefill"
    precision: str = "bfloat16"
    name: str | None = None

    @property
    def stem(self) -> str:
        """The name that it has without one of its own."""
        part = "" if self.part == "both" else f"_{self.part}"
        heads = f"{self.key_heads}to{self.value_heads}heads"
        return f"delta_net_{self.batch}x{self.tokens}_{heads}{part}" + "_decode" * (self.phase == "decode")

    @property
    def counts(self) -> Mapping[str, int]:
        """Sizes that must be positive, by field."""
        names = ("batch", "tokens", "key_heads", "value_heads", "key_dim", "value_dim")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raises InputError where fields contradict each other."""
        check_part(self.part, self.phase, self.tokens)
        if self.value_heads % self.key_heads:
            problem = f"got {self.value_heads} for {self.key_heads} heads of keys"
            raise InputError("value_heads", problem, "every head of keys serves as many heads of values")


class Mamba2(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Mamba-2 without its products: causal convolution and scan of a state space (Dao and Gu, ICML 2024).

    Attributes:
        op: ``mamba2``.
        batch: sequences.
        tokens: new ones of each.
        heads: of the state.
        head_dim: elements of a head.
        state: elements of the state for each of them.
        groups: of heads that share what is written and read.
        part: one of :data:`PARTS`.
        phase: one of :data:`PHASES`.
        precision: of activations; states are float32.
        name: a name of its own.
    """

    precisions: ClassVar[tuple[str, ...]] = ("bfloat16",)

    op: str
    batch: int
    tokens: int
    heads: int
    head_dim: int = 64
    state: int = 128
    groups: int = 1
    part: str = "both"
    phase: str = "prefill"
    precision: str = "bfloat16"
    name: str | None = None

    @property
    def stem(self) -> str:
        """The name that it has without one of its own."""
        part = "" if self.part == "both" else f"_{self.part}"
        heads = f"{self.heads}heads{self.head_dim}x{self.state}"
        return f"mamba2_{self.batch}x{self.tokens}_{heads}{part}" + "_decode" * (self.phase == "decode")

    @property
    def counts(self) -> Mapping[str, int]:
        """Sizes that must be positive, by field."""
        return {name: getattr(self, name) for name in ("batch", "tokens", "heads", "head_dim", "state", "groups")}

    def check(self) -> None:
        """Raises InputError where fields contradict each other."""
        check_part(self.part, self.phase, self.tokens)
        if self.heads % self.groups:
            raise InputError("groups", f"got {self.groups} for {self.heads} heads", "groups have as many heads each")
