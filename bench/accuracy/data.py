"""Where the measured data is."""

from __future__ import annotations

import os
from pathlib import Path

from hal.support.errors import InputError

VARIABLE = "ROLLER_DATA"


def default_directory() -> Path:
    """Directory that the environment variable names, else the repository's ``shared/data``."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else Path(__file__).parents[2].parent / "shared" / "data"


def data_directory(given: Path | None = None) -> Path:
    """``given``, or the default; checked to be there.

    Raises:
        InputError: there is no such directory.
    """
    directory = given or default_directory()
    if not directory.is_dir():
        raise InputError(str(directory), "no such directory", f"name the measured data with --data or {VARIABLE}")
    return directory
