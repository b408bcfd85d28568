"""Convolutions by 3x3 filters of stride 1, recognised by what they compute."""

from __future__ import annotations

from dataclasses import dataclass

from sokoban.kernel.form import KernelForm
from sokoban.language.expression import Call, Load

#: Rows and columns of the filters.
TAPS = 3


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A 3x3 convolution of stride 1 as a form has it.

    Attributes:
        images: axis of the images; None where there is one.
        filters, channels, rows, columns: axes of the output and of the reduction.
        taps: axes of the filters' rows and columns.
        data, weights: what is multiplied.
        flipped: whether the filters are read backwards along rows, and along columns.
    """

    images: str | None
    filters: str
    channels: str
    rows: str
    columns: str
    taps: tuple[str, str]
    data: Load
    weights: Load
    flipped: tuple[bool, bool]

    @property
    def channels_last(self) -> bool:
        """Whether channels are the innermost dimension of the data."""
        return self.data.indices[-1].is_plain_axis


def convolution_of(form: KernelForm) -> Convolution | None:
    """The roles of the axes of a 3x3 convolution of stride 1 and dilation 1; None for any other operator."""
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
        found = _roles(form, data, weights)
        if found is not None:
            return found
    return None


def _roles(form: KernelForm, data: Load, weights: Load) -> Convolution | None:
    windows = [index for index in data.indices if len(index.axes) == 2]
    plain = [index.axes[0] for index in data.indices if index.is_plain_axis]
    in_weights = [index.axes[0] for index in weights.indices if index.is_plain_axis]
    if len(windows) != 2 or len(windows) + len(plain) != len(data.indices) or len(in_weights) != 4:
        return None
    if len(weights.indices) != 4 or len(set(in_weights)) != 4 or weights.pad is not None:
        return None
    taps, outputs, flipped = [], [], []
    for index in windows:
        tap = next((axis for axis in index.axes if axis in form.reduced), None)
        output = next((axis for axis in index.axes if axis in form.spatial), None)
        if tap is None or output is None or form.sizes[tap] != TAPS or index.coefficient(output) != 1:
            return None
        if abs(index.coefficient(tap)) != 1:
            return None
        taps.append(tap)
        outputs.append(output)
        flipped.append(index.coefficient(tap) < 0)
    channels = [axis for axis in form.reduced if axis not in taps]
    filters = [axis for axis in form.spatial if axis in in_weights]
    images = [axis for axis in form.spatial if axis not in filters and axis not in outputs]
    if len(channels) != 1 or len(filters) != 1 or len(images) > 1 or set(in_weights) != {*channels, *filters, *taps}:
        return None
    if sorted(plain) != sorted([*channels, *images]):
        return None
    rows, columns = outputs
    return Convolution(
        images=images[0] if images else None,
        filters=filters[0],
        channels=channels[0],
        rows=rows,
        columns=columns,
        taps=(taps[0], taps[1]),
        data=data,
        weights=weights,
        flipped=(flipped[0], flipped[1]),
    )
