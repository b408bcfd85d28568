"""Convolutions of two dimensions, recognised by what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sokoban.kernel.form import KernelForm
from sokoban.language.expression import AffineIndex, Call, Load


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution as a form has it.

    Attributes:
        images: axis of the images; None where there is one.
        filters, channels, rows, columns: axes of the output and of the reduction.
        taps: axes of the filters' rows and columns.
        counts: rows and columns of the filters.
        strides: of the windows, down and across.
        data, weights: what is multiplied.
        flipped: whether the filters are read backwards along rows, and along columns.
    """

    images: str | None
    filters: str
    channels: str
    rows: str
    columns: str
    taps: tuple[str, str]
    counts: tuple[int, int]
    strides: tuple[int, int]
    data: Load
    weights: Load
    flipped: tuple[bool, bool]

    @property
    def channels_last(self) -> bool:
        """Whether channels are the innermost dimension of the data."""
        return self.data.indices[-1].is_plain_axis


def convolution_of(form: KernelForm) -> Convolution | None:
    """The roles of the axes of a convolution without dilation; None for any other operator."""
    reduction = form.reduction
    if form.kind != "tile" or reduction is None or len(form.reduced) != 3 or reduction.function != "sum":
        return None
    body = reduction.body
    if not isinstance(body, Call) or body.function != "mul":
        return None
    first, second = body.arguments
    if not isinstance(first, Load) or not isinstance(second, Load) or first.pad or second.pad:
        return None
    for data, weights in ((first, second), (second, first)):
        convolution = _roles(form, data, weights)
        if convolution is not None:
            return convolution
    return None


def _roles(form: KernelForm, data: Load, weights: Load) -> Convolution | None:
    """The convolution of ``data`` by ``weights``; None where their axes have other roles."""
    plain, in_weights = _plain_axes(data), _plain_axes(weights)
    if len(data.indices) != len(plain) + 2 or not _is_filter(weights, in_weights):
        return None
    sides = [_side(form, index) for index in data.indices if len(index.axes) == 2]
    known = [side for side in sides if side is not None]
    if len(known) != 2 or len(sides) != 2:
        return None
    rows, columns = known
    taps = (rows.tap, columns.tap)
    channels = [axis for axis in form.reduced if axis not in taps]
    filters = [axis for axis in form.spatial if axis in in_weights]
    images = [axis for axis in form.spatial if axis not in (*filters, rows.output, columns.output)]
    if len(channels) != 1 or len(filters) != 1 or len(images) > 1:
        return None
    if set(in_weights) != {*channels, *filters, *taps} or sorted(plain) != sorted([*channels, *images]):
        return None
    return Convolution(
        images=images[0] if images else None,
        filters=filters[0],
        channels=channels[0],
        rows=rows.output,
        columns=columns.output,
        taps=taps,
        counts=(form.sizes[rows.tap], form.sizes[columns.tap]),
        strides=(rows.stride, columns.stride),
        data=data,
        weights=weights,
        flipped=(rows.flipped, columns.flipped),
    )


def _plain_axes(load: Load) -> list[str]:
    """The axes that are indices by themselves."""
    return [index.axes[0] for index in load.indices if index.is_plain_axis]


def _is_filter(weights: Load, plain: Sequence[str]) -> bool:
    """Whether a tensor is read at four different axes, and nowhere beyond its end."""
    return len(weights.indices) == len(set(plain)) == len(plain) == 4 and weights.pad is None


class _Side(NamedTuple):
    """One dimension of the window: its axis of the output, that of the filter, how far windows are apart, and whether
    the filter is read backwards."""

    output: str
    tap: str
    stride: int
    flipped: bool


def _side(form: KernelForm, index: AffineIndex) -> _Side | None:
    """The window along an index of two axes; None where it is none, or one with gaps between its taps."""
    tap = next((axis for axis in index.axes if axis in form.reduced), None)
    output = next((axis for axis in index.axes if axis in form.spatial), None)
    if tap is None or output is None or abs(index.coefficient(tap)) != 1:
        return None
    stride, flipped = index.coefficient(output), index.coefficient(tap) < 0
    return _Side(output, tap, stride, flipped) if stride == 1 or (stride > 1 and not flipped) else None
