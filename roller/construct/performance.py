"""The micro-performance model that guides construction (thesis 6.3.3): four closed forms per tile and layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from operator import floordiv

from hal.spec.device import DeviceSpec
from roller.construct.rtile import TileSpace

#: Sizes of a tile over the axes of a :class:`TileSpace`.
Shape = tuple[int, ...]

#: Elements held in registers, bytes held in shared memory, bytes that the operator moves tile by tile.
Costs = tuple[int, int, float]


@dataclass
class MicroModel:
    """MemFootprint, MemTraffic, MaxComputePerf and MemPerf of one operator on one device.

    A layer is ``"registers"`` or ``"shared"``. Everything a tile's shape implies is computed once and remembered.

    Attributes:
        compute_flops: sustained arithmetic rate for this operator, FLOP/s.
        operations: arithmetic operations per point, a multiply-add counting two.
        costs_by_shape: costs by shape, as far as :meth:`costs` was asked; models of one ``space`` may share them.
    """

    space: TileSpace
    device: DeviceSpec
    compute_flops: float
    operations: float
    costs_by_shape: dict[Shape, Costs] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._negative_sizes = tuple([-size for size in self.space.sizes])
        # Element size, axes that are a dimension by themselves, and the other dimensions of every input.
        self._reads = [(access.element_bytes, access.pick_plain, access.windows) for access in self.space.inputs]

    def costs(self, shape: Shape) -> Costs:
        """Elements held in registers, bytes held in shared memory, and bytes the operator moves tile by tile."""
        costs = self.costs_by_shape.get(shape)
        if costs is None:
            space = self.space
            elements = math.prod(shape[: space.spatial_count])
            footprint = 0
            for element_bytes, direct_sizes, windows in self._reads:
                # data_tile_elements, written out: no other lines run as often.
                count = math.prod(direct_sizes(shape))
                for extent, terms in windows:
                    for axis, coefficient in terms:
                        extent += coefficient * shape[axis]
                    count *= extent
                elements += count
                footprint += element_bytes * count
            # Rounding down what is negative rounds up what is not.
            tiles = abs(math.prod(map(floordiv, self._negative_sizes, shape)))
            costs = self.costs_by_shape[shape] = (elements, footprint, float(tiles * footprint))
        return costs

    @cached_property
    def _in_every_input(self) -> tuple[bool, ...]:
        """Truth, by axis, of every input having the axis as a dimension of its own."""
        return tuple(all(axis in access.plain for access in self.space.inputs) for axis in range(len(self.space.axes)))

    def can_save(self, axis: int, menu: tuple[int, ...]) -> bool:
        """True if growing an axis through ``menu`` may save traffic. Where every input has it as a dimension of its own
        and every size divides it, tiles grow and get fewer in exact proportion: reuse never changes."""
        return not self._in_every_input[axis] or any([self.space.sizes[axis] % size for size in menu])

    def footprint(self, layer: str, shape: Shape) -> int:
        """MemFootprint: elements in registers (accumulators and one fragment per operand) or bytes in shared memory."""
        elements, bytes_in_shared, _ = self.costs(shape)
        return elements if layer == "registers" else bytes_in_shared

    def traffic(self, shape: Shape) -> float:
        """MemTraffic: bytes the whole operator moves into a layer when it is computed in tiles of ``shape``.

        Partial tiles at the edge count in full. Outputs are written once whatever the tile and left out.
        """
        return self.costs(shape)[2]

    def bandwidth(self, layer: str) -> float:
        """Bytes per second of the layer below."""
        below = self.device.shared if layer == "registers" else self.device.dram
        return below.bandwidth_bytes_per_second

    def max_compute_perf(self) -> float:
        """MaxComputePerf: FLOP/s of the device for this operator with nothing else in the way."""
        return self.compute_flops

    def mem_perf(self, layer: str, shape: Shape) -> float:
        """MemPerf: FLOP/s at which the layer below can feed ``layer``: work over the time of the tile's traffic."""
        seconds = self.traffic(shape) / self.bandwidth(layer)
        return self.space.points * self.operations / seconds if seconds else float("inf")


def data_reuse_score(traffic: float, grown_traffic: float, footprint: float, grown_footprint: float) -> float:
    """Traffic saved per unit of footprint added when one axis grows a step.

    S_i = (Q(T) - Q(T'_i)) / (F(T'_i) - F(T))    [thesis 6.3.1]
    Q is MemTraffic in bytes, F is MemFootprint. A step that adds no footprint scores the traffic it saves.

    >>> data_reuse_score(traffic=1000.0, grown_traffic=600.0, footprint=32, grown_footprint=48)
    25.0
    """
    return (traffic - grown_traffic) / max(1, grown_footprint - footprint)
