"""PyTorch's own planners of distributed training, given Roller's prices.

PyTorch decides what to recompute, what to overlap and what to fuse by how long operators take. These are subclasses
and hooks that answer that question for a board that need not be there (``docs/planners.md``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.support.lazy import imported_on_use

if TYPE_CHECKING:
    from daydream.planners.board import board_operators
    from daydream.planners.estimators import RollerRuntimeEstimator, RollerSACEstimator
    from daydream.planners.hooks import budget_runtime, node_runtime, op_runtime
    from daydream.planners.profile import write_profile

__getattr__ = imported_on_use(
    __name__,
    {
        "daydream.planners.board": ("board_operators",),
        "daydream.planners.estimators": ("RollerRuntimeEstimator", "RollerSACEstimator"),
        "daydream.planners.hooks": ("budget_runtime", "node_runtime", "op_runtime"),
        "daydream.planners.profile": ("write_profile",),
    },
)

__all__ = [
    "RollerRuntimeEstimator",
    "RollerSACEstimator",
    "board_operators",
    "budget_runtime",
    "node_runtime",
    "op_runtime",
    "write_profile",
]
