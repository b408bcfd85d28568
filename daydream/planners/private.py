"""PyTorch's private modules, or one line that says which version has them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hal.support.errors import InputError

#: The release of PyTorch whose private modules the planners are written against.
SUPPORTED = "2.13"


def private(module: str, name: str) -> Any:
    """A name of a private module of PyTorch.

    Raises:
        InputError: this PyTorch does not have it, or there is no PyTorch.
    """
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise unsupported(error) from error


def unsupported(error: Exception) -> InputError:
    """The line that a failed import of PyTorch, or of a part of it, comes to."""
    try:
        import torch
    except ImportError:
        return InputError("torch", "PyTorch is not installed", "pip install 'roller[models]'")
    return InputError("torch", f"PyTorch {torch.__version__}: {error}", f"daydream.planners is for PyTorch {SUPPORTED}")
