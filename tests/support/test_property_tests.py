"""Draws depend on the source of a test alone, and a failure of new draws says how to repeat it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import Rounds
from tests.support.isolation import ROOT
from tests.support.property_tests import DRAWS, REPEAT

DRAWN = """
import sys
from tests.support import property_tests
from hypothesis import given, strategies as st
{more}
drawn = []

@given(st.integers(), st.floats(), st.lists(st.sampled_from("abc")), st.sets(st.integers(0, 100)))
def test_some(number, real, letters, numbers):
    drawn.append(repr((number, real, letters, sorted(numbers))))

test_some()
print(drawn)
"""


def drawn(folder: Path, hash_seed: str, more: str) -> str:
    folder.mkdir()
    (folder / "constants.py").write_text("A, B, C = 8675309, 2.718281828, 'a string of this module'\n")
    (folder / "draws.py").write_text(DRAWN.format(more=more))
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    command = [sys.executable, str(folder / "draws.py")]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_two_processes_draw_the_same(tmp_path: Path) -> None:
    # Of two places, two orders of sets, and with other modules loaded, whose constants Hypothesis would try.
    first = drawn(tmp_path / "tests", "1", "")
    assert first.count(",") > 200
    assert drawn(tmp_path / "elsewhere", "2", "import constants, json.tool") == first


WRONG = """
from hypothesis import given, strategies as st

@given(st.integers())
def test_wrong(value):
    assert value != 3 and value < 1000

def test_seeded(new_seed):
    assert new_seed == 0
"""


@pytest.mark.slow
def test_a_failure_of_new_draws_says_how_to_repeat_it(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(WRONG)
    command = [sys.executable, "-m", "pytest", "-q", "--assert=rewrite", "-p", "tests.support.property_tests"]
    command += [
        "-p",
        "no:cacheprovider",
        "-m",
        DRAWS,
        "--hypothesis-profile=new",
        "--hypothesis-seed=7",
        str(tmp_path / "test_some.py"),
    ]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    lines = [line for line in output.splitlines() if line.startswith(REPEAT)]
    assert [line.rpartition("::")[2] for line in lines] == ["test_wrong", "test_seeded"]
    assert lines[0].startswith(f"{REPEAT}.venv/bin/pytest --hypothesis-profile=new --hypothesis-seed=7 ")
    assert "assert 7000000 == 0" in output


def test_fuzz_collects_failures_by_test(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    repeat = ".venv/bin/pytest --hypothesis-profile=new --hypothesis-seed={seed} 'a.py::b[x y]'"
    outputs = iter([
        (0, "5 passed"),
        (1, f"E  wrong\n{REPEAT}{repeat.format(seed=8)}\n1 failed"),
        (1, f"E  again\n{REPEAT}{repeat.format(seed=9)}\n1 failed"),
        (3, "Internal error"),
    ])  # fmt: skip
    monkeypatch.setattr(Rounds, "_started", lambda rounds, seed: subprocess.Popen(["true"]))
    monkeypatch.setattr("tests.fuzz._ended", lambda process, seconds: (process.wait() or 0, "") and next(outputs))
    rounds = Rounds(("a.py",), itertools.count(7), float("inf"))
    rounds.run()
    assert (rounds.complete, rounds.broken, next(rounds.seeds)) == (3, True, 11)
    assert rounds.failures == {"'a.py::b[x y]'": repeat.format(seed=8)}
    shown = capsys.readouterr().out
    assert "E  wrong" in shown and "E  again" not in shown and "Internal error" in shown
    assert repeat.format(seed=9) in shown
