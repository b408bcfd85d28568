"""Tensors of a graph module that never change: frozen parameters, and what is computed from them once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import tracing
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """A block that computes with numbers, within a compilation that computes with shapes alone."""
    with _disable_current_modes(), tracing(None), torch.no_grad():
        yield


def constant_of(module: Any, node: Any) -> Any:
    """The tensor of a constant node; what is computed from it has numbers within :func:`on_real_tensors` alone."""
    owner = module
    for part in node.target.split("."):
        owner = getattr(owner, part)
    return owner


def new_constant(module: Any, like: Any, tensor: Any) -> Any:
    """A node of a new constant, put where the graph inserts; ``like`` is a constant's node, whose fake mode it gets."""
    number = 0
    while hasattr(module, f"roller_constant_{number}"):
        number += 1
    name = f"roller_constant_{number}"
    # Inductor's cache of graphs keeps what a constant looks like, not its numbers, as of parameters that it freezes.
    tensor._is_frozen_param = True
    module.register_buffer(name, tensor)
    node = module.graph.get_attr(name)
    value = like.meta["val"]
    node.meta = {"val": value.new_empty(tuple(tensor.shape), dtype=tensor.dtype)}
    return node
