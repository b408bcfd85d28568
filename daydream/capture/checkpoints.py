"""Modules whose results the forward pass does not keep: the backward pass computes them again."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hal.support.errors import InputError


def apply_checkpoints(model: Any, which: str) -> list[str]:
    """Checkpoints modules of a model in place, and returns their paths.

    Args:
        model: any module.
        which: ``none``; ``full`` for the blocks of which the model repeats the most; else a pattern of paths, as
            ``layers.*``, that ends at the modules to checkpoint.

    Raises:
        InputError: no module has such a path, or none is repeated.
    """
    if which == "none":
        return []
    paths = _repeated(model) if which == "full" else _matching(model, which)
    for path in paths:
        module = model.get_submodule(path)
        module.forward = _recomputed(module)
    return paths


def _repeated(model: Any) -> list[str]:
    """Paths of the blocks in the list of equal modules that holds the most parameters."""
    best: tuple[int, list[str]] = (0, [])
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        children = dict(module.named_children())
        size = sum(parameter.numel() for parameter in module.parameters())
        if len(children) > 1 and len({type(child) for child in children.values()}) == 1 and size > best[0]:
            best = size, [f"{path}.{name}" if path else name for name in children]
    if not best[1]:
        raise InputError("--checkpoint full", "the model repeats no block", "name modules: --checkpoint 'stages.*'")
    return best[1]


def _matching(model: Any, pattern: str) -> list[str]:
    """Paths that a pattern fits; ``*`` does not cross dots."""
    depth = pattern.count(".")
    paths = [
        path
        for path, _ in model.named_modules()
        if path and path.count(".") == depth and fnmatch.fnmatchcase(path, pattern)
    ]
    if not paths:
        some = next((path for path, _ in model.named_modules() if path), "")
        raise InputError(f"--checkpoint {pattern}", "no module has such a path", f"a path is {some}" if some else "")
    return paths


def _recomputed(module: Any) -> Callable[..., Any]:
    forward = module.forward

    def inner(*args: Any, **kwargs: Any) -> Any:
        # Called as a module, so that what runs again is known to be inside it.
        module.forward = forward
        try:
            return module(*args, **kwargs)
        finally:
            module.forward = outer

    def outer(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return outer
