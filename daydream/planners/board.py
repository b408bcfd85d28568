"""Operators as a board runs them, on tensors that only say that they lie on a CPU or on ``meta``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from daydream.capture.pytorch.meta_kernels import scaled_dot_product

#: The dispatcher comes by these keys, with and without gradients.
_KEYS = ("AutogradCPU", "AutogradMeta")


@contextmanager
def board_operators() -> Iterator[None]:
    """Within, attention is one fused operator and dropout another, as on a board.

    PyTorch composes both of others by the device of their arguments: on a CPU dropout is four operators, and attention
    with dropout a dozen.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for key in _KEYS:
            library.impl("scaled_dot_product_attention", scaled_dot_product("flash"), key)
            library.impl("dropout", _dropout, key)
        yield
    finally:
        library._destroy()


def _dropout(tensor: Any, p: float, train: bool) -> Any:
    return torch.ops.aten.native_dropout.default(tensor, p, True)[0] if train and p > 0 else tensor
