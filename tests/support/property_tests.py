"""Property tests draw the same examples in every run, on every machine; new ones only where they are asked for.

Profiles of Hypothesis: ``same`` is what every run takes, its draws depend on the source of a test alone. ``new`` draws
by ``--hypothesis-seed``; ``make fuzz`` (:mod:`tests.fuzz`) runs it over and over. Neither keeps a database of failures,
and neither has a limit of time: both would say on one machine what they do not say on another.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

#: What selects every test that draws: those of Hypothesis, which its plugin marks, and those that take ``new_seed``.
DRAWS = "hypothesis or seeded"

#: How a line begins that says how to repeat a failure.
REPEAT = "repeat with: "

_SEEDS_OF_A_RUN = 1_000_000

settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "new", database=None, deadline=None, print_blob=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


def _no_constants() -> providers.Constants:
    """Nothing. Hypothesis draws now and then a number that some module loaded so far contains, unless the path of the
    module has a folder ``tests`` in it: draws would depend on what ran before and on where the tree lies."""
    return _NOTHING


_NOTHING = providers.Constants()
if not hasattr(providers, "_get_local_constants"):
    raise ImportError("this version of Hypothesis finds constants in another way; see _no_constants")
providers._get_local_constants = _no_constants


@pytest.fixture
def new_seed(request: pytest.FixtureRequest) -> int:
    """The first seed for a test that draws without Hypothesis: 0, or with ``--hypothesis-seed`` a number followed by
    999,999 that no other seed gives."""
    return _SEEDS_OF_A_RUN * _seed(request.config)


def _seed(config: pytest.Config) -> int:
    return int(config.getoption("--hypothesis-seed") or 0)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "seeded: draws by the fixture new_seed; marked by itself")


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if "new_seed" in getattr(item, "fixturenames", ()):
            item.add_marker("seeded")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With a seed given: for every failure the command that repeats it."""
    if not config.getoption("--hypothesis-seed"):
        return
    failed = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    for name in dict.fromkeys(report.nodeid for report in failed):
        options = f"--hypothesis-profile=new --hypothesis-seed={_seed(config)}"
        terminalreporter.write_line(f"{REPEAT}.venv/bin/pytest {options} {shlex.quote(name)}")
