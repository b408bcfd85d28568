"""Daydream: what-if questions on real training traces (thesis chapter 4 and appendix A).

:func:`replay` reads a trace and simulates it, :func:`predict` applies passes to it: what the command line does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.support.lazy import imported_on_use

if TYPE_CHECKING:
    from daydream.answers import Prediction, Replay, predict, replay
    from daydream.whatif import parse_pass

__getattr__ = imported_on_use(
    __name__,
    {"daydream.answers": ("Prediction", "Replay", "predict", "replay"), "daydream.whatif": ("parse_pass",)},
)

__all__ = ["Prediction", "Replay", "parse_pass", "predict", "replay"]
