"""The parts that a plan moves about: the blocks that a model repeats, and what comes before and behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from daydream.capture.captured import Capture, CapturedParameter
from daydream.graph.graph import Phase
from daydream.plan.sizes import Sizes
from daydream.trace.trace import NONE, Ints
from hal.support.errors import InputError


@dataclass(frozen=True, eq=False)
class Units:
    """A step in units: 0 is what comes before the first block, the last what comes behind the last block.

    A capture may hold fewer blocks than the model: of the equal ones at its end the second then stands for all but the
    first and the last.

    Attributes:
        capture: the step.
        blocks: paths of all repeated modules of the model, in the order in which they run.
        unit: captured unit of every operator; -1 for the update.
        captured: captured unit of every unit.
        experts: storages of parameters of which a rank holds its experts' part alone.
    """

    capture: Capture
    blocks: tuple[str, ...]
    unit: Ints
    captured: Ints
    experts: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        """Blocks and the two around them."""
        return len(self.captured)

    @property
    def whole(self) -> bool:
        """True if the capture holds every block."""
        return not self.many[1]

    @cached_property
    def many(self) -> tuple[int, tuple[int, ...]]:
        """The captured unit that stands for several, and those; -1 and none where the capture is whole."""
        counts = np.bincount(self.captured)
        if counts.max() == 1:
            return NONE, ()
        many = int(counts.argmax())
        return many, tuple(np.flatnonzero(self.captured == many).tolist())

    @cached_property
    def phase(self) -> Ints:
        """Of every operator."""
        return np.array([int(operator.phase) for operator in self.capture.operators], np.int64)

    @cached_property
    def rows(self) -> Mapping[tuple[int, Phase], Ints]:
        """Operators of a captured unit in one phase, in order."""
        captured = range(int(self.captured[-1]) + 1)
        phases = (Phase.FORWARD, Phase.BACKWARD)
        return {
            (unit, phase): np.flatnonzero((self.unit == unit) & (self.phase == phase))
            for unit in captured for phase in phases
        }  # fmt: skip

    @cached_property
    def parameter_unit(self) -> Ints:
        """Captured unit of every parameter of the capture."""
        units = {path: number for number, path in enumerate(self.capture.blocks, 1)}
        owners = [_block_of(each.name, units) for each in self.capture.parameters]
        # Those of no block belong to where they are first read.
        first = {number: row for row, each in reversed(list(enumerate(self.capture.operators))) for number in each.read}
        return np.array(
            [
                owner if owner is not None else max(int(self.unit[first.get(each.storage, 0)]), 0)
                for owner, each in zip(owners, self.capture.parameters, strict=True)
            ],
            np.int64,
        )

    @cached_property
    def parameters(self) -> tuple[tuple[CapturedParameter, ...], ...]:
        """Parameters of every captured unit."""
        members: list[list[CapturedParameter]] = [[] for _ in range(int(self.captured[-1]) + 1)]
        for each, unit in zip(self.capture.parameters, self.parameter_unit.tolist(), strict=True):
            members[unit].append(each)
        return tuple(map(tuple, members))

    def parameters_of(self, unit: int) -> tuple[CapturedParameter, ...]:
        """Parameters of a unit."""
        return self.parameters[int(self.captured[unit])]

    @cached_property
    def elements(self) -> Ints:
        """Elements of the parameters of every unit."""
        sizes = [sum(each.tensor.elements for each in members) for members in self.parameters]
        return np.array(sizes, np.int64)[self.captured]

    @cached_property
    def trained(self) -> Ints:
        """Elements of every unit's parameters that have gradients."""
        sizes = [sum(each.tensor.elements for each in members if each.trained) for members in self.parameters]
        return np.array(sizes, np.int64)[self.captured]

    def sizes(self, unit: int, bytes_of: Callable[[CapturedParameter], float]) -> Sizes:
        """Bytes of a unit's parameters, or what ``bytes_of`` says of each."""
        sums = [0.0, 0.0]
        for each in self.parameters_of(unit):
            sums[each.storage in self.experts] += bytes_of(each)
        return Sizes(*sums)

    @cached_property
    def expert_dims(self) -> frozenset[tuple[int, ...]]:
        """Sizes of the parameters of :attr:`experts`."""
        return frozenset(each.tensor.dims for each in self.capture.parameters if each.storage in self.experts)

    def is_root(self, unit: int) -> bool:
        """True if a unit is none of the blocks."""
        return unit in (0, self.count - 1)

    def stages(self, count: int, blocks: Sequence[int] = ()) -> list[list[int]]:
        """Units of every stage, or chunk of one: so many blocks each, or runs as equal as can be.

        Raises:
            InputError: there are fewer blocks than stages, or other numbers of them.
        """
        if blocks and (len(blocks) != count or sum(blocks) != len(self.blocks)):
            problem = f"{len(blocks)} parts of {sum(blocks)} blocks, but {count} parts share {len(self.blocks)}"
            raise InputError("--stages", problem, "write the blocks of every part, chunk after chunk")
        bare = count - len(self.blocks)
        if bare > (2 if self.blocks else 1):
            problem = f"{count} parts of a pipeline, but the model repeats {len(self.blocks)} blocks"
            raise InputError("--pipeline", problem, "divide it less")
        inner = np.arange(1, self.count - 1)
        # One part more than blocks is what lies behind them, two more are what lies around them.
        first, last = int(bare == 2 and bool(self.blocks)), int(bare > 0 and bool(self.blocks))
        if blocks:
            parts = np.split(inner, np.cumsum(blocks)[:-1])
        else:
            parts = [inner[:0]] * first + np.array_split(inner, count - first - last) + [inner[:0]] * last
        runs = [list(map(int, run)) for run in parts]
        runs[0].insert(0, 0)
        runs[-1].append(self.count - 1)
        return runs


#: Blocks of a capture that stand for equal ones of a larger model.
FEW = 3


def units_of(capture: Capture, blocks: int | None = None) -> Units:
    """The units of a captured step; a model that repeats nothing is two of them.

    Args:
        capture: the step.
        blocks: of the model, where the capture holds :data:`FEW` of those that are equal at its end.

    Raises:
        InputError: its blocks do not run one after the other.
    """
    paths = capture.blocks
    numbers = {path: number for number, path in enumerate(paths, 1)}
    owner = [_block_of(module.path, numbers) or 0 for module in capture.modules]
    block = np.array([owner[each.module] if each.module != NONE else 0 for each in capture.operators], np.int64)
    phase = np.array([int(each.phase) for each in capture.operators], np.int64)
    unit = np.full(len(block), NONE)
    forward, backward = np.flatnonzero(phase == Phase.FORWARD), np.flatnonzero(phase == Phase.BACKWARD)
    count = len(paths)
    unit[forward] = _running(block[forward], count)
    # Backward, the blocks come in the other order.
    mirrored = np.where(block[backward] > 0, count + 1 - block[backward], 0)
    unit[backward] = count + 1 - _running(mirrored, count)
    captured = np.arange(count + 2)
    if blocks is not None and blocks > count:
        captured = np.concatenate([np.arange(count - 1), np.full(blocks - count + 1, count - 1), [count, count + 1]])
        paths = tuple(f"{paths[0].rpartition('.')[0]}.{number}" for number in range(blocks))
    return Units(capture, paths, unit, captured)


def _running(block: Ints, count: int) -> Ints:
    """The unit of operators in a row, by the block that each is in, 0 outside all.

    What stands between two blocks belongs to the earlier one, what stands behind the last to the unit behind it.

    >>> _running(np.array([0, 1, 0, 1, 2, 2, 0]), 2).tolist()
    [0, 1, 1, 1, 2, 2, 3]
    """
    reached = np.maximum.accumulate(block) if len(block) else block
    if np.any((block > 0) & (block < reached)):
        raise InputError("model", "its blocks do not run one after the other", "plan it without --pipeline and fsdp")
    last = np.flatnonzero(block == count)
    behind = np.arange(len(block)) > (last[-1] if count and len(last) else NONE if not count else len(block))
    return np.where(behind, count + 1, reached)


def _block_of(path: str, numbers: Mapping[str, int]) -> int | None:
    """The number of the block that holds a path.

    >>> _block_of("layers.1.norm.weight", {"layers.0": 1, "layers.1": 2})
    2
    """
    parts = path.split(".")
    heads = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((numbers[head] for head in heads if head in numbers), None)


def compiled_blocks(capture: Capture) -> Capture:
    """The step with every block compiled by itself, and what lies around the blocks as it is."""
    from daydream.capture.fusion.inductor import fused

    units = units_of(capture)
    inside = (units.unit > 0) & ~np.isin(units.unit, (0, units.count - 1))
    return fused(capture, np.where(inside, units.unit, NONE).tolist())
