"""Imported by the server process that build workers are forked from: what every one of them needs, once.

Nothing of it ever becomes garbage. It is kept from the collector while it is imported, and for good in the workers,
where looking at it would copy every page of it that they share with the server.
"""

import gc

from codegen.tir.tvm_import import leave_out_the_unused


def _load() -> None:
    import tvm.backend.cuda.cpp  # how it prints CUDA's own functions

    import codegen.gpu.source.nvrtc
    import codegen.gpu.source.text
    import codegen.verify.gpu


gc.disable()
leave_out_the_unused()
_load()
gc.freeze()
gc.enable()
