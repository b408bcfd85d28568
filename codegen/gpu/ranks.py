"""Values along a line, or their places, by rank: the first few of a line in their order.

Threads that share a line look at each of its elements once and keep the best two of their share. The best of all is
the first rank; the thread that had it goes on with its second, and once that is taken, too, looks through its share
again for the best two of what comes behind, out of registers where it fits them. A thread with a line of its own looks
through it for every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.lines import WARP, LineRequest, Lines, WalkedLines
from codegen.tir.carried import NOWHERE
from codegen.tir.lowered import Lowered
from codegen.tir.statements import allocate, barrier, local_buffer, named
from codegen.tir.values import Expr
from sokoban.language.expression import Reduction
from sokoban.schedule.patches import AHEAD, adjacent_loads, keeps_share


def takes(request: LineRequest) -> bool:
    """Values and places by rank."""
    return request.problem.rank_axis is not None


def lower(request: LineRequest) -> Lowered:
    """The kernel of values or places by rank."""
    return _Ranks(request).run()


class _Best:
    """The best of several elements in registers: its value and its place."""

    def __init__(self, lines: Lines, name: str) -> None:
        self.carried = lines.carried
        self.value = local_buffer(lines.name(f"{name}_value"), 1, lines.dtype)
        self.place = local_buffer(lines.name(f"{name}_place"), 1, "int32")

    def clear(self) -> None:
        """No element, before which all come."""
        self.set(self.carried.first, tirx.const(NOWHERE, "int32"))

    def set(self, value: Expr, place: Expr) -> None:
        """An element."""
        T.buffer_store(self.value, value, [0])
        T.buffer_store(self.place, place, [0])

    def copy(self, other: _Best) -> None:
        """The element of another one."""
        self.set(other.value[0], other.place[0])

    def take(self, value: Expr, place: Expr, *conditions: Expr) -> None:
        """One more element, where conditions are true."""
        better = self.carried.is_better(value, place, self.value[0], self.place[0])
        with T.If(tirx.all(better, *conditions)), T.Then():
            self.set(value, place)

    def comes_before(self, value: Expr, place: Expr) -> Expr:
        """Truth of an element coming behind this one."""
        return self.carried.is_better(self.value[0], self.place[0], value, place)


class _Ranks(WalkedLines):
    """Values or places by rank."""

    @property
    def shared_bytes(self) -> int:
        return self._halves * self.lines * self._exchanged * (self.element_bytes + 4)

    @property
    def _exchanged(self) -> int:
        """Threads or warps of a line that meet in shared memory."""
        if self.threads == 1 or (self.shuffles and self.warps == 1):
            return 0
        return self.warps if self.shuffles else self.threads

    @property
    def _halves(self) -> int:
        """Ranks that shared memory holds at a time."""
        return 2 if self.shuffles else 1

    def _store(self, rank: Expr, best: _Best, conditions: list[Expr]) -> None:
        axis, walk = self.kernel.rank_axis, self.kernel.walk
        assert axis is not None and isinstance(walk, Reduction)
        point = {**self.row, axis: rank}
        result = best.place[0] if walk.is_place else best.value[0]

        def store() -> None:
            T.buffer_store(self.output, self.final(point, {}, result), [self.output_address(point)])

        self.if_all(conditions, store)

    def _by_rank(self, body: Callable[[Expr], None]) -> None:
        with named(T.serial, self.kernel.ranks, "rank") as rank:
            body(rank)

    # ---- a line of a thread

    def _alone(self) -> None:
        last, best = _Best(self, "last"), _Best(self, "best")
        last.clear()
        values = self._line_values() if keeps_share(self.kernel, self.schedule) else None

        def one(rank: Expr) -> None:
            best.clear()

            def consider(value: Expr, place: Expr) -> None:
                best.take(value, place, tirx.any(tirx.EQ(rank, 0), last.comes_before(value, place)))

            self._each(values, consider)
            last.copy(best)
            self._store(rank, best, self.exists)

        self._by_rank(one)

    def _line_values(self) -> Any:
        """Registers with the values of a thread's line."""
        values = local_buffer(self.name("values"), self.length, self.dtype)
        with named(T.unroll, self.length, "place") as place:
            T.buffer_store(values, self.body(self.at(place), {}), [place])
        return values

    def _each(self, values: Any | None, consider: Callable[[Expr, Expr], None]) -> None:
        """Every element of a thread's line, in registers or read."""
        if values is not None:
            with named(T.unroll, self.length, "place") as place:
                consider(values[place], place)
            return

        def several(first: Expr) -> None:
            ahead = self.values_ahead(first)
            with named(T.unroll, AHEAD, "lane") as lane:
                self.if_all(self.inside_ahead(first + lane), lambda: consider(ahead[lane], first + lane))

        self.each_ahead(several)

    # ---- a line of several threads

    def _together(self) -> None:
        self.share, self.second, self.best = (_Best(self, name) for name in ("share", "second", "best"))
        self.keeps = keeps_share(self.kernel, self.schedule)
        self.values = local_buffer(self.name("values"), self.vector * (self.turns if self.keeps else 1), self.dtype)
        if self._exchanged:
            count = self._halves * self.lines * self._exchanged
            self.shared_value = allocate(self.name("shared_value"), count, self.dtype, "shared")
            self.shared_place = allocate(self.name("shared_place"), count, "int32", "shared")
        self._look(reads=True)

        def one(rank: Expr) -> None:
            self.best.copy(self.share)
            (self._by_shuffles if self.shuffles else self._by_shared)(rank)
            self._store(rank, self.best, [tirx.EQ(self.lane, 0), *self.exists])
            with T.If(tirx.EQ(self.share.place[0], self.best.place[0])), T.Then():
                self._go_on()

        self._by_rank(one)

    def _go_on(self) -> None:
        """The second of a thread whose best was taken in its place; the best two of what comes behind where there is
        none."""
        with T.If(tirx.NE(self.second.place[0], NOWHERE)):
            with T.Then():
                self.share.copy(self.second)
                self.second.clear()
            with T.Else():
                self._look(reads=not self.keeps, behind=self.best)

    def _consider(self, value: Expr, place: Expr, *conditions: Expr) -> None:
        """One more element of a thread's share, where conditions are true."""
        better = self.carried.is_better(value, place, self.share.value[0], self.share.place[0])
        with T.If(tirx.all(better, *conditions)):
            with T.Then():
                self.second.copy(self.share)
                self.share.set(value, place)
            with T.Else():
                self.second.take(value, place, *conditions)

    def _look(self, *, reads: bool, behind: _Best | None = None) -> None:
        """The best two of a thread's share, of elements that come behind one."""
        self.share.clear()
        self.second.clear()
        with named(T.unroll if self.keeps else T.serial, self.turns, "turn") as turn:
            first, start = self.first_place(turn), turn * self.vector if self.keeps else 0

            def vector() -> None:
                if reads:
                    buffers = self.loaded_vectors(adjacent_loads(self.kernel), first)
                    with named(T.unroll, self.vector, "lane") as lane:
                        value = self.body(self.at(first + lane), self.elements(buffers, lane))
                        T.buffer_store(self.values, value, [start + lane])
                with named(T.unroll, self.vector, "lane") as lane:
                    value, place = self.values[start + lane], first + lane
                    self._consider(value, place, *([behind.comes_before(value, place)] if behind else []))

            self.if_all(self.inside(first), vector)

    def shuffled(self, shuffle: Callable[..., Expr], value: Expr, delta: int) -> Expr:
        """The value that another lane of the warp has; all of them take part, whichever looked through its share."""
        return shuffle(tirx.const(0xFFFFFFFF, "uint32"), value, delta, self._together_in_warp, WARP)

    @property
    def _together_in_warp(self) -> int:
        """Threads of a line that are in one warp."""
        return min(self.threads, WARP)

    def _by_shuffles(self, rank: Expr) -> None:
        self._shuffle(self._together_in_warp)
        if self.warps > 1:
            lane = tirx.floormod(self.lane, WARP)
            start = (tirx.floormod(rank, 2) * self.lines + self.line) * self.warps
            with T.If(tirx.EQ(lane, 0)), T.Then():
                T.buffer_store(self.shared_value, self.best.value[0], [start + tirx.floordiv(self.lane, WARP)])
                T.buffer_store(self.shared_place, self.best.place[0], [start + tirx.floordiv(self.lane, WARP)])
            barrier()
            place = start + tirx.min(lane, self.warps - 1)
            self.best.set(self.shared_value[place], self.shared_place[place])
            self._shuffle(self.warps)
        self.best.set(*(self.shuffled(T.tvm_warp_shuffle, each[0], 0) for each in (self.best.value, self.best.place)))

    def _shuffle(self, count: int) -> None:
        """The best of ``count`` lanes, in the first of them."""
        other = _Best(self, "other")
        for delta in (1 << bit for bit in reversed(range(count.bit_length() - 1))):
            other.set(
                self.shuffled(T.tvm_warp_shuffle_down, self.best.value[0], delta),
                self.shuffled(T.tvm_warp_shuffle_down, self.best.place[0], delta),
            )
            self.best.take(other.value[0], other.place[0])

    def _by_shared(self, rank: Expr) -> None:
        start = self.line * self.threads
        place = start + self.lane
        T.buffer_store(self.shared_value, self.best.value[0], [place])
        T.buffer_store(self.shared_place, self.best.place[0], [place])
        half = self.threads // 2
        while half:
            barrier()
            with T.If(self.lane < half), T.Then():
                self.best.take(self.shared_value[place + half], self.shared_place[place + half])
                T.buffer_store(self.shared_value, self.best.value[0], [place])
                T.buffer_store(self.shared_place, self.best.place[0], [place])
            half //= 2
        barrier()
        self.best.set(self.shared_value[start], self.shared_place[start])
        barrier()
