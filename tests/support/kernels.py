"""Kernels that tests compile are kept in a folder of the tree, so that the next run compiles those that changed.

g++'s programs of the emulator, NVRTC's cubins and what PoCL makes of OpenCL kernels, each by source, options and
compiler: ``.test-cache``, which ``make clean`` removes. A continuous integration (``CI`` in the environment) starts
without and leaves none.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from codegen.gpu.source import nvrtc as device_compiler
from codegen.verify import emulator as cuda_emulator
from tests.support.site.kernel_cache import AS_WRITTEN, KEEPERS, VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).parent / "site"


def _folder() -> Path:
    """Where this process and its children keep kernels: processes of pytest below the first take that one's folder."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])
    if not os.environ.get("CI"):
        return ROOT / ".test-cache"
    folder, process = Path(tempfile.mkdtemp(prefix="roller-tests-kernels-")), os.getpid()

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _keep() -> None:
    folder = _folder()
    os.environ[VARIABLE] = str(folder)
    os.environ["POCL_CACHE_DIR"] = str(folder / "pocl")
    (folder / "pocl").mkdir(parents=True, exist_ok=True)
    # Children find sitecustomize.py there, also those that are handed this process's own path.
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(SITE) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), *paths]))
    for module in (device_compiler, cuda_emulator):
        KEEPERS[module.__name__](module, folder)


_keep()


@pytest.fixture
def no_kept_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests of the compilers themselves: everything is compiled anew, in children too."""
    monkeypatch.delenv(VARIABLE)
    _end_fork_server()
    for module, name in ((device_compiler, "_cubin_and_log"), (cuda_emulator, "_program_folder")):
        monkeypatch.setattr(module, name, getattr(getattr(module, name), AS_WRITTEN))
    yield
    _end_fork_server()


def _end_fork_server() -> None:
    """The next pool of workers starts with the environment as it is then."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
