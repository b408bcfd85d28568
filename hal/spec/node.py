"""A node as a checked value: the boards of one machine, the links between them, and the network to other machines.

Bandwidths are of one direction. What a collective takes in a node follows from these numbers
(:mod:`roller.library.collectives`); nothing in the project asks for a node by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from hal.spec.file import table_from_text
from hal.spec.numbers import source_of
from hal.spec.parts import Count, Positive, Text
from hal.support.errors import InputError, listed

LinkKind = Literal["nvlink", "pcie"]
Topology = Literal["switch", "all-to-all", "pair", "host"]

#: Generations of each kind of link whose library rates are known.
GENERATIONS: Mapping[LinkKind, tuple[int, ...]] = {"nvlink": (2, 3, 4, 5), "pcie": (3, 4, 5, 6)}


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connection between the boards of a node.

    Attributes:
        kind: ``nvlink`` or ``pcie``.
        generation: 4 of NVLink 4 and PCIe 4.0.
        count: links of a board, or lanes of PCIe.
        bandwidth_bytes_per_second: of one link or lane as the datasheet has it.
        topology: ``switch``, through which a board reaches any other with all its links; ``all-to-all``, where every
            pair has a share of the links for itself; ``pair``, two boards alone; ``host``, where more than two pass
            their bytes through the memory of the host, whose rate they share.
        reduces: whether the switch adds up what boards send (NVLink SHARP).
    """

    kind: LinkKind
    generation: Count
    count: Count
    bandwidth_bytes_per_second: Positive
    topology: Topology
    reduces: bool = False


class Collectives(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of nccl-tests for a small and a large message; a node's latency is its boards' as much as its links'.

    Attributes:
        call_seconds: a call of a few bytes without the steps of its ring.
        step_seconds: one step of the ring with a few bytes: written by a board and seen by the next.
        bus_bytes_per_second: bus bandwidth of an all-gather of half a gigabyte among all boards of the node.
    """

    call_seconds: Positive
    step_seconds: Positive
    bus_bytes_per_second: Positive


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connection between nodes.

    Attributes:
        title: ``InfiniBand HDR``.
        bandwidth_bytes_per_second: of one board's adapter as the datasheet has it.
        reached_bytes_per_second: what large messages get of it.
        latency_seconds: of a few bytes from a board to one of another node.
    """

    title: Text
    bandwidth_bytes_per_second: Positive
    reached_bytes_per_second: Positive
    latency_seconds: Positive


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processors of a node and their memory.

    Attributes:
        title: ``two EPYC 7742``.
        memory_bytes_per_second: of the memory of all its processors as the datasheet has it.
        memory_bytes: of that memory, all together.
        board_bytes_per_second: of the link between one board and that memory, one way, where all boards use theirs.
        call_seconds: of a call of vLLM's own all-reduce from Python, a message of a few bytes, one after the other;
            absent where it was not measured.
    """

    title: Text
    memory_bytes_per_second: Positive
    memory_bytes: Positive
    board_bytes_per_second: Positive
    call_seconds: Positive | None = None


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node. Building one checks it whole: an impossible node raises ``InputError``.

    Attributes:
        name: short name, lower case, also the file name: ``hgx-h100``.
        title: what its maker calls it.
        devices: names of the boards that it comes with; those that it is the usual node of.
        boards: how many boards it has.
        link: what joins them.
        collectives: what the library's small and large messages take.
        network: what lies between nodes; absent where it stands alone.
        host: the processors; absent where nothing is known of them.
        aliases: other names.
        provenance: key path of a number, or the start of one, to where it comes from; every number is covered.
    """

    name: Text
    title: Text
    devices: tuple[Text, ...]
    boards: Count
    link: Link
    collectives: Collectives
    provenance: dict[str, str]
    network: Network | None = None
    host: Host | None = None
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    def __hash__(self) -> int:
        # The generated hash would fail on the provenance dict; equal nodes still hash equally.
        return hash((self.name, self.boards, self.link, self.collectives, self.network, self.host))

    @property
    def peak_bytes_per_second(self) -> float:
        """All links of one board together."""
        return self.link.count * self.link.bandwidth_bytes_per_second


def node_from_text(data: bytes, shown: str) -> NodeSpec:
    """The node in the bytes of a file called `shown`, TOML or JSON as its name says.

    Raises:
        InputError: the text is malformed or describes no node; the error names line or key path.
    """
    raw = table_from_text(data, shown)
    try:
        return msgspec.convert(raw, NodeSpec)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, InputError):
            raise InputError(f"{shown}: {cause.field}", cause.problem, cause.remedy) from None
        problem, _, path = str(error).partition(" - at `$")
        field = f"node{path.removesuffix('`')}"
        raise InputError(f"{shown}: {field}", problem.replace("`", ""), "docs/nodes.md describes every key") from None


def node_leaves(node: NodeSpec) -> Iterator[tuple[str, int | float]]:
    """Every number of a node with its key path: ``("link.count", 18)``. What is absent gives none."""
    yield "boards", node.boards
    parts = {"link": node.link, "collectives": node.collectives, "network": node.network, "host": node.host}
    for prefix, part in parts.items():
        for field in part.__struct_fields__ if part is not None else ():
            value: Any = getattr(part, field)
            if value is not None and not isinstance(value, str | bool):
                yield f"{prefix}.{field}", value


def _check(node: NodeSpec) -> None:
    for path, value in node_leaves(node):
        if not (math.isfinite(value) and value > 0):
            raise _bad(path, value, "a number above 0")
        if source_of(node.provenance, path) is None:
            raise InputError(f"node.{path}", "has no source", f'add "{path}" to [provenance]')
    leaf_paths = {path for path, _ in node_leaves(node)}
    for path in node.provenance:
        if not any(leaf == path or leaf.startswith(f"{path}.") for leaf in leaf_paths):
            raise InputError(f"node.provenance.{path}", "is the source of no number", "correct the key path")
    if not node.devices:
        raise InputError("node.devices", "is empty", "name the boards that the node comes with")
    _check_links(node)


def _check_links(node: NodeSpec) -> None:
    link, network = node.link, node.network
    if link.generation not in GENERATIONS[link.kind]:
        generations = listed([str(generation) for generation in GENERATIONS[link.kind]])
        raise _bad("link.generation", link.generation, f"one of {generations} for {link.kind}")
    if node.boards < 2 or (link.topology == "pair" and node.boards != 2):
        raise _bad("boards", node.boards, "2, as link.topology says" if link.topology == "pair" else "2 or more")
    if link.reduces and link.topology != "switch":
        raise _bad("link.reduces", True, f"false: only a switch adds up, and topology is {link.topology!r}")
    if node.collectives.bus_bytes_per_second > node.peak_bytes_per_second:
        reached = node.collectives.bus_bytes_per_second
        raise _bad("collectives.bus_bytes_per_second", reached, f"at most link.count x bandwidth ({_peak(node)})")
    if network is not None and network.reached_bytes_per_second > network.bandwidth_bytes_per_second:
        raise _bad("network.reached_bytes_per_second", network.reached_bytes_per_second, "at most the bandwidth")


def _peak(node: NodeSpec) -> str:
    return f"{node.peak_bytes_per_second:g}"


def _bad(path: str, value: object, expected: str) -> InputError:
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return InputError(f"node.{path}", f"got {shown}, expected {expected}")
