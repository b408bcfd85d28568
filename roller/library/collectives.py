"""Times of NCCL's collectives on a node: rings and their three protocols, switches that add up, the network.

A collective is one kernel on every board, whose blocks (channels) each pass a slice of the message on. What one of its
``n`` ranks does, S being the bytes that nccl-tests reports:

- *Rings.* All-gather and reduce-scatter take ``n - 1`` steps of ``S / n`` bytes, an all-reduce ``2 (n - 1)``. By **LL**
  every 8 bytes carry 4 of flags and are seen as soon as they are there; by **LL128** 8 bytes in 128 are flags;
  by **Simple** bytes travel bare and a flag follows them, which takes longer than many a message.
- *NVLS.* From NVSwitch 3 on the switch adds up what all boards of the node hold and sends the sum to all of them.
- *Peers.* In all-to-all every rank sends to all others at once.

Which of them runs is decided as the library decides: by its own estimate of each, with the latencies and rates of its
source (``src/graph/tuning.cc``, NCCL 2.27 to 2.29). That estimate is off by tens of microseconds where Simple begins,
so the time falls back there when messages grow; what the choice then takes follows from the node's numbers and
:class:`Timing`. Seconds and bytes throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hal.node_catalog import load_node, usual_node
from hal.spec.device import DeviceSpec
from hal.spec.node import LinkKind, Network, NodeSpec
from hal.spec.parts import DTYPE_BYTES
from hal.support.errors import InputError, listed
from roller.library.arrays import Floats
from roller.library.streaming.elementwise import LibraryTime
from sokoban.language.collectives import COLLECTIVES

#: CPU time of PyTorch's call of a collective: the median of 25 ``c10d::allreduce_`` calls on the host of a V100.
HOST_SECONDS = 42e-6

#: Share of the links' datasheet rate that the library plans rings with: 20 of 25 GB/s a link of NVLink 3, 20.6 of 25 of
#: NVLink 4, 40.1 of 50 of NVLink 5 (``src/graph/topo.h``), 24 of 31.5 GB/s of sixteen lanes of PCIe 4.0.
PLANNED_SHARE = 0.8

#: Protocols in the order of the tables below.
PROTOCOLS = ("LL", "LL128", "Simple")

#: Seconds before the first step of a ring as the library plans them (``baseLatencies``), by protocol.
PLANNED_CALL = (6.6e-6, 14.0e-6, 8.4e-6)

#: Seconds of a step of a ring as the library plans it (``hwLatencies``), by protocol.
PLANNED_STEP: Mapping[LinkKind, tuple[float, float, float]] = {
    "nvlink": (0.6e-6, 1.9e-6, 3.4e-6),
    "pcie": (1.0e-6, 2.5e-6, 5.7e-6),
}

#: Seconds of a reduction in the switch as the library plans it.
PLANNED_SWITCH = 25e-6

#: Bytes that one block of LL takes in at a time: 512 threads of 8 bytes each. Below so many in every rank's part of a
#: block the library takes fewer blocks, so that the time does not grow.
LL_BLOCK_BYTES = 4096

#: Largest message between two ranks that all-to-all sends by LL (``NCCL_P2P_LL_THRESHOLD``).
PEER_LL_BYTES = 16384

#: Simple over LL in the latency of a step over a network: 14.0 and 2.7 microseconds of ``hwLatencies``.
NETWORK_FLAG = 14.0 / 2.7


@dataclass(frozen=True, kw_only=True)
class PlannedRates:
    """Rates that the library believes one board's links to carry in a ring, for one generation of them.

    Attributes:
        ll: most bytes per second of LL (``llMaxBws``).
        ll128: of LL128 (``perChMaxRingLL128Bws`` of all channels of its graph); 0 where it is not used.
        switch: share of the planned rate at which the switch adds up (``nvlsEfficiency``); 0 where it does not.
    """

    ll: float
    ll128: float
    switch: float = 0.0


#: By generation of NVLink: those of Volta, Ampere, Hopper and Blackwell.
NVLINK_RATES: Mapping[int, PlannedRates] = {
    2: PlannedRates(ll=39e9, ll128=240e9),
    3: PlannedRates(ll=87.7e9, ll128=240e9),
    4: PlannedRates(ll=141e9, ll128=440e9, switch=0.85),
    5: PlannedRates(ll=282e9, ll128=560e9, switch=0.74),
}

#: LL128 needs stores of 128 bytes that arrive whole, which PCIe does not promise.
PCIE_RATES = PlannedRates(ll=87.7e9, ll128=0.0)

#: Blocks of a ring through the host's memory: the library finds one channel there and runs it twice (its logs on eight
#: boards have channels 00 and 01; ``src/graph/connect.cc``).
HOST_CHANNELS = 2

#: Share of the slot's rate that reaches the other of two boards on PCIe: 20 of 31.5 GB/s.
PAIR_SHARE = 0.635


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of the steps of collectives: one set of constants for all nodes.

    What a kernel does before its first step is seconds. Steps are multiples of the node's ``step_seconds``, and rates
    shares of what a board's links carry in the middle of long messages (:func:`link_rate`).
    """

    #: Blocks of a ring by LL, at most.
    blocks: float = 24
    #: LL, once all threads of a block are at work instead of a few: seconds, and the share of every step that comes on.
    ll_full_seconds: float = 0.80e-6
    ll_full_step: float = 0.205
    #: LL, rate on links (flags are half of what they carry), and of a rank's own part in memory.
    ll_rate: float = 0.51
    ll_own: float = 0.53
    #: LL128: seconds before the first step, the step, the rate on links (15 of 16 bytes at best).
    ll128_call_seconds: float = 9.8e-6
    ll128_step: float = 1.6
    ll128_rate: float = 0.935
    #: Simple: seconds before the first step; of a step what nothing hides, and what the second half of a slice hides.
    simple_call_seconds: float = 10.6e-6
    simple_step: float = 3.3
    simple_flag: float = 4.2
    #: LL128 and Simple: rate at which a rank's own part is copied, or added to what has come in.
    own: float = 2.2
    #: How much longer Simple's own part takes where elements of one byte are added up.
    narrow: float = 0.2
    #: The switch: seconds before the first byte, and rate (every byte goes out once, every sum comes back).
    switch_call_seconds: float = 35.6e-6
    switch_rate: float = 0.71
    #: Peers: seconds of a call between two over a ring's, and steps for every further doubling of the ranks.
    peer_call_seconds: float = 1.9e-6
    peer_ranks: float = 0.9
    #: Peers by LL: steps for every :data:`LL_BLOCK_BYTES`.
    peer_ll: float = 0.66
    #: Peers by Simple: steps of a flag, and for every doubling of a message above 32 KiB, six at most.
    peer_flag: float = 4.3
    peer_ramp: float = 0.7
    #: Peers, rate on links and of the own part.
    peer_rate: float = 0.85
    peer_own: float = 3.5


TIMING = Timing()


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Seconds of one way to do it: what waits, what links carry, what stays on the board."""

    latency: Floats
    links: Floats
    copy: Floats


def collective_seconds(
    collective: str,
    message_bytes: ArrayLike,
    ranks: ArrayLike,
    node: NodeSpec,
    *,
    dtype: str = "bfloat16",
    per_node: int | None = None,
    timing: Timing = TIMING,
) -> LibraryTime:
    """Time of a collective from the first board's kernel to the last one's end, out of place.

    Args:
        collective: one of :data:`sokoban.language.collectives.COLLECTIVES`.
        message_bytes: as nccl-tests counts: of an all-reduce, all-to-all, broadcast and send what a rank holds, of an
            all-gather what it ends with, of a reduce-scatter what it begins with.
        ranks: how many take part, one on a board; above the node's boards whole nodes.
        node: where.
        dtype: element type, which matters to sums alone.
        per_node: how many of them share a node, where others than neighbours form the group; None fills nodes.
        timing: constants of the model.

    Raises:
        InputError: there is no such collective, ranks do not fit the node, or a message has no bytes.
    """
    if collective not in COLLECTIVES:
        raise InputError("op", f"no collective is called {collective!r}", f"use one of {', '.join(COLLECTIVES)}")
    size, count = np.broadcast_arrays(np.asarray(message_bytes, np.float64), np.asarray(ranks, np.float64))
    inside = np.minimum(count, node.boards)
    if per_node is None:
        check_ranks(count, node)
    else:
        _check_spread(count, per_node, node)
        inside = np.minimum(count, per_node)
    if np.any(size < 1):
        raise InputError("bytes", f"got {size.min():g}, expected 1 or more", "write the size of a message")
    nodes = count / inside
    # In an all-to-all a rank's messages to other nodes do not pass through its own.
    sent = size / nodes if collective == "alltoall" else size
    if collective in ("alltoall", "send"):
        parts, algorithm = _peers(collective == "send", sent, inside, node, timing)
    else:
        parts, algorithm = _ring_or_switch(collective, sent, inside, node, DTYPE_BYTES[dtype], timing)
    latency, links, copy = parts.latency, parts.links, parts.copy
    if node.link.topology == "host":
        # While one board waits for a flag the others' bytes pass through the host, and its own part is copied at home.
        copy = np.zeros(copy.shape)
        links = np.where(inside > 2, np.maximum(links - (latency - node.collectives.call_seconds), 0), links)
    if node.network is not None:
        wait, carried = _between(collective, size, inside, nodes, node.network)
        # Slices of the message are on both at a time.
        latency, links = latency + wait, np.maximum(links, carried)
        algorithm = np.where(nodes > 1, np.char.add(algorithm, " and network"), algorithm)
    stages = {"latency": latency, "links": links, "copy": copy}
    kernel = latency + links + copy
    names = np.array(list(stages))
    return LibraryTime(
        call_seconds=np.maximum(kernel, HOST_SECONDS),
        kernel_seconds=kernel,
        stages=stages,
        bound=names[np.argmax(np.stack(list(stages.values())), axis=0)],
        algorithm=algorithm,
        kernels=np.ones(kernel.shape, np.int64),
    )


def node_for(device: DeviceSpec, name: str | None = None) -> NodeSpec:
    """The node in which collectives of a board run: the one of that name or file, or the board's usual one.

    Raises:
        InputError: there is no such node, it holds other boards, or the board has no usual one.
    """
    if name is None:
        usual = usual_node(device)
        if usual is None:
            raise InputError(
                "node", f"{device.name} has no usual node", "name one with --node, or describe one in a file"
            )
        return usual
    node = load_node(name)
    if device.name not in node.devices:
        boards = listed(node.devices)
        raise InputError("node", f"{node.name} holds {boards}, not {device.name}", "choose a node with this board")
    return node


def check_ranks(ranks: ArrayLike, node: NodeSpec) -> None:
    """Refuse numbers of ranks that the node, or nodes like it, cannot have.

    Raises:
        InputError: fewer than two, or more than the boards without a network or without filling the last node.
    """
    counts = np.atleast_1d(np.asarray(ranks, np.float64))
    if np.any(counts < 2):
        raise InputError("ranks", f"got {counts.min():g}, expected 2 or more", "one rank has no other to exchange with")
    largest = counts.max()
    if largest > node.boards and node.network is None:
        raise InputError(
            "ranks", f"{largest:g} are beyond the {node.boards} boards of {node.name} without a network",
            "write fewer, or describe its network in a node file",
        )  # fmt: skip
    parted = counts[(counts > node.boards) & (counts % node.boards != 0)]
    if len(parted):
        raise InputError(
            "ranks", f"{parted[0]:g} do not fill nodes of {node.boards} boards", f"write a multiple of {node.boards}"
        )


def _check_spread(counts: Floats, per_node: int, node: NodeSpec) -> None:
    """Refuse a group that does not fill its part of every node.

    Raises:
        InputError: more boards of a node than it has, a last node with fewer, or several nodes without a network.
    """
    if not 1 <= per_node <= node.boards:
        raise InputError("per_node", f"got {per_node}", f"write 1 to {node.boards}, as {node.name} has boards")
    over = counts[counts > per_node]
    if len(over) and np.any(over % per_node):
        raise InputError("ranks", f"{over[0]:g} do not fill nodes of {per_node}", f"write a multiple of {per_node}")
    if len(over) and node.network is None:
        remedy = "describe its network in a node file"
        raise InputError("node", f"{node.name} stands alone, {over[0]:g} ranks need several", remedy)


def link_rate(node: NodeSpec, ranks: Floats, timing: Timing = TIMING) -> Floats:
    """Bytes per second that the links of a board carry in long messages among so many ranks of its node."""
    # The bus bandwidth is measured with the copy of a rank's own part in it: one byte to every boards - 1 on links.
    if node.link.topology == "host":
        shared = node.collectives.bus_bytes_per_second * node.boards / ranks
        return np.where(ranks > 2, shared, PAIR_SHARE * node.peak_bytes_per_second)
    bandwidth = node.collectives.bus_bytes_per_second * (1 + 1 / ((node.boards - 1) * timing.own))
    reachable = (ranks - 1) / (node.boards - 1) if node.link.topology == "all-to-all" else 1.0
    return np.minimum(bandwidth, node.peak_bytes_per_second) * np.broadcast_to(reachable, ranks.shape)


def step_seconds(node: NodeSpec, ranks: Floats) -> Floats:
    """Seconds from a board's write to the next one's sight of it: the node's, which two boards on PCIe do without."""
    step = np.full(np.shape(ranks), node.collectives.step_seconds)
    return np.where(ranks > 2, step, PLANNED_STEP["pcie"][0]) if node.link.topology == "host" else step


# Rings and the switch


def _ring_or_switch(
    collective: str, size: Floats, ranks: Floats, node: NodeSpec, element_bytes: int, timing: Timing
) -> tuple[_Parts, NDArray[np.str_]]:
    steps = 2 * (ranks - 1) if collective == "all_reduce" else ranks - 1
    plans = _planned(collective, size, ranks, steps, node)
    ways = [_low_latency(size, ranks, steps, node, timing), _low_latency_128(size, ranks, steps, node, timing)]
    adds_bytes = element_bytes == 1 and collective in ("all_reduce", "reduce_scatter")
    slower = 1 + timing.narrow * adds_bytes
    ways.append(_simple(collective, size, ranks, steps, node, slower, timing))
    names = [f"ring {protocol}" for protocol in PROTOCOLS]
    if collective == "all_reduce" and node.link.reduces and element_bytes > 1:
        # The library gives a group of ranks the switch's sums where it is all the boards that the switch joins.
        share = _rates(node).switch * PLANNED_SHARE
        plan = PLANNED_SWITCH + size / (node.peak_bytes_per_second * share)
        plans.append(np.where(ranks == node.boards, plan, np.inf))
        ways.append(_switch(size, ranks, node, timing))
        names.append("NVLS")
    chosen = np.argmin(np.stack(plans), axis=0)
    parts = _Parts(
        latency=np.choose(chosen, [way.latency for way in ways]),
        links=np.choose(chosen, [way.links for way in ways]),
        copy=np.choose(chosen, [way.copy for way in ways]),
    )
    return parts, np.array(names)[chosen]


def _rates(node: NodeSpec) -> PlannedRates:
    return NVLINK_RATES[node.link.generation] if node.link.kind == "nvlink" else PCIE_RATES


def _planned(collective: str, size: Floats, ranks: Floats, steps: Floats, node: NodeSpec) -> list[Floats]:
    """Times that the library believes a ring to take by each protocol; infinite where it does not use it."""
    rates, bandwidth = _rates(node), node.peak_bytes_per_second * PLANNED_SHARE
    buses = (min(rates.ll, bandwidth / 2), min(rates.ll128, bandwidth * 0.92), bandwidth)
    # A broadcast's boards send as they receive: it plans for one step, and moves the message once.
    waits, moved = (np.ones_like(steps), size) if collective == "broadcast" else (steps, size * steps / ranks)
    return [
        call + waits * step + moved / bus if bus else np.full(size.shape, np.inf)
        for call, step, bus in zip(PLANNED_CALL, PLANNED_STEP[node.link.kind], buses, strict=True)
    ]


def _low_latency(size: Floats, ranks: Floats, steps: Floats, node: NodeSpec, timing: Timing) -> _Parts:
    """A ring by LL."""
    step, rate = step_seconds(node, ranks), link_rate(node, ranks, timing)
    part = size / ranks
    blocks = np.clip(part / LL_BLOCK_BYTES, 1, HOST_CHANNELS if node.link.topology == "host" else timing.blocks)
    # One block with few threads grows to 512 of them over three doublings; then come more blocks, at no cost in time.
    full = np.clip(np.log2(np.maximum(part / blocks, 1) / (LL_BLOCK_BYTES / 8)) / 3, 0, 1)
    # A block moves its part in whole turns of all threads; those behind the first take as long as their bytes.
    turns = np.maximum(np.ceil(part / blocks / LL_BLOCK_BYTES - 1e-9), 1)
    beyond = (turns - 1) * LL_BLOCK_BYTES * blocks
    return _Parts(
        latency=node.collectives.call_seconds
        + timing.ll_full_seconds * full
        + step * steps * (1 + timing.ll_full_step * full),
        links=steps * beyond / (timing.ll_rate * rate),
        copy=beyond / (timing.ll_own * rate),
    )


def _low_latency_128(size: Floats, ranks: Floats, steps: Floats, node: NodeSpec, timing: Timing) -> _Parts:
    """A ring by LL128."""
    step, rate = step_seconds(node, ranks), link_rate(node, ranks, timing)
    part = size / ranks
    return _Parts(
        latency=node.collectives.call_seconds + timing.ll128_call_seconds + steps * step * timing.ll128_step,
        links=steps * part / (timing.ll128_rate * rate),
        copy=part / (timing.own * rate),
    )


def _simple(
    collective: str, size: Floats, ranks: Floats, steps: Floats, node: NodeSpec, slower: float, timing: Timing
) -> _Parts:
    """A ring by Simple; ``slower``: how much longer a rank's own part takes than a copy of it."""
    step, rate = step_seconds(node, ranks), link_rate(node, ranks, timing)
    start = node.collectives.call_seconds + timing.simple_call_seconds
    if collective == "broadcast":
        # Slices follow each other down the chain; nothing is added and nothing stays.
        wait = start + steps * step * (timing.simple_step + timing.simple_flag)
        return _Parts(latency=wait, links=size / rate, copy=np.zeros(size.shape))
    part = size / ranks
    carried = part / rate
    # A step's part is two slices: the flag of one is under way while the other is sent.
    wait = np.maximum(step * timing.simple_flag - carried / 2, 0)
    return _Parts(
        latency=start + steps * (step * timing.simple_step + wait),
        links=steps * carried,
        copy=slower * part / (timing.own * rate),
    )


def _switch(size: Floats, ranks: Floats, node: NodeSpec, timing: Timing) -> _Parts:
    """An all-reduce by the switch: every board sends all of its bytes and a part of the sums."""
    wait = node.collectives.call_seconds + timing.switch_call_seconds
    moved = size * (1 + 1 / ranks)
    links = moved / (timing.switch_rate * link_rate(node, ranks, timing))
    return _Parts(latency=np.full(size.shape, wait), links=links, copy=np.zeros(size.shape))


# Peers


def _peers(
    is_send: bool, size: Floats, ranks: Floats, node: NodeSpec, timing: Timing
) -> tuple[_Parts, NDArray[np.str_]]:
    """All-to-all of `size` bytes on every rank, or one message of them."""
    step, rate = step_seconds(node, ranks), link_rate(node, ranks, timing)
    part = size if is_send else size / ranks
    others = np.ones_like(ranks) if is_send else ranks - 1
    # One doubling is in what a call between two takes.
    start = (
        node.collectives.call_seconds + timing.peer_call_seconds + step * timing.peer_ranks * (np.log2(others + 1) - 1)
    )
    is_low = part <= PEER_LL_BYTES
    doublings = np.clip(np.log2(part / (2 * PEER_LL_BYTES)), 0, 6)
    flag = np.where(is_low, timing.peer_ll * part / LL_BLOCK_BYTES, timing.peer_flag + timing.peer_ramp * doublings)
    links = np.where(is_low, 0.0, others * part / (timing.peer_rate * rate))
    copy = np.zeros_like(part) if is_send else np.where(is_low, 0.0, part / (timing.peer_own * rate))
    names = np.where(is_low, "peers LL", "peers Simple")
    return _Parts(latency=start + step * flag, links=links, copy=copy), names


# Between nodes


def _between(collective: str, size: Floats, inside: Floats, nodes: Floats, network: Network) -> tuple[Floats, Floats]:
    """Time that the network between nodes adds: seconds that wait, and seconds in which it carries bytes.

    Every board has an adapter of its own and exchanges its part of the message with the boards in its place in other
    nodes, in a tree of nodes.
    """
    rounds = np.log2(nodes) * (2 if collective == "all_reduce" else 1)
    share = (nodes - 1) / nodes
    if collective == "alltoall":
        rounds, moved = np.minimum(nodes - 1, 1), share * size
    elif collective == "broadcast":
        moved = np.where(nodes > 1, size / inside, 0.0)
    else:
        moved = share * size / inside * (2 if collective == "all_reduce" else 1)
    carried = moved / network.reached_bytes_per_second
    wait = rounds * network.latency_seconds
    is_low = wait + 2 * carried < NETWORK_FLAG * wait + carried
    return np.where(is_low, wait, NETWORK_FLAG * wait), np.where(is_low, 2 * carried, carried)
