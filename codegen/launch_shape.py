"""Blocks of a launch where a size is known at launch only: the record that launchers work the grid out of.

It needs Python alone: manifests hold it, and it is read on the GPU's machine.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Name of the parameter that holds the size, the last one of a kernel's text.
SIZE_PARAMETER = "launch_size"


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """The grid of a kernel by the size that is known at launch; the kernel takes the size as its last parameter.

    Attributes:
        tile: elements that a tile has along the size's axis.
        blocks: of every tile along that axis.
        elements: of the axis for each of the size, where it is fused with others.
        most: blocks that are launched at most, where each computes several tiles; None where each has one.
    """

    tile: int
    blocks: int
    elements: int = 1
    most: int | None = None

    def grid(self, size: int) -> tuple[int, int, int]:
        """Blocks of the launch for a size.

        >>> LaunchShape(tile=128, blocks=32).grid(129), LaunchShape(tile=128, blocks=32, most=40).grid(129)
        ((64, 1, 1), (40, 1, 1))
        """
        blocks = -(-size * self.elements // self.tile) * self.blocks
        return (blocks if self.most is None else min(blocks, self.most), 1, 1)
