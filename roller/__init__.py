"""Roller: rTiles, alignment rules, construction and the compile pipeline (thesis chapter 6).

:func:`load` and :func:`torch_op` run what it compiled; they need NumPy and CuPy, not the compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.support.lazy import imported_on_use

if TYPE_CHECKING:
    from codegen.runtime.load import load, torch_op

__getattr__ = imported_on_use(__name__, {"codegen.runtime.load": ("load", "torch_op")})

__all__ = ["load", "torch_op"]
