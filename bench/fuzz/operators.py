"""Operators drawn by number: the same number gives the same operator on every machine.

Some are expressions from top to bottom; others have a frame that one kind of kernel is made for (products, windows,
rows, several steps, attention), whose operands, weights, masks and epilogues are drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.fuzz.named import named, wanted_attention
from bench.fuzz.productions import INSIDE, OUTSIDE
from bench.fuzz.targets import FRAMES as TARGET_FRAMES
from bench.fuzz.targets import Target, targets, with_production
from bench.fuzz.values import INTEGER_BOUNDS, Term, Writer, positive, product, quotient, total, within
from hal.support.errors import InputError
from sokoban.language.operators import operator_from_data

Data = dict[str, Any]

#: Elements of axes: one, a few, prime, beside a tile, several tiles.
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
        self.whole = all(dtype in INTEGERS for dtype in self.dtypes) and self.chance.random() < 0.8
        self.averages = False
        self.writer = Writer(self.chance, self.sizes, self.dtypes, self.whole)
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
            peaked=term.peaked, exact=self.whole,
        )  # fmt: skip
        return read

    def reduced(self, function: str, axes: Sequence[str], body: Term) -> Term:
        """A reduction of a value over axes."""
        count = math.prod(self.sizes[axis] for axis in axes)
        shown = axes[0] if len(axes) == 1 and self.chance.random() < 0.5 else f"[{', '.join(axes)}]"
        inner = body.text[1:-1] if body.text.startswith("(") and _encloses(body.text) else body.text
        text = f"{function}({shown}, {inner})"
        if function == "sum" and self.averages and not self.whole and self.chance.random() < 0.1:
            # Whole numbers have no mean.
            return replace(body, text=f"mean({shown}, {inner})", error=2 * (body.error + body.usual), exact=False)
        if function in ("max", "min"):
            return Term(text, body.low, body.high, body.usual, body.error, body.exact, body.peaked)
        if function == "prod":
            return Term(text, 0.0, 3.0, 1.0, count * (body.error + 1.0), peaked=body.peaked)
        usual = body.usual * math.sqrt(count) if body.low < 0 < body.high else body.usual * count
        low, high = min(body.low * count, 0.0), max(body.high * count, 0.0)
        error = body.error * math.sqrt(count) + usual
        return Term(text, low, high, usual, error, self.whole, body.peaked)

    def body(self, function: str, spatial: Sequence[str], reduced: Sequence[str], depth: int) -> Term:
        """What is reduced: it reads an input along every reduced axis."""
        axes = [*spatial, *reduced]
        first = self.writer.load(spatial, every=reduced, plain=self.chance.random() < 0.5)
        term = self.inside(self.writer.value(axes, depth, first), axes)
        if function == "prod":
            count = math.prod(self.sizes[axis] for axis in reduced)
            return self.factor(term, count)
        if self.whole:
            return self.whole_body(first, term, reduced)
        return within(term, 1e4) if not term.peaked else term

    def factor(self, term: Term, count: int) -> Term:
        """A factor near one, of which ``count`` may be multiplied."""
        scale = 2.0 ** -math.ceil(math.log2(2 + count / 4))
        return Term(f"(1 + {scale:g}*{bounded(term).text})", 0.5, 1.5, 1.0, 1.0, peaked=term.peaked)

    def whole_body(self, first: Term, term: Term, reduced: Sequence[str]) -> Term:
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
        if self.whole:
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
        if not self.whole and self.chance.random() < 0.05:
            data["accumulate"] = "float64"
        return data


def bounded(term: Term) -> Term:
    """A number between -1 and 1."""
    return Term(f"tanh({within(term, 6.0).text})", -1.0, 1.0, 0.6, 1.0)


def _encloses(text: str) -> bool:
    """Whether the first bracket closes at the end."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position == len(text) - 1
    return False


# Frames


def pointwise(draw: Draw) -> Data:
    """A value of every element, over one to three axes."""
    axes = draw.axes(*("i", "j", "l")[: draw.chance.randint(1, 3)])
    _limit(draw, 2**22)
    return draw.finish(_epilogue(draw, axes, draw.writer.load(axes)), axes)


def transposed(draw: Draw) -> Data:
    """An input read in another order of its dimensions, and a value of it."""
    axes = draw.axes(*("i", "j", "l")[: draw.chance.randint(2, 3)], tables=(PRIME, EDGE, LARGE))
    _limit(draw, 2**22)
    order = list(axes)
    draw.chance.shuffle(order)
    load = draw.writer.load([], every=order)
    term = load if draw.chance.random() < 0.3 else _epilogue(draw, axes, load)
    return draw.finish(term, axes)


def reduction(draw: Draw) -> Data:
    """One reduction of any kind of any value, perhaps inside arithmetic."""
    draw.averages = True
    spatial = draw.axes(*("i", "j")[: draw.chance.choice((1, 1, 2))])
    reduced = draw.axes(*("k", "r")[: draw.chance.choice((1, 1, 2))])
    _limit(draw, 2**26)
    function = draw.function(("sum", "sum", "sum", "max", "min") + (() if draw.whole else ("prod", "prod")))
    draw.writer.peaked = function == "max"
    if function == "prod":
        draw.sizes.update({axis: min(draw.sizes[axis], 33) for axis in reduced})
    if draw.chance.random() < 0.08 and not draw.whole and function != "prod":
        # Of places alone.
        weights = [_position_weight(draw, [axis, *spatial]) for axis in reduced]
        body = total(draw.writer.position(reduced[:1]), weights[-1])
        body = within(product(body, weights[0]), 100.0)
    else:
        body = draw.body(function, spatial, reduced, draw.chance.randint(0, 3))
    term = draw.reduced(function, reduced, body)
    if draw.chance.random() < 0.4:
        term = draw.state("C", spatial, term)
    if draw.chance.random() < 0.7 or draw.target is not None:
        term = _epilogue(draw, spatial, term)
    return draw.finish(term, spatial)


def contraction(draw: Draw) -> Data:
    """A sum of products over two inputs that share the summed axes, weighted and masked by positions."""
    batch = draw.axes("b", tables=(TINY,)) if draw.chance.random() < 0.25 else []
    rows, columns = (
        draw.axes("i", tables=(TINY, PRIME, EDGE, LARGE, LARGE)),
        draw.axes("j", tables=(PRIME, EDGE, LARGE)),
    )
    reduced = draw.axes("k", tables=(PRIME, EDGE, LARGE))
    if draw.chance.random() < 0.15:
        reduced += draw.axes("r", tables=(TINY, TINY, PRIME))
    _limit(draw, 2**30)
    left = _operand(draw, "A", [*batch, *rows, *reduced])
    right = _operand(draw, "B", [*(batch if draw.chance.random() < 0.7 else []), *reduced, *columns])
    spatial = [*batch, *rows, *columns]
    weights = draw.chance.random()
    body = product(left, right)
    if weights < 0.75:
        left, right = _weighted(draw, spatial, reduced, left), _weighted(draw, spatial, reduced, right)
        body = product(left, right)
    if weights < 0.35:
        body = product(body, _position_weight(draw, [*spatial, *reduced]))
    if draw.whole and body.most * math.prod(draw.sizes[axis] for axis in reduced) > 2**30:
        body = product(_operand(draw, "A", [*batch, *rows, *reduced]), _operand(draw, "B", [*reduced, *columns]))
    term = draw.reduced("sum", reduced, draw.inside(body, [*spatial, *reduced]))
    term = draw.state("C", spatial, term) if draw.chance.random() < 0.4 else term
    if draw.chance.random() < 0.6 or draw.target is not None:
        term = _epilogue(draw, spatial, term)
    return draw.finish(term, spatial)


def matrix_product(draw: Draw) -> Data:
    """A product of matrices that matrix units take, with any epilogue."""
    chance = draw.chance
    dtype = chance.choice(("float16", "float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"))
    if draw.target is not None:
        dtype = "float16"
    draw.dtypes, draw.whole = (dtype,), dtype == "int8"
    draw.writer.dtypes, draw.writer.whole = ("int32",) if dtype == "int8" else (dtype,), draw.whole
    if dtype.startswith("float8"):
        draw.writer.dtypes = ("float32",)
    aligned = ((64, 128, 256), (512, 1024, 2048), (192, 384, 768, 96))
    even: Sequence[Sequence[int]] = aligned if chance.random() < 0.6 else (PRIME, EDGE, LARGE)
    if draw.target is not None:
        even = ((512, 1024, 2048),)
    batch = draw.axes("b", tables=((2, 3, 16),)) if chance.random() < 0.2 and draw.target is None else []
    draw.axes("i", tables=even if draw.target is not None else (*even, (1, 8, 16, 33)))
    draw.axes("j", "k", tables=even)
    draw.sizes["k"] = max(draw.sizes["k"], 16)
    if dtype == "int8" or dtype.startswith("float8"):
        draw.sizes["k"] = -(-draw.sizes["k"] // 32) * 32
    spatial, reduced = [*batch, "i", "j"], ["k"]
    is_moved = draw.target is not None and draw.target.place == INSIDE and draw.target.name in ("strided", "window")
    if is_moved or (not batch and chance.random() < 0.2):
        reduced = ["r", "k"]
        left, right = _moved(draw, dtype)
    else:
        left = _operand(draw, "A", _turned(chance, [*batch, "i", "k"]), dtype)
        right = _operand(draw, "B", _turned(chance, [*batch, "k", "j"]), dtype)
    term = draw.state("C", spatial, draw.reduced("sum", reduced, product(left, right)))
    if chance.random() < 0.75 or draw.target is not None:
        if draw.whole:
            # What follows a sum of integers is computed in floats unless integers are asked for.
            draw.whole = draw.writer.whole = chance.random() < 0.5
            draw.writer.dtypes = ("int32",) if draw.whole else ("float32",)
        term = _epilogue(draw, spatial, term)
    data = draw.finish(term, spatial)
    if dtype.startswith("float8") or (dtype == "int8" and not draw.whole):
        data["dtypes"]["Y"] = chance.choice(("float32", "float16", "bfloat16"))
        if data["dtypes"]["Y"] == "float16":
            data["dtypes"]["Y"] = "float32" if dtype == "int8" else "float16"
    if dtype == "float32":
        data["allow_tf32"] = "accumulate" not in data
    elif dtype in NARROW:
        data["accumulate"] = "float32"
    return data


def windows(draw: Draw) -> Data:
    """A convolution, a depthwise one or a pool, strided, dilated and padded, with weights by position."""
    chance = draw.chance
    depthwise = chance.random() < 0.5 or draw.target is not None
    draw.axes("n", tables=((1, 2, 3),))
    draw.axes("c", tables=((3, 7, 16, 32, 33, 64),) if not depthwise else ((1, 3, 32, 33, 64, 96),))
    draw.axes("h", "w", tables=((5, 7, 13, 14, 28, 31, 56),))
    draw.axes("r", "s", tables=((1, 2, 3, 3, 5),))
    spatial, reduced = ["n", "c", "h", "w"], ["r", "s"]
    channel = "c"
    if not depthwise:
        draw.axes("f", tables=((4, 16, 17, 32, 64),))
        spatial, reduced, channel = ["n", "f", "h", "w"], ["c", "r", "s"], "c"
    strides = [chance.choice((1, 1, 2, 3)) for _ in range(2)]
    dilations = [chance.choice((1, 1, 1, 2)) for _ in range(2)]
    paddings = [chance.choice((0, 1, 1, 2)) for _ in range(2)]
    function = draw.function(("sum", "sum", "sum", "sum", "max", "min")) if depthwise else "sum"
    draw.writer.peaked = function == "max"
    indices, shape, is_outside = ["n", channel], [draw.sizes["n"], draw.sizes[channel]], False
    for axis, kernel, stride, dilation, padding in zip("hw", "rs", strides, dilations, paddings, strict=True):
        indices.append(f"{stride}*{axis} + {dilation}*{kernel} - {padding}")
        high = stride * (draw.sizes[axis] - 1) + dilation * (draw.sizes[kernel] - 1) - padding
        extent = max(high + 1 - chance.choice((0, padding)), 1)
        is_outside |= padding > 0 or high >= extent
        shape.append(extent)
    turned = chance.random() < 0.25
    if turned:
        indices, shape = [indices[0], *indices[2:], indices[1]], [shape[0], *shape[2:], shape[1]]
    pad = {"max": "-inf", "min": "inf"}.get(function, "0") if is_outside else ""
    if pad == "0" and chance.random() < 0.2:
        pad = "1"
    dtype = draw.dtypes[0]
    tensor = "X"
    draw.writer.inputs.shapes[tensor], draw.writer.inputs.dtypes[tensor] = shape, dtype
    low, high_value = INTEGER_BOUNDS if dtype in INTEGERS else (-1.0, 1.5)
    text = f"X[{', '.join(indices)}{f' | pad={pad}' if pad else ''}]"
    load = Term(text, low, high_value, -low / 2 + 0.1, exact=True, peaked=draw.writer.peaked)
    body = load
    if function == "sum":
        if chance.random() < 0.8:
            order = ["c", "r", "s"] if depthwise else ["f", "c", "r", "s"]
            body = product(load, _operand(draw, "W", order))
        if chance.random() < 0.3 and draw.target is None:
            body = _epilogue(draw, [*spatial, *reduced], body, chance.randint(1, 2))
            body = draw.whole_body(load, body, reduced) if draw.whole else within(body, 100.0)
        if chance.random() < 0.3:
            body = product(body, _position_weight(draw, [*spatial, *reduced]))
        elif chance.random() < 0.3:
            zero = Term("0", 0, 0, 0.1, exact=True)
            body = Term(f"select({draw.writer.truth([*spatial, *reduced], 1)}, {body.text}, {zero.text})",
                        min(body.low, 0), max(body.high, 0), body.usual, body.error)  # fmt: skip
    if draw.target is not None:
        body = draw.inside(body, [*spatial, *reduced])
    term = draw.reduced(function, reduced, body)
    if pad in ("inf", "-inf"):
        # A window may lie outside as a whole.
        return draw.finish(term, spatial)
    term = draw.state("C", spatial, term) if chance.random() < 0.4 else term
    if chance.random() < 0.5 or draw.target is not None:
        term = _epilogue(draw, spatial, term)
    return draw.finish(term, spatial)


def rows(draw: Draw) -> Data:
    """Several reductions over the columns of each row, each of what the ones before made of it."""
    chance = draw.chance
    columns = draw.axes("j", tables=(TINY, PRIME, EDGE, LARGE))
    left = draw.axes(*("b", "i")[: chance.choice((1, 1, 2))])
    draw.sizes.update({axis: min(draw.sizes[axis], 130) for axis in left})
    return _rows(draw, left, columns)


def long_rows(draw: Draw) -> Data:
    """Few rows so long that slices of them are kernels of their own."""
    columns = draw.axes("j", tables=((8192, 24576, 65536, 131072, 262144),))
    return _rows(draw, draw.axes("i", tables=((1, 2, 3),)), columns)


def _rows(draw: Draw, left: list[str], columns: list[str]) -> Data:
    chance = draw.chance
    if draw.whole:
        draw.whole = draw.writer.whole = False
    axes = [*left, *columns]
    # Thousands of equal factors are rounded the same way.
    known = ("sum", "max", "min", "sum", "prod") if draw.sizes[columns[0]] <= 600 else ("sum", "max", "min", "sum")
    functions = [draw.function(known) for _ in range(chance.randint(1, 3))]
    draw.writer.peaked = "max" in functions
    current = draw.inside(_epilogue(draw, axes, draw.writer.load([], every=axes), depth=chance.randint(0, 2)), axes)
    if chance.random() < 0.5:
        current = draw.state("L", axes, current)
    count = draw.sizes["j"]
    for number, function in enumerate(functions):
        if chance.random() < 0.25:
            mask = f"select({draw.writer.truth(axes, 1)}, {current.text}, {chance.choice(('0', '-1', '0.5'))})"
            current = Term(
                mask, min(current.low, -1), max(current.high, 1), current.usual, current.error, peaked=current.peaked
            )
        if current.most > 1e3 and not current.peaked:
            current = within(current, 100.0)
        reduced = draw.reduced(function, columns, draw.factor(current, count) if function == "prod" else current)
        if function == "sum":
            mean = f"({reduced.text} / {count})"
            reduced = replace(current, text=mean, error=current.error + current.usual, exact=False)
        reduced = draw.state(f"R{number}", left, reduced)
        current = _combined(draw, current, reduced)
        if chance.random() < 0.5:
            current = draw.state(f"E{number}", axes, current)
    if chance.random() < 0.5:
        current = _epilogue(draw, axes, current)
    if chance.random() < 0.25 and f"E{len(functions) - 1}" not in current.text:
        current = total(current, draw.writer.position(axes))
    return draw.finish(current, axes)


def masked_softmax(draw: Draw) -> Data:
    """A softmax of masked logits, written out."""
    chance = draw.chance
    draw.whole = draw.writer.whole = False
    left, columns = draw.axes("i", tables=(TINY, PRIME, EDGE)), draw.axes("j", tables=(PRIME, EDGE, LARGE))
    draw.writer.peaked = True
    axes = [*left, *columns]
    load = draw.writer.load([], every=axes)
    mask = chance.choice(("j <= i", "j >= i", f"j < {max(draw.sizes['j'] // 2, 1)}", "j == i or j < 3", "not (j > i)"))
    hidden = chance.choice(("-inf", "(-30)"))
    hidden = "(-3e38)" if hidden == "-inf" else hidden
    masked = chance.random() < 0.8
    text = f"select({mask}, {load.text}, {hidden})" if masked else load.text
    draw.statements += [
        f"L[i, j] = {text}", "M[i] = max(j, L[i, j])", "E[i, j] = exp(L[i, j] - M[i])", "S[i] = sum(j, E[i, j])",
    ]  # fmt: skip
    return draw.finish(Term("(E[i, j] / S[i])", 0.0, 1.0, 0.5, 4.0), axes)


def steps(draw: Draw) -> Data:
    """Two reductions over different axes, one after the other: a pair, a sequence or a chain."""
    chance = draw.chance
    draw.whole = draw.writer.whole = False
    draw.axes("i", tables=(EDGE, PRIME, LARGE))
    draw.axes("k", "p", tables=((16, 32, 33, 64), PRIME))
    draw.axes("n", tables=((16, 32, 64, 65, 128),))
    dtype = draw.dtypes[0] if draw.dtypes[0] not in ("int8", "int32") else "float32"
    draw.dtypes = (dtype,)
    draw.writer.dtypes = draw.dtypes
    first = product(_operand(draw, "A", ["i", "k"]), _operand(draw, "B", ["k", "n"]))
    if chance.random() < 0.3:
        first = product(first, _position_weight(draw, ["i", "n", "k"]))
    first = within(draw.inside(first, ["i", "n", "k"]), 100.0)
    hidden = draw.state("H", ["i", "n"], draw.reduced("sum", ["k"], first))
    if chance.random() < 0.8:
        hidden = draw.state("G", ["i", "n"], bounded_epilogue(draw, ["i", "n"], hidden))
    second = product(hidden, _operand(draw, "D", ["n", "p"]))
    if chance.random() < 0.2:
        second = product(second, _position_weight(draw, ["i", "n", "p"]))
    function = draw.function(("sum", "sum", "sum", "max", "min", "prod"))
    if function == "prod":
        second = draw.factor(second, draw.sizes["n"])
    term = draw.reduced(function, ["n"], second)
    if chance.random() < 0.4 or draw.target is not None:
        term = _epilogue(draw, ["i", "p"], draw.state("C", ["i", "p"], term), depth=1)
    return draw.finish(term, ["i", "p"])


def pair(draw: Draw) -> Data:
    """Two products in a row with something point-wise between them, all of one type, as one kernel computes them."""
    chance = draw.chance
    dtype = chance.choice(("float16", "float16", "bfloat16", "float32"))
    sizes: Sequence[Sequence[int]] = ((16, 32, 64), (16, 24, 33, 96, 128))
    if draw.target is not None:
        dtype = chance.choice(
            ("float16", "bfloat16") if draw.target.lowering == "walks.pair_warps" else ("float32", "float16")
        )
        sizes = sizes[:1]
    draw.dtypes, draw.whole = (dtype,), False
    draw.writer.dtypes, draw.writer.whole = draw.dtypes, False
    draw.axes("i", tables=(EDGE, (192, 512, 1000, 2048)) if draw.target is None else ((2048, 4096, 5000),))
    draw.axes("k", "n", "p", tables=sizes)
    first = product(_plain(draw, "A", ["i", "k"]), _plain(draw, "B", _turned(chance, ["k", "n"])))
    hidden = draw.state("H", ["i", "n"], draw.reduced("sum", ["k"], first))
    if chance.random() < 0.85 or draw.target is not None:
        between = draw.inside(draw.writer.value(["i", "n"], chance.randint(1, 2), hidden), ["i", "n"])
        hidden = draw.state("G", ["i", "n"], within(between, 8.0))
    term = draw.reduced("sum", ["n"], product(hidden, _plain(draw, "D", _turned(chance, ["n", "p"]))))
    if chance.random() < 0.5 or draw.target is not None:
        term = _epilogue(draw, ["i", "p"], draw.state("C", ["i", "p"], term), depth=chance.randint(1, 2))
    data = draw.finish(within(term, 500.0), ["i", "p"])
    data["dtypes"]["Y"] = dtype
    return data


def read_again(draw: Draw) -> Data:
    """A tensor of a value or of a sum, read by the next statement elsewhere, too: shifted, turned, or as a window."""
    chance = draw.chance
    draw.whole = draw.writer.whole = False
    axes = draw.axes("i", "j", tables=(TINY, PRIME, EDGE))
    turned = chance.random() < 0.3
    if turned:
        draw.sizes["j"] = draw.sizes["i"]
    if chance.random() < 0.5:
        reduced = draw.axes("k", tables=(PRIME, EDGE))
        term = draw.reduced("sum", reduced, within(draw.body("sum", axes, reduced, 1), 8.0))
    else:
        term = _epilogue(draw, axes, draw.writer.load(axes))
    first = draw.state("C", axes, within(term, 500.0))
    last = draw.sizes["i"] - 1
    indices, pad = chance.choice(
        (("i - 1, j", "1"), ("i + 2, j - 1", "0"), (f"{last} - i, j", ""), ("0, j", ""), (f"{last}, j", ""))
    )
    if turned and chance.random() < 0.7:
        indices, pad = "j, i", ""
    text = f"C[{indices}{f' | pad={pad}' if pad else ''}]"
    other = replace(first, text=text, low=min(first.low, 0), high=max(first.high, 1), exact=False)
    if chance.random() < 0.25:
        draw.axes("r", tables=((2, 3),))
        function = chance.choice(("sum", "max", "min"))
        # Larger elements than those that the peaks are put on are of a computed tensor.
        windows = replace(other, text=f"C[i + r - 1, j | pad={'0' if function == 'sum' else '-1'}]")
        return draw.finish(draw.reduced(function, ["r"], windows), axes)
    return draw.finish(_epilogue(draw, axes, total(first, product(other, draw.writer.constant()))), axes)


def long_reduction(draw: Draw) -> Data:
    """A reduction so long beside its outputs that slices or lines of it are kernels of their own."""
    chance = draw.chance
    draw.axes("k", tables=((4096, 8192, 10007, 16384, 30000),))
    if chance.random() < 0.5:
        draw.axes("i", "j", tables=((1, 2, 8, 16, 33, 64),))
        body = product(_operand(draw, "A", ["i", "k"]), _operand(draw, "B", ["k", "j"]))
        spatial, function = ["i", "j"], "sum"
    else:
        draw.axes("i", tables=((1, 2, 7, 32),))
        function = draw.function(("sum", "max", "min"))
        draw.writer.peaked = function == "max"
        body, spatial = draw.writer.load([], every=["i", "k"] if chance.random() < 0.6 else ["k", "i"]), ["i"]
    if draw.whole:
        body = draw.writer.load([], every=["i", "k"])
    kind = chance.randrange(4)
    if kind == 0:
        body = product(body, Term(f"(k / {draw.sizes['k']})", 0, 1, 0.5, 1)) if not draw.whole else body
    elif kind == 1:
        masked = f"select({draw.writer.truth([*spatial, 'k'], 1)}, {body.text}, 0)"
        body = replace(body, text=masked, low=min(body.low, 0), high=max(body.high, 0), exact=False)
    term = draw.reduced(function, ["k"], draw.inside(body, [*spatial, "k"]))
    if chance.random() < 0.6 or draw.target is not None:
        term = _epilogue(draw, spatial, draw.state("C", spatial, term))
    return draw.finish(term, spatial)


# What frames share


def _limit(draw: Draw, points: int) -> None:
    """Axes shortened, the longest first, until there are so many points at most."""
    while math.prod(draw.sizes.values()) > points:
        longest = max(draw.sizes, key=draw.sizes.__getitem__)
        draw.sizes[longest] = draw.sizes[longest] // 2 + 1


def _moved(draw: Draw, dtype: str) -> tuple[Term, Term]:
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


def _plain(draw: Draw, tensor: str, axes: Sequence[str]) -> Term:
    """A load of an input along axes as they are."""
    dtype = draw.dtypes[0]
    draw.writer.inputs.shapes[tensor] = [draw.sizes[axis] for axis in axes]
    draw.writer.inputs.dtypes[tensor] = dtype
    return Term(f"{tensor}[{', '.join(axes)}]", -1.0, 1.0, 0.6, exact=True)


def _turned(chance: random.Random, axes: list[str]) -> list[str]:
    """The axes of a matrix, with its last two turned half of the time."""
    return axes if chance.random() < 0.5 else [*axes[:-2], axes[-1], axes[-2]]


def _operand(draw: Draw, tensor: str, axes: Sequence[str], dtype: str | None = None) -> Term:
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


def _weighted(draw: Draw, spatial: Sequence[str], reduced: Sequence[str], operand: Term) -> Term:
    """An operand as it is, masked by positions, weighted by one, or as a function of it."""
    kind = draw.chance.choice(("plain", "plain", "masked", "weighted", "function"))
    axes = [*spatial, *reduced]
    if kind == "masked":
        other = "0" if draw.chance.random() < 0.7 or draw.whole else draw.writer.value(axes, 0).text
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
            draw.whole,
            operand.peaked,
        )
    if kind == "weighted":
        return product(operand, _position_weight(draw, axes))
    if kind == "function":
        term = draw.writer.value(axes, draw.chance.randint(1, 2), operand)
        return term if draw.whole else (within(term, 100.0) if not term.peaked else bounded(term))
    return operand


def _position_weight(draw: Draw, axes: Sequence[str]) -> Term:
    """A weight by position: the value of an axis, scaled, or a truth value as a number."""
    kind = draw.chance.randrange(4)
    if kind == 0 or draw.whole:
        text = f"select({draw.writer.truth(axes, 0)}, 1, {draw.chance.choice((0, 2, -1))})"
        return Term(text, -1, 2, 1, exact=True)
    position = draw.writer.position(axes)
    if kind == 1:
        return position
    scaled = f"{1 / 2 ** math.ceil(math.log2(position.most + 2)):g}"
    if kind == 2:
        return Term(f"({position.text} * {scaled})", -1, 1, 0.5, 0.5)
    return Term(f"cos({position.text} * {scaled})", 0.5, 1, 0.8, 1)


def _epilogue(draw: Draw, axes: Sequence[str], term: Term, depth: int | None = None) -> Term:
    """A value of ``term``, inputs, positions and numbers."""
    return draw.outside(draw.writer.value(axes, draw.chance.randint(1, 3) if depth is None else depth, term), axes)


def bounded_epilogue(draw: Draw, axes: Sequence[str], term: Term) -> Term:
    """An epilogue that is small enough to be stored in any float."""
    return within(_epilogue(draw, axes, term, draw.chance.randint(1, 2)), 8.0)


def _combined(draw: Draw, current: Term, reduced: Term) -> Term:
    """A value of the columns and of what was reduced of them."""
    kind = draw.chance.choice(("minus", "over", "times", "exp"))
    if kind == "minus":
        return total(current, reduced, "sub")
    if kind == "over":
        return quotient(current, positive(reduced))
    if kind == "times":
        return product(bounded(current), reduced)
    return Term(f"exp({bounded(total(current, reduced, 'sub')).text})", 0.3, 3.0, 1.0, 4.0)


#: Frames and how often they are drawn.
FRAMES: tuple[tuple[Callable[[Draw], Data], int], ...] = (
    (pointwise, 6), (transposed, 3), (reduction, 14), (contraction, 19), (matrix_product, 22), (windows, 14), (rows, 8),
    (long_rows, 4), (masked_softmax, 2), (steps, 4), (pair, 9), (read_again, 4), (long_reduction, 6),
)  # fmt: skip


_BY_NAME = {frame.__name__: frame for frame, _ in FRAMES}


def operator(number: int, seed: int = 0) -> Data:
    """The operator of a number, as JSON has it; those of even numbers are drawn for a target.

    >>> operator(0) == operator(0)
    True
    """
    chance = random.Random(f"{seed}/{number}")
    while True:
        data = {"name": f"drawn_{seed}_{number}", **_drawn(chance, target_of(number))}
        try:
            operator_from_data(data)
        except InputError:
            continue  # What was to be read, or an axis, was drawn nowhere.
        return data


def target_of(number: int) -> Target | None:
    """What the operator of a number is drawn for."""
    return targets()[number // 2 % len(targets())] if number % 2 == 0 else None


def _drawn(chance: random.Random, target: Target | None) -> Data:
    if target is not None and target.lowering.startswith("attention"):
        return wanted_attention(chance, target)
    if target is not None:
        return _BY_NAME[chance.choice(TARGET_FRAMES[target.lowering])](Draw(chance, target))
    if chance.random() < 0.13:
        return named(chance)
    frames, weights = zip(*FRAMES, strict=True)
    return chance.choices(frames, weights)[0](Draw(chance))
