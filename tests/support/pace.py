"""A test that takes more than five seconds and is not marked ``slow`` fails.

Seconds are those of processors, of the test's process and of its children, alive or ended, and of a machine of an
ordinary pace: a busy or a slow one is told by a loop of known length, timed when a test seems too long. What fixtures
take counts for no test: some of them serve many.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")

#: Turns of the loop, and the processor seconds that they take where nothing else runs (a server core of 2019).
_LOOP_TURNS, _LOOP_SECONDS = 2_000_000, 0.028


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


def slowness() -> float:
    """How many times longer than on an idle machine of an ordinary pace work takes here and now; at least 1."""
    started = time.process_time()
    for _ in range(_LOOP_TURNS):
        pass
    return max(1.0, (time.process_time() - started) / _LOOP_SECONDS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test that takes too long and has not failed otherwise."""
    started = processor_seconds()
    yield
    seconds = processor_seconds() - started
    longest = item.config.getoption("--longest")
    if seconds > longest and item.get_closest_marker("slow") is None and seconds > longest * slowness():
        pytest.fail(f"took {seconds:.1f} s of processor time: make it faster than {longest:g} s, or mark it slow")
