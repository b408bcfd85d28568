"""All-reduces by vLLM's kernels: shots, links, hosts, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.catalog import load_device
from hal.node_catalog import load_node
from hal.support.errors import InputError
from roller.library import library_time
from roller.library.collectives import HOST_SECONDS
from roller.library.peer_reduce import peer_reduce_seconds

H100 = load_device("h100")
REDUCE = {"op": "all_reduce", "bytes": 2**20, "ranks": 8, "kernels": "vllm"}


def reduced(**changed: Any) -> Any:
    return library_time({**REDUCE, **changed}, H100)


def test_small_messages_take_less_than_by_nccl() -> None:
    assert reduced(bytes=512).seconds < 0.5 * reduced(bytes=512, kernels="nccl").seconds
    assert reduced(bytes=512).seconds == pytest.approx(4.6e-6, rel=0.15)


@pytest.mark.parametrize(
    ("size", "ranks", "kernel"),
    [(2**22, 2, "one shot"), (2**18, 4, "one shot"), (2**19, 4, "two shots"), (2**18 - 16, 8, "one shot")],
)
def test_many_bytes_go_in_two_shots(size: int, ranks: int, kernel: str) -> None:
    assert reduced(bytes=size, ranks=ranks).kernel == kernel


@pytest.mark.parametrize(
    ("device", "size", "ranks", "kernel"),
    [
        ("h100", 2**23, 2, "two shots"), ("h100", 2**18, 8, "switch's sums"), ("h100", 2**25, 4, "ring Simple"),
        ("h100", 2**26, 8, "NVLS"), ("b200", 2**21, 4, "two shots"), ("b200", 2**20, 8, "switch's sums"),
        ("a100-sxm-80gb", 2**23 - 16, 8, "two shots"), ("a100-sxm-80gb", 2**25, 8, "ring Simple"),
        ("l40s", 2**10, 2, "one shot"), ("l40s", 2**10, 4, "ring LL"), ("l40s", 2**22, 8, "ring Simple"),
    ],
)  # fmt: skip
def test_long_messages_and_boards_without_nvlink_go_to_others(device: str, size: int, ranks: int, kernel: str) -> None:
    assert library_time({**REDUCE, "bytes": size, "ranks": ranks}, load_device(device)).kernel == kernel


def test_kernels_on_symmetric_memory_copy_in_and_out() -> None:
    times = peer_reduce_seconds(np.array([2.0**17, 2.0**25]), np.array([8.0, 8.0]), load_node("hgx-h100"), H100)
    assert times.kernels.tolist() == [1, 3]
    assert times.stages["copy"][0] == 0
    assert times.stages["copy"][1] == pytest.approx(4 * 2**25 / 3.02e12, rel=0.3)


def test_boards_that_pass_bytes_through_the_host_share_its_rate() -> None:
    l40s = load_device("l40s")
    two, four, eight = (library_time({**REDUCE, "bytes": 2**25, "ranks": ranks}, l40s).seconds for ranks in (2, 4, 8))
    assert four == pytest.approx(13.6e-3, rel=0.01)
    assert eight / four == pytest.approx((2 * 7 / 8 * 8) / (2 * 3 / 4 * 4), rel=0.01)
    assert two < four / 5


def test_two_shots_move_less_than_one_among_many() -> None:
    below, above = reduced(bytes=2**19 - 16, ranks=4), reduced(bytes=2**20, ranks=4)
    assert above.seconds < 2 * below.seconds


def test_hosts_set_the_pace_of_small_calls_and_copies_that_of_large_ones() -> None:
    assert reduced(bytes=512).call_seconds == pytest.approx(20.5e-6)
    large = reduced(bytes=2**22, ranks=2)
    assert large.call_seconds == pytest.approx(large.seconds + 2 * 2**22 / (0.72 * 3.02e12))


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
