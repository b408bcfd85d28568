"""Modules whose results the forward pass does not keep: the backward pass computes them again."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hal.support.errors import InputError

#: Parts of operators' names whose results selective checkpoints keep: products of which every second is kept, and
#: attention.
_HALVED, _SAVED = "aten::mm", ("aten::_scaled_dot_product_", "_c10d_functional::reduce_scatter")


def apply_checkpoints(model: Any, which: str) -> list[str]:
    """Checkpoints modules of a model in place, and returns their paths.

    Args:
        model: any module.
        which: ``none``; ``full`` for the blocks of which the model repeats the most; ``selective`` for the same blocks,
            of which attention and every second product are kept, as torchtitan does per operator; ``attention``, of
            which :func:`attention_recomputed` takes care; else a pattern of paths, as ``layers.*``, that ends at the
            modules to checkpoint.

    Raises:
        InputError: no module has such a path, or none is repeated.
    """
    if which == "none":
        return []
    if which == "attention":
        return []
    if which in ("full", "selective"):
        paths = repeated_blocks(model)
        if not paths:
            remedy = "name modules: --checkpoint 'stages.*'"
            raise InputError(f"--checkpoint {which}", "the model repeats no block", remedy)
    else:
        paths = _matching(model, which)
    for path in paths:
        module = model.get_submodule(path)
        module.forward = _recomputed(module, _selective if which == "selective" else None)
    return paths


def _selective() -> Any:
    """Policy that keeps results in the forward pass and returns them in the backward pass, for one block."""
    counts = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = operator.name()
        is_saved = name.startswith(_SAVED)
        if name == _HALVED:
            counts[context.is_recompute] += 1
            is_saved = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def repeated_blocks(model: Any) -> list[str]:
    """Paths of the blocks in the list of equal modules that holds the most parameters; empty without such a list."""
    best: tuple[int, list[str]] = (0, [])
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.Sequential):
            continue
        children = dict(module.named_children())
        size = sum(parameter.numel() for parameter in module.parameters())
        if len(children) > 1 and len({type(child) for child in children.values()}) == 1 and size > best[0]:
            best = size, [f"{path}.{name}" if path else name for name in children]
    return best[1]


@contextmanager
def attention_recomputed() -> Iterator[None]:
    """Within, attention is computed again in the backward pass: scores, softmax and what they are multiplied by.

    Megatron's rule of selective recomputation (Korthikanti et al. 2022, section 5; its ``core_attn``), for models that
    call ``scaled_dot_product_attention``.
    """
    attend = torch.nn.functional.scaled_dot_product_attention

    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return attend(*args, **kwargs)
        return checkpoint(attend, *args, use_reentrant=False, **kwargs)

    with patch.object(torch.nn.functional, "scaled_dot_product_attention", again):
        yield


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


def _recomputed(module: Any, contexts: Callable[[], Any] | None = None) -> Callable[..., Any]:
    """The module's forward as a checkpoint; ``contexts`` makes what decides by operator, None keeps nothing."""
    around: dict[str, Any] = {"context_fn": contexts} if contexts is not None else {}
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
        return checkpoint(inner, *args, use_reentrant=False, **around, **kwargs)

    return outer
