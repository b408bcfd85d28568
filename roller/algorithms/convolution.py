"""Convolutions of one to three dimensions, recognised by what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sokoban.kernel.form import KernelForm
from sokoban.language.expression import AffineIndex, Call, Load

#: Dimensions of the images: sounds, pictures, volumes.
MOST_DIMENSIONS = 3


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution as a form has it.

    Attributes:
        images: axis of the images; None where there is one.
        filters, channels: axes of the output and of the reduction.
        outputs: axes of the output that windows move along, innermost last, as in all that follow.
        taps: axes of a window.
        counts: taps of a window.
        strides: how far windows are apart.
        dilations: how far taps are apart; one of the two is 1.
        data, weights: what is multiplied.
        flipped: whether the filters are read backwards.
    """

    images: str | None
    filters: str
    channels: str
    outputs: tuple[str, ...]
    taps: tuple[str, ...]
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    data: Load
    weights: Load
    flipped: tuple[bool, ...]

    @property
    def rows(self) -> str:
        """Axis of the output's rows, of two dimensions."""
        return self.outputs[0]

    @property
    def columns(self) -> str:
        """Axis of the output's columns."""
        return self.outputs[-1]

    @property
    def channels_last(self) -> bool:
        """True if channels are the innermost dimension of the data."""
        return self.data.indices[-1].is_plain_axis


def convolution_of(form: KernelForm) -> Convolution | None:
    """The roles of the axes of a convolution; None for any other operator, and for strides and dilation together."""
    reduction = form.reduction
    if not form.is_tile or form.scattered_loads or reduction is None or reduction.function != "sum":
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
    in_data, in_weights = _axes_read_directly(data), _axes_read_directly(weights)
    sides = [_side(form, index) for index in data.indices if len(index.axes) == 2]
    window_sides = [side for side in sides if side is not None]
    if not 1 <= len(window_sides) == len(sides) <= MOST_DIMENSIONS or len(data.indices) != len(in_data) + len(
        window_sides
    ):
        return None
    if not _is_filter(weights, in_weights, len(window_sides) + 2):
        return None
    outputs, taps = tuple(side.output for side in window_sides), tuple(side.tap for side in window_sides)
    channels = [axis for axis in form.reduced if axis not in taps]
    filters = [axis for axis in form.spatial if axis in in_weights]
    images = [axis for axis in form.spatial if axis not in (*filters, *outputs)]
    if len(channels) != 1 or len(filters) != 1 or len(images) > 1:
        return None
    if set(in_weights) != {*channels, *filters, *taps} or sorted(in_data) != sorted([*channels, *images]):
        return None
    return Convolution(
        images=images[0] if images else None,
        filters=filters[0],
        channels=channels[0],
        outputs=outputs,
        taps=taps,
        counts=tuple(form.sizes[tap] for tap in taps),
        strides=tuple(side.stride for side in window_sides),
        dilations=tuple(side.dilation for side in window_sides),
        data=data,
        weights=weights,
        flipped=tuple(side.flipped for side in window_sides),
    )


def _axes_read_directly(load: Load) -> list[str]:
    """The axes that are indices by themselves."""
    return [index.axes[0] for index in load.indices if index.is_plain_axis]


def _is_filter(weights: Load, axes: Sequence[str], count: int) -> bool:
    """True if a tensor is read at so many different axes, and nowhere beyond its end."""
    return len(weights.indices) == len(set(axes)) == len(axes) == count and weights.pad is None


class _Side(NamedTuple):
    """One dimension of the window: its axis of the output, that of the filter, how far windows and taps are apart, and
    whether the filter is read backwards."""

    output: str
    tap: str
    stride: int
    dilation: int
    flipped: bool


def _side(form: KernelForm, index: AffineIndex) -> _Side | None:
    """The window along an index of two axes; None where it is none, or has gaps between windows and between taps."""
    tap = next((axis for axis in index.axes if axis in form.reduced), None)
    output = next((axis for axis in index.axes if axis in form.spatial), None)
    if tap is None or output is None:
        return None
    stride, dilation, flipped = index.coefficient(output), abs(index.coefficient(tap)), index.coefficient(tap) < 0
    is_window = stride == 1 or (stride > 1 and dilation == 1 and not flipped)
    return _Side(output, tap, stride, dilation, flipped) if is_window else None
