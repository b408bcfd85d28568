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
