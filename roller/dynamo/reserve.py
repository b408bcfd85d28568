"""Memory for a graph's weights that gets its pages while Dynamo traces the model.

Weights in the order of kernels are written into memory of their own in every process, and a page that nothing has used
since the machine began, or that a virtual machine has given back, takes microseconds: 340 MB took 0.24 to 0.9 s on an
EPYC with Zen 4, most of which a first call waited for. Tracing takes longer and one core. The graph is known at its end
alone, its size before: programs compile the same model again, so that as many bytes as the last graph took are written
with zeros by a thread in the first compilation of a process, and given back at its end where none took them.
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import Any

import torch
from torch._dynamo.callback import on_compile_end, on_compile_start

from hal.support.store import Store, cache_folder, digest

#: Bytes below which pages are not waited for, and share of the machine's free memory that a reserve takes at most.
_FEWEST_BYTES, _MOST_OF_FREE = 32 << 20, 0.25


class Reserve:
    """Memory of a size that the last process needed.

    Attributes:
        store: where the size is kept.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._storage: Any = None
        self._writing: threading.Thread | None = None
        self._has_begun = False

    def begin(self, _: Any = None) -> None:
        """Let a thread write into the memory, in the first compilation of the process."""
        size = 0 if self._has_begun else self._size()
        self._has_begun = True
        if not _FEWEST_BYTES <= size <= _MOST_OF_FREE * _free_bytes():
            return
        self._storage = storage = torch.empty(size, dtype=torch.uint8).untyped_storage()
        # Python's lock is free until all is written.
        write = partial(ctypes.memset, storage.data_ptr(), 0, storage.nbytes())
        self._writing = threading.Thread(target=lambda _: write(), args=(storage,), daemon=True)
        self._writing.start()

    def take(self, size: int) -> Any:
        """PyTorch's memory of so many bytes, whose pages are there where it was reserved."""
        reserved, self._storage = self._storage, None
        if size >= _FEWEST_BYTES and size != self._size():
            self.store.write(self._key(), str(size).encode())
        if reserved is not None and reserved.nbytes() == size:
            assert self._writing is not None
            self._writing.join()  # what is written from now on is no zero
            return reserved
        return torch.empty(size, dtype=torch.uint8).untyped_storage()

    def drop(self, _: Any = None) -> None:
        """Give back what was not taken."""
        self._storage = None

    def _size(self) -> int:
        try:
            return int(self.store.read(self._key()) or 0)
        except ValueError:  # damaged
            return 0

    @staticmethod
    def _key() -> str:
        return digest("bytes of the last graph", torch.__version__)


def _free_bytes() -> int:
    """Bytes of memory that a program may take without another one losing its own; 0 where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0


#: The process's own.
RESERVE = Reserve(Store(cache_folder("reserve")))


def reserve_while_tracing() -> None:
    """Reserve memory at the beginning of the first compilation of Dynamo's, from now on."""
    on_compile_start(RESERVE.begin)
    on_compile_end(RESERVE.drop)
