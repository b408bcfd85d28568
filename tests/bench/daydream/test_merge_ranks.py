"""The benchmark of merged ranks: planted clocks, and the picture of what merging costs."""

from __future__ import annotations

from pathlib import Path

from bench.daydream.merge_ranks import Cost, draw, planted


def test_the_costs_of_merging_are_drawn(tmp_path: Path) -> None:
    draw([Cost(1, 1.0, 0.9, 0.1), Cost(2, 2.0, 1.8, 0.2)], tmp_path / "costs.png")
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")


def test_a_planted_job_is_merged_with_and_without_alignment() -> None:
    told = planted(2, 1, 30_000.0, seed=3)
    assert told.worst_us < 5.0
    assert told.error < 0.001 < told.error_as_recorded
