"""Calls as texts of the expression language, over axes of their own: the parts that all of them have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.kernelbench.problem import Call, Layout, Shape


class Unsaid(Exception):
    """A call that the language does not say; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """A call in the language.

    Attributes:
        text: statements over ``{0}``, ``{1}``, ... for the call's tensors and ``{out}`` for its result; names of axes
            and of tensors in between end in ``@``, for a number of the call.
        sizes: elements of every axis.
        shapes: of the tensors as the statements index them.
        output: shape of the result as they define it.
        dtypes: of tensors that have another than the call's own.
        padded: shape of a result that is longer than the call's, which is a part of it; None where it is the call's.
        is_of_values: whether it reads each element of its tensors where it lies, so that what makes these element by
            element may belong to it.
        is_pointwise: whether it goes element by element over its result's shape.
    """

    text: str
    sizes: Mapping[str, int]
    shapes: Sequence[Shape]
    output: Shape
    dtypes: Mapping[str, str] = field(default_factory=dict)
    padded: Shape | None = None
    is_of_values: bool = False
    is_pointwise: bool = False


def cropped(call: Call) -> Said:
    """The first elements along every dimension of a tensor."""
    names = axes_of("i", call.outputs[0])
    text = f"{{out}}[{', '.join(names)}] = {read_text(0, names)}"
    return Said(text=text, sizes=sizes_of(names, call.outputs[0]), shapes=call.shapes, output=call.outputs[0])


def in_memory_order(call: Call, translated: Said) -> tuple[str, list[Shape]]:
    """Text and shapes of a call over its tensors as they lie in memory.

    Raises:
        Unsaid: a tensor is a part of another.
    """
    text, shapes = translated.text, list(translated.shapes)
    for place, layout in enumerate(call.layouts[: len(shapes)]):
        if layout is None:
            continue
        if shapes[place] != call.shapes[place]:
            raise Unsaid("a turned tensor, or a part of one, by another shape")
        shapes[place], places = _in_memory(call.shapes[place], layout)
        text = _turned(text, place, places)
    return text, shapes


def _in_memory(shape: Shape, layout: Layout) -> tuple[Shape, list[tuple[int | None, int]]]:
    """The tensor that a view is of, outermost dimension first, and of each of its dimensions the view's and where that
    begins; along dimensions without a stride one element is read everywhere."""
    strides = layout.strides
    order = [dim for dim, extent in enumerate(shape) if extent > 1 and strides[dim]]
    order.sort(key=lambda dim: -strides[dim])
    extents, places = list[int](), list[tuple[int | None, int]]()
    inner, offset = layout.elements, layout.offset
    for dim in order:
        stride = strides[dim]
        first = offset // stride
        if inner % stride or first + shape[dim] > inner // stride:
            raise Unsaid("a part of a tensor that is no box of it")
        extents.append(inner // stride)
        places.append((dim, first))
        inner, offset = stride, offset % stride
    if inner > 1 or not extents:
        extents.append(inner)
        places.append((None, offset))
    return tuple(extents), places


def _turned(text: str, place: int, places: Sequence[tuple[int | None, int]]) -> str:
    """Reads of a tensor by the indices of what it is a view of."""

    def turned(match: re.Match[str]) -> str:
        indices, pad = match[1].split(", "), match[2] or ""
        moved = [
            str(first) if dim is None else f"{indices[dim]} + {first}" if first else indices[dim]
            for dim, first in places
        ]
        return f"{{{place}}}[{', '.join(moved)}{pad}]"

    return re.sub(rf"\{{{place}\}}\[([^\]|]*?)( \| pad=[^\]]*)?\]", turned, text)


# Axes


def axes_of(letter: str, shape: Shape) -> list[str]:
    """Names of axes for the dimensions of a shape."""
    return [f"{letter}{place}@" for place in range(len(shape))] or ["one@"]


def sizes_of(names: Sequence[str], shape: Shape) -> dict[str, int]:
    """Sizes by axis."""
    return dict(zip(names, shape or (1,), strict=True))


def read_text(place: int, indices: Sequence[str], pad: str = "") -> str:
    """Text that reads the tensor at a place."""
    return f"{{{place}}}[{', '.join(indices) or '0'}{f' | pad={pad}' if pad else ''}]"


def broadcast_indices(names: Sequence[str], shape: Shape, output: Shape) -> list[str]:
    """Indices that read a tensor over the axes of a result, as NumPy broadcasts it."""
    skipped = len(output) - len(shape)
    return ["0" if extent == 1 else names[skipped + place] for place, extent in enumerate(shape)]


def number_text(value: float) -> str:
    """A number as the language has it, negative ones in brackets."""
    text = repr(abs(float(value)))
    return text if value >= 0 else f"(-{text})"
