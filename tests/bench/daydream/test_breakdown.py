"""The bench of what steps hold: a translator of LSTMs, of which cuDNN's parts are worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench.daydream.breakdown import breakdown, draw, table
from daydream.graph.memory import MemoryKind

#: Numbers of a state of all words of 32 sentences of 30.
STATES = 32 * 30 * 512 * 4


def test_a_translator_keeps_gates_and_cells(tmp_path: Path):
    row = breakdown("LSTM", 32)
    assert sum(row.share(kind) for kind in row.largest) == pytest.approx(1)
    sizes = {each.bytes for each in row.memory.footprint.held if each.kind is MemoryKind.FEATURE_MAPS}
    # Four gates, the cell, and states of all layers but the last: two layers read, three write.
    assert {(2 * 5 + 1) * STATES, (3 * 5 + 2) * STATES} <= sizes
    # The writer's matrices once more, and 3 x 4 - 1 numbers for each element of its first states.
    assert row.largest[MemoryKind.WORKSPACE] == 3 * (2 * 2048 * 512) * 4 + 11 * 3 * 32 * 512 * 4
    draw([row], tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert table([row]).row_count == 1
