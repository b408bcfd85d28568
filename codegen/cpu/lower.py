"""Tile schedule -> TVM for CPUs: register-blocked loops over vectors, in blocks that threads take.

A schedule reads on a CPU as it does everywhere, one layer further up: a block belongs to a core, ``thread`` is the
register tile, whose elements along one axis fill vector registers; ``step`` is how much of the sum is walked before
the next tile, so that its operands stay in the caches; ``cached`` operands are copied ("packed") in the order in which
the innermost loop reads them, as deep in the loops as they are still used again.

The kernel is a function of a range of blocks. Which thread runs which is up to the caller (``cpu_runtime/pool.c``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.cpu.copies import Staged
from codegen.cpu.cuts import Cut, cut, points, position, vectors
from codegen.cpu.function import CpuFunction, LoweredCpu, read_flat
from codegen.cpu.functions import evaluate
from codegen.cpu.vectors import ALL_CACHES, OWN_CACHE, Held, along_rows, ask_for_line, prefetch, runs_through
from codegen.tir.lowered import LoweringError, identifier, reason_of
from codegen.tir.statements import local_buffer, named
from codegen.tir.values import Expr, combine, identity
from hal.microbench.cpu.vector_ir import LINE_BYTES
from hal.support.errors import listed
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import DTYPE_BYTES, Load
from sokoban.schedule.cpu_tiles import (
    ASKED_LINES,
    LARGE_TILE,
    WRITTEN_OUT,
    asked_ahead,
    in_panels,
    phases_of,
    place_of_copy,
    sum_loops,
    vector_axis,
)
from sokoban.schedule.tile import TileSchedule

_MOST_ELEMENTS = 2**31 - 1
_DTYPES = ("float32", "float64")
#: Turns of the innermost loop by which panels are asked for ahead of their use.
_TURNS_AHEAD = 8
#: Lines of results that are asked for at most in one turn, as it is written out.
_MOST_ASKED = 2


def lower_cpu(form: KernelForm, schedule: TileSchedule, *, entry: str, vector_bytes: int) -> LoweredCpu:
    """Lower one schedule.

    Args:
        form: the operator in canonical form.
        schedule: sizes for every axis of ``form`` that it needs; ``reduce_threads`` are lanes that share a reduction.
            Its stages, padding and unrolling have no meaning here.
        entry: name of the function.
        vector_bytes: width of a vector register.

    Raises:
        LoweringError: the schedule does not fit the operator.
    """
    if schedule.uses_matrix:
        raise LoweringError(f"{entry}: {schedule.instruction} is no instruction of a CPU")
    for tensor in form.expr.tensors:
        if tensor.dtype not in _DTYPES:
            raise LoweringError(f"{entry}: {tensor.name} is {tensor.dtype}; CPU kernels take {listed(_DTYPES)}")
        if tensor.element_count > _MOST_ELEMENTS:
            raise LoweringError(f"{entry}: {tensor.name} has more than {_MOST_ELEMENTS} elements")
    lanes = vector_bytes // DTYPE_BYTES[form.expr.accumulate]
    try:
        if form.kind == "rows" or schedule.reduce_threads:
            from codegen.cpu.rows import RowsLowering

            return RowsLowering(form, schedule, entry, lanes).run()
        return _TileLowering(form, schedule, entry, lanes).run()
    except RuntimeError as error:  # what all of TVM's errors are
        if isinstance(error, LoweringError):
            raise
        raise LoweringError(f"{entry}: {reason_of(error)}") from error


class _TileLowering:
    """One ``tile`` kernel, its statements in the order in which :meth:`_block` writes them."""

    def __init__(self, form: KernelForm, schedule: TileSchedule, entry: str, lanes: int) -> None:
        self.form, self.schedule, self.entry, self.lanes = form, schedule, entry, lanes
        self.dtype = form.expr.accumulate
        self.tensors = form.expr.tensor_by_name
        self.cuts = {
            axis: cut(axis, form.sizes[axis], schedule.block_of[axis], schedule.register_tile[axis])
            for axis in form.final.axes
        }
        #: The output axis along which registers hold vectors; "" of a single number.
        axes = form.final.axes
        self.vector_axis = vector_axis(axes, {axis: cut.tile for axis, cut in self.cuts.items()}, lanes) if axes else ""
        self.steps = {
            axis: min(schedule.step_of.get(axis, form.sizes[axis]), form.sizes[axis]) for axis in form.reduced
        }
        self.in_steps = any(step < form.sizes[axis] for axis, step in self.steps.items())
        if self.in_steps and form.expr.output.dtype != self.dtype:
            raise LoweringError(f"{entry}: partial sums of several steps need an output of {self.dtype}")
        #: Loops over the register tiles of a block, the axis of the vectors innermost.
        self.tile_loops = [axis for axis in form.final.axes if axis != self.vector_axis] + [self.vector_axis]
        #: Vectors of sums in a register tile.
        self.sums = math.prod(cut.tile for axis, cut in self.cuts.items() if axis != self.vector_axis) * len(
            vectors(self.cuts[self.vector_axis].tile if self.vector_axis else 1, lanes)
        )
        self.sum_loops = sum_loops(form, self.vector_axis)
        self.staged = self._stage()

    def run(self) -> LoweredCpu:
        elements = sum(staged.elements for _, staged in self.staged)
        module = CpuFunction(self.form, self.entry).build(elements, self._block)
        blocks = math.prod(cut.blocks for cut in self.cuts.values())
        element_bytes = DTYPE_BYTES[self.dtype]
        return LoweredCpu(module, self.entry, blocks, elements * element_bytes, self.lanes * element_bytes)

    # ---- operands in scratch memory

    def _stage(self) -> list[tuple[int, Staged]]:
        """The cached operands, each with the number of tile loops around its copy."""
        found: list[tuple[int, Staged]] = []
        start = 0
        for load in dict.fromkeys(self.form.body_loads if self.form.reduction else ()):
            if load.tensor not in self.schedule.cached or not load.indices:
                continue
            if any(coefficient < 0 for index in load.indices for _, coefficient in index.terms):
                raise LoweringError(f"{self.entry}: {load.tensor} is read backwards and cannot be staged")
            depth, sizes = self._place(load)
            staged = Staged(load=load, tensor=self.tensors[load.tensor], start=start, sizes=sizes)
            if in_panels(load, self.vector_axis):
                inner = tuple(axis for axis in (*self.form.final.axes, *self.sum_loops) if axis != self.vector_axis)
                used = tuple(axis for axis in inner if any(index.coefficient(axis) for index in load.indices))
                tile = self.cuts[self.vector_axis].tile
                staged = replace(staged, panel=self.vector_axis, tile=tile, inner=used)
            elif phases_of(load, self.vector_axis) > 1:
                staged = replace(staged, along=self.vector_axis, phases=phases_of(load, self.vector_axis))
            start += staged.elements
            found.append((depth, staged))
        return found

    def _place(self, load: Load) -> tuple[int, dict[str, int]]:
        """How many tile loops lie around the copy, and how much of every axis it holds: it is made just outside the
        innermost loop that uses it again."""
        counts = {axis: cut.tiles_per_block for axis, cut in self.cuts.items()}
        depth = place_of_copy(load, self.tile_loops, counts)
        sizes = dict(self.steps)
        for number, axis in enumerate(self.tile_loops):
            cut = self.cuts[axis]
            sizes[axis] = cut.tile if number < depth else cut.tiles_per_block * cut.tile
        return depth, sizes

    # ---- the kernel

    def _block(self, sources: Mapping[str, Any], output: Any, scratch: Any, number: Expr) -> None:
        self.sources, self.output, self.scratch = sources, output, scratch
        self.zero = number >> 30
        self.block_origin = self._origin(number)
        blocks = math.prod(cut.blocks for cut in self.cuts.values())
        self.next_block = self._origin(tirx.min(number + 1, blocks - 1))
        self._walk_steps(list(self.steps), {})

    def _origin(self, number: Expr) -> dict[str, Expr]:
        """The first element of a block."""
        origin: dict[str, Expr] = {}
        for axis, extent in reversed(self.cuts.items()):
            place = tirx.floormod(number, extent.blocks) if extent.blocks > 1 else tirx.const(0, "int32")
            origin[axis] = place * extent.block
            number = tirx.floordiv(number, extent.blocks)
        return origin

    def _walk_steps(self, axes: Sequence[str], at: dict[str, Expr]) -> None:
        if not axes:
            self.step_origin = at
            self.tile_number: Expr = tirx.const(0, "int32")
            self._walk_tiles(0, dict(self.block_origin))
            return
        axis, *others = axes
        size, step = self.form.sizes[axis], self.steps[axis]
        if step == size:
            self._walk_steps(others, {**at, axis: tirx.const(0, "int32")})
            return
        with named(T.serial, -(-size // step), f"{identifier(axis)}_step") as number:
            self._walk_steps(others, {**at, axis: number * step})

    def _walk_tiles(self, depth: int, at: dict[str, Expr]) -> None:
        """The tile loops from ``depth`` on, and before each the copies that belong there."""
        for place, staged in self.staged:
            if place == depth:
                origin = {**at, **self.step_origin}
                staged.copy(self.sources[staged.load.tensor], self.scratch, origin, self.form.sizes, self.lanes)
        if depth == len(self.tile_loops):
            self._choose_tile(list(self.cuts.values()), at, {})
            return
        axis = self.tile_loops[depth]
        cut = self.cuts[axis]
        if cut.tiles_per_block == 1:
            self._walk_tiles(depth + 1, at)
            return
        left = cut.size - self.block_origin[axis]
        count = tirx.min(cut.tiles_per_block, tirx.floordiv(left + cut.tile - 1, cut.tile))
        before = self.tile_number
        with named(T.serial, count, f"{identifier(axis)}_tile") as number:
            self.tile_number = before * cut.tiles_per_block + number
            self._walk_tiles(depth + 1, {**at, axis: self.block_origin[axis] + number * cut.tile})
        self.tile_number = before

    def _choose_tile(self, cuts: Sequence[Cut], at: Mapping[str, Expr], extents: dict[str, int]) -> None:
        """The register tile, whole or what an axis has left of one: a body for each."""
        if not cuts:
            self._tile(at, extents)
            return
        cut, *others = cuts
        if not cut.rest:
            self._choose_tile(others, at, {**extents, cut.axis: cut.tile})
            return
        with T.If(at[cut.axis] + cut.tile <= cut.size):
            with T.Then():
                self._choose_tile(others, at, {**extents, cut.axis: cut.tile})
            with T.Else():
                self._choose_tile(others, at, {**extents, cut.axis: cut.rest})

    def _tile(self, at: Mapping[str, Expr], extents: Mapping[str, int]) -> None:
        rows = list(points({axis: extent for axis, extent in extents.items() if axis != self.vector_axis}))
        pieces = vectors(extents[self.vector_axis], self.lanes)
        if self.form.reduction is None:
            for row in rows:
                self._ask_for_streams(at, row, extents)
                for start, width in pieces:
                    self._store(at, row, start, width, None)
            return
        # A buffer per vector: TVM then gives it a vector's type, and LLVM a register.
        sums = [
            Held(local_buffer(f"sum_{number}_{start}", width, self.dtype), row, start, width)
            for number, row in enumerate(rows)
            for start, width in pieces
        ]

        def each(body: Callable[[Any, Mapping[str, int], int, Expr], None]) -> None:
            for held in sums:
                with T.vectorized(held.width) as lane:
                    body(held.buffer, held.row, held.start, lane)

        def clear(held: Any, row: Mapping[str, int], start: int, lane: Expr) -> None:
            T.buffer_store(held, identity(self._reduction.function, self.dtype), [lane])

        def resume(held: Any, row: Mapping[str, int], start: int, lane: Expr) -> None:
            before = self.output[self._place_of(at, row, start, lane)]
            T.buffer_store(held, combine(self._reduction.function, before, held[lane]), [lane])

        def keep(held: Any, row: Mapping[str, int], start: int, lane: Expr) -> None:
            T.buffer_store(self.output, held[lane], [self._place_of(at, row, start, lane)])

        each(clear)
        self.extents = extents
        self._sum(self.sum_loops, {}, at, each)
        last_axis = self.form.final.axes[-1] if self.vector_axis else ""
        if self.vector_axis != last_axis:
            sums = along_rows(sums, self.vector_axis, last_axis, extents[last_axis])
        stepped = [axis for axis in self.form.reduced if self.steps[axis] < self.form.sizes[axis]]
        # Only now: sums of the steps before are on their way here since the first turn.
        if stepped:
            with T.If(tirx.Not(tirx.all(*(self.step_origin[axis] == 0 for axis in stepped)))), T.Then():
                each(resume)
        last = [self.step_origin[axis] + self.steps[axis] >= self.form.sizes[axis] for axis in stepped]

        def finish() -> None:
            for held in sums:
                self._store(at, held.row, held.start, held.width, held.buffer)

        if not last:
            finish()
            return
        with T.If(tirx.all(*last)):
            with T.Then():
                finish()
            with T.Else():
                each(keep)

    @property
    def _reduction(self) -> Any:
        reduction = self.form.reduction
        assert reduction is not None
        return reduction

    def _sum(
        self, axes: Sequence[str], offsets: dict[str, Expr], at: Mapping[str, Expr], each: Callable[..., None]
    ) -> None:
        """Loops over one step of the sum, and in them a multiply-add per vector of the tile."""
        if not axes:
            self._turn(offsets, at, each)
            return
        axis, *others = axes
        size, step = self.form.sizes[axis], self.steps[axis]
        extent = step if size % step == 0 else tirx.min(step, size - self.step_origin[axis])
        if not others and self.sums > LARGE_TILE:
            self._turns(axis, extent, offsets, at, each)
            return
        if size % step == 0 and self.sums > LARGE_TILE:
            extent = extent + self.zero
        with named(T.serial, extent, identifier(axis)) as index:
            self._sum(others, {**offsets, axis: index}, at, each)

    # LLVM would unroll short loops of known length all the same, and keep operands of several turns in registers that
    # there are not; so it is not told the length of a loop around a large tile. Nor are loops that are shorter than
    # `WRITTEN_OUT` written out, a window's rows: turns share what they read there, and LLVM would read all of it first.
    def _turns(
        self, axis: str, extent: Any, offsets: dict[str, Expr], at: Mapping[str, Expr], each: Callable[..., None]
    ) -> None:
        """The innermost loop around a large tile, some turns of it written out."""
        written = WRITTEN_OUT if self.steps[axis] >= WRITTEN_OUT else 1
        whole = extent // written
        with named(T.serial, whole + self.zero, identifier(axis)) as index:
            if written > 1:
                self._ask_ahead(axis, index, offsets, at)
            for turn in range(written):
                self._turn({**offsets, axis: index * written + turn}, at, each)
        rest = extent - whole * written
        if isinstance(rest, int) and rest == 0:
            return
        with named(T.serial, rest + self.zero, f"{identifier(axis)}_rest") as index:
            self._turn({**offsets, axis: whole * written + index}, at, each)

    def _turn(self, offsets: dict[str, Expr], at: Mapping[str, Expr], each: Callable[..., None]) -> None:
        """A turn of the innermost loop."""
        self._prefetch(at, offsets)
        each(
            lambda held, row, start, lane: T.buffer_store(
                held,
                combine(self._reduction.function, held[lane], self._body(at, row, start, lane, offsets)),
                [lane],
            )
        )

    def _ask_ahead(self, axis: str, index: Expr, offsets: Mapping[str, Expr], at: Mapping[str, Expr]) -> None:
        """Ask for what comes after this tile's sums, a little in every turn of its loops, as they are written out."""
        turn: Expr = tirx.const(0, "int32")
        turns = self.steps[axis] // WRITTEN_OUT
        for outer in self.sum_loops[:-1]:
            turn = turn * self.steps[outer] + offsets[outer]
        all_turns = turns * math.prod(self.steps[outer] for outer in self.sum_loops[:-1])
        self._ask_for_next_operands(turn * turns + index, all_turns)
        self._ask_for_results(turn * turns + index, all_turns, at)

    def _ask_for_next_operands(self, index: Expr, turns: int) -> None:
        """In turn ``index`` of ``turns``: ask for lines of what the next step of the sum, or else the next block,
        copies or reads. See `sokoban.schedule.cpu_tiles.asked_ahead`."""
        stepped = [axis for axis, step in self.steps.items() if step < self.form.sizes[axis]]
        if len(stepped) > 1:
            return
        block = {axis: cut.tiles_per_block * cut.tile for axis, cut in self.cuts.items()}
        copies = {staged.load: depth for depth, staged in self.staged}
        for load in dict.fromkeys(self.form.body_loads):
            if load.indices and not copies.get(load, 0):
                self._ask_for_rows(load, {**block, **self.steps}, load in copies, stepped, index, turns)

    def _ask_for_rows(
        self, load: Load, held: Mapping[str, int], staged: bool, stepped: Sequence[str], index: Expr, turns: int
    ) -> None:
        """Ask for some lines of the next rows of one operand, one row after the other."""
        shape = self.tensors[load.tensor].shape
        line = LINE_BYTES // self.tensors[load.tensor].element_bytes
        tiles = math.prod(cut.tiles_per_block for cut in self.cuts.values())
        least = int(asked_ahead(load, self.vector_axis, shape, held, staged, tiles, turns, line))
        in_row = -(-held[self.vector_axis] // line)
        # So many that a row is a multiple of them: a turn's lines are neighbours.
        each = next((count for count in range(max(1, least), ASKED_LINES + 1) if in_row % count == 0), 0)
        if not least or not each:
            return
        origin = self._next_origin(stepped)
        first = position([origin[index.axes[0]] for index in load.indices], shape)
        portions = in_row // each
        count = portions * math.prod(held[index.axes[0]] for index in load.indices[:-1])
        number = tirx.min(self.tile_number * turns + index, count - 1)
        place = first + tirx.floordiv(number, portions) * shape[-1] + tirx.floormod(number, portions) * (each * line)
        for part in range(each):
            prefetch(self.sources[load.tensor][place + part * line], OWN_CACHE)

    def _ask_for_results(self, index: Expr, turns: int, at: Mapping[str, Expr]) -> None:
        """In turn ``index`` of ``turns``: ask for a line or two of where the sums go, and where those of the steps
        before are. Rows of results lie apart too, often by so much that a cache has lost them since the last step."""
        line = LINE_BYTES // self.form.expr.output.element_bytes
        lines = -(-self.extents[self.vector_axis] // line) if self.vector_axis else 1
        count = lines * math.prod(extent for axis, extent in self.extents.items() if axis != self.vector_axis)
        if count > _MOST_ASKED * turns or self.vector_axis != self.form.final.axes[-1]:
            return
        for part in range(-(-count // turns)):
            number = tirx.min(index + part * turns, count - 1)
            row: dict[str, Expr] = {}
            rest = tirx.floordiv(number, lines)
            for axis in reversed([axis for axis in self.extents if axis != self.vector_axis]):
                row[axis] = tirx.floormod(rest, self.extents[axis])
                rest = tirx.floordiv(rest, self.extents[axis])
            place = self._place_of(at, row, 0, tirx.floormod(number, lines) * line)
            prefetch(self.output[place], ALL_CACHES, written=True)

    def _ask_for_streams(self, at: Mapping[str, Expr], row: Mapping[str, int], extents: Mapping[str, int]) -> None:
        """Ask for what a kernel without a sum reads and writes some tiles later in the same row."""
        form, axes = self.form, self.form.final.axes
        if not axes or self.vector_axis != axes[-1]:
            return
        output = form.expr.output
        streams = [
            (self.sources[load.tensor], self.tensors[load.tensor], False)
            for load in dict.fromkeys(form.body_loads)
            if runs_through(load, self.tensors[load.tensor], axes, output.element_count)
        ]
        for buffer, tensor, written in [*streams, (self.output, output, True)]:
            for start in range(0, extents[self.vector_axis], LINE_BYTES // tensor.element_bytes):
                ask_for_line(buffer, tensor, self._axes(at, row, start, tirx.const(0, "int32")), axes, written=written)

    def _next_origin(self, stepped: Sequence[str]) -> dict[str, Expr]:
        """The first element of the next step of the sum, after the last one that of the next block."""
        origin: dict[str, Expr] = {axis: tirx.const(0, "int32") for axis in self.steps}
        if not stepped:
            return origin | self.next_block
        (axis,) = stepped
        following = self.step_origin[axis] + self.steps[axis]
        last = following >= self.form.sizes[axis]
        origin[axis] = tirx.Select(last, tirx.const(0, "int32"), following)
        return origin | {
            each: tirx.Select(last, self.next_block[each], self.block_origin[each]) for each in self.block_origin
        }

    def _prefetch(self, at: Mapping[str, Expr], offsets: Mapping[str, Expr]) -> None:
        """Panels come from the second cache, in order: ask for the lines of some turns later."""
        for depth, staged in self.staged:
            if not staged.panel:
                continue
            local: dict[str, Expr] = dict(offsets)
            for number, axis in enumerate(self.tile_loops):
                local[axis] = tirx.const(0, "int32") if number < depth else at[axis] - self.block_origin[axis]
            for line in range(0, staged.tile, LINE_BYTES // DTYPE_BYTES[self.dtype]):
                ahead = staged.tile * _TURNS_AHEAD + line
                prefetch(staged.element(self.scratch, local, tirx.const(ahead, "int32")), ALL_CACHES)

    def _body(
        self, at: Mapping[str, Expr], row: Mapping[str, int], start: int, lane: Expr, offsets: Mapping[str, Expr]
    ) -> Expr:
        axes = self._axes(at, row, start, lane)
        axes.update({axis: self.step_origin[axis] + offset for axis, offset in offsets.items()})
        in_scratch = {staged.load: (depth, staged) for depth, staged in self.staged}

        def read(load: Load) -> Expr:
            if load not in in_scratch:
                tensor = self.tensors[load.tensor]
                return read_flat(load, tensor, self.sources[load.tensor], axes, self.form.sizes, self.dtype)
            depth, staged = in_scratch[load]
            local: dict[str, Expr] = dict(offsets)
            for number, axis in enumerate(self.tile_loops):
                base = tirx.const(0, "int32") if number < depth else at[axis] - self.block_origin[axis]
                local[axis] = base if axis == staged.panel else base + row.get(axis, start + lane)
            return staged.element(self.scratch, local, start + lane)

        return evaluate(self._reduction.body, axes, read, self.dtype)

    # ---- results

    def _axes(self, at: Mapping[str, Expr], row: Mapping[str, Any], start: int, lane: Expr) -> dict[str, Expr]:
        return {axis: at[axis] + row.get(axis, start + lane) for axis in self.form.final.axes}

    def _place_of(self, at: Mapping[str, Expr], row: Mapping[str, Any], start: int, lane: Expr) -> Expr:
        axes = self._axes(at, row, start, lane)
        return position([axes[axis] for axis in self.form.final.axes], self.form.expr.output.shape)

    def _store(self, at: Mapping[str, Expr], row: Mapping[str, int], start: int, width: int, held: Any) -> None:
        """The final statement for one vector of the output."""
        form, dtype = self.form, self.form.expr.final_dtype
        with T.vectorized(width) as lane:
            axes = self._axes(at, row, start, lane)

            def read(load: Load) -> Expr:
                if held is not None and load.tensor == form.reductions[0].tensor:
                    return held[lane].astype(dtype)
                tensor = self.tensors[load.tensor]
                return read_flat(load, tensor, self.sources[load.tensor], axes, form.sizes, dtype)

            value = evaluate(form.final.value, axes, read, dtype).astype(form.expr.output.dtype)
            T.buffer_store(self.output, value, [self._place_of(at, row, start, lane)])
