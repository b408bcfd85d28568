"""Products, convolutions and pools."""

from __future__ import annotations

import math
from collections.abc import Callable
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


def convolution(call: Call) -> Said:
    """A convolution of any number of dimensions, with groups, or transposed."""
    x, w = call.shapes[:2]
    count = len(x) - 2
    stride, padding, dilation = (_per_dimension(call.value(place), count) for place in (3, 4, 5))
    groups, output = call.value(8, 1), call.outputs[0]
    grouped = ["g@"] * (groups > 1)
    channels, filters = x[1] // groups, output[1] // groups
    sizes: dict[str, int] = {"n@": x[0], **dict.fromkeys(grouped, groups), "f@": filters, "c@": channels}
    shapes = [(x[0], *([groups] * len(grouped)), channels, *x[2:])]
    left = ["n@", *grouped, "f@"]
    image, window, result = list[str](), list[str](), [x[0], *([groups] * len(grouped)), filters]
    whole = list(output)
    inner = ["c@"]
    for place in range(count):
        o, k = f"o{place}@", f"k{place}@"
        extent, step, pad, apart = output[2 + place], stride[place], padding[place], dilation[place]
        sizes[o] = extent
        if call.value(6, False) and step > 1:
            # Of a place s*q + r the taps that meet an input are r + p - s*t, for the few inputs q + t.
            if apart > 1:
                raise Unsaid("a transposed convolution with strides and dilation: which taps meet is no affine index")
            low, high = -((w[2 + place] - 1 - pad) // step), (step - 1 + pad) // step
            q, r, t = f"q{place}@", f"r{place}@", f"t{place}@"
            del sizes[o]
            sizes |= {q: -(-extent // step), r: step, t: high - low + 1}
            whole[2 + place] = -(-extent // step) * step
            left += [q, r]
            result += [-(-extent // step), step]
            image.append(f"{q} + {t} + {low}".replace("+ -", "- "))
            window.append(f"{r} + {pad - step * low} - {step}*{t}")
            inner.append(t)
            continue
        sizes[k] = w[2 + place]
        left.append(o)
        result.append(extent)
        inner.append(k)
        image.append(f"{o} + {pad} - {apart}*{k}" if call.value(6, False) else f"{step}*{o} + {apart}*{k} - {pad}")
        window.append(k)
    is_transposed = call.value(6, False)
    weights = [*grouped, *(("c@", "f@") if is_transposed else ("f@", "c@"))]
    shapes.append(
        (*([groups] * len(grouped)), *((channels, filters) if is_transposed else (filters, channels)), *w[2:])
    )
    text = f"sum([{', '.join(inner)}], {read_text(0, ['n@', *grouped, 'c@', *image], '0')} * "
    text += f"{read_text(1, [*weights, *window], '0' if is_transposed else '')})"
    if len(call.shapes) > 2:
        text += f" + {read_text(2, [*grouped, 'f@'])}"
        shapes.append((*([groups] * len(grouped)), filters))
    text = f"{{out}}[{', '.join(left)}] = {text}"
    padded = None if tuple(whole) == output else tuple(whole)
    return Said(text=text, sizes=sizes, shapes=shapes, output=tuple(result), padded=padded)


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
