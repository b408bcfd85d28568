"""Hosts with names: what a processor takes for a call."""

from __future__ import annotations

import numpy as np
import pytest

from daydream.prediction.host import host_seconds
from daydream.prediction.processors import MEASURED_SECONDS, PROCESSORS
from hal.catalog import load_device
from hal.support.errors import InputError
from tests.daydream.captures import operator

CALLS = [operator("aten::mm"), operator("aten::view", launches=False)]


def test_a_processor_with_a_name_takes_its_own_time_for_a_call() -> None:
    v100 = load_device("v100-sxm2-16gb")
    named = host_seconds(CALLS, [1, 0], v100, "xeon-e5-2698v4")
    assert named[0] == MEASURED_SECONDS
    usual = host_seconds(CALLS, [1, 0], v100)
    assert np.allclose(named / usual, MEASURED_SECONDS / 0.5 / 36.1e-6)


def test_others_are_as_much_faster_as_their_clock_and_cores() -> None:
    v100 = load_device("v100-sxm2-16gb")
    milan = host_seconds(CALLS, [1, 0], v100, "epyc-7763")
    # 3.5 GHz for 3.6, and two generations of 10 and 19 % more in a cycle.
    assert milan[0] == pytest.approx(MEASURED_SECONDS * 3.6 / (3.5 * 1.10 * 1.19))
    assert all(each.turbo_hz < 4.5e9 and each.per_cycle >= 1 for each in PROCESSORS.values())


def test_an_unknown_processor_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InputError, match="xeon-e5-2698v4"):
        host_seconds(CALLS, [1, 0], load_device("t4"), "486dx")
