"""Libraries that this machine could load before.

Inductor asks in every process which vector instructions its compiler and this machine agree upon, and starts ten
interpreters for it, one after the other, each of which loads a library of a few bytes: 1.3 s of a first call whose code
is ready. A library that could be loaded once can be loaded again by the same PyTorch on a processor with the same
instructions, so that these answers are kept. Those that say no are not: whatever was missing may be there next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor.cpu_vec_isa import VecISA

from hal.support.store import Store, cache_folder, digest

#: The method of :class:`torch._inductor.cpu_vec_isa.VecISA` that starts an interpreter; absent in releases that load
#: libraries otherwise.
_PROBE = "_probe_load"

_LOADS = b"loads"


@contextmanager
def remembered_probes() -> Iterator[None]:
    """A block in which Inductor loads no library to see if it can, where it could before."""
    probe: Callable[[VecISA, str], bool] | None = getattr(VecISA, _PROBE, None)
    if probe is None:
        yield
        return
    store = Store(cache_folder("probes"))

    def remembered(self: VecISA, library: str) -> bool:
        key = digest(Path(library).read_bytes(), torch.__version__, torch.__file__, _instructions())
        if store.read(key) == _LOADS:
            return True
        loads = probe(self, library)
        if loads:
            store.write(key, _LOADS)
        return loads

    with patch.object(VecISA, _PROBE, remembered):
        yield


def _instructions() -> str:
    """What PyTorch reads off this processor."""
    capabilities: Mapping[str, Any] = torch.cpu.get_capabilities()
    return repr(sorted(capabilities.items()))
