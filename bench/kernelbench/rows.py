"""Reductions, rows and what goes along them, and elements that are moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.kernelbench.problem import Call, Shape
from bench.kernelbench.texts import Said, Unsaid, axes_of, number_text, read_text, sizes_of


def _dimensions(call: Call, place: int = 1) -> list[int]:
    rank = len(call.shapes[0])
    value = call.value(place)
    dims = (
        [value] if isinstance(value, int) and not isinstance(value, bool) else value if isinstance(value, list) else []
    )
    return sorted(int(dim) % rank for dim in dims) or list(range(rank))


@dataclass(frozen=True)
class _Lines:
    """A tensor along some of its dimensions: axes, and what a reduction leaves."""

    names: list[str]
    along: list[str]
    remaining: list[str]
    sizes: dict[str, int]

    @staticmethod
    def of(shape: Shape, dims: Sequence[int]) -> _Lines:
        names = axes_of("i", shape)
        along = [names[dim] for dim in dims]
        remaining = [name for name in names if name not in along]
        sizes = sizes_of(names, shape) | ({} if remaining else {"one@": 1})
        return _Lines(names, along, remaining or ["one@"], sizes)

    @property
    def full(self) -> str:
        return ", ".join(self.names)

    @property
    def left(self) -> str:
        return ", ".join(self.remaining)

    @property
    def back(self) -> str:
        """Indices that read a reduction's result for every element."""
        return "0" if self.remaining == ["one@"] else self.left

    @property
    def axes(self) -> str:
        return f"[{', '.join(self.along)}]"

    @property
    def count(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.along)

    @property
    def output(self) -> Shape:
        return tuple(self.sizes[axis] for axis in self.remaining)


def reduction(value: str, *, behind: str = "{}", place: int = 1) -> Callable[[Call], Said]:
    """A reduction: ``value`` over the axes ``A`` of the elements ``X``, and what becomes of its result."""

    def rule(call: Call) -> Said:
        lines = _Lines.of(call.shapes[0], _dimensions(call, place))
        body = value.replace("A", lines.axes).replace("X", read_text(0, lines.names))
        text = f"{{out}}[{lines.left}] = {behind.format(body).replace('COUNT', str(lines.count))}"
        return Said(text=text, sizes=lines.sizes, shapes=call.shapes[:1], output=lines.output, is_of_values=True)

    return rule


def norm(call: Call) -> Said:
    """Euclidean norms."""
    power = call.value(1, 2)
    if power != 2:
        raise Unsaid(f"a norm of {power}")
    return reduction("sum(A, X * X)", behind="sqrt({})", place=2)(call)


def place(function: str) -> Callable[[Call], Said]:
    """Places along a dimension."""

    def rule(call: Call) -> Said:
        dims = _dimensions(call)
        if len(dims) > 1:
            raise Unsaid("a place in all of a tensor")
        return reduction(f"{function}(A, X)")(call)

    return rule


#: Ending of the stem of a scan between two turns of its dimension.
REVERSED = "_reversed"


def without_turns(calls: Sequence[Call]) -> list[Call]:
    """Calls in which a scan between two turns of the dimension that it goes along is one from the other end."""
    result, place = list[Call](), 0
    while place < len(calls):
        three = calls[place : place + 3]
        if [call.stem for call in three] in (["flip", word, "flip"] for word in ("cumsum", "cumprod")):
            first, middle, last = three
            turned = [_dimensions(call) for call in three]
            is_one = turned == [turned[0]] * 3 and len(turned[0]) == 1
            if is_one and (middle.read, last.read) == ((first.written,), (middle.written,)):
                stem = middle.stem + REVERSED
                result.append(replace(first, stem=stem, values=middle.values, written=last.written))
                place += 3
                continue
        result.append(calls[place])
        place += 1
    return result


def diagonal(call: Call) -> Said:
    """A matrix with a vector's elements on its diagonal."""
    shape = call.outputs[0]
    if len(shape) != 2 or call.value(1, 0):
        raise Unsaid("diagonals of several matrices, or others than the main one")
    text = f"{{out}}[i0@, i1@] = select(i0@ == i1@, {read_text(0, ['i0@'])}, 0)"
    return Said(text=text, sizes=sizes_of(["i0@", "i1@"], shape), shapes=call.shapes, output=shape)


def scan(function: str) -> Callable[[Call], Said]:
    """Scans along a dimension."""

    def rule(call: Call) -> Said:
        lines = _Lines.of(call.shapes[0], _dimensions(call))
        sizes = sizes_of(lines.names, call.shapes[0])
        options = ", reverse" * call.stem.endswith(REVERSED)
        text = f"{{out}}[{lines.full}] = {function}({lines.along[0]}, {read_text(0, lines.names)}{options})"
        return Said(text=text, sizes=sizes, shapes=call.shapes[:1], output=call.outputs[0], is_of_values=True)

    return rule


def softmax(call: Call) -> Said:
    """Softmax, or its logarithm."""
    lines, x = _Lines.of(call.shapes[0], _dimensions(call)), "X"
    x = read_text(0, lines.names)
    last = f"E@[{lines.full}] / T@[{lines.back}]"
    if call.stem.startswith("_log"):
        last = f"{x} - M@[{lines.back}] - log(T@[{lines.back}])"
    text = (
        f"M@[{lines.left}] = max({lines.axes}, {x}); E@[{lines.full}] = exp({x} - M@[{lines.back}]); "
        f"T@[{lines.left}] = sum({lines.axes}, E@[{lines.full}]); {{out}}[{lines.full}] = {last}"
    )
    return Said(text=text, sizes=lines.sizes, shapes=call.shapes[:1], output=call.outputs[0], is_of_values=True)


#: Stem of a loss that is one of logits, of which no probabilities are written.
CROSS_ENTROPY = "cross_entropy"


def without_probabilities(calls: Sequence[Call]) -> list[Call]:
    """Calls in which a loss of the logarithms of a softmax, which nothing else reads, is one of what that reads."""
    result = list[Call]()
    for place, call in enumerate(calls):
        before = result[-1] if result else None
        if call.stem == "nll_loss_forward" and before is not None and before.stem == "_log_softmax":
            readers = sum(before.written in each.read for each in calls[place:])
            if call.read[0] == before.written and readers == 1 and len(call.shapes[0]) == 2:
                result[-1] = replace(
                    call,
                    stem=CROSS_ENTROPY,
                    shapes=(before.shapes[0], *call.shapes[1:]),
                    read=(before.read[0], *call.read[1:]),
                    layouts=(*before.layouts[:1], *call.layouts[1:]),
                )
                continue
        result.append(call)
    return result


def loss_of_classes(call: Call) -> Said:
    """Negative logarithms of the probabilities of classes, whose numbers are in a tensor, or the cross-entropy of
    logits; their mean, without those of a number that is ignored."""
    if len(call.shapes) != 2 or len(call.shapes[0]) != 2:
        raise Unsaid("a loss of classes with weights, or of images")
    if call.value(3, 1) != 1:
        raise Unsaid("a loss that is no mean")
    count, classes = call.shapes[0]
    counted = f"{{1}}[i@] == {call.value(4, -100)}"
    text, of_class = "", "(-{0}[i@, {1}[i@]])"
    if call.stem == CROSS_ENTROPY:
        text = "M@[i@] = max(c@, {0}[i@, c@]); S@[i@] = sum(c@, exp({0}[i@, c@] - M@[i@])); "
        text += "L@[i@] = log(S@[i@]) - ({0}[i@, {1}[i@]] - M@[i@]); "
        of_class = "L@[i@]"
    text += f"{{out}}[one@] = sum(i@, select({counted}, 0, {of_class})) / sum(i@, select({counted}, 0, 1))"
    sizes = {"i@": count, "one@": 1} | ({"c@": classes} if call.stem == CROSS_ENTROPY else {})
    return Said(text=text, sizes=sizes, shapes=call.shapes, output=(1,))


def embedding(call: Call) -> Said:
    """Rows of a table, by their numbers."""
    table, numbers = call.shapes[:2]
    names = axes_of("i", (*numbers, table[1]))
    text = f"{{out}}[{', '.join(names)}] = {{0}}[{{1}}[{', '.join(names[:-1]) or '0'}], {names[-1]}]"
    output = (*numbers, table[1])
    return Said(text=text, sizes=sizes_of(names, output), shapes=[table, numbers], output=output)


def gather(call: Call) -> Said:
    """Elements at numbers along a dimension."""
    shape, numbers = call.shapes[:2]
    dim = call.value(1) % len(shape)
    names = axes_of("i", numbers)
    indices = [f"{{1}}[{', '.join(names)}]" if place == dim else name for place, name in enumerate(names)]
    text = f"{{out}}[{', '.join(names)}] = {{0}}[{', '.join(indices)}]"
    return Said(text=text, sizes=sizes_of(names, numbers), shapes=[shape, numbers], output=numbers)


def index_select(call: Call) -> Said:
    """Slices at numbers along a dimension."""
    shape, numbers = call.shapes[:2]
    dim = call.value(1) % len(shape)
    output = (*shape[:dim], math.prod(numbers), *shape[dim + 1 :])
    names = axes_of("i", output)
    indices = [f"{{1}}[{name}]" if place == dim else name for place, name in enumerate(names)]
    text = f"{{out}}[{', '.join(names)}] = {{0}}[{', '.join(indices)}]"
    return Said(text=text, sizes=sizes_of(names, output), shapes=[shape, (output[dim],)], output=output)


def logsumexp(call: Call) -> Said:
    """Logarithms of sums of exponentials."""
    lines = _Lines.of(call.shapes[0], _dimensions(call))
    x = read_text(0, lines.names)
    text = (
        f"M@[{lines.left}] = max({lines.axes}, {x}); "
        f"T@[{lines.left}] = sum({lines.axes}, exp({x} - M@[{lines.back}])); "
        f"{{out}}[{lines.left}] = log(T@[{lines.back}]) + M@[{lines.back}]"
    )
    return Said(text=text, sizes=lines.sizes, shapes=call.shapes[:1], output=lines.output, is_of_values=True)


def _normalised(
    call: Call, shape: Shape, dims: Sequence[int], eps: float, weights: Sequence[str], shapes: Sequence[Shape]
) -> Said:
    """Mean and variance along dimensions, and elements by them, times a first weight and plus a second."""
    lines = _Lines.of(shape, dims)
    x, count = read_text(0, lines.names), lines.count
    affine = "".join(f" {sign} {text}" for sign, text in zip("*+", weights, strict=False))
    text = (
        f"S@[{lines.left}] = sum({lines.axes}, {x}); D@[{lines.full}] = {x} - S@[{lines.back}] / {count}; "
        f"V@[{lines.left}] = sum({lines.axes}, D@[{lines.full}] * D@[{lines.full}]); "
        f"{{out}}[{lines.full}] = D@[{lines.full}] * rsqrt(V@[{lines.back}] / {count} + {eps!r}){affine}"
    )
    return Said(text=text, sizes=lines.sizes, shapes=[shape, *shapes], output=shape)


def layer_norm(call: Call) -> Said:
    """Layer norm."""
    shape = call.shapes[0]
    over = len(call.value(1))
    names = axes_of("i", shape)
    weights = [read_text(1 + place, names[-over:]) for place in range(len(call.shapes) - 1)]
    return _normalised(call, shape, range(len(shape) - over, len(shape)), call.value(4, 1e-5), weights, call.shapes[1:])


def group_norm(call: Call) -> Said:
    """Group norm."""
    n, c, *space = call.shapes[0]
    groups = call.value(6)
    shape = (n, groups, c // groups, math.prod(space) if space else 1)
    weights = [read_text(1 + place, ["i1@", "i2@"]) for place in range(len(call.shapes) - 1)]
    return _normalised(call, shape, (2, 3), call.value(7, 1e-5), weights, [(groups, c // groups)] * len(weights))


def batch_norm(call: Call) -> Said:
    """Batch norm in training, instance norm among it."""
    n, c, *space = call.shapes[0]
    shape = (n, c, math.prod(space) if space else 1)
    if call.value(5) is not True:
        raise Unsaid("batch norm by running statistics")
    weights = [read_text(1 + place, ["i1@"]) for place in range(min(2, len(call.shapes) - 1))]
    return _normalised(call, shape, (0, 2), call.value(7, 1e-5), weights, [(c,)] * len(weights))


def loss(value: str) -> Callable[[Call], Said]:
    """A mean over all elements of a value of two tensors ``X`` and ``Z``."""

    def rule(call: Call) -> Said:
        if call.value(2, 1) != 1:
            raise Unsaid("a loss that is no mean")
        lines = _Lines.of(call.shapes[0], range(len(call.shapes[0])))
        body = value.replace("X", read_text(0, lines.names)).replace("Z", read_text(1, lines.names))
        text = f"{{out}}[one@] = sum({lines.axes}, {body}) / {lines.count}"
        return Said(text=text, sizes=lines.sizes, shapes=call.shapes[:2], output=(1,), is_of_values=True)

    return rule


def filled(value: float | None = None, place: int = 0) -> Callable[[Call], Said]:
    """A result of one number, which is an argument of the call where it is not given."""

    def rule(call: Call) -> Said:
        names = axes_of("i", call.outputs[0])
        number = number_text(call.value(place)) if value is None else value
        text = f"{{out}}[{', '.join(names)}] = {number}"
        return Said(text=text, sizes=sizes_of(names, call.outputs[0]), shapes=[], output=call.outputs[0])

    return rule


def triangle(comparison: str) -> Callable[[Call], Said]:
    """Elements on one side of a diagonal."""

    def rule(call: Call) -> Said:
        (shape,), diagonal = call.shapes[:1], call.value(1, 0)
        names = axes_of("i", shape)
        condition = f"{names[-1]} {comparison} {names[-2]} + {diagonal}"
        text = f"{{out}}[{', '.join(names)}] = select({condition}, {read_text(0, names)}, 0)"
        return Said(text=text, sizes=sizes_of(names, shape), shapes=[shape], output=shape, is_pointwise=True)

    return rule


def flip(call: Call) -> Said:
    """Elements in the opposite order."""
    shape = call.shapes[0]
    names, dims = axes_of("i", shape), _dimensions(call)
    indices = [f"{shape[dim] - 1} - {name}" if dim in dims else name for dim, name in enumerate(names)]
    text = f"{{out}}[{', '.join(names)}] = {read_text(0, indices)}"
    return Said(text=text, sizes=sizes_of(names, shape), shapes=[shape], output=shape)


def joined(call: Call) -> Said:
    """Tensors side by side along a dimension."""
    output = call.outputs[0]
    value = call.value(1, 0)
    dim = int(value) % len(output)
    names, begun, text = axes_of("i", output), 0, ""
    closing = ""
    for place, shape in enumerate(call.shapes):
        moved = f"{names[dim]} - {begun}" if begun else names[dim]
        read = read_text(place, [moved if axis == dim else name for axis, name in enumerate(names)], "0")
        begun += shape[dim]
        if place + 1 < len(call.shapes):
            text, closing = f"{text}select({names[dim]} < {begun}, {read}, ", closing + ")"
        else:
            text += read
    text = f"{{out}}[{', '.join(names)}] = {text}{closing}"
    return Said(text=text, sizes=sizes_of(names, output), shapes=call.shapes, output=output)
