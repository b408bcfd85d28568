"""Paths of the construction: tiles grown along the best data-reuse score, step by step (algorithm 2)."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from struct import iter_unpack
from typing import Any

from hal.support.native import native_library
from roller.construct.performance import MicroModel, Shape, data_reuse_score
from roller.construct.rtile import TileSpace

#: The same walk in C.
SOURCE = Path(__file__).parent / "native" / "growth.c"

#: Axes that the C file has room for.
MOST_AXES = 24

#: Points of an operator, and bytes that it moves, up to which the C file can count.
MOST_COUNTED = 1 << 62

#: A step of growth: its score, the axis, the grown shape.
Step = tuple[float, int, Shape]

#: The aligned sizes of every axis, ascending.
Menu = Sequence[tuple[int, ...]]


class Growth:
    """Walks over the tiles of one operator on one device.

    Attributes:
        blocked: once a path has ended, the most rewarding step that did not fit at its end; None where no growth would
            have saved traffic.
    """

    def __init__(self, model: MicroModel) -> None:
        self.model = model
        self.blocked: Step | None = None

    def path(self, layer: str, shape: Shape, menu: Menu, capacity: int, rank: int = 0) -> Iterator[Step]:
        """GetNextRTileShape again and again: the step with the best data-reuse score that fits ``capacity``, until none
        is left; in the first three steps that with the ``rank``-th best score, counted from zero.

        Equal scores go to the innermost axis: it is the one that memory is contiguous along.
        """
        if self.library is not None:
            return iter(self._compiled(self.library, layer, shape, menu, capacity, rank))
        return self._walked(layer, shape, menu, capacity, rank)

    def _walked(self, layer: str, shape: Shape, menu: Menu, capacity: int, rank: int) -> Iterator[Step]:
        """:meth:`path` in Python."""
        count = 0
        while True:
            step = self._best_step(layer, shape, menu, capacity, rank if count < 3 else 0)
            if step is None:
                return
            count, shape = count + 1, step[2]
            yield step

    def _best_step(self, layer: str, shape: Shape, menu: Menu, capacity: int, rank: int) -> Step | None:
        cost_index = 0 if layer == "registers" else 1
        cached_costs, costs = self.model.costs_by_shape.get, self.model.costs
        before = costs(shape)
        footprint, traffic = before[cost_index], before[2]
        steps: list[Step] = []
        blocked: list[Step] = []
        for axis, sizes in enumerate(menu):
            size = shape[axis]
            if sizes[-1] <= size:
                continue
            grown = (*shape[:axis], sizes[bisect_right(sizes, size)], *shape[axis + 1 :])
            after = cached_costs(grown) or costs(grown)
            score = data_reuse_score(traffic, after[2], footprint, after[cost_index])
            if score > 0:
                (steps if after[cost_index] <= capacity else blocked).append((score, axis, grown))
        if not steps:
            self.blocked = max(blocked, default=None)
            return None
        return sorted(steps, reverse=True)[min(rank, len(steps) - 1)] if rank else max(steps)

    # ---- in C

    @cached_property
    def library(self) -> Any:
        """The walks in C; None where there are none, or numbers are too large for them."""
        space = self.model.space
        # No tile moves more than an element of every input for every point, each at most doubled along every axis.
        most_moved = (space.points << len(space.axes)) * sum(access.element_bytes for access in space.inputs)
        if len(space.axes) > MOST_AXES or most_moved > MOST_COUNTED:
            return None
        library = native_library(SOURCE).library()
        if library is None:
            return None
        if library.grow.argtypes is None:
            pointer, number = ctypes.c_void_p, ctypes.c_int64
            library.grow.argtypes = (*[pointer] * 3, *[number] * 5, pointer, pointer)
            library.shared_tiles.argtypes = (*[pointer] * 7, number, *[pointer] * 3)
            library.grow.restype = library.shared_tiles.restype = number
        return library

    def _compiled(self, library: Any, layer: str, shape: Shape, menu: Menu, capacity: int, rank: int) -> list[Step]:
        """:meth:`path` in C, all of it at once."""
        costs_by_shape, width = self.model.costs_by_shape, len(shape) + 3
        start, sizes = array("q", shape), flat_menu(menu)
        most = len(sizes) - len(shape)
        steps, numbers = array("q", bytes(8 * width * (most + 1))), array("d", bytes(16 * (most + 1)))
        count = library.grow(
            self.described.buffer_info()[0],
            start.buffer_info()[0],
            sizes.buffer_info()[0],
            layer != "registers",
            capacity,
            rank,
            3,
            most,
            steps.buffer_info()[0],
            numbers.buffer_info()[0],
        )
        path: list[Step] = []
        values, results = iter_unpack(f"{width}q", steps), iter_unpack("2d", numbers)
        for line, (score, traffic) in islice(zip(values, results, strict=True), count):
            reached = line[3:]
            costs_by_shape[reached] = line[1], line[2], traffic
            path.append((score, line[0], reached))
        line = next(values)
        self.blocked = None if line[0] < 0 else (numbers[2 * count], line[0], line[3:])
        return path

    @cached_property
    def described(self) -> array[int]:
        """The operator as the C file reads it."""
        return _described(self.model.space)


def flat_menu(menu: Menu) -> array[int]:
    """A menu as the C file reads it: of every axis how many sizes there are, and the sizes."""
    flat: list[int] = []
    for sizes in menu:
        flat.append(len(sizes))
        flat += sizes
    return array("q", flat)


def _described(space: TileSpace) -> array[int]:
    numbers = [len(space.axes), space.spatial_count, len(space.inputs), *space.sizes]
    for access in space.inputs:
        numbers += (access.element_bytes, len(access.plain), *access.plain, len(access.windows))
        for extent, terms in access.windows:
            numbers += (extent, len(terms), *(number for term in terms for number in term))
    return array("q", numbers)
