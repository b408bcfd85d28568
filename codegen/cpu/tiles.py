"""``tile`` kernels for processors: register-blocked loops over vectors, in blocks that threads take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.cpu.cuts import Cut, points, vectors
from codegen.cpu.function import LoweredCpu, lowered_blocks, read_flat, reads_inside
from codegen.cpu.functions import CHOSEN, VectorValue
from codegen.cpu.plan import Block, Tile, TilePlan
from codegen.cpu.tile_lines import TileLines
from codegen.cpu.vectors import ResultVector, along_rows
from codegen.tir.lowered import identifier
from codegen.tir.lowering import TileRequest
from codegen.tir.statements import local_buffer, named
from codegen.tir.values import Expr, combine, identity
from sokoban.language.expression import Load
from sokoban.schedule.cpu_tiles import LARGE_TILE, WRITTEN_OUT


def takes(request: TileRequest) -> bool:
    """Whatever no other lowering takes: outputs by tiles, with a sum or without."""
    return True


def lower(request: TileRequest) -> LoweredCpu:
    """The kernel of a schedule of tiles."""
    plan = TilePlan.of(request)
    return lowered_blocks(
        request,
        blocks=plan.blocks,
        scratch_elements=plan.scratch_elements,
        body=lambda buffers, number: _BlockLoops(plan, Block.of(plan, buffers, number)).write(),
    )


class _BlockLoops:
    """The loops around the register tiles of a block: steps of the sum, then tiles, and the copies among them."""

    def __init__(self, plan: TilePlan, block: Block) -> None:
        self.plan, self.block = plan, block

    def write(self) -> None:
        """All statements of the block."""
        self._steps(list(self.plan.steps), {})

    def _steps(self, axes: Sequence[str], step: Mapping[str, Expr]) -> None:
        """Loops over the steps along ``axes``, which begin at ``step`` along the others."""
        if not axes:
            self._tiles(0, tirx.const(0, "int32"), step, dict(self.block.origin))
            return
        axis, *others = axes
        size, extent = self.plan.form.sizes[axis], self.plan.steps[axis]
        if extent == size:
            self._steps(others, {**step, axis: tirx.const(0, "int32")})
            return
        with named(T.serial, -(-size // extent), f"{identifier(axis)}_step") as number:
            self._steps(others, {**step, axis: number * extent})

    def _tiles(self, depth: int, tile_number: Expr, step: Mapping[str, Expr], first: Mapping[str, Expr]) -> None:
        """The tile loops from ``depth`` on, and before each the copies that belong there."""
        plan, block = self.plan, self.block
        for copy in plan.copies:
            if copy.depth == depth:
                source = block.buffers.sources[copy.staged.load.tensor]
                copy.staged.copy(source, block.buffers.scratch, {**first, **step}, plan.form.sizes, plan.lanes)
        if depth == len(plan.tile_loops):
            self._choose_tile(list(plan.cuts.values()), tile_number, step, first, {})
            return
        axis = plan.tile_loops[depth]
        cut = plan.cuts[axis]
        if cut.tiles_per_block == 1:
            self._tiles(depth + 1, tile_number, step, first)
            return
        remaining = cut.size - block.origin[axis]
        count = tirx.min(cut.tiles_per_block, tirx.floordiv(remaining + cut.tile - 1, cut.tile))
        with named(T.serial, count, f"{identifier(axis)}_tile") as number:
            moved = {**first, axis: block.origin[axis] + number * cut.tile}
            self._tiles(depth + 1, tile_number * cut.tiles_per_block + number, step, moved)

    def _choose_tile(
        self,
        cuts: Sequence[Cut],
        tile_number: Expr,
        step: Mapping[str, Expr],
        first: Mapping[str, Expr],
        extents: Mapping[str, int],
    ) -> None:
        """The register tile, whole or what an axis has left of one: a body for each."""
        if not cuts:
            tile = Tile(
                plan=self.plan, block=self.block, step=step, number=tile_number, first=first, extents=dict(extents)
            )
            _RegisterTile(tile).write()
            return
        cut, *others = cuts
        if not cut.rest:
            self._choose_tile(others, tile_number, step, first, {**extents, cut.axis: cut.tile})
            return
        with T.If(first[cut.axis] + cut.tile <= cut.size):
            with T.Then():
                self._choose_tile(others, tile_number, step, first, {**extents, cut.axis: cut.tile})
            with T.Else():
                self._choose_tile(others, tile_number, step, first, {**extents, cut.axis: cut.rest})


class _RegisterTile:
    """The statements of one register tile."""

    def __init__(self, tile: Tile) -> None:
        self.tile, self.plan, self.block, self.buffers = tile, tile.plan, tile.block, tile.block.buffers
        self.lines = TileLines(tile)
        extents, axis = tile.extents, self.plan.vector_axis
        self.rows = list(points({other: extent for other, extent in extents.items() if other != axis}))
        self.pieces = vectors(extents[axis], self.plan.lanes)

    def write(self) -> None:
        """All statements of the tile."""
        if self.plan.form.reduction is not None:
            self._write_sums()
            return
        for row in self.rows:
            self.lines.ask_for_streams(row)
            for start, width in self.pieces:
                self._store(row, start, width, None)

    def _write_sums(self) -> None:
        """The sums of one step in registers; added to those of the steps before, and after the last one finished."""
        plan = self.plan
        # A buffer per vector: TVM then gives it a vector's type, and LLVM a register.
        sums = [
            ResultVector(local_buffer(f"sum_{number}_{start}", width, plan.dtype), row, start, width)
            for number, row in enumerate(self.rows)
            for start, width in self.pieces
        ]
        self._clear(sums)
        self._sum(sums, plan.sum_loops, {})
        last_axis = plan.form.final.axes[-1] if plan.vector_axis else ""
        if plan.vector_axis != last_axis:
            sums = along_rows(sums, plan.vector_axis, last_axis, self.tile.extents[last_axis])
        if not plan.stepped:
            self._finish(sums)
            return
        step = self.tile.step
        # Only now: sums of the steps before are on their way here since the first turn.
        with T.If(tirx.Not(tirx.all(*(step[axis] == 0 for axis in plan.stepped)))), T.Then():
            self._resume(sums)
        with T.If(tirx.all(*(step[axis] + plan.steps[axis] >= plan.form.sizes[axis] for axis in plan.stepped))):
            with T.Then():
                self._finish(sums)
            with T.Else():
                self._keep(sums)

    # ---- sums

    def _clear(self, sums: Sequence[ResultVector]) -> None:
        for result in sums:
            with T.vectorized(result.width) as lane:
                T.buffer_store(result.buffer, identity(self.plan.reduction.function, self.plan.dtype), [lane])

    def _resume(self, sums: Sequence[ResultVector]) -> None:
        """Add what the steps before left in the output."""
        for result in sums:
            with T.vectorized(result.width) as lane:
                before = self.buffers.output[self.tile.place(result.row, result.start, lane)]
                total = combine(self.plan.reduction.function, before, result.buffer[lane], CHOSEN)
                T.buffer_store(result.buffer, total, [lane])

    def _keep(self, sums: Sequence[ResultVector]) -> None:
        """Leave the sums so far in the output."""
        for result in sums:
            with T.vectorized(result.width) as lane:
                T.buffer_store(
                    self.buffers.output, result.buffer[lane], [self.tile.place(result.row, result.start, lane)]
                )

    def _finish(self, sums: Sequence[ResultVector]) -> None:
        for result in sums:
            self._store(result.row, result.start, result.width, result.buffer)

    def _sum(self, sums: Sequence[ResultVector], axes: Sequence[str], offsets: Mapping[str, Expr]) -> None:
        """Loops over one step of the sum, and in them a multiply-add per vector of the tile.

        ``offsets``: how far the loops around these have come, by axis.
        """
        if not axes:
            self._turn(sums, offsets)
            return
        axis, *others = axes
        size, step = self.plan.form.sizes[axis], self.plan.steps[axis]
        extent = step if size % step == 0 else tirx.min(step, size - self.tile.step[axis])
        if not others and self.plan.sums > LARGE_TILE:
            self._turns(sums, axis, extent, offsets)
            return
        if size % step == 0 and self.plan.sums > LARGE_TILE:
            extent = extent + self.block.zero
        with named(T.serial, extent, identifier(axis)) as index:
            self._sum(sums, others, {**offsets, axis: index})

    # LLVM would unroll short loops of known length all the same, and keep operands of several turns in registers that
    # there are not; so the length of a loop around a large tile is hidden from it. Nor are loops that are shorter than
    # `WRITTEN_OUT` written out, a window's rows: turns share what they read there, and LLVM would read all of it first.
    def _turns(self, sums: Sequence[ResultVector], axis: str, extent: Any, offsets: Mapping[str, Expr]) -> None:
        """The innermost loop around a large tile, some turns of it written out."""
        written = WRITTEN_OUT if self.plan.steps[axis] >= WRITTEN_OUT else 1
        full_turns = extent // written
        with named(T.serial, full_turns + self.block.zero, identifier(axis)) as index:
            if written > 1:
                self.lines.ask_ahead(axis, index, offsets)
            for turn in range(written):
                self._turn(sums, {**offsets, axis: index * written + turn})
        remaining = extent - full_turns * written
        if isinstance(remaining, int) and remaining == 0:
            return
        with named(T.serial, remaining + self.block.zero, f"{identifier(axis)}_rest") as index:
            self._turn(sums, {**offsets, axis: full_turns * written + index})

    def _turn(self, sums: Sequence[ResultVector], offsets: Mapping[str, Expr]) -> None:
        """A turn of the innermost loop."""
        self.lines.ask_for_panels(offsets)
        copies = {copy.staged.load: copy for copy in self.plan.copies}
        for result in sums:
            body = VectorValue(
                self.plan.reduction.body,
                self.plan.dtype,
                result.width,
                lambda load: load in copies or self._is_inside(load),
            )
            with T.vectorized(result.width) as lane:
                value = self._term(body, result.row, result.start, lane, offsets)
                total = combine(self.plan.reduction.function, result.buffer[lane], value, CHOSEN)
                T.buffer_store(result.buffer, total, [lane])

    def _term(
        self, body: VectorValue, row: Mapping[str, int], start: int, lane: Expr, offsets: Mapping[str, Expr]
    ) -> Expr:
        """The term that one point of the sum adds to an element."""
        plan, tile = self.plan, self.tile
        axes = tile.axes(row, start, lane)
        axes.update({axis: tile.step[axis] + offset for axis, offset in offsets.items()})
        copies = {copy.staged.load: copy for copy in plan.copies}

        def read(load: Load) -> Expr:
            if load not in copies:
                return self._read(load, axes, plan.dtype)
            copy = copies[load]
            local = dict(offsets)
            for axis, base in tile.bases(copy):
                local[axis] = base if axis == copy.staged.panel else base + row.get(axis, start + lane)
            return copy.staged.element(self.buffers.scratch, local, start + lane)

        return body.at(axes, read, lane)

    def _read(self, load: Load, axes: Mapping[str, Expr], dtype: str) -> Expr:
        """An element of an operand in place."""
        form = self.plan.form
        return read_flat(load, form.expr.tensor_by_name, self.buffers.sources, axes, form.sizes, dtype)

    def _is_inside(self, load: Load) -> bool:
        form = self.plan.form
        return reads_inside(load, form.expr.tensor_by_name[load.tensor], form.sizes)

    # ---- results

    def _store(self, row: Mapping[str, int], start: int, width: int, sums: Any) -> None:
        """The final statement for one vector of the output, whose ``sums`` are in a register; None without a sum."""
        form, dtype = self.plan.form, self.plan.form.expr.final_dtype
        final = VectorValue(form.final.value, dtype, width, self._is_inside)
        with T.vectorized(width) as lane:
            axes = self.tile.axes(row, start, lane)

            def read(load: Load) -> Expr:
                if sums is not None and load.tensor == form.reductions[0].tensor:
                    return sums[lane].astype(dtype)
                return self._read(load, axes, dtype)

            value = final.at(axes, read, lane).astype(form.expr.output.dtype)
            T.buffer_store(self.buffers.output, value, [self.tile.place(row, start, lane)])
