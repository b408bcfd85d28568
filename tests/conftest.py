"""What every test may rely on: no test reads or writes a cache of the person who runs it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from hal.support.command_line import COLLECTION_THRESHOLDS
from hal.support.threads import ONE_THREAD

ROOT = Path(__file__).resolve().parent.parent
# A process of pytest fills a core; read when NumPy and PyTorch are loaded.
for variable, count in ONE_THREAD.items():
    os.environ.setdefault(variable, count)

# Thousands of tests and PyTorch's modules are not looked through for garbage again and again.
gc.set_threshold(*COLLECTION_THRESHOLDS)

pytest_plugins = [
    "tests.support.isolation",
    "tests.support.kernels",
    "tests.support.pace",
    "tests.support.property_tests",
    "tests.support.this_cpu",
    "tests.support.tools",
]


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
