"""Products, convolutions and pools."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.kernelbench.problem import Call
from bench.kernelbench.texts import Said, Unsaid, axes_of, broadcast_indices, number_text, read_text, sizes_of


def product(call: Call) -> Said:
    """``mm``, ``bmm`` and ``addmm``."""
    first = len(call.shapes) - 2
    a = call.shapes[first]
    batch = ["b@"] * (len(a) == 3)
    text = f"sum(k@, {read_text(first, [*batch, 'm@', 'k@'])} * {read_text(first + 1, [*batch, 'k@', 'n@'])})"
    output = call.outputs[0]
    names = [*batch, "m@", "n@"]
    if first:
        beta, alpha = (number_text(call.value(place, 1)) for place in (3, 4))
        scaled = text if alpha == "1.0" else f"{alpha} * {text}"
        added = read_text(0, broadcast_indices(names, call.shapes[0], output))
        text = f"{scaled} + {added if beta == '1.0' else f'{beta} * {added}'}"
    sizes = {**sizes_of(names, output), "k@": a[-1]}
    return Said(text=f"{{out}}[{', '.join(names)}] = {text}", sizes=sizes, shapes=call.shapes, output=output)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One dimension of a convolution.

    Attributes:
        left: axes of the result, with their ``sizes``.
        summed: axes that are summed over, with their sizes.
        image, window: indices of the image and of the filters.
        condition: what has to hold for anything to be summed; empty for nothing.
        meeting: what has to hold for a tap to meet an input; empty where all do.
    """

    left: dict[str, int]
    summed: dict[str, int]
    image: str
    window: str
    condition: str = ""
    meeting: str = ""

    @property
    def extent(self) -> int:
        """Places of the result."""
        return math.prod(self.left.values())


def _side(number: int, taps: int, extent: int, step: int, pad: int, apart: int) -> _Side:
    o, k = f"o{number}@", f"k{number}@"
    return _Side(left={o: extent}, summed={k: taps}, image=f"{step}*{o} + {apart}*{k} - {pad}", window=k)


def _transposed_side(number: int, taps: int, extent: int, step: int, pad: int, apart: int) -> _Side:
    """One dimension of a transposed convolution, whose places by strides of s are s*q + r."""
    o, k, q, r, t = (f"{letter}{number}@" for letter in "okqrt")
    if step == 1:
        return _Side(left={o: extent}, summed={k: taps}, image=f"{o} + {pad} - {apart}*{k}", window=k)
    left = {q: -(-extent // step), r: step}
    if apart % step == 0:
        # All taps meet inputs at places of one remainder.
        met = -pad % step
        image = f"{q} + {(met + pad) // step} - {apart // step}*{k}"
        return _Side(left=left, summed={k: taps}, image=image, window=k, condition=f"{r} == {met}")
    # The few inputs q + t that a tap meets: t from the last one at the first place to the first one at the last.
    low, high = -((apart * (taps - 1) - pad) // step), (step - 1 + pad) // step
    image = f"{q} + {t} + {low}".replace("+ -", "- ")
    way = f"{r} + {pad - step * low} - {step}*{t}"
    if apart == 1:
        return _Side(left=left, summed={t: high - low + 1}, image=image, window=way)
    return _Side(left=left, summed={k: taps, t: high - low + 1}, image=image, window=k, meeting=f"{way} == {apart}*{k}")


def convolution(call: Call) -> Said:
    """A convolution of any number of dimensions, with groups, or transposed."""
    x, w, output = *call.shapes[:2], call.outputs[0]
    stride, padding, dilation = (_per_dimension(call.value(place), len(x) - 2) for place in (3, 4, 5))
    is_transposed, groups = call.value(6, False), call.value(8, 1)
    of_side = _transposed_side if is_transposed else _side
    sides = [
        of_side(*each) for each in zip(range(len(x) - 2), w[2:], output[2:], stride, padding, dilation, strict=True)
    ]
    grouped, counts = (["g@"], [groups]) if groups > 1 else ([], [])
    channels, filters = x[1] // groups, output[1] // groups
    places = {axis: size for side in sides for axis, size in side.left.items()}
    sizes = {"n@": x[0], **dict.fromkeys(grouped, groups), "f@": filters, "c@": channels, **places}
    summed = {axis: size for side in sides for axis, size in side.summed.items()}
    sizes |= summed
    weights, of_weights = (["c@", "f@"], [channels, filters]) if is_transposed else (["f@", "c@"], [filters, channels])
    image = read_text(0, ["n@", *grouped, "c@", *(side.image for side in sides)], "0")
    window = read_text(1, [*grouped, *weights, *(side.window for side in sides)], "0" if is_transposed else "")
    met = [side.meeting for side in sides if side.meeting]
    term = f"select({' and '.join(met)}, {image} * {window}, 0)" if met else f"{image} * {window}"
    text = f"sum([{', '.join(['c@', *summed])}], {term})"
    conditions = [side.condition for side in sides if side.condition]
    if conditions:
        text = f"select({' and '.join(conditions)}, {text}, 0)"
    shapes = [(x[0], *counts, channels, *x[2:]), (*counts, *of_weights, *w[2:])]
    if len(call.shapes) > 2:
        text += f" + {read_text(2, [*grouped, 'f@'])}"
        shapes.append((*counts, filters))
    text = f"{{out}}[{', '.join(['n@', *grouped, 'f@', *places])}] = {text}"
    whole = (*output[:2], *(side.extent for side in sides))
    return Said(
        text=text, sizes=sizes, shapes=shapes, output=(x[0], *counts, filters, *places.values()),
        padded=None if whole == output else whole,
    )  # fmt: skip


def _per_dimension(value: Any, count: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value or 0]
    return [int(each) for each in (values * count if len(values) == 1 else values)]


def pool(function: str) -> Callable[[Call], Said]:
    """Windows of a tensor: their largest elements, or their mean."""

    def rule(call: Call) -> Said:
        (x,), output = call.shapes[:1], call.outputs[0]
        count = int(call.stem.partition("pool")[2][0]) if "pool" in call.stem else 2
        kernel = _per_dimension(call.value(1), count)
        stride = _per_dimension(call.value(2) or call.value(1), count)
        padding = _per_dimension(call.value(3, 0), count)
        dilation = _per_dimension(call.value(4, 1), count) if function == "max" else [1] * count
        outer = axes_of("i", x[: len(x) - count])
        o, k = [f"o{place}@" for place in range(count)], [f"k{place}@" for place in range(count)]
        windows = [f"{s}*{a} + {d}*{b} - {p}" for s, a, d, b, p in zip(stride, o, dilation, k, padding, strict=True)]
        value = (
            f"{function}([{', '.join(k)}], {read_text(0, [*outer, *windows], '-inf' if function == 'max' else '0')})"
        )
        if function == "sum":
            if any(padding) and call.value(5) is False:
                raise Unsaid("an average that does not count its padding")
            value += f" / {math.prod(kernel)}"
        sizes = {**sizes_of([*outer, *o], output), **dict(zip(k, kernel, strict=True))}
        return Said(text=f"{{out}}[{', '.join([*outer, *o])}] = {value}", sizes=sizes, shapes=[x], output=output)

    return rule
