"""Options and the summary of the benchmarks."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from hal.catalog import load_device
from hal.spec.device import DeviceSpec


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--limits",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="fail where construction or compilation takes longer than the project promises",
    )


@pytest.fixture
def limits(request: pytest.FixtureRequest) -> bool:
    """True if times are to be held against the promised ones."""
    return bool(request.config.getoption("--limits"))


@pytest.fixture(scope="session")
def v100() -> DeviceSpec:
    return load_device("v100")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Figures that the benchmarks recorded besides their own times: pytest-benchmark keeps them for its JSON only."""
    session = getattr(config, "_benchmarksession", None)
    recorded = [bench for bench in getattr(session, "benchmarks", []) if bench.extra_info]
    if not recorded:
        return
    terminalreporter.section("recorded")
    for bench in recorded:
        terminalreporter.write_line(bench.name)
        for key, value in bench.extra_info.items():
            terminalreporter.write_line(f"  {key:20} {value:g}" if isinstance(value, float) else f"  {key:20} {value}")
