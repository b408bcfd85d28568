"""Key paths: every number of a device by the name it has in a device file, such as ``limits.threads_per_block``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from hal.spec.parts import DeviceFields


def leaves(device: DeviceFields) -> Iterator[tuple[str, int | float]]:
    """Every number of a device with its key path: ``("layers.dram.capacity_bytes", 17179869184)``.

    Tuples of numbers give one leaf per element, all under the path of the tuple. Absent numbers give none.
    """
    for number in device.compute_capability or ():
        yield "compute_capability", number
    yield "unit_count", device.unit_count
    for prefix, part in _parts(device):
        for field in part.__struct_fields__:
            value = getattr(part, field)
            for item in value if isinstance(value, tuple) else (value,):
                if item is not None and not isinstance(item, str):
                    yield f"{prefix}.{field}", item
    yield "launch_overhead_seconds", device.launch_overhead_seconds
    yield "block_launch_seconds", device.block_launch_seconds


def source_of(provenance: dict[str, str], path: str) -> str | None:
    """The text of the longest key that is ``path`` or a whole-word start of it; None when there is none.

    ``layers.dram.capacity_bytes`` is looked up as itself, then ``layers.dram``, then ``layers``.
    """
    while path:
        if path in provenance:
            return provenance[path]
        path = path.rpartition(".")[0]
    return None


def _parts(device: DeviceFields) -> Iterator[tuple[str, msgspec.Struct]]:
    yield "teu", device.teu
    for layer in device.layers:
        yield f"layers.{layer.name}", layer
    yield "limits", device.limits
    yield "clocks", device.clocks
    for rate in device.throughput:
        yield f"throughput.{rate.dtype}", rate
    for instruction in device.matrix_instructions:
        yield f"matrix_instructions.{instruction.key}", instruction
    if device.framework is not None:
        yield "framework", device.framework
