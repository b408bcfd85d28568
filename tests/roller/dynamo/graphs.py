"""Functional graphs of PyTorch, as backends get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def graph_of(function: Callable[..., Any], *inputs: Any) -> Any:
    """The graph module of a function, decomposed as Inductor has it; nodes know their values' shapes."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
