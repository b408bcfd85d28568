"""Libraries that this machine could load before, and headers that were compiled before.

Inductor asks in every process which vector instructions its compiler and this machine agree upon, and starts ten
interpreters for it, one after the other, each of which loads a library of a few bytes: 1.3 s of a first call whose code
is ready. It also runs its compiler over a header to find the compiled one, whether anything is left to compile or not:
0.15 s. A library that could be loaded once can be loaded again by the same PyTorch on a processor with the same
instructions, and a header that has changed since is read as a text, so that these answers are kept. Those that say no
are not: whatever was missing may be there next time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.codecache
from torch._inductor.cpu_vec_isa import VecISA

from hal.support.store import Store, cache_folder, digest

#: What Inductor asks: the method of :class:`torch._inductor.cpu_vec_isa.VecISA` that loads a library in a process of
#: its own, and the function of :mod:`torch._inductor.codecache` that finds a compiled header. Absent in other releases.
_LOADS, _HEADER = "_probe_load", "_precompile_header"

_YES = b"loads"


@contextmanager
def remembered_probes() -> Iterator[None]:
    """A block in which Inductor asks nothing whose answer is known."""
    loads: Any = getattr(VecISA, _LOADS, None)
    compiled: Any = getattr(torch._inductor.codecache, _HEADER, None)
    if loads is None or compiled is None:
        yield
        return
    store = Store(cache_folder("probes"))

    def remembered_loads(self: VecISA, library: str) -> bool:
        key = digest(Path(library).read_bytes(), torch.__version__, torch.__file__, _instructions())
        if store.read(key) == _YES:
            return True
        answer = bool(loads(self, library))
        if answer:
            store.write(key, _YES)
        return answer

    def remembered_header(header: str, command_line: str, **options: Any) -> str:
        key = digest(header, command_line, torch.__version__, torch.__file__)
        path = (store.read(key) or b"").decode()
        if not os.path.exists(path):
            path = str(compiled(header, command_line, **options))
            store.write(key, path.encode())
        return path

    with (
        patch.object(VecISA, _LOADS, remembered_loads),
        patch.object(torch._inductor.codecache, _HEADER, remembered_header),
    ):
        yield


def _instructions() -> str:
    """What PyTorch reads off this processor."""
    capabilities: Mapping[str, Any] = torch.cpu.get_capabilities()
    return repr(sorted(capabilities.items()))
