"""What every test may rely on: no test reads or writes a cache of the person who runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.verify.opencl import opencl_available

ROOT = Path(__file__).resolve().parent.parent
pytest_plugins = ["tests.support.isolation", "tests.support.property_tests"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``opencl`` are skipped, with the reason, where no kernel can be run."""
    marked = [item for item in items if item.get_closest_marker("opencl")]
    missing = opencl_available() if marked else None
    if missing is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
