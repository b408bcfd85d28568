"""Layers with a state: tokens, heads and sequences set their times, by the kernels that a board has."""

from __future__ import annotations

from typing import Any

import pytest

from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library import library_time, library_times

H100, B200, L40S = load_device("h100"), load_device("b200"), load_device("l40s")
NET = {"op": "delta_net", "batch": 4, "tokens": 4096, "key_heads": 16, "value_heads": 32}
MAMBA = {"op": "mamba2", "batch": 4, "tokens": 4096, "heads": 64}


def seconds(device: Any, **changed: Any) -> float:
    return library_time({**NET, **changed}, device).seconds


@pytest.mark.parametrize("device", [H100, B200, L40S], ids=lambda device: str(device.name))
def test_a_layer_is_its_convolution_and_its_rule(device: Any) -> None:
    both = library_time(NET, device)
    assert [part.label for part in both.parts] == ["convolution", "rule"]
    assert both.seconds == pytest.approx(seconds(device, part="convolution") + seconds(device, part="rule"))


def test_chunks_of_a_sequence_follow_one_another_while_units_are_free() -> None:
    short, long = (seconds(H100, part="rule", batch=1, tokens=tokens) for tokens in (4096, 8192))
    assert long == pytest.approx(2 * short, rel=0.1)
    assert seconds(H100, part="rule", batch=4) == pytest.approx(short, rel=0.15)
    assert seconds(H100, part="rule", batch=8) > 1.8 * short


def test_decoding_reads_and_writes_the_states() -> None:
    decoding = seconds(H100, part="rule", phase="decode", batch=1024, tokens=1)
    assert decoding == pytest.approx(2 * 1024 * 32 * 128 * 128 * 4 / 3.02e12, rel=0.15)


def test_states_that_fit_stay_in_l2() -> None:
    fitting, larger = (seconds(L40S, part="rule", phase="decode", batch=batch, tokens=1) for batch in (32, 64))
    assert larger > 5 * fitting


def test_mamba_solves_no_triangle() -> None:
    net = {**NET, "tokens": 64, "batch": 1, "key_heads": 1, "value_heads": 64, "value_dim": 64, "part": "rule"}
    scan = {**MAMBA, "tokens": 64, "batch": 1, "part": "rule"}
    with_triangle, without = library_times([net, scan], L40S)
    assert 0 < without.seconds < with_triangle.seconds


def test_the_backward_pass_walks_the_tokens_twice() -> None:
    assert library_time(NET, H100, "backward").seconds == pytest.approx(2 * seconds(H100))
    with pytest.raises(InputError, match="phase: decoding has no backward pass; write prefill"):
        library_time({**NET, "tokens": 1, "phase": "decode"}, H100, "backward")
