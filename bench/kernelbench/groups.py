"""Problems as lists of operators: calls in the language, those element by element behind what they read.

Convolutions of float32 may round to TensorFloat-32 and products may not, as PyTorch has it by default. Of tensors with
more elements than 32 bits count, a part along the first axis is an operator, launched once for each part, as PyTorch's
own iterators cut such tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.kernelbench.problem import Call, Problem, Shape
from bench.kernelbench.rows import without_probabilities, without_turns
from bench.kernelbench.rules import said
from bench.kernelbench.texts import Said, Unsaid, cropped, in_memory_order
from hal.support.errors import InputError
from sokoban.language.checks import MAX_ELEMENTS
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operator_from_data

#: A tensor and its indices, none of which is read from a tensor.
_READ = re.compile(r"(\w+)\[([^\[\]]*)\]")
#: Values that most functions of a group take, beyond which operators end.
MOST_STATEMENTS = 12


@dataclass
class _Group:
    """Statements that are one operator.

    Attributes:
        statements: in order.
        sizes, shapes, dtypes: by axis and by tensor.
        result: number of the tensor that the last statement writes, and its ``output`` shape as statements have it.
        stems: what it computes.
        made: names of results by number.
        is_pointwise: whether all of it goes element by element.
    """

    statements: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    result: int = -1
    output: Shape = ()
    stems: list[str] = field(default_factory=list)
    made: dict[int, str] = field(default_factory=dict)
    is_pointwise: bool = True

    def add(self, number: int, call: Call, translated: Said) -> None:
        """One more call, whose axes and tensors in between have its ``number`` in their names."""
        text, shapes = in_memory_order(call, translated)
        names = [self.made.get(read, f"T{read}") for read in call.read]
        for place, shape in enumerate(shapes):
            shape = shape or (1,)
            if call.read[place] in self.made:
                continue
            if self.shapes.setdefault(names[place], shape) != shape:
                # One tensor by two shapes is two parameters.
                names[place] = f"{names[place]}_{number}_{place}"
                self.shapes[names[place]] = shape
            self.dtypes[names[place]] = call.dtypes[place]
        out = f"R{number}"
        self.statements.append(text.format(*names, out=out).replace("@", f"_{number}"))
        self.sizes |= {axis.replace("@", f"_{number}"): size for axis, size in translated.sizes.items()}
        self.result, self.output = call.written, translated.output
        self.is_pointwise &= translated.is_pointwise
        self.made[call.written] = out
        self.stems.append(call.stem.removesuffix("_"))

    def takes(self, call: Call, translated: Said, readers: int) -> bool:
        """True if a call goes element by element over this group's result, or reduces what this group computes so, and
        nothing else reads that."""
        is_read_whole = all(
            shape == self.output
            for shape, read in zip(translated.shapes, call.read, strict=False)
            if read == self.result
        ) and not any(layout for layout, read in zip(call.layouts, call.read, strict=False) if read in self.made)
        is_of_it = translated.is_of_values if self.is_pointwise else False
        is_of_it |= translated.is_pointwise and translated.output == self.output
        is_own = self.result in call.read and readers == 1 and is_read_whole
        return is_of_it and is_own and len(self.statements) < MOST_STATEMENTS

    def data(self, name: str) -> dict[str, Any]:
        """The operator as JSON has it."""
        return {
            "expr": "; ".join(self.statements), "sizes": self.sizes,
            "shapes": {tensor: list(shape) for tensor, shape in self.shapes.items()},
            "dtypes": {tensor: dtype for tensor, dtype in self.dtypes.items() if dtype != "float32"}, "name": name,
            "allow_tf32": "convolution" in self.stems and set(self.dtypes.values()) == {"float32"},
        }  # fmt: skip

    def in_parts(self) -> tuple[_Group, int]:
        """One of the fewest equal parts along the first axis whose tensors all have :data:`MAX_ELEMENTS` elements at
        most, and how many there are; the group as it is where there is no need, or no such axis."""
        text = "; ".join(self.statements)
        axes = {each.partition("[")[2].partition("]")[0].partition(",")[0] for each in text.split("; ")}
        lengths, along = {self.sizes.get(axis) for axis in axes}, _along(text, axes)
        (length,) = lengths if len(lengths) == 1 else (None,)
        for parts in range(1, (length or 0) + 1):
            shapes = {
                name: (shape[0] // parts, *shape[1:]) if name in along else shape for name, shape in self.shapes.items()
            }
            most = max(map(math.prod, [*shapes.values(), (math.prod(self.output) // parts,)]))
            if length and length % parts == 0 and most <= MAX_ELEMENTS and (along or parts == 1):
                return replace(self, shapes=shapes, sizes=self.sizes | dict.fromkeys(axes, length // parts)), parts
        return self, 1


def _along(text: str, axes: set[str]) -> set[str]:
    """Tensors whose first dimension is one of some axes; none where an axis stands anywhere else."""
    along = set()
    named = re.compile(r"\b(" + "|".join(map(re.escape, axes)) + r")\b")
    for tensor, index in _READ.findall(text):
        first, *others = index.partition("|")[0].split(",")
        if named.search(",".join(others)) or (named.search(first) and first.strip() not in axes):
            return set()
        along |= {tensor} if named.search(first) else set()
    return set() if named.search(_READ.sub("", text)) else along


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Operators that a problem is, or why it is none.

    Attributes:
        problem: the problem.
        expressions: of the language, in order; all of them compute it. Tensors are called ``T`` and their number.
        results: numbers of the tensors that they write.
        launches: how often each is launched: once, or for every part of its tensors.
        reason: why there are none; empty where there are.
    """

    problem: Problem
    expressions: tuple[TensorExpr, ...] = ()
    results: tuple[int, ...] = ()
    launches: tuple[int, ...] = ()
    reason: str = ""


def operators_of(problem: Problem) -> Operators:
    """A problem in the language."""
    calls = without_probabilities(without_turns(problem.calls()))
    try:
        groups = _groups(calls)
    except Unsaid as reason:
        return Operators(problem=problem, reason=str(reason))
    stem = problem.name.partition("/")[2].partition("_")[0] or "0"
    expressions, launches = [], []
    for number, group in enumerate(groups, start=1):
        part, count = group.in_parts()
        launches.append(count)
        data = part.data(f"problem_{stem}_{number}_{'_'.join(group.stems)}"[:90])
        try:
            expressions.append(operator_from_data(data))
        except InputError as error:
            return Operators(problem=problem, reason=f"{' and '.join(group.stems)}: {error}")
    results = tuple(group.result for group in groups)
    return Operators(problem=problem, expressions=tuple(expressions), results=results, launches=tuple(launches))


def _groups(calls: Sequence[Call]) -> list[_Group]:
    """Calls as operators: what goes element by element over the result before it belongs to that."""
    groups: list[_Group] = []
    for number, call in enumerate(calls):
        translated = said(call)
        readers = sum(groups[-1].result in each.read for each in calls[number:]) if groups else 0
        if not groups or not groups[-1].takes(call, translated, readers):
            groups.append(_Group())
        groups[-1].add(number, call, translated)
        if translated.padded is not None:
            groups.append(_Group())
            of_result = replace(call, shapes=(translated.padded,), read=(call.written,), layouts=(), stem="crop")
            groups[-1].add(number, of_result, cropped(of_result))
    return groups
