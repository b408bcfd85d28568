"""The clock that a power limit leaves to attention."""

from __future__ import annotations

import numpy as np
import pytest

from sokoban.model.gpu.power import POWER_SECONDS, STEP_POWER, power_limited


def test_short_kernels_end_before_the_clock_falls_and_long_ones_keep_the_lower() -> None:
    seconds = np.array([1e-6, POWER_SECONDS, 1e3])
    slowdown = power_limited(seconds, 1.5 * seconds) / seconds
    assert slowdown == pytest.approx([1.0, 1 + (1.5 * STEP_POWER - 1) / 2, 1.5 * STEP_POWER], rel=1e-4)


def test_products_that_draw_little_fall_by_nothing() -> None:
    assert power_limited(0.5, 0.5 / STEP_POWER) == 0.5
