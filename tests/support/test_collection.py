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


@pytest.mark.slow
@pytest.mark.usefixtures("device_compiler")  # every file is collected, those that import TVM too
def test_every_collection_finds_the_same_tests(tmp_path: Path) -> None:
    first = collecting("1", tmp_path / "one")
    time.sleep(1.1)  # gzip and others note the second
    second = collecting("2", tmp_path / "two")
    lists = [[line for line in process.communicate()[0].splitlines() if "::" in line] for process in (first, second)]
    assert len(lists[0]) > 5000
    assert lists[0] == lists[1]
