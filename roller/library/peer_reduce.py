"""All-reduces of serving engines within a node, by kernels that read the memory of other boards (vLLM's own).

Blocks of 512 threads, 36 of them, read 16 bytes a thread from every board and write the sum: in one shot all of the
message, in two shots the board's own part first and the parts of the others then. Flags are exchanged before and after
a shot. A round of reads takes a latency and what the links need for it, since no more is under way. From some size on
vLLM calls others' kernels (PyTorch's symmetric memory, NCCL), which take the host as long as any collective of PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hal.spec.device import DeviceSpec
from hal.spec.node import NodeSpec
from hal.support.errors import InputError
from roller.library.arrays import Bools, Floats
from roller.library.collectives import HOST_SECONDS as COLLECTIVE_HOST_SECONDS
from roller.library.collectives import check_ranks
from roller.library.streaming.elementwise import LibraryTime

#: Bytes of a result that all threads take in a round.
ROUND_BYTES = 36 * 512 * 16

#: Most bytes that go in one shot among four and among more boards; two always do.
ONE_SHOT_BYTES, ONE_SHOT_BYTES_OF_MANY = 512 * 1024, 256 * 1024

#: MiB from which vLLM takes others' kernels, by capability, after the most boards that it holds for
#: (``CUSTOM_ALL_REDUCE_MAX_SIZES``).
OTHERS_MIB: Mapping[tuple[int, int], tuple[tuple[int, float], ...]] = {
    (9, 0): ((2, 64), (4, 32), (6, 0.5), (8, 0.25)),
    (10, 0): ((2, 2), (4, 2), (6, 1), (8, 1)),
    (10, 3): ((2, 4), (4, 4), (6, 8), (8, 4)),
}

#: Host seconds of a call from Python where the node has no number of its own (chosen on HGX H100's host), and the share
#: of the DRAM rate at which it copies messages into shared buffers.
HOST_SECONDS, COPY_SHARE = 2.05e-5, 0.36


@dataclass(frozen=True, kw_only=True)
class PeerConstants:
    """Numbers of the kernels, whatever the node; chosen on calls of 512 bytes to 16 MiB on A100, H100, B200 and L40S.

    Attributes:
        flags: exchanges of flags between two boards, in steps of the node's links.
        rank_flags: added for every doubling of the boards.
        shot_flags: added for the second shot.
        round_seconds: latency of a round of reads.
        link_share: of a board's links, one way.
    """

    flags: float = 4.46
    rank_flags: float = 0.536
    shot_flags: float = 5.26
    round_seconds: float = 8.1e-7
    link_share: float = 0.344


CONSTANTS = PeerConstants()


def peer_reduce_seconds(
    message_bytes: Floats, ranks: Floats, node: NodeSpec, device: DeviceSpec, constants: PeerConstants = CONSTANTS
) -> LibraryTime:
    """Time of all-reduces of so many bytes on each of ``ranks`` boards of a node.

    Raises:
        InputError: the boards are none of one node.
    """
    check_ranks(ranks, node)
    if np.any(ranks > node.boards):
        raise InputError("ranks", f"got {ranks.max():g}, {node.name} has {node.boards}", 'use "kernels": "nccl"')
    one = _in_one_shot(message_bytes, ranks)
    links = node.link.count * node.link.bandwidth_bytes_per_second
    rounds = np.where(one, message_bytes, 2 * message_bytes / ranks) / ROUND_BYTES
    flags = constants.flags + constants.rank_flags * np.log2(ranks) + np.where(one, 0.0, constants.shot_flags)
    stages = {
        "latency": node.collectives.step_seconds * flags + rounds * constants.round_seconds,
        "links": rounds * (ranks - 1) * ROUND_BYTES / (constants.link_share * links),
    }
    kernel = np.asarray(stages["latency"] + stages["links"])
    copied = 2 * message_bytes / (COPY_SHARE * device.dram.bandwidth_bytes_per_second)
    return LibraryTime(
        call_seconds=np.maximum(kernel + copied, _host_seconds(message_bytes, ranks, node, device)),
        kernel_seconds=kernel,
        stages=stages,
        bound=np.where(stages["links"] > stages["latency"], "links", "latency"),
        algorithm=np.where(one, "one shot", "two shots"),
        kernels=np.ones(kernel.shape, np.int64),
    )


def _host_seconds(message_bytes: Floats, ranks: Floats, node: NodeSpec, device: DeviceSpec) -> Floats:
    """Host seconds of calls from Python, by whose kernels they take."""
    limits = OTHERS_MIB.get(device.compute_capability or (0, 0), ())
    most = np.full(np.shape(message_bytes), np.inf)
    for boards, mebibytes in reversed(limits):
        most = np.where(ranks <= boards, mebibytes * 2**20, most)
    own = HOST_SECONDS if node.host is None else node.host.call_seconds or HOST_SECONDS
    return np.where(message_bytes >= most, max(own, COLLECTIVE_HOST_SECONDS), own)


def _in_one_shot(message_bytes: Floats, ranks: Floats) -> Bools:
    few = (ranks <= 4) & (message_bytes < ONE_SHOT_BYTES)
    return np.asarray((ranks == 2) | few | (message_bytes < ONE_SHOT_BYTES_OF_MANY))
