"""Operators whose inputs are read at places that other inputs hold: a frame's loads, some of whose indices are read."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.fuzz.draw import Data, Draw
from bench.fuzz.productions import GATHERED
from bench.fuzz.values import Term, Writer
from sokoban.language.expression import FLOAT8_DTYPES

#: What names of tensors of places begin with.
_PLACES = "P"

#: Chance that a load of a new input has an index that is read.
GATHERS = 0.6

#: Chance that an operand of a product has an axis of the output along which it is read so, of these.
_ROWS, _OUTPUT_AXES = 0.6, ("b", "i", "j")

#: Elements of dimensions that are read so.
_EXTENTS = (1, 2, 5, 16, 33, 100, 300)

#: Most places of a tensor of them.
_MOST_PLACES = 2**20


class GatheringWriter(Writer):
    """A writer some of whose loads have an index that is read from a tensor of places."""

    def load(self, axes: Sequence[str], every: Sequence[str] = (), unindexed: bool = False) -> Term:
        """A load of a new input, or of one known, as :meth:`bench.fuzz.values.Writer.load` draws it."""
        before = set(self.inputs.shapes)
        term = super().load(axes, every, unindexed)
        tensor = next(iter(set(self.inputs.shapes) - before), None)
        return term if tensor is None or self.chance.random() >= GATHERS else self._gathered(term, axes, every)

    def special_load(self, axes: Sequence[str], kind: str) -> Term:
        """A load of a new input, at places for :data:`bench.fuzz.productions.GATHERED`."""
        term = super().special_load(axes, kind)
        return self._gathered(term, axes) if kind == GATHERED else term

    def _gathered(self, term: Term, axes: Sequence[str], every: Sequence[str] = ()) -> Term:
        """A load of a new input at places along one of its dimensions."""
        name, _, rest = term.text.partition("[")
        inside, bar, pad = rest[:-1].partition(" | ")
        indices = inside.split(", ")
        dimension = self.chance.randrange(len(indices))
        walked = [
            axis for axis in dict.fromkeys((*every, *axes)) if axis in indices[dimension].replace("*", " ").split()
        ]
        walked += [axis for axis in axes if axis not in walked and self.chance.random() < 0.3]
        if math.prod(self.sizes[axis] for axis in walked) > _MOST_PLACES:
            return term
        places = f"{_PLACES}{len(self.inputs.shapes)}"
        self.inputs.shapes[places] = [self.sizes[axis] for axis in walked] or [1]
        self.inputs.dtypes[places] = "int32"
        shape = self.inputs.shapes[name]
        others = math.prod(shape) // shape[dimension]
        shape[dimension] = self.chance.choice([extent for extent in _EXTENTS if extent * others <= 2**24] or [1])
        indices[dimension] = f"{places}[{', '.join(walked) or '0'}]"
        return replace(term, text=f"{name}[{', '.join(indices)}{bar}{pad}]")

    def _again(self, axes: Sequence[str]) -> Term | None:
        """No second load: what places are in a tensor of them no value says."""
        return None


def _with_rows(data: Data, chance: random.Random) -> Data:
    """An operator one of whose operands, ``A`` or ``B``, is read at places along an axis of the output."""
    reads = sorted(set(re.findall(r"\b[AB]\[[^\]|]*\]", data["expr"])))
    if not reads:
        return data
    read = chance.choice(reads)
    tensor, indices = read[0], read[2:-1].split(", ")
    rows = [dimension for dimension, index in enumerate(indices) if index in _OUTPUT_AXES]
    # Products of eight-bit floats at places have no kernel.
    if not rows or data["dtypes"].get(tensor) in FLOAT8_DTYPES:
        return data
    dimension, places = chance.choice(rows), f"{_PLACES}{tensor}"
    axis = indices[dimension]
    indices[dimension] = f"{places}[{axis}]"
    shapes = {name: list(shape) for name, shape in data["shapes"].items()} | {places: [data["sizes"][axis]]}
    shapes[tensor][dimension] = chance.choice(_EXTENTS)
    return data | {
        "expr": data["expr"].replace(read, f"{tensor}[{', '.join(indices)}]"),
        "shapes": shapes,
        "dtypes": data["dtypes"] | {places: "int32"},
    }


def gathering(frames: Sequence[Callable[[Draw], Data]], chance: random.Random) -> Data:
    """An operator of one of some frames, with a load at least that is at places that are read."""
    while True:
        draw = Draw(chance)
        draw.writer = GatheringWriter(chance, draw.sizes, draw.dtypes, draw.integers)
        data = chance.choice(frames)(draw)
        if chance.random() < _ROWS:
            data = _with_rows(data, chance)
        if any(name.startswith(_PLACES) for name in data["shapes"]):
            return data
