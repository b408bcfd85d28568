"""Whose the bytes are at a moment of a footprint, for captured steps and recordings alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daydream.memory.footprint import Footprint, MemoryKind
from daydream.trace.trace import NONE


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Memory held for a layer at a moment.

    Attributes:
        name: the layer's; ``""`` outside all.
        by_kind: bytes of the kinds that there are.
    """

    name: str
    by_kind: dict[MemoryKind, int]

    @property
    def bytes(self) -> int:
        """Of all kinds together."""
        return sum(self.by_kind.values())


def layers_at(memory: Footprint, moment: int, names: Sequence[str]) -> list[LayerBytes]:
    """Bytes held at a moment by layer, the largest first; allocations' ``module`` points at ``names``."""
    sizes: dict[int, dict[MemoryKind, int]] = {}
    for each in memory.held:
        if each.born <= moment <= each.died:
            kinds = sizes.setdefault(each.module, {})
            kinds[each.kind] = kinds.get(each.kind, 0) + each.bytes
    layers = [LayerBytes(names[module] if module != NONE else "", kinds) for module, kinds in sizes.items()]
    return sorted(layers, key=lambda layer: -layer.bytes)
