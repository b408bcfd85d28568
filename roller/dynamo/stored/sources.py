"""The key of PyTorch's sources, as another process has worked it out.

Graphs are stored by the contents of all 2,300 files of PyTorch's (``torch_key``), which a thread reads while Dynamo
traces the first graph. It needs 0.14 s of the interpreter's lock, and takes it in 2,300 turns for which tracing waits:
0.3 s of a first call on an EPYC with Zen 4. Files of the same names, sizes and times of change have the contents that
they had, which are looked at in 0.02 s.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

import torch
from torch._inductor.codecache import torch_key

from hal.support.store import Store, cache_folder, digest, stamps

#: Endings of the files that ``torch_key`` reads some of, and folders that it reads none of.
_SUFFIXES = (".py", ".so", ".cpp", ".ld")
_OTHERS = frozenset(("__pycache__", "include", "lib", "share", "bin", "test"))


def begin_torch_key() -> None:
    """Let PyTorch know the key of its sources, or a thread work it out; releases without such functions do it later."""
    begun: Any = torch_key
    if not hasattr(begun, "prefetch") or not hasattr(begun, "set"):
        return
    store = Store(cache_folder("sources"))
    stamp = digest(torch.__version__, *stamps(os.path.dirname(torch.__file__), _SUFFIXES, _OTHERS))
    known = store.read(stamp)
    if known is None:
        begun.prefetch()
        threading.Thread(target=lambda: store.write(stamp, torch_key()), daemon=True).start()
        return
    with suppress(RuntimeError):  # somebody has asked for it before
        begun.set(known)
