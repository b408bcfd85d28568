"""Optimizers whose state is as it is from the second step on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


def optimizer_of(parameters: Sequence[Any], name: str, implementation: str = "foreach") -> Any | None:
    """The optimizer with its state made; None for ``none`` and for a model without parameters to train.

    Args:
        parameters: that are trained.
        name: one of :data:`daydream.capture.options.OPTIMIZERS`.
        implementation: one of :data:`daydream.capture.options.IMPLEMENTATIONS`.
    """
    if name == "none" or not parameters:
        return None
    way: dict[str, Any] = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    makers: dict[str, Callable[..., Any]] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **way),
        "adam": lambda: torch.optim.Adam(parameters, lr=1e-3, **way),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-3, **way),
    }
    optimizer = makers[name]()
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    with fused_on_meta():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def clip_gradients(parameters: Sequence[Any], implementation: str = "foreach") -> None:
    """Scales gradients so that the norm of all of them is 1 at most, as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        parameters: with gradients.
        implementation: one of :data:`daydream.capture.options.IMPLEMENTATIONS`; but for ``for-loop`` on lists.
    """
    module: Any = sys.modules[torch.nn.utils.clip_grad_norm_.__module__]
    # Tensors without data take lists as those of boards do.
    with patch.object(module, "_has_foreach_support", lambda *_: implementation != "for-loop"):
        torch.nn.utils.clip_grad_norm_(parameters, max_norm=1.0)


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Tensors that an optimizer keeps from step to step."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value


@contextmanager
def fused_on_meta() -> Iterator[None]:
    """Within, fused optimizers take tensors without data."""
    module: Any = sys.modules[torch.optim.Optimizer.__module__]
    devices = module._get_fused_kernels_supported_devices
    with patch.object(module, "_get_fused_kernels_supported_devices", lambda: [*devices(), "meta"]):
        yield
