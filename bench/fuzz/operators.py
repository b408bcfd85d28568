"""Operators drawn by number: the same number gives the same operator on every machine.

Some are expressions from top to bottom; others have a frame that one kind of kernel is made for (products, windows,
rows, several steps, attention), whose operands, weights, masks and epilogues are drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.fuzz.draw import (
    EDGE,
    INTEGERS,
    LARGE,
    NARROW,
    PRIME,
    TINY,
    Data,
    Draw,
    bounded_epilogue,
    combined,
    epilogue,
    input_of,
    limit,
    moved,
    operand,
    position_weight,
    turned,
    weighted,
)
from bench.fuzz.gathers import GatheringWriter, gathering
from bench.fuzz.named import named, wanted
from bench.fuzz.productions import GATHERED, INSIDE
from bench.fuzz.targets import FRAMES as TARGET_FRAMES
from bench.fuzz.targets import Target, line_target, targets
from bench.fuzz.values import INTEGER_BOUNDS, Term, product, total, within
from hal.support.errors import InputError
from sokoban.language.expression import PLACE_REDUCTIONS
from sokoban.language.operators import operator_from_data


def pointwise(draw: Draw) -> Data:
    """A value of every element, over one to three axes."""
    axes = draw.axes(*("i", "j", "l")[: draw.chance.randint(1, 3)])
    limit(draw, 2**22)
    return draw.finish(epilogue(draw, axes, draw.writer.load(axes)), axes)


def transposed(draw: Draw) -> Data:
    """An input read in another order of its dimensions, and a value of it."""
    axes = draw.axes(*("i", "j", "l")[: draw.chance.randint(2, 3)], tables=(PRIME, EDGE, LARGE))
    limit(draw, 2**22)
    order = list(axes)
    draw.chance.shuffle(order)
    load = draw.writer.load([], every=order)
    term = load if draw.chance.random() < 0.3 else epilogue(draw, axes, load)
    return draw.finish(term, axes)


def reduction(draw: Draw) -> Data:
    """One reduction of any kind of any value, perhaps inside arithmetic."""
    draw.averages = True
    spatial = draw.axes(*("i", "j")[: draw.chance.choice((1, 1, 2))])
    reduced = draw.axes(*("k", "r")[: draw.chance.choice((1, 1, 2))])
    limit(draw, 2**26)
    function = draw.function(("sum", "sum", "sum", "max", "min") + (() if draw.integers else ("prod", "prod")))
    draw.writer.peaked = function == "max"
    if function == "prod":
        draw.sizes.update({axis: min(draw.sizes[axis], 33) for axis in reduced})
    if draw.chance.random() < 0.08 and not draw.integers and function != "prod":
        # Of places alone.
        weights = [position_weight(draw, [axis, *spatial]) for axis in reduced]
        body = total(draw.writer.position(reduced[:1]), weights[-1])
        body = within(product(body, weights[0]), 100.0)
    else:
        body = draw.body(function, spatial, reduced, draw.chance.randint(0, 3))
    term = draw.reduced(function, reduced, body)
    if draw.chance.random() < 0.4:
        term = draw.state("C", spatial, term)
    if draw.chance.random() < 0.7 or draw.target is not None:
        term = epilogue(draw, spatial, term)
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
    limit(draw, 2**30)
    a = operand(draw, "A", [*batch, *rows, *reduced])
    b = operand(draw, "B", [*(batch if draw.chance.random() < 0.7 else []), *reduced, *columns])
    spatial = [*batch, *rows, *columns]
    weights = draw.chance.random()
    body = product(a, b)
    if weights < 0.75:
        a, b = weighted(draw, spatial, reduced, a), weighted(draw, spatial, reduced, b)
        body = product(a, b)
    if weights < 0.35:
        body = product(body, position_weight(draw, [*spatial, *reduced]))
    if draw.integers and body.most * math.prod(draw.sizes[axis] for axis in reduced) > 2**30:
        body = product(operand(draw, "A", [*batch, *rows, *reduced]), operand(draw, "B", [*reduced, *columns]))
    term = draw.reduced("sum", reduced, draw.inside(body, [*spatial, *reduced]))
    term = draw.state("C", spatial, term) if draw.chance.random() < 0.4 else term
    if draw.chance.random() < 0.6 or draw.target is not None:
        term = epilogue(draw, spatial, term)
    return draw.finish(term, spatial)


def matrix_product(draw: Draw) -> Data:
    """A product of matrices that matrix units take, with any epilogue."""
    chance = draw.chance
    dtype = chance.choice(("float16", "float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"))
    if draw.target is not None:
        dtype = "float16"
    draw.dtypes, draw.integers = (dtype,), dtype == "int8"
    draw.writer.dtypes, draw.writer.integers = ("int32",) if dtype == "int8" else (dtype,), draw.integers
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
        a, b = moved(draw, dtype)
    else:
        a = operand(draw, "A", turned(chance, [*batch, "i", "k"]), dtype)
        b = operand(draw, "B", turned(chance, [*batch, "k", "j"]), dtype)
    term = draw.state("C", spatial, draw.reduced("sum", reduced, product(a, b)))
    if chance.random() < 0.75 or draw.target is not None:
        if draw.integers:
            # What follows a sum of integers is computed in floats unless integers are asked for.
            draw.integers = draw.writer.integers = chance.random() < 0.5
            draw.writer.dtypes = ("int32",) if draw.integers else ("float32",)
        term = epilogue(draw, spatial, term)
    data = draw.finish(term, spatial)
    if dtype.startswith("float8") or (dtype == "int8" and not draw.integers):
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
            body = product(load, operand(draw, "W", order))
        if chance.random() < 0.3 and draw.target is None:
            body = epilogue(draw, [*spatial, *reduced], body, chance.randint(1, 2))
            body = draw.uncut_body(load, body, reduced) if draw.integers else within(body, 100.0)
        if chance.random() < 0.3:
            body = product(body, position_weight(draw, [*spatial, *reduced]))
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
        term = epilogue(draw, spatial, term)
    return draw.finish(term, spatial)


def rows(draw: Draw) -> Data:
    """Several reductions over the columns of each row, each of what the ones before made of it."""
    chance = draw.chance
    columns = draw.axes("j", tables=(TINY, PRIME, EDGE, LARGE))
    row_axes = draw.axes(*("b", "i")[: chance.choice((1, 1, 2))])
    draw.sizes.update({axis: min(draw.sizes[axis], 130) for axis in row_axes})
    return _rows(draw, row_axes, columns)


def long_rows(draw: Draw) -> Data:
    """Few rows so long that slices of them are kernels of their own."""
    columns = draw.axes("j", tables=((8192, 24576, 65536, 131072, 262144),))
    return _rows(draw, draw.axes("i", tables=((1, 2, 3),)), columns)


def _rows(draw: Draw, row_axes: list[str], columns: list[str]) -> Data:
    chance = draw.chance
    if draw.integers:
        draw.integers = draw.writer.integers = False
    axes = [*row_axes, *columns]
    # Thousands of equal factors are rounded the same way.
    reductions = ("sum", "max", "min", "sum", "prod") if draw.sizes[columns[0]] <= 600 else ("sum", "max", "min", "sum")
    functions = [draw.function(reductions) for _ in range(chance.randint(1, 3))]
    draw.writer.peaked = "max" in functions
    current = draw.inside(epilogue(draw, axes, draw.writer.load([], every=axes), depth=chance.randint(0, 2)), axes)
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
        reduced = draw.state(f"R{number}", row_axes, reduced)
        current = combined(draw, current, reduced)
        if chance.random() < 0.5:
            current = draw.state(f"E{number}", axes, current)
    if chance.random() < 0.5:
        current = epilogue(draw, axes, current)
    if chance.random() < 0.25 and f"E{len(functions) - 1}" not in current.text:
        current = total(current, draw.writer.position(axes))
    return draw.finish(current, axes)


def masked_softmax(draw: Draw) -> Data:
    """A softmax of masked logits, written out."""
    chance = draw.chance
    draw.integers = draw.writer.integers = False
    row_axes, columns = draw.axes("i", tables=(TINY, PRIME, EDGE)), draw.axes("j", tables=(PRIME, EDGE, LARGE))
    draw.writer.peaked = True
    axes = [*row_axes, *columns]
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
    draw.integers = draw.writer.integers = False
    draw.axes("i", tables=(EDGE, PRIME, LARGE))
    draw.axes("k", "p", tables=((16, 32, 33, 64), PRIME))
    draw.axes("n", tables=((16, 32, 64, 65, 128),))
    dtype = draw.dtypes[0] if draw.dtypes[0] not in ("int8", "int32") else "float32"
    draw.dtypes = (dtype,)
    draw.writer.dtypes = draw.dtypes
    first = product(operand(draw, "A", ["i", "k"]), operand(draw, "B", ["k", "n"]))
    if chance.random() < 0.3:
        first = product(first, position_weight(draw, ["i", "n", "k"]))
    first = within(draw.inside(first, ["i", "n", "k"]), 100.0)
    hidden = draw.state("H", ["i", "n"], draw.reduced("sum", ["k"], first))
    if chance.random() < 0.8:
        hidden = draw.state("G", ["i", "n"], bounded_epilogue(draw, ["i", "n"], hidden))
    second = product(hidden, operand(draw, "D", ["n", "p"]))
    if chance.random() < 0.2:
        second = product(second, position_weight(draw, ["i", "n", "p"]))
    function = draw.function(("sum", "sum", "sum", "max", "min", "prod"))
    if function == "prod":
        second = draw.factor(second, draw.sizes["n"])
    term = draw.reduced(function, ["n"], second)
    if chance.random() < 0.4 or draw.target is not None:
        term = epilogue(draw, ["i", "p"], draw.state("C", ["i", "p"], term), depth=1)
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
    draw.dtypes, draw.integers = (dtype,), False
    draw.writer.dtypes, draw.writer.integers = draw.dtypes, False
    draw.axes("i", tables=(EDGE, (192, 512, 1000, 2048)) if draw.target is None else ((2048, 4096, 5000),))
    draw.axes("k", "n", "p", tables=sizes)
    first = product(input_of(draw, "A", ["i", "k"]), input_of(draw, "B", turned(chance, ["k", "n"])))
    hidden = draw.state("H", ["i", "n"], draw.reduced("sum", ["k"], first))
    if chance.random() < 0.85 or draw.target is not None:
        between = draw.inside(draw.writer.value(["i", "n"], chance.randint(1, 2), hidden), ["i", "n"])
        hidden = draw.state("G", ["i", "n"], within(between, 8.0))
    term = draw.reduced("sum", ["n"], product(hidden, input_of(draw, "D", turned(chance, ["n", "p"]))))
    if chance.random() < 0.5 or draw.target is not None:
        term = epilogue(draw, ["i", "p"], draw.state("C", ["i", "p"], term), depth=chance.randint(1, 2))
    data = draw.finish(within(term, 500.0), ["i", "p"])
    data["dtypes"]["Y"] = dtype
    return data


def read_again(draw: Draw) -> Data:
    """A tensor of a value or of a sum, read by the next statement elsewhere, too: shifted, turned, or as a window."""
    chance = draw.chance
    draw.integers = draw.writer.integers = False
    axes = draw.axes("i", "j", tables=(TINY, PRIME, EDGE))
    turned = chance.random() < 0.3
    if turned:
        draw.sizes["j"] = draw.sizes["i"]
    if chance.random() < 0.5:
        reduced = draw.axes("k", tables=(PRIME, EDGE))
        term = draw.reduced("sum", reduced, within(draw.body("sum", axes, reduced, 1), 8.0))
    else:
        term = epilogue(draw, axes, draw.writer.load(axes))
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
    return draw.finish(epilogue(draw, axes, total(first, product(other, draw.writer.constant()))), axes)


def long_reduction(draw: Draw) -> Data:
    """A reduction so long against its outputs that slices or lines of it are kernels of their own."""
    chance = draw.chance
    draw.axes("k", tables=((4096, 8192, 10007, 16384, 30000),))
    is_product = draw.target is not None and draw.target.name == "prod"
    if chance.random() < 0.5 and not is_product:
        draw.axes("i", "j", tables=((1, 2, 8, 16, 33, 64),))
        body = product(operand(draw, "A", ["i", "k"]), operand(draw, "B", ["k", "j"]))
        spatial, function = ["i", "j"], "sum"
    else:
        draw.axes("i", tables=((1, 2, 7, 32),))
        function = "prod" if is_product else draw.function(("sum", "max", "min"))
        draw.writer.peaked = function == "max"
        body, spatial = draw.writer.load([], every=["i", "k"] if chance.random() < 0.6 else ["k", "i"]), ["i"]
        if is_product:
            body = draw.factor(body, draw.sizes["k"])
    if draw.integers:
        body = draw.writer.load([], every=["i", "k"])
    kind = -1 if is_product else chance.randrange(4)
    if kind == 0:
        body = product(body, Term(f"(k / {draw.sizes['k']})", 0, 1, 0.5, 1)) if not draw.integers else body
    elif kind == 1:
        masked = f"select({draw.writer.truth([*spatial, 'k'], 1)}, {body.text}, 0)"
        body = replace(body, text=masked, low=min(body.low, 0), high=max(body.high, 0), exact=False)
    term = draw.reduced(function, ["k"], draw.inside(body, [*spatial, "k"]))
    if chance.random() < 0.6 or draw.target is not None:
        term = epilogue(draw, spatial, draw.state("C", spatial, term))
    return draw.finish(term, spatial)


def lines(draw: Draw) -> Data:
    """A scan, or the place of a largest or smallest value, along any axis of up to three."""
    axes = draw.axes(*("i", "j", "k")[: draw.chance.choice((1, 2, 2, 3))])
    return _lines(draw, axes, draw.chance.choice(axes))


def long_lines(draw: Draw) -> Data:
    """Few lines so long that parts of them are for several blocks."""
    along = draw.axes("j", tables=((16384, 24576, 65536, 131072, 262144),))
    axes = [*draw.axes("i", tables=((1, 2, 3),)), *along][draw.chance.choice((0, 0, 1)) :]
    draw.chance.shuffle(axes)
    return _lines(draw, axes, "j")


def _lines(draw: Draw, axes: list[str], along: str) -> Data:
    chance = draw.chance
    others = [axis for axis in axes if axis != along]
    limit(draw, 2**20)
    wanted = draw.target.name if draw.target is not None and not draw.target.place else ""
    is_place = bool(others) and (wanted in PLACE_REDUCTIONS or (not wanted and chance.random() < 0.35))
    if is_place:
        return _place(draw, others, along, wanted or chance.choice(PLACE_REDUCTIONS))
    function = draw.function(("sum", "sum", "max", "min") + (() if draw.integers else ("prod",)))
    draw.writer.peaked = function == "max"
    body = draw.body(function, others, [along], chance.randint(0, 3))
    options = ", reverse" * (chance.random() < 0.4)
    options += ", exclusive" * (function in ("sum", "prod") and chance.random() < 0.4)
    term = draw.reduced(function, [along], body)
    term = replace(term, text=f"cum{function}({along}, {body.text}{options})")
    term = draw.state("C", axes, term) if chance.random() < 0.4 else term
    if chance.random() < 0.15 and not draw.integers and others and "C" in term.text:
        return draw.finish(draw.reduced(chance.choice(("max", "min")), [along], term), others)
    chance.shuffle(axes)
    return draw.finish(epilogue(draw, axes, term) if chance.random() < 0.6 or draw.target else term, axes)


def _place(draw: Draw, axes: list[str], along: str, function: str) -> Data:
    """A place of a value that rounding leaves alone; of several that are equal the first is right."""
    chance = draw.chance
    draw.writer.peaked = function == "argmax"
    order = [*axes, along]
    chance.shuffle(order)
    body = draw.writer.load([], every=order)
    kind = chance.randrange(4)
    if kind == 1:
        body = replace(body, text=f"select({draw.writer.truth([*axes, along], 1)}, {body.text}, 0)")
    elif kind == 2:
        body = replace(body, text=f"(-{body.text})" if chance.random() < 0.5 else f"abs({body.text})")
    last = draw.sizes[along] - 1
    place = Term(f"{function}({along}, {body.text})", 0.0, float(max(last, 1)), last / 2 + 0.1, exact=True)
    if draw.integers or (chance.random() < 0.6 and draw.target is None):
        return draw.finish(place, axes) | {"dtypes": {**draw.data("Y", "int32")["dtypes"]}}
    draw.writer.peaked = False
    return draw.finish(epilogue(draw, axes, place), axes)


#: Frames and how often they are drawn.
FRAMES: tuple[tuple[Callable[[Draw], Data], int], ...] = (
    (pointwise, 6), (transposed, 3), (reduction, 14), (contraction, 19), (matrix_product, 22), (windows, 14), (rows, 8),
    (long_rows, 4), (masked_softmax, 2), (steps, 4), (pair, 9), (read_again, 4), (long_reduction, 6),
)  # fmt: skip


_BY_NAME = {frame.__name__: frame for frame in (*(frame for frame, _ in FRAMES), lines, long_lines)}


def operator(number: int, seed: int = 0) -> Data:
    """The operator of a number, as JSON has it; those of even numbers are drawn for a target.

    >>> operator(0) == operator(0)
    True
    """
    chance = random.Random(f"{seed}/{number}")
    while True:
        data = {"name": f"drawn_{seed}_{number}", **_drawn(chance, number)}
        try:
            operator_from_data(data)
        except InputError:
            continue  # What was to be read, or an axis, was drawn nowhere.
        return data


def target_of(number: int) -> Target | None:
    """Target that the operator of a number is drawn for."""
    return targets()[number // 2 % len(targets())] if number % 2 == 0 else None


def _draw_for(chance: random.Random, target: Target | None) -> Draw:
    draw = Draw(chance, target)
    if target is not None and target.name == GATHERED:
        draw.writer = GatheringWriter(chance, draw.sizes, draw.dtypes, draw.integers)
    return draw


def _drawn(chance: random.Random, number: int) -> Data:
    if number % 12 == 11:
        return lines(_draw_for(chance, line_target(number)))
    if number % 12 == 5:
        return gathering((pointwise, reduction, contraction, matrix_product, rows, lines, steps), chance)
    if (target := target_of(number)) is not None:
        frame = chance.choice(TARGET_FRAMES[target.lowering])
        return _BY_NAME[frame](_draw_for(chance, target)) if frame in _BY_NAME else wanted(chance, target)
    if chance.random() < 0.13:
        return named(chance)
    frames, weights = zip(*FRAMES, strict=True)
    return chance.choices(frames, weights)[0](Draw(chance))
