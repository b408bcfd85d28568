"""Imported by the server process that build workers are forked from: what every one of them needs, once.

Nothing of it ever becomes garbage. It is kept from the collector while it is imported, and for good in the workers,
where looking at it would copy every page of it that they share with the server.
"""

import gc
import os
import sys
from types import TracebackType

from codegen.tir.tvm_import import leave_out_the_unused
from hal.support.threads import ONE_THREAD


def report_failed_start(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's report of a worker that fails before it runs, but for one whose caller has just gone.

    That one finds no orders in its pipe, or semaphores that are unlinked. Whoever pressed Ctrl-C knows.
    """
    if not isinstance(error, (EOFError, FileNotFoundError)):
        sys.__excepthook__(kind, error, trace)


def _load() -> None:
    import tvm.backend.cuda.cpp  # how it prints CUDA's own functions

    import codegen.gpu.source.nvrtc
    import codegen.gpu.source.text
    import codegen.verify.gpu


sys.excepthook = report_failed_start
# Read when NumPy is loaded, which computes the references of kernels.
os.environ.update(ONE_THREAD)
gc.disable()
leave_out_the_unused()
_load()
gc.freeze()
gc.enable()
