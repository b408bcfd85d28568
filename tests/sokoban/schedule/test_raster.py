"""Bands run down and across the last two axes that have several blocks."""

from __future__ import annotations

from sokoban.schedule.raster import raster_axes


def test_a_band_runs_across_the_last_axis_with_several_tiles() -> None:
    assert raster_axes({"b": 3, "m": 4, "n": 5}) == ("m", "n")
    assert raster_axes({"b": 3, "m": 4, "n": 1}) == ("b", "m")
    assert raster_axes({"m": 1, "n": 5}) is None
