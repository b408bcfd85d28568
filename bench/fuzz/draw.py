"""Operators under way: their axes and statements, and the operands, weights and epilogues that are drawn for them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.fuzz.productions import INSIDE, OUTSIDE
from bench.fuzz.targets import Target, with_production
from bench.fuzz.values import INTEGER_BOUNDS, Term, Writer, positive, product, quotient, total, within

Data = dict[str, Any]

#: Elements of axes: one, a few, prime, near a tile, several tiles.
TINY = (1, 1, 2, 3, 4, 5)
PRIME = (7, 11, 13, 17, 23, 37, 53, 61, 97, 131)
EDGE = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
LARGE = (192, 256, 384, 500, 512, 521, 768, 1000, 1024, 1025, 2048, 2049)

#: Dtypes of an operator's inputs and how often they are drawn; "whole" is computed in integers.
FAMILIES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("float32",), 10), (("float16",), 4), (("bfloat16",), 3), (("float64",), 3), (("int8",), 2), (("int32",), 1),
    (("int8", "int32"), 1), (("float16", "float32"), 1), (("float32", "int8"), 1), (("bfloat16", "float32"), 1),
    (("float32", "int32"), 1),
)  # fmt: skip

NARROW = ("float16", "bfloat16")
FLOATS = (*NARROW, "float32", "float64")
INTEGERS = ("int8", "int32")


@dataclass
class Draw:
    """One operator under way: what it is drawn by, its axes and its statements.

    Attributes:
        chance: what everything is drawn by.
        target: what the operator is drawn for; None for nothing but itself.
    """

    chance: random.Random
    target: Target | None = None

    def __post_init__(self) -> None:
        self.sizes: dict[str, int] = {}
        families, weights = zip(*FAMILIES, strict=True)
        self.dtypes: tuple[str, ...] = self.chance.choices(families, weights)[0]
        if self.target is not None:
            is_on_cpu = self.target.lowering.startswith("cpu")
            self.dtypes = (self.chance.choice(("float16", "float32", "float64") if is_on_cpu else FLOATS),)
        self.integers = all(dtype in INTEGERS for dtype in self.dtypes) and self.chance.random() < 0.8
        self.averages = False
        self.writer = Writer(self.chance, self.sizes, self.dtypes, self.integers)
        self.statements: list[str] = []

    def inside(self, term: Term, axes: Sequence[str]) -> Term:
        """A value inside of a reduction, with the production that is wanted there."""
        return self._wanted(INSIDE, term, axes)

    def outside(self, term: Term, axes: Sequence[str]) -> Term:
        """A value outside of reductions, with the production that is wanted there."""
        return self._wanted(OUTSIDE, term, axes)

    def _wanted(self, place: str, term: Term, axes: Sequence[str]) -> Term:
        if self.target is None or self.target.place != place:
            return term
        return with_production(self.writer, term, axes, self.target.name)

    def operand_offset(self, axis: str, offset: int) -> int:
        """By how much an operand's rows or columns are moved, 8 or none where that is wanted, -1 for what is padded."""
        if self.target is None:
            return offset
        wanted = self.target.name if self.target.place == INSIDE else ""
        if wanted not in ("offset", "pad zero"):
            return 0
        return (8 if wanted == "offset" else -1) if axis == "i" else 0

    def function(self, functions: Sequence[str]) -> str:
        """One of some reductions, the one that is wanted if it is among them."""
        wanted = self.target.name if self.target is not None and not self.target.place else ""
        return wanted if wanted in functions else self.chance.choice(functions)

    def axes(self, *names: str, tables: Sequence[Sequence[int]] = (TINY, PRIME, EDGE, LARGE)) -> list[str]:
        """New axes."""
        for name in names:
            self.sizes[name] = self.chance.choice(self.chance.choice(tables))
        return list(names)

    def state(self, tensor: str, axes: Sequence[str], term: Term) -> Term:
        """A statement; the value of the tensor that it defines."""
        text = term.text
        if text.startswith("(") and text.endswith(")") and _encloses(text):
            text = text[1:-1]
        self.statements.append(f"{tensor}[{', '.join(axes)}] = {text}")
        read = Term(
            f"{tensor}[{', '.join(axes)}]", term.low, term.high, term.usual, term.error + term.usual,
            peaked=term.peaked, exact=self.integers,
        )  # fmt: skip
        return read

    def reduced(self, function: str, axes: Sequence[str], body: Term) -> Term:
        """A reduction of a value over axes."""
        count = math.prod(self.sizes[axis] for axis in axes)
        shown = axes[0] if len(axes) == 1 and self.chance.random() < 0.5 else f"[{', '.join(axes)}]"
        inner = body.text[1:-1] if body.text.startswith("(") and _encloses(body.text) else body.text
        text = f"{function}({shown}, {inner})"
        if function == "sum" and self.averages and not self.integers and self.chance.random() < 0.1:
            # Whole numbers have no mean.
            return replace(body, text=f"mean({shown}, {inner})", error=2 * (body.error + body.usual), exact=False)
        if function in ("max", "min"):
            return Term(text, body.low, body.high, body.usual, body.error, body.exact, body.peaked)
        if function == "prod":
            return Term(text, 0.0, 3.0, 1.0, count * (body.error + 1.0), peaked=body.peaked)
        usual = body.usual * math.sqrt(count) if body.low < 0 < body.high else body.usual * count
        low, high = min(body.low * count, 0.0), max(body.high * count, 0.0)
        error = body.error * math.sqrt(count) + usual
        return Term(text, low, high, usual, error, self.integers, body.peaked)

    def body(self, function: str, spatial: Sequence[str], reduced: Sequence[str], depth: int) -> Term:
        """Body of a reduction: it reads an input along every reduced axis."""
        axes = [*spatial, *reduced]
        first = self.writer.load(spatial, every=reduced, unindexed=self.chance.random() < 0.5)
        term = self.inside(self.writer.value(axes, depth, first), axes)
        if function == "prod":
            count = math.prod(self.sizes[axis] for axis in reduced)
            return self.factor(term, count)
        if self.integers:
            return self.uncut_body(first, term, reduced)
        return within(term, 1e4) if not term.peaked else term

    def factor(self, term: Term, count: int) -> Term:
        """A factor near one, of which ``count`` may be multiplied."""
        scale = 2.0 ** -math.ceil(math.log2(2 + count / 4))
        return Term(f"(1 + {scale:g}*{bounded(term).text})", 0.5, 1.5, 1.0, 1.0, peaked=term.peaked)

    def uncut_body(self, first: Term, term: Term, reduced: Sequence[str]) -> Term:
        """Integers whose sum 32 bits hold."""
        count = math.prod(self.sizes[axis] for axis in reduced)
        return term if term.most * count < 2**30 else first

    def finish(self, term: Term, axes: Sequence[str], tensor: str = "Y") -> Data:
        """The operator, whose last statement is ``term``."""
        narrow = [dtype for dtype in self.dtypes if dtype in NARROW]
        result = "float32"
        if "float64" in self.dtypes:
            result = "float64"
        elif narrow and self.chance.random() < 0.7:
            result = narrow[0]
        if self.integers:
            result = "int32"
        if result == "float16" and term.usual > 500:
            term = within(Term(term.text, term.low, term.high, term.usual), 500.0)
        self.state(tensor, axes, term)
        return self.data(tensor, result)

    def data(self, tensor: str, result: str) -> Data:
        """The operator as JSON has it."""
        text = "; ".join(self.statements)
        inputs = self.writer.inputs
        read = {name for name in inputs.shapes if f"{name}[" in text}
        dtypes = {name: inputs.dtypes[name] for name in inputs.shapes if name in read}
        data: Data = {
            "expr": text,
            "sizes": {axis: size for axis, size in self.sizes.items()},
            "dtypes": {name: dtype for name, dtype in dtypes.items() if dtype != "float32"} | {tensor: result},
            "shapes": {name: shape for name, shape in inputs.shapes.items() if name in read},
        }
        if not self.integers and self.chance.random() < 0.05:
            data["accumulate"] = "float64"
        return data


def bounded(term: Term) -> Term:
    """A number between -1 and 1."""
    return Term(f"tanh({within(term, 6.0).text})", -1.0, 1.0, 0.6, 1.0)


def _encloses(text: str) -> bool:
    """True if the first bracket closes at the end."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position == len(text) - 1
    return False


def limit(draw: Draw, points: int) -> None:
    """Axes shortened, the longest first, until there are so many points at most."""
    while math.prod(draw.sizes.values()) > points:
        longest = max(draw.sizes, key=draw.sizes.__getitem__)
        draw.sizes[longest] = draw.sizes[longest] // 2 + 1


def moved(draw: Draw, dtype: str) -> tuple[Term, Term]:
    """Operands of a product whose rows move in every step, as those of an image do below a filter."""
    stride = draw.chance.choice((1, 1, 2, 30) if draw.target is None else (2, 30))
    draw.axes("r", tables=((2, 3, 5),))
    sizes, inputs = draw.sizes, draw.writer.inputs
    inputs.shapes["A"] = [sizes["i"] + stride * (sizes["r"] - 1), sizes["k"]]
    inputs.shapes["B"] = [sizes["r"], sizes["k"], sizes["j"]]
    inputs.dtypes.update({"A": dtype, "B": dtype})
    low, high = INTEGER_BOUNDS if dtype in INTEGERS else (-1.0, 1.0)
    read = Term(f"A[i + {stride}*r, k]", low, high, high / 2, exact=True)
    return read, replace(read, text="B[r, k, j]")


def input_of(draw: Draw, tensor: str, axes: Sequence[str]) -> Term:
    """A load of an input along axes as they are."""
    dtype = draw.dtypes[0]
    draw.writer.inputs.shapes[tensor] = [draw.sizes[axis] for axis in axes]
    draw.writer.inputs.dtypes[tensor] = dtype
    return Term(f"{tensor}[{', '.join(axes)}]", -1.0, 1.0, 0.6, exact=True)


def turned(chance: random.Random, axes: list[str]) -> list[str]:
    """The axes of a matrix, with its last two turned half of the time."""
    return axes if chance.random() < 0.5 else [*axes[:-2], axes[-1], axes[-2]]


def operand(draw: Draw, tensor: str, axes: Sequence[str], dtype: str | None = None) -> Term:
    """A load of an input along axes as they are, sometimes in another order or shifted by an offset."""
    order = list(axes)
    if dtype is None and draw.chance.random() < 0.3:
        draw.chance.shuffle(order)
    dtype = dtype or draw.chance.choice(draw.dtypes)
    shape, indices, pad = [], [], ""
    for axis in order:
        offset = draw.chance.choice((1, 2, 8, -1)) if draw.chance.random() < 0.06 else 0
        offset = draw.operand_offset(axis, offset)
        is_reversed = offset >= 0 and draw.target is None and draw.chance.random() < 0.03
        # What is missing is zero.
        shape.append(max(draw.sizes[axis] + offset, 1))
        if offset < 0:
            pad, offset = " | pad=0", 0
        text = f"{draw.sizes[axis] - 1 + offset} - {axis}" if is_reversed else axis + (f" + {offset}" if offset else "")
        indices.append(text)
    draw.writer.inputs.shapes[tensor], draw.writer.inputs.dtypes[tensor] = shape, dtype
    low, high = INTEGER_BOUNDS if dtype in INTEGERS else (-1.0, 1.0)
    return Term(f"{tensor}[{', '.join(indices)}{pad}]", low, high, high / 2, exact=True, peaked=draw.writer.peaked)


def weighted(draw: Draw, spatial: Sequence[str], reduced: Sequence[str], operand: Term) -> Term:
    """An operand as it is, masked by positions, weighted by one, or as a function of it."""
    kind = draw.chance.choice(("plain", "plain", "masked", "weighted", "function"))
    axes = [*spatial, *reduced]
    if kind == "masked":
        other = "0" if draw.chance.random() < 0.7 or draw.integers else draw.writer.value(axes, 0).text
        truth = draw.writer.truth(axes, 1)
        text = f"select({truth}, {operand.text}, {other})"
        if other == "0" and draw.chance.random() < 0.3:
            text = f"select({truth}, 0, {operand.text})"
        return Term(
            text,
            min(operand.low, -3),
            max(operand.high, 3),
            operand.usual,
            operand.error + 1,
            draw.integers,
            operand.peaked,
        )
    if kind == "weighted":
        return product(operand, position_weight(draw, axes))
    if kind == "function":
        term = draw.writer.value(axes, draw.chance.randint(1, 2), operand)
        return term if draw.integers else (within(term, 100.0) if not term.peaked else bounded(term))
    return operand


def position_weight(draw: Draw, axes: Sequence[str]) -> Term:
    """A weight by position: the value of an axis, scaled, or a truth value as a number."""
    kind = draw.chance.randrange(4)
    if kind == 0 or draw.integers:
        text = f"select({draw.writer.truth(axes, 0)}, 1, {draw.chance.choice((0, 2, -1))})"
        return Term(text, -1, 2, 1, exact=True)
    position = draw.writer.position(axes)
    if kind == 1:
        return position
    scaled = f"{1 / 2 ** math.ceil(math.log2(position.most + 2)):g}"
    if kind == 2:
        return Term(f"({position.text} * {scaled})", -1, 1, 0.5, 0.5)
    return Term(f"cos({position.text} * {scaled})", 0.5, 1, 0.8, 1)


def epilogue(draw: Draw, axes: Sequence[str], term: Term, depth: int | None = None) -> Term:
    """A value of ``term``, inputs, positions and numbers."""
    return draw.outside(draw.writer.value(axes, draw.chance.randint(1, 3) if depth is None else depth, term), axes)


def bounded_epilogue(draw: Draw, axes: Sequence[str], term: Term) -> Term:
    """An epilogue that is small enough to be stored in any float."""
    return within(epilogue(draw, axes, term, draw.chance.randint(1, 2)), 8.0)


def combined(draw: Draw, current: Term, reduced: Term) -> Term:
    """A value of the columns and of what was reduced of them."""
    kind = draw.chance.choice(("minus", "over", "times", "exp"))
    if kind == "minus":
        return total(current, reduced, "sub")
    if kind == "over":
        return quotient(current, positive(reduced))
    if kind == "times":
        return product(bounded(current), reduced)
    return Term(f"exp({bounded(total(current, reduced, 'sub')).text})", 0.3, 3.0, 1.0, 4.0)
