"""``--version`` tells the version, the commit and the compilers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from daydream.cli import main as daydream
from hal.support import version
from roller.cli import main as roller


def test_a_wheel_knows_its_commit_from_the_file_that_the_build_wrote(tmp_path: Path) -> None:
    assert version.commit(tmp_path) is None
    (tmp_path / "hal").mkdir()
    (tmp_path / "hal" / "commit.txt").write_text("0123456789ab\n")
    assert version.commit(tmp_path) == "0123456789ab"


def test_a_checkout_asks_git_and_tells_of_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        author = ["-c", "user.name=n", "-c", "user.email=e"]
        done = subprocess.run(["git", *author, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    git("tag", "v1")
    assert version.commit(tmp_path) == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "file").write_text("b")
    assert version.commit(tmp_path) == git("rev-parse", "--short=12", "HEAD") + "-dirty"


@pytest.mark.parametrize("program", (roller, daydream), ids=("roller", "daydream"))
def test_both_programs_tell(program: click.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"roller": "0.2.0", "apache-tvm": "0.27.0", "nvidia-cuda-nvrtc-cu12": "12.9.86"}
    monkeypatch.setattr(version.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(version.platform, "python_version", lambda: "3.12.1")
    monkeypatch.setattr(version, "commit", lambda: "0123456789ab")
    result = CliRunner().invoke(program, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"{program.name} 0.2.0, commit 0123456789ab\nPython 3.12.1, TVM 0.27.0, NVRTC 12.9.86\n"
