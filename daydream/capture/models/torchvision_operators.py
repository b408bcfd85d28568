"""torchvision made importable where its operators in machine code do not fit PyTorch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@cache
def import_torchvision() -> Any:
    """torchvision, which timm and transformers import.

    It registers functions for its operators while it is imported, and fails where the library that defines them cannot
    be loaded. Their schemas are all that it needs then.
    """
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            library.define(schema)
        _KEPT.append(library)
        import torchvision
    return torchvision


_KEPT: list[Any] = []
