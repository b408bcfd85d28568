"""What each generation of the profiler tells of a collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daydream.ranks.collectives import Collectives, Group, Kind, find_collectives
from daydream.ranks.pairing import Meetings, pair
from daydream.tasks.build import build_graph
from daydream.trace.files import read_trace
from tests.daydream.ranks.jobs import collectives
from tests.daydream.traces import Builder

KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def of(builder: Builder, folder: Path) -> Collectives:
    return find_collectives(build_graph(read_trace(builder.write(folder / "trace.json"))))


def nccl(
    *collectives: dict[str, Any], kernel: str = KERNEL, call: str = "record_param_comms", **of_call: Any
) -> Builder:
    """Collectives one after another, with the arguments of their kernels and of their calls."""
    builder = Builder(head={"distributedInfo": {"rank": 0, "world_size": 4}})
    for number, arguments in enumerate(collectives):
        at = 100.0 * number
        add = builder.annotation if call.startswith("nccl:") else builder.operator
        add(call, at, 30.0, **of_call)
        builder.launch(at + 5.0, 5.0, correlation=number + 1)
        builder.kernel(kernel, at + 20.0, 40.0, correlation=number + 1, stream=20, **arguments)
    return builder


def test_arguments_stand_on_the_kernel(tmp_path: Path) -> None:
    arguments = {
        "Collective name": "_reduce_scatter_base", "In msg nelems": 1000, "dtype": "BFloat16", "Seq": 7,
        "Process Group Name": "mesh_dp", "Process Group Ranks": "[1, 0]",
    }  # fmt: skip
    own = of(nccl(arguments), tmp_path)
    assert (Kind(own.kind[0]), own.groups) == (Kind.REDUCE_SCATTER, (Group("mesh_dp", (0, 1)),))
    assert (own.bytes[0], own.sequence[0]) == (2000.0, 7)
    assert (own.start_us[0], own.end_us[0]) == (20.0, 60.0)


def test_or_on_the_call_around_the_launch(tmp_path: Path) -> None:
    arguments = {
        "Collective name": "allgather_into_tensor_coalesced", "Process Group ID": 3, "Global rank start": 1,
        "Global rank stride": 2, "Group size": 3,
    }  # fmt: skip
    own = of(nccl({}, kernel="ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", **arguments), tmp_path)
    assert (Kind(own.kind[0]), own.groups) == (Kind.ALL_GATHER, (Group("3", (1, 3, 5)),))


def test_or_in_a_name_alone(tmp_path: Path) -> None:
    own = of(
        nccl({}, kernel="ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", call="nccl:all_to_all"), tmp_path
    )
    assert (Kind(own.kind[0]), own.groups, own.sequence[0]) == (Kind.ALL_TO_ALL, (Group("stream 0"),), -1)


def test_ranks_that_the_profiler_cut_short_stand_in_the_head(tmp_path: Path) -> None:
    builder = nccl({"Collective name": "broadcast", "Process Group Name": "9", "Process Group Ranks": "[0, 1, ...]"})
    builder.head["distributedInfo"]["pg_config"] = [{"pg_name": "9", "ranks": [0, 1, 2]}]
    assert of(builder, tmp_path).groups == (Group("9", (0, 1, 2)),)


@pytest.mark.parametrize("ranks", ("[0, 1, true]", "[[0]]", "{", "[-1]"))
def test_ranks_that_are_none_are_left_out(ranks: str, tmp_path: Path) -> None:
    own = of(nccl({"Collective name": "barrier", "Process Group Name": "9", "Process Group Ranks": ranks}), tmp_path)
    assert own.groups == (Group("9"),)


# Pairs


def met(*own: Collectives) -> Meetings:
    ranks = list(range(len(own)))
    return pair(ranks, own, [["step"]] * len(own), [Path(f"rank{rank}.json") for rank in ranks])


def places(meetings: Meetings) -> list[list[int]]:
    """Of every meeting the place of its collective on each rank."""
    return [meetings.place[meetings.meeting == number].tolist() for number in range(meetings.count)]


def test_sequence_numbers_pair_recordings_that_began_apart() -> None:
    early = collectives([Kind.ALL_REDUCE] * 3, sequence=[4, 5, 6])
    late = collectives([Kind.ALL_REDUCE] * 3, sequence=[5, 6, 7])
    assert places(met(early, late)) == [[1, 0], [2, 1]]


def test_threads_may_begin_two_collectives_in_either_order() -> None:
    first = collectives([Kind.ALL_REDUCE, Kind.ALL_REDUCE, Kind.ALL_GATHER], [100.0, 8.0, 1.0])
    second = collectives([Kind.ALL_REDUCE, Kind.ALL_REDUCE, Kind.ALL_GATHER], [8.0, 100.0, 2.0])
    assert places(met(first, second)) == [[0, 1], [1, 0], [2, 2]]


def test_messages_are_paired_by_sender_and_receiver() -> None:
    sender = collectives([Kind.SEND, Kind.RECV], peer=[1, 1])
    receiver = collectives([Kind.RECV, Kind.SEND], peer=[0, 0])
    meetings = met(sender, receiver)
    assert sorted(group.name for group in meetings.groups) == ["all: 0 to 1", "all: 1 to 0"]
    assert places(meetings) == [[0, 0], [1, 1]]
    assert meetings.sends.tolist() == [True, False, False, True]
    assert meetings.waits.tolist() == [False, True, True, False]


def test_receivers_of_a_broadcast_wait_for_its_root() -> None:
    own = [collectives([Kind.BROADCAST], root=[1]) for _ in range(2)]
    meetings = met(*own)
    assert (meetings.sends.tolist(), meetings.waits.tolist()) == ([False, True], [True, False])
