"""Builds of candidates in MetaSchedule's worker processes; imported there, so it needs nothing but TVM.

TVM's own function does the same after it has imported the matrix instructions of every GPU, which takes longer than a
worker has on a slow core.
"""

from __future__ import annotations

from typing import Any

BUILD = "roller.bench.cpu.build"


def register() -> None:
    """Make :func:`build` known to TVM under the name :data:`BUILD`."""
    import tvm

    tvm.register_global_func(BUILD, build, override=True)


def build(module: Any, target: Any, parameters: Any = None) -> Any:
    """A candidate as a runtime module; ``parameters`` is always None here."""
    from tvm import tirx
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    return tirx.build(RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module), target)
