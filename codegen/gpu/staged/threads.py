"""Elements that one thread owns of a block's tile, and its reads of operands from shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.staged.tiles import StagedTile
from codegen.tir.lowered import identifier
from codegen.tir.statements import local_buffer, named, vector_read, vector_write, wide
from codegen.tir.values import Expr, remainder
from sokoban.schedule.accesses import VECTOR_BYTES
from sokoban.schedule.tile import TileSchedule

#: What is done for some of a thread's elements: number of the virtual copy and place in it, by axis.
Body = Callable[[Mapping[str, Expr], Mapping[str, Expr]], None]


class StepLoop(NamedTuple):
    """A loop over points of a step.

    Attributes:
        axis: the reduction axis.
        trips: how often it turns.
        elements: points along the axis per turn.
        unrolled: whether the source has every turn written out.
    """

    axis: str
    trips: int
    elements: int
    unrolled: bool


def step_loops(reduced: Sequence[str], schedule: TileSchedule) -> list[StepLoop]:
    """Loops over the points of a step, outermost first: unrolled inside, as far as the schedule's statements reach.

    A step of 32 points of k, with 4 results a thread and room for 64 statements, is 2 turns of 16 points written out.
    """
    statements = max(1, schedule.unroll // math.prod(schedule.register_tile.values()))
    inner: list[StepLoop] = []
    outer: list[StepLoop] = []
    for axis in reversed(reduced):
        size, unrolled = schedule.step_of[axis], 1
        if size <= statements:
            unrolled = size
        elif not outer:
            unrolled = math.gcd(size, 1 << (statements.bit_length() - 1))
        inner.insert(0, StepLoop(axis, unrolled, 1, True))
        if unrolled < size:
            outer.insert(0, StepLoop(axis, size // unrolled, unrolled, False))
        statements //= unrolled
    return outer + inner


class ThreadTile:
    """The elements of one thread: adjacent ones in each of several virtual copies, along the output's axes."""

    def __init__(self, axes: Sequence[str], schedule: TileSchedule) -> None:
        self.axes, self.schedule = axes, schedule

    def places(self, thread: Expr) -> dict[str, Expr]:
        """First element of a thread along every axis of its block: threads count the output's last axis fastest."""
        places: dict[str, Expr] = {}
        for axis in reversed(self.axes):
            count = self.schedule.threads_of[axis]
            number = remainder(thread, count) if axis != self.axes[0] else thread
            places[axis] = number * self.schedule.thread_of[axis]
            thread = tirx.floordiv(thread, count)
        return places

    def local(self, copies: Mapping[str, Expr], places: Mapping[str, Expr]) -> dict[str, Expr]:
        """Elements from the thread's first one to another, by axis: ``places`` in virtual copy ``copies``."""
        copy_elements = {axis: self.schedule.threads_of[axis] * self.schedule.thread_of[axis] for axis in places}
        return {axis: copies[axis] * copy_elements[axis] + places[axis] for axis in places}

    def element(
        self, copies: Mapping[str, Expr], places: Mapping[str, Expr], axes: Sequence[str] | None = None
    ) -> Expr:
        """The number of an element among the thread's, along some axes; all of them by default."""
        total: Expr = tirx.const(0, "int32")
        for axis in self.axes if axes is None else axes:
            place = copies[axis] * self.schedule.thread_of[axis] + places[axis]
            total = total * self.schedule.register_tile[axis] + place
        return total

    def walk(self, body: Body, width: int = 1, axes: Sequence[str] | None = None) -> None:
        """``body`` for all elements along some axes, ``width`` adjacent ones along the last axis at a time."""
        axes = self.axes if axes is None else axes
        loops = [(axis, "copy", self.schedule.vthreads_of[axis]) for axis in axes]
        loops += [(axis, "own", self.schedule.thread_of[axis]) for axis in axes]

        def enter(level: int, copies: dict[str, Expr], places: dict[str, Expr]) -> None:
            if level == len(loops):
                body(copies, places)
                return
            axis, kind, extent = loops[level]
            elements = width if level == len(loops) - 1 else 1
            target = copies if kind == "copy" else places
            if extent // elements == 1:
                target[axis] = tirx.const(0, "int32")
                enter(level + 1, copies, places)
                return
            with named(T.unroll, extent // elements, f"{identifier(axis)}_{kind}") as index:
                target[axis] = index * elements
                enter(level + 1, copies, places)

        enter(0, {}, {})


class OperandNames(NamedTuple):
    """Names of an operand's registers: where the thread starts, what it has read, and where loops have come to."""

    base: str
    fragment: str
    position: str


class Operand:
    """A thread's reads of one staged tile."""

    def __init__(
        self,
        tile: StagedTile,
        shared: Any,
        thread_tile: ThreadTile,
        places: Mapping[str, Expr],
        *,
        stage_elements: int,
        turns: Sequence[tuple[str, int]],
        names: OperandNames,
    ) -> None:
        """``places`` is where the thread starts in its block, ``stage_elements`` how far the buffers of ``shared`` lie
        apart (0 where there is one); ``turns`` are the loops that are not unrolled, as a reduction axis and elements
        per turn."""
        self.tile, self.shared, self.thread_tile = tile, shared, thread_tile
        self.schedule = thread_tile.schedule
        # In stored order.
        terms = [axis for position in tile.order for axis, _ in tile.dimensions[position].terms]
        self.axes = [axis for axis in terms if axis in self.schedule.thread_of]
        self.width = self._width(stage_elements)
        self._fragment_name = names.fragment
        # Where the thread starts, worked out once: what comes on top of it fits into an instruction. In units of what
        # all such addresses are multiples of, so that compilers see how wide aligned reads can be.
        divided_places = {axis: place for axis, place in places.items() if self.schedule.threads_of[axis] > 1}
        starts = [tile.apart(axis) * self.schedule.thread_of[axis] for axis in divided_places]
        turn_elements = [tile.apart(axis) * elements for axis, elements in turns]
        self.unit = math.gcd(
            VECTOR_BYTES // min(VECTOR_BYTES, tile.tensor.element_bytes),
            *(tile.start + tile.lowest, stage_elements), *starts, *turn_elements,
        )  # fmt: skip
        self.base = local_buffer(names.base, 1, "int32")
        T.buffer_store(self.base, tirx.floordiv(tile.address(divided_places) + tile.start, self.unit), [0])
        self.loop_place = local_buffer(names.position, 1, "int32")

    def _width(self, stage_elements: int) -> int:
        """Adjacent elements that a thread reads at a time; 1 where they are not known to be aligned."""
        tile = self.tile
        dimension = tile.dimensions[tile.order[-1]]
        if len(dimension.terms) != 1 or dimension.terms[0][1] != 1 or tile.tensor.element_bytes < 4:
            return 1
        axis = dimension.terms[0][0]
        if axis not in self.schedule.thread_of:
            return 1
        widest = VECTOR_BYTES // tile.tensor.element_bytes
        row = tile.extents[tile.order[-1]] + tile.padding if len(tile.order) > 1 else 0
        return math.gcd(widest, self.schedule.thread_of[axis], row, tile.start % widest, stage_elements)

    @property
    def is_fragment(self) -> bool:
        """True if a thread's operands of one point are read together: every element by one axis of its own."""
        return self.width > 1 and len(self.axes) == len(set(self.axes))

    def position(self, copies: Mapping[str, Expr], places: Mapping[str, Expr]) -> Expr:
        """Position of an element in a fragment."""
        return self.thread_tile.element(copies, places, self.axes)

    def start(self, buffer_start: Expr) -> None:
        """Begin a step, whose buffer starts at element ``buffer_start``."""
        T.buffer_store(self.loop_place, self.base[0] + tirx.floordiv(buffer_start, self.unit), [0])

    def advance(self, axis: str, elements: int) -> None:
        """Go on by some elements along a reduction axis: a loop over it then adds one number per turn."""
        by = self.tile.apart(axis) * elements // self.unit
        if by:
            T.buffer_store(self.loop_place, self.loop_place[0] + by, [0])

    def element(self, local: Mapping[str, Expr]) -> Expr:
        """The element at ``local``, positions behind the thread's first and in the step as far as loops have come."""
        return self.shared[self._index(local)]

    def _index(self, local: Mapping[str, Expr]) -> Expr:
        """Position in the shared buffer of the element at ``local``."""
        behind = self.tile.address({axis: wide(place) for axis, place in local.items()}, lowest=False)
        return wide(self.loop_place[0]) * self.unit + behind

    def fragment(self, point: Mapping[str, Expr]) -> Any:
        """A thread's operands of one point of the reduction, read as vectors."""
        elements = math.prod(self.schedule.register_tile[axis] for axis in self.axes)
        fragment = local_buffer(self._fragment_name, elements, self.tile.tensor.dtype)

        def read(copies: Mapping[str, Expr], places: Mapping[str, Expr]) -> None:
            local = {**self.thread_tile.local(copies, places), **point}
            first = self._index(local)
            vector_write(
                fragment, self.position(copies, places), self.width, vector_read(self.shared, first, self.width)
            )

        self.thread_tile.walk(read, self.width, self.axes)
        return fragment
