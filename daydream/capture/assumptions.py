"""Assumptions of a capture on values that a model reads: there are no data to read them from.

A model of a library whose control flow depends on its data takes what is supposed: how many elements ``torch.nonzero``
finds, and which value the host reads of a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from hal.support.errors import InputError

#: What may be supposed, in words with the value in its place.
KINDS: Mapping[str, str] = {
    "nonzero": "{:g} of a tensor's elements are not zero where a result is as large as they are many",
    "item": "{:g} is what the host reads of tensors",
}

#: What is supposed of a library's model that asks for values, where nothing was said.
USUAL = ("nonzero=0.5", "item=0")


def parse_assumptions(texts: Sequence[str]) -> dict[str, float]:
    """Assumptions from ``NAME=VALUE``.

    Raises:
        InputError: a text names none, or gives no number, or a share that is none.

    >>> parse_assumptions(["nonzero=0.1", "item=0"])
    {'nonzero': 0.1, 'item': 0.0}
    """
    assumed: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in KINDS or not re.fullmatch(r"-?\d{1,9}(\.\d{1,9})?", value):
            raise InputError("--assume", f"{text!r} is no assumption", f"write {' or '.join(USUAL)}")
        assumed[name] = float(value)
    if not 0 <= assumed.get("nonzero", 0.0) <= 1:
        raise InputError("--assume", f"{assumed['nonzero']:g} is no share", "write a number from 0 to 1")
    return assumed


def assumption_texts(assumed: Mapping[str, float]) -> list[str]:
    """The assumptions as sentences."""
    return [KINDS[name].format(value) for name, value in assumed.items()]


@contextmanager
def values_assumed(assumed: Mapping[str, float]) -> Iterator[None]:
    """Within, operators on ``meta`` whose results depend on data give what is assumed."""
    library = torch.library.Library("aten", "IMPL")
    try:
        if "nonzero" in assumed:
            library.impl("nonzero", _nonzero_of(assumed["nonzero"]), "Meta")
            library.impl("masked_select", _selected(assumed["nonzero"]), "Meta")
        if "item" in assumed:
            library.impl("_local_scalar_dense", _read(assumed["item"]), "Meta")
        with _named_by_values() if "item" in assumed else nullcontext():
            yield
    finally:
        library._destroy()


def _named_by_values() -> Any:
    """Numbers in text, such as the names of experts, as what is read; PyTorch writes out a tensor without data."""
    usual: Any = torch.Tensor.__format__

    def written(self: torch.Tensor, spec: str) -> str:
        return format(self.item(), spec) if self.is_meta and self.dim() == 0 else str(usual(self, spec))

    return patch.object(torch.Tensor, "__format__", written)


def _count(tensor: torch.Tensor, share: float) -> int:
    return min(max(round(tensor.numel() * share), 1), tensor.numel())


def _nonzero_of(share: float) -> Any:
    def nonzero(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty((_count(tensor, share), tensor.dim()), dtype=torch.int64)

    return nonzero


def _selected(share: float) -> Any:
    def masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(_count(torch.broadcast_tensors(tensor, mask)[0], share))

    return masked_select


def _read(value: float) -> Any:
    def read(tensor: torch.Tensor) -> bool | float | int:
        if tensor.dtype == torch.bool:
            return bool(value)
        return value if tensor.is_floating_point() else int(value)

    return read
