"""Stacked areas: their heights, their pieces, and what is asked of pictures."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np

from daydream.report.area import BINS, HEIGHT, TOP, Area, stacked
from daydream.report.picture import LABEL_WIDTH, WIDTH


def polygons(svg: str) -> dict[str, list[tuple[float, float]]]:
    root = ElementTree.fromstring(svg)
    return {
        each.get("class", ""): [
            (float(x), float(y)) for x, y in (point.split(",") for point in each.get("points", "").split())
        ]
        for each in root.iter("polygon")
    }


def test_one_lies_on_the_other() -> None:
    time_us = np.array([0.0, 50.0])
    areas = [Area("maps", "forward", np.array([10, 30])), Area("rest", "other", np.array([10, 10]))]
    drawn = polygons(stacked(time_us, areas, 0.0, 100.0, "memory"))
    base, middle = TOP + HEIGHT, (LABEL_WIDTH + WIDTH) / 2
    lower = [(LABEL_WIDTH, base - HEIGHT / 4), (middle, base - HEIGHT / 4), (middle, base - 0.75 * HEIGHT)]
    assert drawn["forward"][:3] == lower
    assert drawn["forward"][4:] == [(WIDTH, base), (middle, base), (middle, base), (LABEL_WIDTH, base)]
    assert drawn["other"][:4] == [
        (LABEL_WIDTH, base - HEIGHT / 2),
        (middle, base - HEIGHT / 2),
        (middle, TOP),
        (WIDTH, TOP),
    ]
    assert drawn["other"][-1] == lower[0]


def test_a_short_peak_is_not_lost_among_many_changes() -> None:
    amounts = np.ones(20 * BINS, np.int64)
    amounts[7777] = 100
    svg = stacked(np.arange(len(amounts), dtype=float), [Area("maps", "forward", amounts)], 0.0, len(amounts), "memory")
    (points,) = polygons(svg).values()
    assert min(y for _, y in points) == TOP
    assert len(points) == 4 * BINS


def test_an_earlier_amount_holds_at_the_begin() -> None:
    svg = stacked(np.array([-np.inf, 80.0]), [Area("maps", "forward", np.array([4, 8]))], 50.0, 100.0, "memory")
    (points,) = polygons(svg).values()
    assert points[0] == (LABEL_WIDTH, TOP + HEIGHT / 2)


def test_nothing_to_draw_is_a_picture() -> None:
    for time_us in (np.empty(0), np.array([1.0])):
        area = Area("maps", "forward", np.zeros(len(time_us), np.int64))
        assert polygons(stacked(time_us, [area], 0.0, 10.0, "<memory>")) == {}
    assert polygons(stacked(np.array([1.0]), [], 0.0, 10.0, "memory")) == {}
