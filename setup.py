"""A wheel tells the commit it was built from (``roller --version``); everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))  # a build's own interpreter has no Roller

from hal.support.version import COMMIT_FILE, commit


class BuildWithCommit(build_py):
    """Adds the file that ``hal.support.version`` reads where there is no checkout."""

    def run(self) -> None:
        super().run()
        source = commit()
        if source is not None and not self.editable_mode:
            Path(self.build_lib, COMMIT_FILE).write_text(source + "\n", "utf-8")


setup(cmdclass={"build_py": BuildWithCommit})
