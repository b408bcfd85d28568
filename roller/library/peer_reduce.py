"""All-reduces of serving engines within a node, by whichever kernels vLLM takes for a message.

- *Its own*, for two boards or boards joined by NVLink, below 8 MiB or less. Blocks of 512 threads, 36 of them, read 16
  bytes a thread from every board and write the sum: in one shot all of the message, in two shots the board's own part
  first and the parts of the others then. Flags are exchanged before and after a shot. A round of reads takes a latency
  or what the links need for it, whichever is longer.
- *PyTorch's on symmetric memory*, on Hopper and Blackwell, for longer ones: copied into a shared buffer, added up by
  the switch where so many boards can, or in two shots, and copied out again.
- *NCCL's* for all others (:mod:`roller.library.collectives`): long messages, and more than two boards without NVLink.

Who runs is decided as vLLM decides (``custom_all_reduce.py``, ``symm_mem.py`` and ``all_reduce_utils.py`` in
``vllm/distributed/device_communicators``, 0.14 to 0.24). Seconds and bytes throughout.
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
from roller.library.collectives import check_ranks, collective_seconds, step_seconds
from roller.library.streaming.elementwise import LibraryTime, elementwise_seconds

MIB = 2**20

#: Bytes of a result that all threads take in a round.
ROUND_BYTES = 36 * 512 * 16

#: Most bytes that go in one shot among four and among more boards; two always do.
ONE_SHOT_BYTES, ONE_SHOT_BYTES_OF_MANY = 512 * 1024, 256 * 1024

#: MiB from which its own kernels hand over (``max_size``), and from which they do where symmetric memory serves
#: (``CUSTOM_ALL_REDUCE_MAX_SIZES``): by capability, after the most boards that it holds for.
OWN_MIB = 8.0
Limits = tuple[tuple[int, float], ...]
OWN_MIB_BEFORE_SYMMETRIC: Mapping[tuple[int, int], Limits] = {
    (9, 0): ((2, 64), (4, 32), (6, 0.5), (8, 0.25)),
    (10, 0): ((2, 2), (4, 2), (6, 1), (8, 1)),
    (10, 3): ((2, 4), (4, 4), (6, 8), (8, 4)),
}

#: MiB from which kernels on symmetric memory hand over (``SYMM_MEM_ALL_REDUCE_MAX_SIZES``), and the fewest boards whose
#: sums the switch makes there (``_WORLD_SIZES_MULTIMEM``).
SYMMETRIC_MIB: Mapping[tuple[int, int], Limits] = {
    (9, 0): ((2, 64), (4, 32), (6, 64), (8, 64)),
    (10, 0): ((2, 8), (4, 32), (6, 128), (8, 128)),
    (10, 3): ((2, 4), (4, 32), (6, 32), (8, 64)),
}
SWITCH_RANKS: Mapping[tuple[int, int], int] = {(9, 0): 4, (10, 0): 6, (10, 3): 6}

#: Host seconds of a call from Python where the node has no number of its own (chosen on HGX H100's host), and the share
#: of the DRAM rate at which it copies messages into shared buffers.
HOST_SECONDS, COPY_SHARE = 2.05e-5, 0.72


@dataclass(frozen=True, kw_only=True)
class PeerConstants:
    """Numbers of the kernels, whatever the node; chosen on every other size of the calls in CUDA graphs.

    Attributes:
        flags: exchanges of flags between two boards, in steps of the node's links.
        rank_flags: added for every doubling of the boards.
        shot_flags: added for the second shot.
        round_flags: latency of a round of reads, in steps of the node's links.
        link_share: of a board's links, one way, in reads of its own kernels.
        symmetric_flags: exchanges of flags of a kernel on symmetric memory, in steps of the node's links.
        two_shot_share: of a board's links, one way, in two shots on symmetric memory.
        switch_share: of a board's links, one way, where the switch adds up.
    """

    flags: float = 4.71
    rank_flags: float = 0.361
    shot_flags: float = 3.63
    round_flags: float = 1.33
    link_share: float = 0.638
    symmetric_flags: float = 8.46
    two_shot_share: float = 0.702
    switch_share: float = 0.674


CONSTANTS = PeerConstants()


def peer_reduce_seconds(
    message_bytes: Floats, ranks: Floats, node: NodeSpec, device: DeviceSpec, constants: PeerConstants = CONSTANTS
) -> LibraryTime:
    """Time of all-reduces of so many bytes of 16-bit elements on each of ``ranks`` boards of a node.

    Raises:
        InputError: the boards are none of one node.
    """
    check_ranks(ranks, node)
    if np.any(ranks > node.boards):
        raise InputError("ranks", f"got {ranks.max():g}, {node.name} has {node.boards}", 'use "kernels": "nccl"')
    message_bytes, ranks = np.broadcast_arrays(message_bytes, ranks)
    by_own = message_bytes < _own_limit(ranks, node, device)
    by_symmetric = ~by_own & (message_bytes < _limit(SYMMETRIC_MIB, ranks, node, device, 0.0))
    one = _in_one_shot(message_bytes, ranks)
    own = _own(message_bytes, ranks, one, node, constants)
    symmetric, is_switch = _symmetric(message_bytes, ranks, node, device, constants)
    others = collective_seconds("all_reduce", message_bytes, ranks, node)
    stages = {
        stage: np.select([by_own, by_symmetric], [own.get(stage, zero), symmetric.get(stage, zero)], seconds)
        for zero in [np.zeros(message_bytes.shape)]
        for stage, seconds in others.stages.items()
    }
    kernel = np.asarray(sum(stages.values()))
    # Calls from Python copy a message into a buffer that other boards see; NCCL's do not.
    copied = np.where(by_own, 2 * message_bytes / (COPY_SHARE * device.dram.bandwidth_bytes_per_second), 0.0)
    host = HOST_SECONDS if node.host is None else node.host.call_seconds or HOST_SECONDS
    names = np.array(list(stages))
    shots = np.where(one, "one shot", "two shots")
    return LibraryTime(
        call_seconds=np.maximum(kernel + copied, np.where(by_own, host, max(host, COLLECTIVE_HOST_SECONDS))),
        kernel_seconds=kernel,
        stages=stages,
        bound=names[np.argmax(np.stack(list(stages.values())), axis=0)],
        algorithm=np.select(
            [by_own, by_symmetric], [shots, np.where(is_switch, "switch's sums", "two shots")], others.algorithm
        ),
        kernels=np.where(by_symmetric, 3, 1),
    )


def _own(
    message_bytes: Floats, ranks: Floats, one: Bools, node: NodeSpec, constants: PeerConstants
) -> dict[str, Floats]:
    """Stages of vLLM's own kernels."""
    rounds = np.where(one, message_bytes, 2 * message_bytes / ranks) / ROUND_BYTES
    flags = constants.flags + constants.rank_flags * np.log2(ranks) + np.where(one, 0.0, constants.shot_flags)
    step = step_seconds(node, ranks)
    # What a round's bytes take on links hides its latency.
    links = (ranks - 1) * ROUND_BYTES / (constants.link_share * node.peak_bytes_per_second)
    waits = np.maximum(constants.round_flags * step - links, 0)
    return {"latency": step * flags + rounds * waits, "links": rounds * links}


def _symmetric(
    message_bytes: Floats, ranks: Floats, node: NodeSpec, device: DeviceSpec, constants: PeerConstants
) -> tuple[dict[str, Floats], Bools]:
    """Stages of kernels on symmetric memory, and whether the switch adds up."""
    fewest = SWITCH_RANKS.get(device.compute_capability or (0, 0), np.inf)
    is_switch = np.asarray(node.link.reduces & (ranks >= fewest))
    # To the switch goes all of a message, and the board's part of the sums that it sends to all others; in two shots
    # a board reads the others' parts of its own, and their sums.
    moved = np.where(is_switch, message_bytes * (1 + 1 / ranks), 2 * message_bytes * (ranks - 1) / ranks)
    share = np.where(is_switch, constants.switch_share, constants.two_shot_share)
    copies = elementwise_seconds("copy", message_bytes / 2, device, dtype_bytes=2).kernel_seconds
    stages = {
        "latency": step_seconds(node, ranks) * constants.symmetric_flags,
        "links": moved / (share * node.peak_bytes_per_second),
        "copy": 2 * copies,
    }
    return stages, is_switch


def _own_limit(ranks: Floats, node: NodeSpec, device: DeviceSpec) -> Floats:
    """Bytes from which vLLM does not take its own kernels; 0 for more than two boards without NVLink."""
    limit = np.minimum(_limit(OWN_MIB_BEFORE_SYMMETRIC, ranks, node, device, OWN_MIB), OWN_MIB * MIB)
    return np.where((ranks > 2) & (node.link.kind != "nvlink"), 0.0, limit)


def _limit(
    table: Mapping[tuple[int, int], Limits], ranks: Floats, node: NodeSpec, device: DeviceSpec, otherwise: float
) -> Floats:
    """Bytes of a table in MiB; ``otherwise`` where symmetric memory does not serve the boards of the node."""
    capability = device.compute_capability or (0, 0)
    limits = table.get(capability, ()) if node.link.kind == "nvlink" else ()
    most = np.full(ranks.shape, otherwise * MIB)
    for boards, mebibytes in reversed(limits):
        most = np.where(ranks <= boards, mebibytes * MIB, most)
    return most


def _in_one_shot(message_bytes: Floats, ranks: Floats) -> Bools:
    few = (ranks <= 4) & (message_bytes < ONE_SHOT_BYTES)
    return np.asarray((ranks == 2) | few | (message_bytes < ONE_SHOT_BYTES_OF_MANY))
