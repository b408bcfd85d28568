"""Physical effects taken out of a cost model for the time of one evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.model.gpu import compiled

#: Stands for nothing where a figure has to be positive.
TINY = 1e-15

#: Exponent with which times add up to little more than the longest; larger ones underflow.
NO_SUM = 24.0

Patches = tuple[tuple[ModuleType, Mapping[str, Any]], ...]


@dataclass(frozen=True)
class Effect:
    """One effect, and the model without it.

    Attributes:
        name: as the tables show it.
        patches: what to replace, by module: ``(module, {name: replacement})``. A name that a module lacks is an error.
        device: the board without it.
    """

    name: str
    patches: Patches = ()
    device: Callable[[DeviceSpec], DeviceSpec] = field(default=lambda board: board)


@contextmanager
def without(effects: Iterable[Effect]) -> Iterator[None]:
    """The models without some effects, inside the block: by NumPy alone, as compiled code knows all effects."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(compiled, "ready", lambda table, placed: None))
        for effect in effects:
            for module, names in effect.patches:
                stack.enter_context(patch.multiple(module, **names))
        yield


def bars(panel: Any, values: Sequence[float], labels: Sequence[str]) -> None:
    """One horizontal bar per value, from the top down, positive ones red."""
    # A few effects without which a model is useless would flatten all others.
    limit = max(4 * float(np.quantile(np.abs(values), 0.7)), 1e-3)
    left = -max(0.15 * limit, min(limit, -min(values)))
    places = range(len(values))
    panel.barh(places, np.clip(values, left, limit), color=["C3" if value > 0 else "C0" for value in values])
    for place, value in zip(places, values, strict=True):
        if value > limit:
            panel.text(0.97 * limit, place, f"{value:.3g}", va="center", ha="right", fontsize=8, color="white")
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_yticks(places, labels, fontsize=9)
    panel.set(xlim=(left, limit), ylim=(len(values) - 0.4, -0.6))
    panel.grid(axis="x", alpha=0.25)
