"""What every test may rely on: no test reads or writes a cache of the person who runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytest_plugins = [
    "tests.support.isolation",
    "tests.support.kernels",
    "tests.support.pace",
    "tests.support.property_tests",
    "tests.support.tools",
]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
