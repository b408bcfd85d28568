"""Names of tests depend on nothing but the tree: processes that collect them apart agree, as those of xdist have to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.isolation import ROOT


def collecting(hash_seed: str, temporary: Path) -> subprocess.Popen[str]:
    """A process that lists the tests, with its own order of sets and its own folder for temporary files."""
    temporary.mkdir()
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def found_by(process: subprocess.Popen[str]) -> list[str]:
    """The tests that a process lists, in its order."""
    return [line for line in process.communicate()[0].splitlines() if line.startswith("tests/") and "::" in line]


def collects_everything(config: pytest.Config) -> bool:
    """Whether the tests of this run are those of the tree: nothing was named or left out."""
    selected = any(config.getoption(name) for name in ("keyword", "markexpr", "deselect"))
    return not selected and [Path(path).resolve() for path in config.args] == [ROOT / "tests"]


@pytest.mark.slow
@pytest.mark.usefixtures("device_compiler")  # every file is collected, those that import TVM too
def test_every_collection_finds_the_same_tests(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """This run's own collection is one of the two where it is whole: its order of sets and its folder are others."""
    if collects_everything(request.config):
        first = [item.nodeid for item in request.session.items]
        second = found_by(collecting("1", tmp_path / "one"))
    else:
        process = collecting("1", tmp_path / "one")
        time.sleep(1.1)  # gzip and others note the second
        second = found_by(collecting("2", tmp_path / "two"))
        first = found_by(process)
    assert len(first) > 5000
    assert first == second
