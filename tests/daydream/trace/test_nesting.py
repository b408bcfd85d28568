"""Which events stand inside which, where ends and starts meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from daydream.trace.files import read_trace
from daydream.trace.nesting import enclosing_events
from tests.daydream.traces import Builder


@pytest.mark.parametrize("start", [0.0, 0.1, 1234.567, 987654.321])
def test_an_event_that_begins_where_another_ends_is_not_inside(start: float, tmp_path: Path) -> None:
    builder = Builder()
    lengths = (0.1, 0.2, 0.3, 0.7, 1.1, 3.3, 0.007)
    at = start
    for number, length in enumerate(lengths):
        builder.operator(f"aten::op{number}", round(at, 3), length)
        at += length
    builder.write(tmp_path / "trace.json")
    trace = read_trace(tmp_path / "trace.json")
    assert enclosing_events(trace).tolist() == [-1] * len(lengths)
