"""Calls as texts of the expression language, over axes of their own: the parts that all of them have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.kernelbench.problem import Call, Shape


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
        is_pointwise: whether it goes element by element over its result's shape.
    """

    text: str
    sizes: Mapping[str, int]
    shapes: Sequence[Shape]
    output: Shape
    dtypes: Mapping[str, str] = field(default_factory=dict)
    padded: Shape | None = None
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
    for place, strides in enumerate(call.strides[: len(shapes)]):
        if not strides:
            continue
        if strides == (-1,):
            raise Unsaid("a part of a tensor")
        if shapes[place] != call.shapes[place]:
            raise Unsaid("a turned tensor by another shape")
        # Along dimensions without a stride one element is read everywhere.
        order = sorted((dim for dim, stride in enumerate(strides) if stride), key=lambda dim: -strides[dim])
        shapes[place] = tuple(call.shapes[place][dim] for dim in order)
        text = _turned(text, place, order)
    return text, shapes


def _turned(text: str, place: int, order: Sequence[int]) -> str:
    """Reads of a tensor with their indices in another order, or without some of them."""

    def turned(match: re.Match[str]) -> str:
        indices, pad = match[1].split(", "), match[2] or ""
        return f"{{{place}}}[{', '.join(indices[dim] for dim in order) or '0'}{pad}]"

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
