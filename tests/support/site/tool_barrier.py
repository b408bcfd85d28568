"""Packages that a test may not import before it has asked for them. Children load this with nothing but Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

#: Set where children may not import them either.
VARIABLE = "ROLLER_TESTS_WITHOUT_TOOLS"
#: Module -> the fixture that stands for it.
MODULES = {
    "tvm": "device_compiler",
    "tvm_ffi": "device_compiler",
    "codegen.gpu.source.nvrtc_library": "device_compiler",
    "pyopencl": "opencl",
    "torch": "pytorch",
}


class ToolBarrier(MetaPathFinder, Loader):
    """Finds the packages, so that everybody sees them installed, and refuses to load them.

    Args:
        refuse: called with the fixture that stands for a package and with what was tried; raises.
    """

    def __init__(self, refuse: Callable[[str, str], NoReturn]) -> None:
        self._refuse = refuse

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        self._refuse(MODULES[module.__name__], f"imports {module.__name__}")
