"""What a test needs beyond Python: fixtures that say so, marks that follow from them, and a run that has none of it.

A test that compiles for a device requests ``device_compiler``, one that runs OpenCL kernels ``opencl``, and so on
through :data:`TOOLS`; a whole module does so by ``pytestmark = pytest.mark.usefixtures(...)``. Such a fixture skips its
tests where the tool is missing, and marks them with its name. A module of tests that imports TVM itself, or a helper
that does, needs no fixture.

``pytest --no-tools`` runs the quick tests that need none of them: ``make check``. A test that comes to a tool there
without having asked for it fails, and is told what to ask for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NoReturn

import pytest

from codegen.generators import linker
from codegen.gpu.source.nvrtc import CompileError, nvrtc_version
from codegen.verify.emulator import emulator_available, prepare_emulator
from codegen.verify.opencl import opencl_available
from tests.support.site.tool_barrier import VARIABLE, ToolBarrier


def _device_compiler_missing() -> str | None:
    if find_spec("tvm") is None:
        return "TVM is not installed"
    try:
        nvrtc_version()
    except CompileError as error:
        return str(error)
    return None


#: Fixture -> why its tool cannot be used here; None where it can. A session asks once.
TOOLS: dict[str, Callable[[], str | None]] = {
    "device_compiler": _device_compiler_missing,
    "opencl": opencl_available,
    "emulator": emulator_available,
    "c_compiler": lambda: "there is no C compiler to link with" if linker() is None else None,
    "pytorch": lambda: "PyTorch is not installed" if find_spec("torch") is None else None,
}
#: Programs that the fixtures stand for.
PROGRAMS = {
    **dict.fromkeys(("g++", "c++", "clang++"), "emulator"),
    **dict.fromkeys(("gcc", "cc", "clang"), "c_compiler"),
}


def _skip_without(name: str) -> None:
    reason = TOOLS[name]()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def device_compiler() -> None:
    """TVM, which lowers schedules, and NVRTC, which compiles CUDA."""
    _skip_without("device_compiler")


@pytest.fixture(scope="session")
def opencl() -> None:
    """A device that runs OpenCL kernels."""
    _skip_without("opencl")


@pytest.fixture(scope="session")
def emulator() -> None:
    """g++, by which :mod:`codegen.verify.emulator` runs CUDA kernels; what it compiles once counts for no test."""
    _skip_without("emulator")
    prepare_emulator()


@pytest.fixture(scope="session")
def c_compiler() -> None:
    """The system's C compiler, which links kernels for processors."""
    _skip_without("c_compiler")


@pytest.fixture(scope="session")
def pytorch() -> Any:
    """The module ``torch``."""
    return pytest.importorskip("torch")


class _Guard:
    """Keeps tools from tests that have not asked for them; installed by ``--no-tools`` alone."""

    def __init__(self) -> None:
        self.collecting = True

    def refuse(self, name: str, what: str) -> NoReturn:
        """Skip the module that is being collected, or fail the test that is running.

        Args:
            name: the fixture that was to be requested.
            what: what the test did.
        """
        if self.collecting:
            pytest.skip(f"{what}: {name}", allow_module_level=True)
        pytest.fail(f"the test {what} and has not asked for it: let it request the fixture {name!r}")

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Refuse to start a compiler."""
        if event in ("subprocess.Popen", "os.posix_spawn"):
            program = os.path.basename(os.fsdecode(arguments[0] or arguments[1][0]))
            if program in PROGRAMS:
                self.refuse(PROGRAMS[program], f"starts {program}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        self.collecting = True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self.collecting = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-tools",
        action="store_true",
        help="leave out tests that need a compiler, OpenCL or PyTorch, and slow ones; see make check",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name in TOOLS:
        config.addinivalue_line("markers", f"{name}: requests the fixture of this name; set by itself")
    if config.getoption("--no-tools"):
        guard = _Guard()
        config.pluginmanager.register(guard, "no-tools")
        sys.meta_path.insert(0, ToolBarrier(guard.refuse))
        sys.addaudithook(guard.audit)
        os.environ[VARIABLE] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with the tools that it requests; a run without tools drops those, and what is marked slow."""
    left_out = []
    for item in items:
        names = [name for name in TOOLS if name in getattr(item, "fixturenames", ())]
        for name in names:
            item.add_marker(name)
        if names or item.get_closest_marker("slow"):
            left_out.append(item)
    if config.getoption("--no-tools") and left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
