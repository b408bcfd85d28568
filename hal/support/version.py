"""Origin of this copy of Roller, which ``--version`` of every program prints.

Builds import this too, so it needs the standard library alone.
"""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Written by ``setup.py`` while a wheel is built, absent in a checkout.
COMMIT_FILE = Path("hal", "commit.txt")

#: Distributions that decide the bytes of kernels.
_COMPILERS = {"TVM": "apache-tvm", "NVRTC": "nvidia-cuda-nvrtc-cu12"}


def commit(root: Path = ROOT) -> str | None:
    """The commit that the packages below ``root`` come from, ``-dirty`` behind it where files differ; None: unknown."""
    if not (root / ".git").exists():
        file = root / COMMIT_FILE
        return file.read_text("utf-8").strip() if file.is_file() else None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def version_text(program: str) -> str:
    """Two lines: the program, then the interpreter and the compilers.

    roller 0.2.0, commit 0123456789ab
    Python 3.11.7, TVM 0.27.0.post1, NVRTC 12.9.86
    """
    source = commit()
    tools = [f"{tool} {_version(name)}" for tool, name in _COMPILERS.items()]
    return (
        f"{program} {_version('roller')}{f', commit {source}' if source else ''}\n"
        f"{', '.join([f'Python {platform.python_version()}', *tools])}"
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "missing" if distribution != "roller" else "not installed"
