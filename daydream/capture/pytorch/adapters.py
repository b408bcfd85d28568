"""Low-rank adapters (LoRA): two small products next to every chosen linear layer, the model's own parameters frozen.

A layer's result becomes W x + s B (A x), A of ``rank`` rows and B of ``rank`` columns (Hu et al. 2021, section 4.1), as
PEFT's ``LoraLayer`` runs them: each a linear layer of its own, a scaling and a sum. Of tensor ranks those that share a
layer's outputs have all of A and their rows of B; those that share its inputs have their columns of A, and what B makes
of the parts is summed up with the layer's own results.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from daydream.capture.pytorch.checkpoints import repeated_blocks
from hal.support.errors import InputError

_OPTION = "--lora"

#: What the option looks like, for messages.
_REMEDY = "write --lora rank=16,modules=q_proj,v_proj"


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Adapters of a model.

    Attributes:
        rank: of every adapter.
        modules: patterns of linear layers' last names or paths; empty for all of the repeated blocks.
    """

    rank: int
    modules: tuple[str, ...] = ()


def parse_adapters(text: str) -> Adapters:
    """Adapters from the text of ``--lora``.

    Raises:
        InputError: a part is no such option.

    >>> parse_adapters("rank=16,modules=q_proj,v_proj")
    Adapters(rank=16, modules=('q_proj', 'v_proj'))
    """
    values: dict[str, list[str]] = {}
    name = ""
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals:
            name, part = key.strip(), value
        if name not in ("rank", "modules") or not part.strip() or (name == "rank" and name in values):
            raise InputError(_OPTION, f"got {text!r}", _REMEDY)
        values.setdefault(name, []).append(part.strip())
    rank = values.get("rank", [""])[0]
    if not rank.isdecimal() or not 0 < int(rank) < 1 << 16:
        raise InputError(f"{_OPTION} rank", f"got {rank!r}", _REMEDY)
    return Adapters(rank=int(rank), modules=tuple(values.get("modules", ())))


def apply_adapters(model: nn.Module, adapters: Adapters) -> str:
    """Puts adapters into a model, freezes all else in place, and says so in a sentence.

    Raises:
        InputError: no linear layer has such a name.
    """
    paths = _chosen(model, adapters.modules)
    model.requires_grad_(False)
    for path in paths:
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        _adapt(layer, adapters.rank)
    names = sorted({path.rpartition(".")[2] for path in paths})
    return (
        f"adapters of rank {adapters.rank} at {', '.join(names)} are trained, without dropout and in the step's "
        "type; all other parameters are frozen"
    )


def _chosen(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not patterns:
        blocks = repeated_blocks(model)
        paths = [path for path in linear if any(path.startswith(f"{block}.") for block in blocks)]
        if not paths:
            raise InputError(_OPTION, "the model repeats no block with linear layers", "name some with modules=")
        return paths
    for pattern in patterns:
        if not any(_fits(path, pattern) for path in linear):
            names = sorted({path.rpartition(".")[2] for path in linear})[:8]
            remedy = f"its linear layers are called {', '.join(names)}" if names else "leave it out"
            raise InputError(f"{_OPTION} modules", f"no linear layer is called {pattern!r}", remedy)
    return [path for path in linear if any(_fits(path, pattern) for pattern in patterns)]


def _fits(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path.rpartition(".")[2], pattern)


def _adapt(layer: nn.Linear, rank: int) -> None:
    weight = layer.weight
    like: dict[str, Any] = {"bias": False, "device": weight.device, "dtype": weight.dtype}
    rows, columns = weight.shape
    layer.lora_A = nn.Linear(columns, rank, **like)
    layer.lora_B = nn.Linear(rank, rows, **like)
    # Hooks of the layer, tensor ranks' exchange among them, see the sum.
    layer.forward = _adapted(layer, layer.forward)  # type: ignore[method-assign, assignment]


def _adapted(layer: Any, forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def sum_of_both(given: torch.Tensor) -> torch.Tensor:
        adapter: torch.Tensor = layer.lora_B(layer.lora_A(given))
        return forward(given) + adapter * 1.0

    return sum_of_both
