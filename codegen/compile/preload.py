"""Imported by the server process that build workers are forked from: what every one of them needs, once.

Nothing of it ever becomes garbage. It is kept from the collector while it is imported, and for good in the workers,
where looking at it would copy every page of it that they share with the server.
"""

import gc


def _load() -> None:
    import codegen.gpu.source.nvrtc
    import codegen.gpu.source.text
    import codegen.verify.cpu
    import codegen.verify.gpu


gc.disable()
_load()
gc.freeze()
gc.enable()
