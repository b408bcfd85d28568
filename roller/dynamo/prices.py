"""Time of a graph with the backend before anything is compiled: kernels of ours by RATIONAL, the rest by its traffic.

What stays with PyTorch runs as Inductor's loops: functions that follow each other, with no kernel between, are one pass
over what they read from others and leave to others, at the bandwidth of the smallest memory that holds it. Products
that stay are the library's, and so is attention.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hal.spec.device import DeviceSpec
from hal.this_cpu import THIS_CPU
from roller.dynamo.constants import on_real_tensors
from roller.dynamo.pointwise import RESHAPES
from roller.dynamo.regions import Region

_aten = torch.ops.aten

#: Time of a call of one kernel or loop by Inductor's code: Python, its arguments, and threads that start and end.
#: Measured on a Xeon with AVX-512 as the slope over chains of 1 to 61 linear functions of 32 features.
CALL_SECONDS = 5e-6

#: Lines of code, and of a call's own data, that a kernel or loop begins with: 4 KiB, as much as the loops of a kernel
#: have. Where a graph's tensors leave room for them they are in the last cache, and elsewhere they come from memory one
#: after another. Chosen on the 64 kernels of MobileNetV3-large, each of which took 10 us longer in the network than
#: once more at once, on two cores of an EPYC with Zen 4.
COLD_LINES = 64

#: Time of a call of a compiled graph besides its code: Dynamo's guards and the function around it, and what every
#: parameter adds, which is looked up, guarded and compared. One core of an EPYC with Zen 4: 0.62 ms in a Llama of 38
#: parameters, 0.96 in MobileNetV3-large, of 312 with the statistics of its batch norms; where they lie and their first
#: numbers took 0.1 us each on a Xeon.
GRAPH_SECONDS = 5.7e-4
PARAMETER_SECONDS = 1.35e-6

#: Queries of a block of PyTorch's attention on processors, from so many queries on, and most keys of one
#: (``FlashAttentionKernel.cpp`` of ATen).
QUERY_BLOCKS = ((768, 256), (192, 64), (0, 32))
KEY_BLOCK = 512

#: Time of that attention: of a call; cycles of a vector of scores (its exponential, and what comes before and after);
#: and of a multiply-add, in those of the peak, for what a block's product packs of each operand. Chosen on an Intel
#: Xeon with 2 MiB of second cache a core, at 6 and 16 heads of 32 and 128 columns, 64 to 1,024 queries and keys; of 12
#: heads, and of 64 columns, times are 5 % off on average.
ATTENTION_SECONDS = 9e-6
SCORE_CYCLES = 40.0
PACKED_SHARE = 24.0
#: Time of a multiply-add in a product without ends, in those of the peak: on that Xeon. It is measured on this
#: machine's own processor, whose vectors the library may not use as wide as they are.
PRODUCT_SHARE = 1.13
#: Rows of the product that is timed for it, and how often.
_TIMED_ROWS, _TIMES = 1024, 5

#: Nodes that give a tensor another shape or order and cost nothing.
VIEWS = RESHAPES | {
    _aten.permute.default, _aten.transpose.int, _aten.t.default, _aten.expand.default, _aten.slice.Tensor,
    _aten.select.int, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int, _aten.detach.default,
    _aten.as_strided.default,
}  # fmt: skip

_ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention")


@dataclass(frozen=True)
class GraphPrice:
    """Predicted time of one call of a graph, in seconds.

    Attributes:
        kernels: in kernels of ours.
        library: in products, convolutions and attention that stay with PyTorch.
        loops: in all else.
        calls: of what calls those.
    """

    kernels: float
    library: float
    loops: float
    calls: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.kernels + self.library + self.loops + self.calls

    def __add__(self, other: GraphPrice) -> GraphPrice:
        return GraphPrice(
            self.kernels + other.kernels, self.library + other.library, self.loops + other.loops,
            self.calls + other.calls,
        )  # fmt: skip


def graph_price(
    graph: Any, taken: Mapping[Region, float], stays: Mapping[Region, float], device: DeviceSpec, parameters: int = 0
) -> GraphPrice:
    """Time of a graph on a processor.

    Args:
        graph: before kernels are put in.
        taken: seconds of the regions that kernels of ours take.
        stays: seconds of those that the library's take.
        device: the processor.
        parameters: tensors that the graph is handed at every call.
    """
    inside = {node for region in (*taken, *stays) for node in region.nodes}
    call_seconds = CALL_SECONDS + _cold_seconds(graph, device)
    attentions = [node for node in graph.nodes if _is_attention(node)]
    others = [node for node in graph.nodes if node.op == "call_function" and node not in inside]
    loops = _loops([node for node in others if node not in set(attentions)], inside | set(attentions))
    return GraphPrice(
        kernels=sum(taken.values()),
        library=sum(stays.values()) + sum(_attention_seconds(node, device) for node in attentions),
        loops=sum(_traffic_seconds(loop, device) for loop in loops),
        calls=GRAPH_SECONDS
        + PARAMETER_SECONDS * parameters
        + call_seconds * (len(taken) + len(stays) + len(attentions) + len(loops)),
    )


def _cold_seconds(graph: Any, device: DeviceSpec) -> float:
    """Time in which what a call begins with comes from memory; 0 where the graph's constants and the longest of its
    other tensors leave it in the last cache of a processor."""
    constants = sum(_bytes(node) for node in graph.nodes if node.op == "get_attr")
    longest = max((_bytes(node) for node in graph.nodes if node.op == "call_function"), default=0)
    cached = max(layer.capacity_bytes for layer in device.layers if layer is not device.dram)
    return COLD_LINES * (device.dram.latency_seconds or 0.0) if constants + longest > cached else 0.0


def _is_attention(node: Any) -> bool:
    return node.op == "call_function" and any(word in str(node.target) for word in _ATTENTION)


def _attention_seconds(node: Any, device: DeviceSpec) -> float:
    """Time of PyTorch's attention: products of blocks and their exponentials; of one query, keys and values as they
    come."""
    (*heads, queries, width), keys = map(int, node.args[0].meta["val"].shape), int(node.args[1].meta["val"].shape[-2])
    if queries == 1:
        read = sum(map(_bytes, node.args[:3]))
        return ATTENTION_SECONDS + read / bandwidth_for(read, device)
    rows = min(queries, next(rows for least, rows in QUERY_BLOCKS if queries >= least))
    blocks = math.prod(heads) * math.ceil(queries / rows)
    uneven = math.ceil(blocks / device.unit_count) * device.unit_count / blocks
    scores = math.prod(heads) * queries * keys
    cycles = SCORE_CYCLES * scores / device.teu.lanes
    share = product_share(device) + PACKED_SHARE * (1 / rows + 1 / min(keys, KEY_BLOCK))
    products = share * 4 * scores * width / device.peak_flops("float32")
    return ATTENTION_SECONDS + uneven * (cycles / (device.clocks.boost_hz * device.unit_count) + products)


def product_share(device: DeviceSpec) -> float:
    """Time of a multiply-add in PyTorch's large products, in those of a processor's peak."""
    return _timed_share(device.peak_flops("float32")) if device.name == THIS_CPU else PRODUCT_SHARE


@cache
def _timed_share(peak: float) -> float:
    with on_real_tensors():
        left, right, result = (torch.ones(_TIMED_ROWS, _TIMED_ROWS) for _ in range(3))
        seconds = []
        for _ in range(_TIMES):
            start = time.perf_counter()
            torch.mm(left, right, out=result)
            seconds.append(time.perf_counter() - start)
    return max(1.0, min(seconds) * peak / (2 * _TIMED_ROWS**3))


def _loops(nodes: Sequence[Any], calls: set[Any]) -> list[list[Any]]:
    """Nodes that Inductor makes one loop of: connected, and with as many calls before them on their longest way."""
    depth: dict[Any, int] = {}
    root: dict[Any, Any] = {}

    def first(node: Any) -> Any:
        while root[node] is not node:
            node = root[node]
        return node

    members = set(nodes)
    for node in nodes[0].graph.nodes if nodes else ():
        before = [depth.get(other, 0) + (other in calls) for other in node.all_input_nodes]
        depth[node] = max(before, default=0)
        if node not in members:
            continue
        root[node] = node
        for other in node.all_input_nodes:
            if other in root and depth[other] == depth[node]:
                root[first(node)] = first(other)
    loops: dict[Any, list[Any]] = {}
    for node in root:
        loops.setdefault(first(node), []).append(node)
    return [loop for loop in loops.values() if any(node.target not in VIEWS for node in loop)]


def _traffic_seconds(loop: Sequence[Any], device: DeviceSpec) -> float:
    """Time of one pass over what a loop reads from elsewhere and what others read of it."""
    members = set(loop)
    read = {
        other for node in loop for other in node.all_input_nodes if other not in members and not _is_table(other, node)
    }
    written = [node for node in loop if any(user not in members for user in node.users) or not node.users]
    total = sum(map(_bytes, read)) + sum(map(_bytes, written))
    return total / bandwidth_for(total, device)


def bandwidth_for(bytes_: int, device: DeviceSpec) -> float:
    """Bytes per second of the smallest memory that holds so many: what was written just before lies in the caches of
    each core, or of all."""
    layers = [layer for layer in device.layers if layer.name != "registers"]
    copies = {"unit": device.unit_count, "device": 1}
    holding = (layer for layer in layers if layer.capacity_bytes * copies.get(layer.shared_by, 0) >= bytes_)
    return next(holding, device.dram).bandwidth_bytes_per_second


def _is_table(read: Any, node: Any) -> bool:
    """True for a tensor of which a node reads rows alone, as many as it writes."""
    return node.target in (_aten.embedding.default, _aten.index.Tensor, _aten.index_select.default) and (
        read is node.args[0]
    )


def _bytes(node: Any) -> int:
    value = node.meta.get("val")
    values: Iterable[Any] = value if isinstance(value, tuple | list) else (value,)
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    return sum(int(each.numel()) * each.element_size() for each in tensors)
