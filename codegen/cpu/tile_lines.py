"""Lines of the caches that a ``tile`` kernel asks for: of copies, of the next operands, of results, of streams."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tvm import tirx

from codegen.cpu.cuts import position
from codegen.cpu.lines import ALL_CACHES, PRIVATE_CACHE, ask_for_line, prefetch, runs_through
from codegen.cpu.plan import Tile
from codegen.tir.values import Expr
from hal.spec.parts import CPU_LINE_BYTES
from sokoban.language.expression import DTYPE_BYTES, Load
from sokoban.schedule.cpu_tiles import WRITTEN_OUT, asked_ahead

#: Turns of the innermost loop by which panels are asked for ahead of their use.
_TURNS_AHEAD = 8
#: Lines of results that are asked for at most in one turn, as it is written out.
_MOST_ASKED = 4


class TileLines:
    """The requests of one register tile."""

    def __init__(self, tile: Tile) -> None:
        self.tile, self.plan, self.buffers = tile, tile.plan, tile.block.buffers
        self.tensors = tile.plan.form.expr.tensor_by_name

    def ask_for_panels(self, offsets: Mapping[str, Expr]) -> None:
        """Panels come from the second cache, in order: ask for the lines of some turns later.

        ``offsets``: how far the loops over the sum have come, by axis.
        """
        for copy in self.plan.copies:
            staged = copy.staged
            if staged.panel is None:
                continue
            local = {**offsets, **dict(self.tile.bases(copy))}
            for line in range(0, staged.tile, CPU_LINE_BYTES // DTYPE_BYTES[self.plan.dtype]):
                ahead = staged.tile * _TURNS_AHEAD + line
                prefetch(staged.element(self.buffers.scratch, local, tirx.const(ahead, "int32")), ALL_CACHES)

    def ask_ahead(self, axis: str, index: Expr, offsets: Mapping[str, Expr]) -> None:
        """Ask for what comes after this tile's sums, a little in every turn ``index`` of its loop over ``axis``, as it
        is written out."""
        outer_turns: Expr = tirx.const(0, "int32")
        turns = self.plan.steps[axis] // WRITTEN_OUT
        for outer in self.plan.sum_loops[:-1]:
            outer_turns = outer_turns * self.plan.steps[outer] + offsets[outer]
        all_turns = turns * math.prod(self.plan.steps[outer] for outer in self.plan.sum_loops[:-1])
        self._ask_for_next_operands(outer_turns * turns + index, all_turns)
        self._ask_for_results(outer_turns * turns + index, all_turns)

    def ask_for_streams(self, row: Mapping[str, int]) -> None:
        """Ask for what a kernel without a sum reads and writes some tiles later in the same row."""
        form, axes, tile = self.plan.form, self.plan.form.final.axes, self.tile
        if not axes or self.plan.vector_axis != axes[-1]:
            return
        output = form.expr.output
        streams = [
            (self.buffers.sources[load.tensor], self.tensors[load.tensor], False)
            for load in dict.fromkeys(form.body_loads)
            if runs_through(load, self.tensors[load.tensor], axes, output.element_count)
        ]
        for buffer, tensor, written in [*streams, (self.buffers.output, output, True)]:
            for start in range(0, tile.extents[self.plan.vector_axis], CPU_LINE_BYTES // tensor.element_bytes):
                ask_for_line(buffer, tensor, tile.axes(row, start, tirx.const(0, "int32")), axes, written=written)

    # ---- while a large tile is summed up

    def _ask_for_next_operands(self, index: Expr, turns: int) -> None:
        """In turn ``index`` of ``turns``: ask for lines of what the next step of the sum, or else the next block,
        copies or reads. See `sokoban.schedule.cpu_tiles.asked_ahead`."""
        plan = self.plan
        if len(plan.stepped) > 1:
            return
        block = {axis: extent.tiles_per_block * extent.tile for axis, extent in plan.cuts.items()}
        depths = {copy.staged.load: copy.depth for copy in plan.copies}
        for load in dict.fromkeys(plan.form.body_loads):
            if load.indices and not depths.get(load, 0):
                self._ask_for_rows(load, {**block, **plan.steps}, load in depths, index, turns)

    def _ask_for_rows(self, load: Load, elements: Mapping[str, int], staged: bool, index: Expr, turns: int) -> None:
        """Ask for some lines of the next rows of one operand, one row after the other."""
        plan, tensor = self.plan, self.tensors[load.tensor]
        line_elements = CPU_LINE_BYTES // tensor.element_bytes
        tiles = math.prod(extent.tiles_per_block for extent in plan.cuts.values())
        lines = int(asked_ahead(load, plan.vector_axis, elements, staged, tiles, turns, line_elements))
        if not lines:
            return
        row_lines = -(-elements[plan.vector_axis] // line_elements)
        # A turn's lines are neighbours in a row, or whole rows.
        portions, rows = max(1, row_lines // lines), max(1, lines // row_lines)
        count = portions * math.prod(elements[index.axes[0]] for index in load.indices[:-1]) // rows
        number = tirx.min(self.tile.number * turns + index, count - 1)
        row, portion = tirx.floordiv(number, portions) * rows, tirx.floormod(number, portions)
        place = position(self._place_of_row(load, elements, row), tensor.shape) + portion * (lines * line_elements)
        pitch = tensor.shape[-1]
        for line in range(lines):
            further = line // row_lines * pitch + line % row_lines * line_elements
            prefetch(self.buffers.sources[load.tensor][place + further], PRIVATE_CACHE)

    def _place_of_row(self, load: Load, elements: Mapping[str, int], row: Expr) -> list[Expr]:
        """Indices of a row of an operand's next step; rows are numbered along its last index but one first."""
        *others, last = (index.axes[0] for index in load.indices)
        origin = self._next_origin()
        places = [origin[last]]
        for axis in reversed(others):
            places.append(origin[axis] + tirx.floormod(row, elements[axis]))
            row = tirx.floordiv(row, elements[axis])
        return places[::-1]

    def _ask_for_results(self, index: Expr, turns: int) -> None:
        """In turn ``index`` of ``turns``: ask for some lines of where the sums go, where those of the steps before are,
        and of what is added to them at the end, place by place. Rows of results lie apart too, often by so much that a
        cache has lost them since the last step."""
        plan, extents = self.plan, self.tile.extents
        axes, output = plan.form.final.axes, plan.form.expr.output
        added = [
            self.buffers.sources[load.tensor]
            for load in dict.fromkeys(plan.form.final_loads)
            if runs_through(load, self.tensors[load.tensor], axes, output.element_count)
            and self.tensors[load.tensor].element_bytes == output.element_bytes
        ]
        line_elements = CPU_LINE_BYTES // plan.form.expr.output.element_bytes
        row_lines = -(-extents[plan.vector_axis] // line_elements) if plan.vector_axis else 1
        count = row_lines * math.prod(extent for axis, extent in extents.items() if axis != plan.vector_axis)
        if count > _MOST_ASKED * turns or plan.vector_axis != plan.form.final.axes[-1]:
            return
        for part in range(-(-count // turns)):
            number = tirx.min(index + part * turns, count - 1)
            row: dict[str, Expr] = {}
            row_number = tirx.floordiv(number, row_lines)
            for axis in reversed([axis for axis in extents if axis != plan.vector_axis]):
                row[axis] = tirx.floormod(row_number, extents[axis])
                row_number = tirx.floordiv(row_number, extents[axis])
            place = self.tile.place(row, 0, tirx.floormod(number, row_lines) * line_elements)
            prefetch(self.buffers.output[place], ALL_CACHES, written=True)
            for source in added:
                prefetch(source[place], ALL_CACHES)

    def _next_origin(self) -> dict[str, Expr]:
        """The first element of the next step of the sum, after the last one that of the next block."""
        plan, block = self.plan, self.tile.block
        origin: dict[str, Expr] = {axis: tirx.const(0, "int32") for axis in plan.steps}
        if not plan.stepped:
            return {**origin, **block.following}
        (axis,) = plan.stepped
        following = self.tile.step[axis] + plan.steps[axis]
        last = following >= plan.form.sizes[axis]
        origin[axis] = tirx.Select(last, tirx.const(0, "int32"), following)
        return origin | {each: tirx.Select(last, block.following[each], block.origin[each]) for each in block.origin}
