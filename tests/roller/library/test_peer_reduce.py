"""All-reduces by vLLM's kernels: shots, links, hosts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library import library_time
from roller.library.collectives import HOST_SECONDS

H100 = load_device("h100")
REDUCE = {"op": "all_reduce", "bytes": 2**20, "ranks": 8, "kernels": "vllm"}


def reduced(**changed: Any) -> Any:
    return library_time({**REDUCE, **changed}, H100)


def test_small_messages_take_less_than_by_nccl() -> None:
    assert reduced(bytes=512).seconds < 0.5 * reduced(bytes=512, kernels="nccl").seconds
    assert reduced(bytes=512).seconds == pytest.approx(4.6e-6, rel=0.15)


@pytest.mark.parametrize(
    ("size", "ranks", "kernel"),
    [(2**24, 2, "one shot"), (2**18, 4, "one shot"), (2**19, 4, "two shots"), (2**18, 8, "two shots")],
)
def test_many_bytes_go_in_two_shots(size: int, ranks: int, kernel: str) -> None:
    assert reduced(bytes=size, ranks=ranks).kernel == kernel


def test_two_shots_move_less_than_one_among_many() -> None:
    below, above = reduced(bytes=2**19 - 16, ranks=4), reduced(bytes=2**20, ranks=4)
    assert above.seconds < 2 * below.seconds


def test_hosts_set_the_pace_of_small_calls_and_copies_that_of_large_ones() -> None:
    assert reduced(bytes=512).call_seconds == pytest.approx(20.5e-6)
    large = reduced(bytes=2**24)
    assert large.call_seconds == pytest.approx(large.seconds + 2 * 2**24 / (0.36 * 3.02e12))


def test_hosts_are_those_of_the_node_and_of_whose_kernels_run() -> None:
    assert reduced(bytes=2**17).call_seconds == pytest.approx(20.5e-6)
    assert reduced(bytes=2**18).call_seconds == pytest.approx(HOST_SECONDS)
    assert reduced(bytes=2**18, ranks=4).call_seconds < HOST_SECONDS
    a100 = library_time({**REDUCE, "bytes": 512}, load_device("a100-sxm-80gb"))
    assert a100.call_seconds == pytest.approx(44.4e-6)


def test_what_is_no_such_all_reduce_is_refused() -> None:
    with pytest.raises(InputError, match=r"kernels: vllm has none for all_gather; use nccl, or an all_reduce"):
        reduced(op="all_gather")
    with pytest.raises(InputError, match=r"kernels: there are none of 'rccl'; use one of nccl and vllm"):
        reduced(kernels="rccl")
    with pytest.raises(InputError, match="ranks: "):
        reduced(ranks=16)
