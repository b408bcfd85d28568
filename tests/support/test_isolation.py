"""Nothing of the person who runs the tests is reached, and a test that tries it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.isolation import FOLDERS_VARIABLE, GUARD, NAMED, ROOT, Guard

ANN = Guard(["/home/ann", "/data/triton"], ["/home/ann/.venvs/roller", "/home/ann/.local/lib/python3.11", "/home", "/"])


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("/home/ann/.cache", True),
        ("/home/ann/.cache/roller/pocl/x", True),
        ("/home/ann/project/../.config/matplotlib", True),
        ("/home/ann/.gitconfig", True),
        ("/data/triton", True),
        ("/data/triton/x", True),
        ("/data/tritons", False),
        ("/home/ann", False),
        ("/home/ann/roller/.venv/bin/python", False),
        ("/home/ann/.venvs/roller/bin/python", False),
        ("/home/ann/.venvs/roller2/bin/python", True),
        ("/home/ann/.local/lib/python3.11/site-packages/numpy/__init__.py", False),
        ("/home/ann/.local/share/x", True),
        ("/home/bob/.cache", False),
        ("relative", False),
    ],
)
def test_dot_folders_of_the_home_and_named_folders_are_refused(path: str, refused: bool) -> None:
    assert ANN.refuses(path) is refused


def test_a_relative_path_counts_from_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Guard([str(tmp_path)], []).refuses(".cache/x")


def test_the_home_directory_is_not_the_persons() -> None:
    assert str(Path.home()) not in GUARD.homes and os.path.expanduser("~") not in GUARD.homes
    assert not any(GUARD.refuses(os.environ[name]) for name in NAMED if name in os.environ)


TRIES = """
import ctypes, os, subprocess, sys
from pathlib import Path

import pytest

PERSON = Path(os.environ["PERSON"])


def test_reading_is_refused_even_if_that_is_caught():
    try:
        (PERSON / ".cache" / "known").read_text()
    except OSError:
        pass


def test_writing():
    (PERSON / ".cache" / "new").mkdir()


def test_what_a_variable_named():
    os.listdir(PERSON / "named")


def test_loading_a_library():
    ctypes.CDLL(str(PERSON / ".cache" / "x.so"))


@pytest.fixture
def late():
    yield
    with pytest.raises(PermissionError):
        os.remove(PERSON / ".cache" / "known")


def test_at_the_end(late):
    pass


def test_a_child_with_another_environment():
    subprocess.run([sys.executable, "-c", ""], env={})


def test_good_a_child_finds_an_empty_home():
    code = "import os, pathlib; print(os.listdir(pathlib.Path.home()), *{'TRITON_CACHE_DIR', 'RANK'} & {*os.environ})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\\n"


def test_good_what_is_no_dot_folder():
    assert os.listdir(PERSON / "work") == []
"""


@pytest.mark.slow
def test_a_test_that_touches_them_fails(tmp_path: Path) -> None:
    person = tmp_path / "ann"
    for folder in (".cache", "named", "work"):
        (person / folder).mkdir(parents=True)
    (person / ".cache" / "known").write_text("kept")
    (tmp_path / "test_tries.py").write_text(TRIES)
    environment = {name: value for name, value in os.environ.items() if name != FOLDERS_VARIABLE}
    environment |= {"HOME": str(person), "PERSON": str(person), "TRITON_CACHE_DIR": str(person / "named"), "RANK": "3"}
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.isolation", "-p", "no:cacheprovider", "-rA", "-q"]
    done = subprocess.run(
        [*command, str(tmp_path / "test_tries.py")], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    lines = [line.split(" - ")[0] for line in done.stdout.splitlines()]
    outcomes = {line.partition("::")[2]: line.split()[0] for line in lines if "::" in line}
    assert outcomes == {
        "test_reading_is_refused_even_if_that_is_caught": "FAILED",
        "test_writing": "FAILED",
        "test_what_a_variable_named": "FAILED",
        "test_loading_a_library": "FAILED",
        "test_at_the_end": "ERROR",
        "test_a_child_with_another_environment": "FAILED",
        "test_good_a_child_finds_an_empty_home": "PASSED",
        "test_good_what_is_no_dot_folder": "PASSED",
    }
    assert f"open {person}/.cache/known" in done.stdout
    assert [path.name for path in (person / ".cache").iterdir()] == ["known"]
