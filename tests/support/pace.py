"""Tests that take more than five seconds and are not marked ``slow`` are named at the end of a run.

Seconds are those of processors, of the test's process and of its children, alive or ended. No test fails by them: they
depend on the machine and on what else it does. What fixtures take counts for no test: some of them serve many.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

#: Property of a report: processor seconds of a long test.
_LONG = "long"

_TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--longest", type=float, default=5.0, metavar="SECONDS", help="processor time of a test that is not marked slow"
    )


def processor_seconds() -> float:
    """What this process and its children, theirs included, have taken so far."""
    times = os.times()
    ended = times.user + times.system + times.children_user + times.children_system
    return ended + sum(map(_seconds_of, _descendants(os.getpid())))


def _descendants(process: int) -> Iterator[int]:
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        children = [int(number) for thread in threads for number in (thread / "children").read_text().split()]
    except OSError:  # ended meanwhile, or no Linux
        return
    for child in children:
        yield child
        yield from _descendants(child)


def _seconds_of(process: int) -> float:
    """Of a process and of its ended children: utime, stime, cutime and cstime of proc(5)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Note the seconds of a test that takes long and does not say so."""
    started = processor_seconds()
    yield
    seconds = processor_seconds() - started
    longest = item.config.getoption("--longest")
    if seconds > longest and item.get_closest_marker("slow") is None:
        item.user_properties.append((_LONG, seconds))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    longest = config.getoption("--longest")
    calls = [report for report in terminalreporter.getreports("passed") if report.when == "call"]
    times = [(seconds, report.nodeid) for report in calls for key, seconds in report.user_properties if key == _LONG]
    for seconds, name in sorted(times, reverse=True):
        advice = f"make it faster than {longest:g} s, or mark it slow"
        terminalreporter.line(f"{name} took {seconds:.1f} s of processor time: {advice}")
