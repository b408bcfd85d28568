"""The parts that a plan moves about: the blocks that a model repeats, and what comes before and behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from daydream.capture.captured import Capture
from daydream.graph.graph import Phase
from daydream.trace.trace import NONE, Ints
from hal.support.errors import InputError


@dataclass(frozen=True, eq=False)
class Units:
    """A captured step in units: 0 is what comes before the first block, the last what comes behind the last block.

    Attributes:
        capture: the step.
        blocks: paths of the repeated modules, in the order in which they run.
        unit: of every operator; -1 for the update.
        module_unit: of every module; the first unit also of those that hold no block's operators.
    """

    capture: Capture
    blocks: tuple[str, ...]
    unit: Ints
    module_unit: Ints

    @property
    def count(self) -> int:
        """Blocks and the two around them."""
        return len(self.blocks) + 2

    @cached_property
    def phase(self) -> Ints:
        """Of every operator."""
        return np.array([int(operator.phase) for operator in self.capture.operators], np.int64)

    def rows(self, unit: int, phase: Phase) -> Ints:
        """Operators of a unit in one phase, in order."""
        return np.flatnonzero((self.unit == unit) & (self.phase == phase))

    @cached_property
    def parameter_unit(self) -> Ints:
        """Of every parameter of the capture."""
        units = {path: number for number, path in enumerate(self.blocks, 1)}
        owners = [_block_of(each.name, units) for each in self.capture.parameters]
        # Those of no block belong to where they are first read.
        first = {storage: row for row, each in reversed(list(enumerate(self.capture.operators))) for storage in each.read}
        return np.array(
            [
                owner if owner is not None else max(int(self.unit[first.get(each.storage, 0)]), 0)
                for owner, each in zip(owners, self.capture.parameters, strict=True)
            ],
            np.int64,
        )

    @cached_property
    def elements(self) -> Ints:
        """Elements of the parameters of every unit."""
        sizes = [each.tensor.elements for each in self.capture.parameters]
        return np.bincount(self.parameter_unit, weights=sizes, minlength=self.count).astype(np.int64)

    @cached_property
    def trained(self) -> Ints:
        """Elements of every unit's parameters that have gradients."""
        sizes = [each.tensor.elements * each.trained for each in self.capture.parameters]
        return np.bincount(self.parameter_unit, weights=sizes, minlength=self.count).astype(np.int64)

    def stages(self, count: int) -> list[list[int]]:
        """Units of every stage, or chunk of one: blocks in runs as equal as can be.

        Raises:
            InputError: there are fewer blocks than stages.
        """
        if count > max(len(self.blocks), 1):
            problem = f"{count} parts of a pipeline, but the model repeats {len(self.blocks)} blocks"
            raise InputError("--pipeline", problem, "divide it less")
        runs = [list(map(int, run)) for run in np.array_split(np.arange(1, self.count - 1), count)]
        runs[0].insert(0, 0)
        runs[-1].append(self.count - 1)
        return runs


def units_of(capture: Capture) -> Units:
    """The units of a captured step; a model that repeats nothing is two of them.

    Raises:
        InputError: its blocks do not run one after the other.
    """
    paths = _repeated(capture)
    numbers = {path: number for number, path in enumerate(paths, 1)}
    owner = [_block_of(module.path, numbers) or 0 for module in capture.modules]
    block = np.array([owner[each.module] if each.module != NONE else 0 for each in capture.operators], np.int64)
    phase = np.array([int(each.phase) for each in capture.operators], np.int64)
    unit = np.full(len(block), NONE)
    forward, backward = np.flatnonzero(phase == Phase.FORWARD), np.flatnonzero(phase == Phase.BACKWARD)
    runs = list(dict.fromkeys(block[forward][block[forward] > 0].tolist()))
    paths = tuple(paths[number - 1] for number in runs)
    renumbered = np.zeros(max(numbers.values(), default=0) + 1, np.int64)
    renumbered[runs] = np.arange(1, len(runs) + 1)
    unit[forward] = _running(renumbered[block[forward]], len(runs))
    # Backward, the blocks come in the other order.
    mirrored = renumbered[block[backward]]
    mirrored = np.where(mirrored > 0, len(runs) + 1 - mirrored, 0)
    unit[backward] = len(runs) + 1 - _running(mirrored, len(runs))
    module_unit = renumbered[np.array(owner, np.int64)] if owner else np.empty(0, np.int64)
    return Units(capture, paths, unit, module_unit)


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


def _repeated(capture: Capture) -> tuple[str, ...]:
    """Paths of the equal modules of one list that hold the most parameters."""
    lists: dict[tuple[str, str], list[str]] = {}
    for module in capture.modules:
        around, _, name = module.path.rpartition(".")
        if name.isdigit():
            lists.setdefault((around, module.kind), []).append(module.path)
    sizes = {
        key: sum(each.tensor.elements for each in capture.parameters if each.name.startswith(f"{key[0]}."))
        for key, paths in lists.items()
        if len(paths) > 1
    }
    return tuple(lists[max(sizes, key=sizes.__getitem__)]) if sizes else ()


def _block_of(path: str, numbers: Mapping[str, int]) -> int | None:
    """The number of the block that holds a path.

    >>> _block_of("layers.1.norm.weight", {"layers.0": 1, "layers.1": 2})
    2
    """
    parts = path.split(".")
    return next((numbers[head] for count in range(len(parts), 0, -1) if (head := ".".join(parts[:count])) in numbers), None)


def compiled_blocks(capture: Capture) -> Capture:
    """The step with every block compiled by itself, and what lies around the blocks as it is."""
    from daydream.capture.fusion import fused

    units = units_of(capture)
    inside = (units.unit > 0) & (units.unit < units.count - 1)
    return fused(capture, np.where(inside, units.unit, NONE).tolist())
