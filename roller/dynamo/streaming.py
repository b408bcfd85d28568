"""Kernels whose weights come from memory at every call: products of a row or a few with a matrix.

A network comes back to a layer's weights after all others, when they have left the caches. Products of many rows use
what they read so often that this hardly counts; those of a few rows take as long as their weights take to come. What is
read in one go comes fastest, in as many places at a time as hide the beginnings of pages, where prefetchers stop.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from hal.spec.device import DeviceSpec
from sokoban.language.expression import TensorExpr

#: Memory's rate for what is read alone over a device's, where it was not measured. A device's is that of sums of two
#: arrays: the line of a third that is written comes into the caches first, and counts once. Products of one row came to
#: 1.30 of it on one core of an EPYC with Zen 4.
READING = 4 / 3

#: Share of all bytes of an operator from which on one operand counts as its weights.
WEIGHTS_SHARE = 0.8


def streams_weights(expr: TensorExpr, device: DeviceSpec) -> bool:
    """True for operators of one operand that is much larger than the others, and whose elements a processor uses in
    less time than memory takes to give them: ten to thirty multiply-adds each."""
    sizes = [tensor.size_bytes for tensor in (*expr.inputs, expr.output)]
    largest = max(expr.inputs, key=lambda tensor: tensor.size_bytes, default=None)
    if largest is None or largest.size_bytes < WEIGHTS_SHARE * sum(sizes):
        return False
    used = 2.0 * math.prod(expr.sizes.values()) / device.peak_flops(expr.accumulate)
    return used <= largest.size_bytes / reading_bandwidth(device)


def reading_bandwidth(device: DeviceSpec) -> float:
    """Bytes per second that a processor reads of memory while it writes next to nothing."""
    return device.dram.read_bytes_per_second or READING * device.dram.bandwidth_bytes_per_second


def with_empty_caches(device: DeviceSpec) -> DeviceSpec:
    """A processor where what all cores share of caches gives what memory does: the caches that a layer finds.

    They are as large as memory, too, so that what passes through them is not counted once more on its way from there.
    Memory itself is no faster than reads of it: where writes have wires of their own, as on EPYC, sums of two arrays
    move more bytes a second than reads alone.
    """
    memory, rate = device.dram, reading_bandwidth(device)
    shared = tuple(
        replace(
            layer,
            capacity_bytes=memory.capacity_bytes,
            bandwidth_bytes_per_second=rate,
            latency_seconds=memory.latency_seconds or layer.latency_seconds,
            page_start_seconds=memory.page_start_seconds,
        )
        for layer in device.layers
        if layer.shared_by == "device" and layer is not memory
    )
    own = tuple(layer for layer in device.layers if layer.shared_by != "device")
    slowest = replace(memory, bandwidth_bytes_per_second=min(memory.bandwidth_bytes_per_second, rate))
    return replace(device, layers=(*own, *shared, slowest))
