"""Tensors of a graph module that never change: frozen parameters, and what is computed from them once."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, compress
from operator import attrgetter, eq
from typing import Any

import numpy as np
import torch
from torch._guards import tracing
from torch.utils._python_dispatch import _disable_current_modes

from roller.dynamo.reserve import RESERVE


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


@dataclass
class Snapshot:
    """Numbers of tensors at some time, as far as it takes to notice that they were written to.

    PyTorch counts writes, but not those by way of ``.data``, as averages of weights and older optimizers have them:
    where a tensor lies and, on processors, its first number are held against those of the time as well. Numbers are
    read where none has moved, so that no memory is looked at that is gone.

    Attributes:
        tensors: those of inference mode, which count no writes, are left out.
        versions: of each at the time.
        places: of those that have memory of their own.
        numbers: the first of each in this machine's memory, as an integer.
    """

    tensors: list[Any]
    versions: list[int] = field(init=False)
    places: list[int] = field(init=False)
    numbers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._placed = [tensor for tensor in self.tensors if _is_placed(tensor)]
        self._cells = [_first_number(tensor) for tensor in self.tensors if _has_bits(tensor)]
        self.versions, self.places, self.numbers = self._versions(), self._places(), self._numbers()

    def holds(self) -> bool:
        """True where no tensor was written to since."""
        return self._versions() == self.versions and self._places() == self.places and self._numbers() == self.numbers

    def unwritten(self) -> Snapshot:
        """Tensors whose writes are as many as at the time, as they are now."""
        return Snapshot(list(compress(self.tensors, map(eq, self.versions, self._versions()))))

    # Hundreds of tensors a call: in loops of C.
    def _versions(self) -> list[int]:
        return list(map(attrgetter("_version"), self.tensors))

    def _places(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._placed))

    def _numbers(self) -> list[int]:
        return list(map(attrgetter("value"), self._cells))


def _is_placed(tensor: Any) -> bool:
    """True for tensors of numbers; others of PyTorch's classes have no memory, or several pieces of it."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def _first_number(tensor: Any) -> Any:
    kinds = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
    return kinds[tensor.element_size()].from_address(tensor.data_ptr())


def is_looked_up(node: Any) -> bool:
    """True for a constant of which a graph reads rows by number, and few of them: a table of embeddings."""
    return bool(node.users) and all(user.target is torch.ops.aten.embedding.default for user in node.users)


#: Bytes of a huge page of Linux on the processors that kernels are compiled for.
HUGE_PAGE_BYTES = 1 << 21
#: Bytes that a tensor's memory begins at a multiple of, as PyTorch's own does.
_LINE_BYTES = 64
#: Advice of Linux (``madvise(2)``): give memory huge pages when it is written to.
_MADV_HUGEPAGE = 14
#: Advice of Linux 6.1 and later (``madvise(2)``): put what lies in memory into huge pages now.
_MADV_COLLAPSE = 25
#: Seconds after which Dynamo, which traces meanwhile, lets go of Python's lock for the thread that writes weights. By
#: default these are five times as many, as long as it takes to write a weight.
_SWITCH_SECONDS = 0.001
#: Seconds after which a thread starts to put memory into huge pages: a model's first call is over by then.
_LATER_SECONDS = 1.0
#: Seconds between two pages. One takes up to 5 ms of a core that kernels run on, and keeps other threads of the process
#: from getting memory meanwhile: calls are to take 1.05 times as long at most until all are there.
_PAUSE_SECONDS = 0.1


@cache
def _madvise() -> Any:
    """The function of the C library; None where the system is not Linux."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


@cache
def _can_collapse() -> bool:
    """True where the system knows the advice, for no memory at all."""
    function = _madvise()
    return function is not None and function(0, 0, _MADV_COLLAPSE) == 0


def storages_of(tensors: Iterable[Any]) -> frozenset[int]:
    """Addresses of the memory that tensors lie in, this machine's alone."""
    return frozenset(each.untyped_storage().data_ptr() for each in tensors if _has_pages(each))


def use_huge_pages(tensors: Iterable[Any], theirs: Collection[int] = frozenset()) -> None:
    """Put tensors that lie in this machine's memory into huge pages, as far as the system does so: what a graph made of
    parameters moves into memory of its own, one tensor after another.

    Weights that come from memory at every call are read 1.1 times as fast so (one core of an EPYC with Zen 5): cores
    fetch ahead of their use up to the end of a page alone, and `hal.microbench` measures bandwidth in huge ones.

    Args:
        tensors: constants of a graph.
        theirs: addresses of memory that others hold, too, and that stays where it is.
    """
    if _madvise() is None:
        return
    storages: dict[int, list[Any]] = {}
    for tensor in tensors:
        if _has_pages(tensor):
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    staying = {start for start, each in storages.items() if start in theirs or any(map(_is_fixed, each))}
    for start in staying:
        _advise(start, storages[start][0].untyped_storage().nbytes(), _MADV_COLLAPSE)
    _move_together([each for start, each in storages.items() if start not in staying])


def _has_pages(tensor: Any) -> bool:
    """True for tensors of numbers in this machine's memory; one of shapes alone, or another graph, has no pages."""
    is_here = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and not tensor.is_mkldnn
    return is_here and tensor.numel() > 0


def _is_fixed(tensor: Any) -> bool:
    return tensor.layout is not torch.strided or tensor.is_inference() or tensor.requires_grad


def _advise(start: int, size: int, advice: int) -> None:
    """Advise the system about the huge pages that lie within some memory as a whole."""
    first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    inside = (start + size - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if inside > 0:
        _madvise()(first, inside, advice)


def dense_copies(tensors: Sequence[tuple[Any, Any]]) -> tuple[list[Any], Future[None]]:
    """Copies of tensors, each with a memory format for its elements' order, as ``clone`` makes them, in memory that a
    thread fills, and puts into huge pages afterwards; by ``clone`` where they fill no such page, or some are not
    numbers in this machine's memory.

    Huge pages are what a virtual machine gives back to its host while they are free, and gets again slowly: writing
    340 MB took 0.8 s in them and 0.15 s in small ones (two cores of an EPYC with Zen 5). One thread alone writes small
    ones: two wait for each other's pages (340 MB took 0.17 s with one, 0.1 to 0.57 with two, on two cores of a Xeon).

    Returns:
        The copies, and what is done once they have their numbers.
    """
    like = [torch.empty_like(tensor, device="meta", memory_format=order) for tensor, order in tensors]
    memory = _memory([each.nbytes for each in like]) if all(map(_has_bits, (each for each, _ in tensors))) else None
    if memory is None:
        nothing_left: Future[None] = Future()
        nothing_left.set_result(None)
        return [tensor.clone(memory_format=order) for tensor, order in tensors], nothing_left
    copies = []
    for (tensor, _), wanted, place in zip(tensors, like, memory.places, strict=True):
        copy = torch.empty(0, dtype=tensor.dtype)
        copies.append(copy.set_(memory.storage, place // tensor.element_size(), wanted.shape, wanted.stride()))
    if not _can_collapse():
        memory.advise(_MADV_HUGEPAGE)
    pairs = [(_bits(copy), _bits(tensor)) for copy, (tensor, _) in zip(copies, tensors, strict=True)]
    thread = ThreadPoolExecutor(1, "copies")
    filled = thread.submit(_fill, pairs, memory)
    thread.shutdown(wait=False)
    return copies, filled


def _fill(pairs: Iterable[tuple[Any, Any]], memory: _Memory) -> None:
    """Write arrays into others, whose memory another thread puts into huge pages later."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, _SWITCH_SECONDS))
    try:
        for copy, source in pairs:
            np.copyto(copy, source)
    finally:
        sys.setswitchinterval(interval)
    if _can_collapse():
        later = threading.Timer(_LATER_SECONDS, _collapse_slowly, (memory,))
        later.daemon = True
        later.start()


#: Integers of as many bytes, which a thread copies without PyTorch: its operators would start a pool of threads for it.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _has_bits(tensor: Any) -> bool:
    """True for tensors that are nothing but numbers in this machine's memory."""
    is_encoded = tensor.dtype.is_complex or tensor.is_quantized or tensor.is_neg()
    return _has_pages(tensor) and tensor.layout is torch.strided and not is_encoded


def _bits(tensor: Any) -> Any:
    """A tensor's memory as an array of integers."""
    return tensor.detach().view(_BITS[tensor.element_size()]).numpy()


def _move_together(storages: Sequence[Sequence[Any]]) -> None:
    """Move tensors, those of a storage each, into memory that lies in huge pages."""
    memory = _memory([each[0].untyped_storage().nbytes() for each in storages])
    if memory is None:
        return
    # Pages come when they are written to: as huge ones, and without a copy.
    memory.advise(_MADV_HUGEPAGE)
    for tensors, place in zip(storages, memory.places, strict=True):
        source = tensors[0].untyped_storage()
        held = torch.empty(0, dtype=torch.uint8).set_(source)
        torch.empty(0, dtype=torch.uint8).set_(memory.storage, place, held.shape, held.stride()).copy_(held)
        for tensor in tensors:
            offset = place // tensor.element_size() + tensor.storage_offset()
            tensor.set_(memory.storage, offset, tensor.shape, tensor.stride())
    memory.advise(_MADV_COLLAPSE)


@dataclass(frozen=True)
class _Memory:
    """Memory that begins with a huge page.

    Attributes:
        storage: PyTorch's.
        places: where tensors begin in it, in bytes.
    """

    storage: Any
    places: tuple[int, ...]

    def advise(self, advice: int) -> None:
        """Advise the system about its huge pages."""
        _advise(self.storage.data_ptr(), self.storage.nbytes(), advice)


def _memory(sizes: Sequence[int]) -> _Memory | None:
    """Memory for tensors of some sizes in bytes, one behind the other; None where they fill no huge page."""
    ends = list(accumulate(-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes))
    if not ends or ends[-1] < HUGE_PAGE_BYTES or _madvise() is None:
        return None
    storage = RESERVE.take(ends[-1] + 2 * HUGE_PAGE_BYTES)
    first = -storage.data_ptr() % HUGE_PAGE_BYTES
    return _Memory(storage, tuple(first + end for end in (0, *ends[:-1])))


def _collapse_slowly(memory: _Memory) -> None:
    """Put memory into huge pages, one at a time."""
    start, size = memory.storage.data_ptr(), memory.storage.nbytes()
    first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    for page in range(first, start + size - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
        _advise(page, HUGE_PAGE_BYTES, _MADV_COLLAPSE)
        time.sleep(_PAUSE_SECONDS)
