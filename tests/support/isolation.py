"""No test reads or writes what belongs to the person who runs it: caches, settings, anything in a dot folder of the
home directory.

Loading this module gives the process an empty home directory, which its children inherit, and drops variables that
name caches elsewhere or that change what programs print. An audit hook then refuses whatever Python still opens, lists,
writes, moves or removes of the person's own, and the test during which that happens fails, even if the refusal is
caught.
Allowed in a dot folder is what the tests consist of: the tree, Python, its packages, the folder for temporary files.
"""

from __future__ import annotations

import atexit
import os
import shutil
import site
import sys
import tempfile
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Folders of the person, joined as in PATH: for processes of pytest below the one that replaced the home directory.
FOLDERS_VARIABLE = "TESTS_PERSONAL_FOLDERS"

#: Where tools keep something if a variable names it. A value inside the tree stays.
NAMED = (
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_STATE_HOME",
    "CCACHE_DIR",
    "CUDA_CACHE_PATH",
    "CUPY_CACHE_DIR",
    "HYPOTHESIS_STORAGE_DIRECTORY",
    "MPLCONFIGDIR",
    "NUMBA_CACHE_DIR",
    "POCL_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "TVM_FFI_CACHE_DIR",
)

#: What programs under test obey: width and colours of the terminal, the place of a process in distributed training.
OBEYED = (
    "COLUMNS",
    "LINES",
    "CLICOLOR_FORCE",
    "FORCE_COLOR",
    "NO_COLOR",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
)

#: Audit events and which of their arguments are paths.
_PATHS: Mapping[str, tuple[int, ...]] = {
    "ctypes.dlopen": (0,),
    "open": (0,),
    "os.chdir": (0,),
    "os.chmod": (0,),
    "os.link": (0, 1),
    "os.listdir": (0,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.scandir": (0,),
    "os.symlink": (0, 1),
    "os.truncate": (0,),
    "os.utime": (0,),
    "sqlite3.connect": (0,),
}


class Guard:
    """What is refused, and what was.

    Attributes:
        homes: of the person, spelled as it was and with its links resolved.
        refused: beginnings of paths: dot folders of the homes, and the folders that variables named.
        allowed: beginnings of paths inside those.
        touched: what was refused since it was last asked for, a line each.
    """

    def __init__(self, folders: Iterable[str], allowed: Iterable[str]) -> None:
        home, *named = folders
        self.homes = frozenset({home, os.path.realpath(home)})
        self.refused = (*(os.path.join(path, ".") for path in self.homes), *map(_beginning, named))
        inside = {spelling for path in allowed for spelling in (_beginning(path), _beginning(os.path.realpath(path)))}
        self.allowed = tuple(sorted(path for path in inside if path.startswith(self.refused)))
        self.touched: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The audit hook.

        Raises:
            PermissionError: the event touches what belongs to the person.
        """
        if event in _PATHS:
            for position in _PATHS[event]:
                path = arguments[position]
                if isinstance(path, str | bytes | os.PathLike) and self.refuses(os.fsdecode(path)):
                    self._refuse(f"{event} {os.fsdecode(path)}")
        elif event == "subprocess.Popen" and arguments[3] is not None:
            program, _, _, variables = arguments
            name, home = os.fsdecode(program), variables.get("HOME", variables.get(b"HOME"))
            # Without HOME Python looks up who runs it; ldconfig, which ctypes starts so, does not.
            personal = "python" in os.path.basename(name) if home is None else os.fsdecode(home) in self.homes
            if personal:
                self._refuse(f"a process without the home directory of the tests: {name}")

    def refuses(self, path: str) -> bool:
        """Whether a path, relative ones from the working directory, belongs to the person."""
        path = _beginning(path)
        return path.startswith(self.refused) and not path.startswith(self.allowed)

    def _refuse(self, what: str) -> None:
        self.touched.append(what)
        raise PermissionError(f"no test may touch what belongs to the person who runs it: {what}")

    def taken(self) -> str:
        """What was touched, as the text of a failure; nothing is left afterwards."""
        lines, self.touched = self.touched, []
        return "".join(f"touched what belongs to the person who runs the tests: {line}\n" for line in lines)


def _beginning(path: str) -> str:
    """The absolute path, with a slash at its end: a path begins with it if it is the same or inside."""
    return os.path.join(os.path.abspath(path), "")


def isolated() -> Guard:
    """Replace the home directory of this process, unless a process above has done so; the guard of the former one."""
    if FOLDERS_VARIABLE not in os.environ:
        home = os.path.abspath(os.path.expanduser("~"))
        named = {name: os.environ[name] for name in NAMED if not _in_tree(os.environ.get(name, str(ROOT)))}
        for name in named:
            del os.environ[name]
        os.environ[FOLDERS_VARIABLE] = os.pathsep.join([home, *(path for path in named.values() if path)])
        for name, colours in (("NO_COLOR", "0"), ("FORCE_COLOR", "1")):
            if os.environ.get(name):
                os.environ.setdefault("PY_COLORS", colours)  # for the report of pytest itself
        if site.ENABLE_USER_SITE:
            os.environ.setdefault("PYTHONUSERBASE", site.getuserbase())
        os.environ["HOME"] = _temporary_home()
    for name in OBEYED:  # in every process: pytest-xdist gives its workers COLUMNS
        os.environ.pop(name, None)
    # Every kernel that a test asks for is built; tests of the cache turn it on.
    os.environ["ROLLER_CACHE"] = "0"
    allowed = [
        str(ROOT),
        str(ROOT.parent / "shared"),  # measured data, where somebody has them
        os.environ["HOME"],
        tempfile.gettempdir(),
        sys.prefix,
        sys.base_prefix,
        *filter(None, (*sys.path, sys.pycache_prefix, os.environ.get("PYTHONUSERBASE"))),
    ]
    return Guard(os.environ[FOLDERS_VARIABLE].split(os.pathsep), allowed)


def _in_tree(path: str) -> bool:
    return bool(path) and Path(path).resolve().is_relative_to(ROOT)


def _temporary_home() -> str:
    home, process = tempfile.mkdtemp(prefix="roller-tests-home-"), os.getpid()

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(home, ignore_errors=True)

    atexit.register(remove)
    return home


GUARD = isolated()
sys.addaudithook(GUARD)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Setting a test up, running it and tearing it down each fail by what they touched."""
    report = yield
    return _failed(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Importing a file of tests fails too."""
    report = yield
    return _failed(report)


def _failed(report: Any) -> Any:
    text = GUARD.taken()
    if text:
        report.sections.append(("Isolation", text))
        if not report.failed:
            report.outcome, report.longrepr = "failed", text
    return report
