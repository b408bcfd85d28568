"""Tensors of a graph module that never change: frozen parameters, and what is computed from them once."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
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


#: Bytes of a huge page of Linux on the processors that kernels are compiled for.
HUGE_PAGE_BYTES = 1 << 21
#: Advice of Linux 6.1 and later (``madvise(2)``): put what lies in memory into huge pages now.
_MADV_COLLAPSE = 25


@cache
def _madvise() -> Any:
    """The function of the C library; None where the system is not Linux."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def use_huge_pages(tensors: Iterable[Any]) -> None:
    """Put tensors that lie in this machine's memory into huge pages, as far as the system does so.

    Weights that come from memory at every call are read 1.1 times as fast so (one core of an EPYC with Zen 5): cores
    fetch ahead of their use up to the end of a page alone, and `hal.microbench` measures bandwidth in huge ones.
    """
    madvise = _madvise()
    for tensor in tensors if madvise is not None else ():
        # What is no tensor of numbers, such as one of shapes alone or another graph, has no pages.
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and not tensor.is_mkldnn:
            storage = tensor.untyped_storage()
            start = -(-storage.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            size = (storage.data_ptr() + storage.nbytes() - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if size > 0:
                madvise(start, size, _MADV_COLLAPSE)
