"""Ends of axes and of tensors as kernels compare with them: numbers, or a parameter where a size is known at launch."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.launch_shape import SIZE_PARAMETER, LaunchShape
from codegen.tir.values import Expr, remainder
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import loads
from sokoban.schedule.tile import TileSchedule


class Bounds:
    """Ends of a kernel's axes and tensors.

    Attributes:
        launch: the axis whose size is known at launch; None where there is none.
        parameter: the variable with that size.
    """

    def __init__(self, form: KernelForm) -> None:
        self.sizes, self.launch = form.sizes, form.launch_axis
        self.parameter: Any = None if self.launch is None else tirx.Var(SIZE_PARAMETER, "int32")
        self._dimensions: set[tuple[str, int]] = set()
        if self.launch is not None:
            name = self.launch.name
            for statement in form.expr.statements:
                self._dimensions |= {(statement.tensor, p) for p, axis in enumerate(statement.axes) if axis == name}
                self._dimensions |= {
                    (load.tensor, p)
                    for load in loads(statement.value)
                    for p, index in enumerate(load.indices)
                    if index.is_plain_axis and index.axes == (name,)
                }

    def size(self, axis: str) -> Expr | int:
        """End of an axis."""
        if self.launch is None or axis != self.launch.name:
            return self.sizes[axis]
        return self.parameter if self.launch.elements == 1 else self.parameter * self.launch.elements

    def extent(self, tensor: str, position: int, extent: int) -> Expr | int:
        """End of a tensor's dimension, of ``extent`` elements for the largest size."""
        if self.launch is None or (tensor, position) not in self._dimensions:
            return extent
        assert extent == self.sizes[self.launch.name], f"dimension {position} of {tensor} ends where the axis does"
        return self.size(self.launch.name)

    def tiles(self, axis: str, tile: int) -> Expr | int:
        """Tiles along an axis."""
        size = self.size(axis)
        return -(-size // tile) if isinstance(size, int) else tirx.truncdiv(size + (tile - 1), tile)

    @staticmethod
    def split(number: Expr, count: Expr | int) -> tuple[Expr, Expr]:
        """Quotient and remainder of a number from 0 on by a count of tiles: of one that is known at launch only as C
        divides, since TVM does not know that it is positive."""
        if isinstance(count, int):
            return tirx.floordiv(number, count), remainder(number, count)
        return tirx.truncdiv(number, count), tirx.truncmod(number, count)

    def declare(self) -> None:
        """The next parameter of the function that is written: the size, where it is one."""
        if self.parameter is not None:
            T.arg(SIZE_PARAMETER, self.parameter)

    def shape(self, schedule: TileSchedule) -> LaunchShape | None:
        """Blocks of the launch, one of them a tile; None where their number is known."""
        if self.launch is None:
            return None
        tile = schedule.block_of[self.launch.name]
        blocks = schedule.grid_blocks(self.sizes) // -(-self.sizes[self.launch.name] // tile)
        return LaunchShape(tile=tile, blocks=blocks, elements=self.launch.elements)
