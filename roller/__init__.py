"""Roller: rTiles, alignment rules, construction and the compile pipeline (thesis chapter 6).

:func:`load` and :func:`torch_op` run what it compiled; they need NumPy and CuPy, not the compiler. :func:`backend` is
`torch.compile`'s with options, and :func:`explain_model` says what it does with a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.support.lazy import imported_on_use

if TYPE_CHECKING:
    from codegen.runtime.load import load, torch_op
    from roller.dynamo.backend import backend
    from roller.dynamo.explanation import explain_model, predict_model

__getattr__ = imported_on_use(
    __name__,
    {
        "codegen.runtime.load": ("load", "torch_op"),
        "roller.dynamo.backend": ("backend",),
        "roller.dynamo.explanation": ("explain_model", "predict_model"),
    },
)

__all__ = ["backend", "explain_model", "load", "predict_model", "torch_op"]
