"""Run by Python as it starts in every child process of a test, which keeps to what the test itself has to keep to.

It costs next to nothing where no kernel is compiled: whatever takes time is imported then.
"""

import os
import sys

_COMPILERS = ("codegen.gpu.source.nvrtc", "codegen.verify.emulator")


class _Keeper:
    """Finder and loader of the modules that compile: what they compile is kept as soon as they are imported."""

    def __init__(self):
        self.loaders = {}

    def find_spec(self, fullname, path, target=None):
        if fullname not in _COMPILERS or fullname in self.loaders:
            return None
        from importlib.util import find_spec

        self.loaders[fullname] = None
        spec = find_spec(fullname)
        self.loaders[fullname], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        from pathlib import Path

        folder = os.path.dirname(__file__)
        sys.path.insert(0, folder)
        from kernel_cache import KEEPERS, VARIABLE

        sys.path.remove(folder)
        module.__loader__ = module.__spec__.loader = self.loaders[module.__name__]
        module.__loader__.exec_module(module)
        KEEPERS[module.__name__](module, Path(os.environ[VARIABLE]))


def _refuse(name, what):
    raise ImportError(f"a child of the test {what} and the test has not asked for it: fixture {name!r}")


if os.environ.get("ROLLER_TESTS_WITHOUT_TOOLS"):
    from tool_barrier import ToolBarrier

    sys.meta_path.insert(0, ToolBarrier(_refuse))
if os.environ.get("ROLLER_TESTS_KERNELS"):
    sys.meta_path.insert(0, _Keeper())
