"""What every test may rely on: no test reads or writes a cache of the person who runs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A process of pytest fills a core. Threads of NumPy's and PyTorch's libraries, of which each would start one per core,
# wait for their work by spinning: small products took ten times the processor time. Read when the libraries are loaded.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

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
