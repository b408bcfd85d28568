"""Memory of hand-made steps, for what-ifs in bytes worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daydream.graph.graph import Phase
from daydream.graph.memory import Held, HeldMemory, MemoryKind

F, B, U = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE


def memory(moments: Sequence[tuple[Phase, int]], held: Sequence[Held]) -> HeldMemory:
    """Memory of moments of these phases and layers, each of the trace row of the same number."""
    return HeldMemory(
        step=0,
        source="by hand",
        events=np.arange(len(moments)),
        phase=np.array([phase for phase, _ in moments], np.int64),
        layer=np.array([layer for _, layer in moments], np.int64),
        held=tuple(held),
    )


def a_map(size: float, born: int, died: int, layer: int = -1) -> Held:
    """A feature map."""
    return Held(bytes=size, born=born, died=died, kind=MemoryKind.FEATURE_MAPS, layer=layer)


def of(kind: MemoryKind, size: float, born: int, died: int) -> Held:
    """Memory of another kind."""
    return Held(bytes=size, born=born, died=died, kind=kind)
