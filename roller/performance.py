"""The micro-performance model that guides construction (thesis 6.3.3): four closed forms per tile and layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hal import DeviceSpec
from roller.rtile import TileSpace, data_tile_elements


@dataclass
class MicroModel:
    """MemFootprint, MemTraffic, MaxComputePerf and MemPerf of one operator on one device.

    A layer is ``"registers"`` or ``"shared"``. Everything a tile's shape implies is computed once and remembered.

    Attributes:
        compute_flops: sustained arithmetic rate for this operator, FLOP/s.
        operations: arithmetic operations per point, a multiply-add counting two.
    """

    space: TileSpace
    device: DeviceSpec
    compute_flops: float
    operations: float
    _known: dict[tuple[int, ...], tuple[int, int, float]] = field(default_factory=dict, repr=False)

    def costs(self, shape: tuple[int, ...]) -> tuple[int, int, float]:
        """Elements held in registers, bytes held in shared memory, and bytes the operator moves tile by tile."""
        known = self._known.get(shape)
        if known is None:
            space = self.space
            elements = held_bytes = 0
            for access in space.inputs:
                count = data_tile_elements(access, shape)
                elements += count
                held_bytes += access.element_bytes * count
            tiles = math.prod([-(-size // extent) for size, extent in zip(space.sizes, shape, strict=True)])
            outputs = math.prod(shape[: space.spatial_count])
            known = self._known[shape] = (outputs + elements, held_bytes, float(tiles * held_bytes))
        return known

    def can_save(self, axis: int, menu: tuple[int, ...]) -> bool:
        """Whether growing an axis through ``menu`` may save traffic. Where every input has it as a dimension of its own
        and every size divides it, tiles grow and get fewer in exact proportion: reuse never changes."""
        everywhere = all(axis in access.plain for access in self.space.inputs)
        return not everywhere or any(self.space.sizes[axis] % size for size in menu)

    def footprint(self, layer: str, shape: tuple[int, ...]) -> int:
        """MemFootprint: elements in registers (accumulators and one fragment per operand) or bytes in shared memory."""
        elements, held_bytes, _ = self.costs(shape)
        return elements if layer == "registers" else held_bytes

    def traffic(self, shape: tuple[int, ...]) -> float:
        """MemTraffic: bytes the whole operator moves into a layer when it is computed in tiles of ``shape``.

        Partial tiles at the edge count in full. Outputs are written once whatever the tile and left out.
        """
        return self.costs(shape)[2]

    def max_compute_perf(self) -> float:
        """MaxComputePerf: FLOP/s of the device for this operator with nothing else in the way."""
        return self.compute_flops

    def mem_perf(self, layer: str, shape: tuple[int, ...]) -> float:
        """MemPerf: FLOP/s at which the layer below can feed ``layer``: work over the time of the tile's traffic."""
        below = self.device.shared if layer == "registers" else self.device.dram
        seconds = self.traffic(shape) / below.bandwidth_bytes_per_second
        return self.space.points * self.operations / seconds if seconds else float("inf")
