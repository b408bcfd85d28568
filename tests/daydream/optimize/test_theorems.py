"""dPRO's theorems on drawn steps: what they promise holds where their premises do, and nothing is said elsewhere."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from daydream.optimize.coarse import CoarseStep, coarsened
from daydream.optimize.exchange import Ends, Exchange
from daydream.optimize.theorems import cuts, subadditive, tensor_fusion_pays
from tests.daydream.optimize.steps import exchange_of, exchanges

#: Rounding of sums of microseconds.
CLOSE = 1e-6

_US = st.integers(1, 400).map(float)
_BYTES = st.integers(1_000, 3_000_000)


def channel_free(step: CoarseStep, ends: Ends) -> float:
    """When the channel has done these buckets."""
    progress, first = step.start(), 0
    for last in ends:
        progress, first = step.extended(progress, first, last), last + 1
    return float(progress.end[0])


@given(exchanges(gradients=5))
def test_fused_tensors_win_as_theorem_2_says(exchange: Exchange) -> None:
    step = coarsened(exchange)
    for before, middle, last in combinations(range(-1, len(step)), 3):
        prefix = (before,) if before >= 0 else ()
        in_front, apart, fused = (channel_free(step, (*prefix, *more)) for more in ((middle,), (middle, last), (last,)))
        progress, first = step.start(), 0
        for end in (*prefix, middle):
            progress, first = step.extended(progress, first, end), end + 1
        returned = float(progress.issued[0, last] + step.call_us[last])
        ready = max(returned, float(progress.ready[0, first : last + 1].max()))
        pays = tensor_fusion_pays(in_front, ready, step.took_us[before + 1, last], step.took_us[middle + 1, last])
        one_by_one = step.took_us[before + 1, middle] + step.took_us[middle + 1, last]
        if not subadditive(step.took_us, before + 1, middle, last):
            # The library takes another way for the whole: the theorem promises nothing.
            assert step.took_us[before + 1, last] > one_by_one
        elif pays:
            assert fused <= apart + CLOSE
        elif not exchange.call_us and step.took_us[before + 1, last] >= step.took_us[middle + 1, last]:
            assert apart <= fused + CLOSE


@given(st.tuples(_US, _US, _US), st.tuples(_BYTES, _BYTES, _BYTES), st.integers(0, 300), st.sampled_from([0.0, 42.0]))
def test_fusing_both_is_no_worse_than_fusing_one_as_theorem_3_says(
    kernels: tuple[float, float, float], sizes: tuple[int, int, int], saved: int, call_us: float
) -> None:
    first, second, third = kernels
    fused = max(second + third - saved, 1.0)
    operators = [(1.0, first, [sizes[0]]), (1.0, second, [sizes[1]]), (1.0, third, [sizes[2]])]
    unfused = coarsened(exchange_of(operators, latency_us=5.0, call_us=call_us))
    one = coarsened(exchange_of([operators[0], (1.0, fused, sizes[1:])], latency_us=5.0, call_us=call_us))
    both = one.replay((0, 2))
    assert both <= unfused.replay((0, 2)) + CLOSE
    assert both <= one.replay((0, 1, 2)) + CLOSE


def test_gradients_of_one_kernel_stay_together_where_a_bucket_costs_a_latency_and_its_bytes() -> None:
    backward = [(1.0, 50.0, [2000.0, 1000.0]), (1.0, 50.0, [4000.0])]
    step = coarsened(exchange_of(backward, latency_us=5.0, call_us=42.0))
    assert cuts(step.took_us, step.ready, step.producer, step.hook, step.call_us).tolist() == [False, True, True]


def test_a_cut_stays_where_the_library_takes_another_way_above_a_size() -> None:
    backward = [(1.0, 50.0, [2000.0, 1000.0]), (1.0, 50.0, [4000.0])]
    step = coarsened(exchange_of(backward, latency_us=5.0))
    took = step.took_us + np.where(step.took_us > step.took_us[0, 0], 100.0, 0.0)
    assert cuts(took, step.ready, step.producer, step.hook, step.call_us).tolist() == [True, True, True]
