"""Convolutions of a graph as anchors: images with channels last and weights in panels where those never change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hal.support.errors import InputError
from roller.dynamo.orders import FIRST, LAST, Packing, has_last_channels
from roller.dynamo.sums import Anchor, UnsupportedError, is_constant, panel_widths, shape_of
from sokoban.language.named import NAMED_OPERATORS
from sokoban.language.named.base import Program
from sokoban.language.operators import operator_from_data

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Convolution:
    """Arguments of a convolution over two dimensions; one over a single dimension is of images of one row."""

    data: Any
    weights: Any
    bias: Any
    strides: tuple[int, int]
    pads: tuple[int, int]
    dilations: tuple[int, int]
    groups: int
    dimensions: int

    @staticmethod
    def of(node: Any) -> _Convolution:
        """The arguments of a node.

        Raises:
            UnsupportedError: it is transposed, or has more dimensions.
        """
        data, weights, bias, stride, padding, dilation, transposed, _, groups = node.args
        if transposed:
            raise UnsupportedError("a transposed convolution")
        dimensions = len(shape_of(data)) - 2
        if dimensions not in (1, 2):
            raise UnsupportedError(f"a convolution over {dimensions} dimensions")
        missing = 2 - dimensions
        strides, dilations = ((*[1] * missing, *each) for each in (stride, dilation))
        return _Convolution(data, weights, bias, strides, (*[0] * missing, *padding), dilations, groups, dimensions)

    @property
    def image(self) -> tuple[int, int, int, int]:
        """Images, channels, rows and columns."""
        n, c, *space = shape_of(self.data)
        h, w = [1] * (2 - len(space)) + space
        return n, c, h, w

    @property
    def filters(self) -> tuple[int, int, int]:
        """Filters, rows and columns of their windows."""
        f, _, *window = shape_of(self.weights)
        kh, kw = [1] * (2 - len(window)) + window
        return f, kh, kw

    @property
    def is_depthwise(self) -> bool:
        """True if every channel has one filter of its own."""
        return self.groups == self.image[1] == self.filters[0] and self.groups > 1

    @property
    def kind(self) -> str:
        """Word for its kind."""
        return "depthwise_conv2d" if self.is_depthwise else "conv2d"


def writes_last_channels(node: Any, lanes: int) -> bool:
    """True for convolutions whose kernels write images with channels last on a processor: those of weights that never
    change, whose channels fill vectors."""
    if not lanes or node.op != "call_function" or node.target is not _aten.convolution.default:
        return False
    try:
        arguments = _Convolution.of(node)
    except UnsupportedError:
        return False
    per_group = arguments.filters[0] // arguments.groups
    fills = arguments.groups == 1 or arguments.is_depthwise or per_group % lanes == 0
    return is_constant(arguments.weights) and arguments.dimensions == 2 and fills


def convolutions(node: Any, lanes: int) -> Iterator[Anchor]:
    arguments = _Convolution.of(node)
    if writes_last_channels(node, lanes):
        return _last_channels(node, arguments, lanes)
    return _first_channels(node, arguments)


def _first_channels(node: Any, arguments: _Convolution) -> Iterator[Anchor]:
    (n, c, h, w), (f, kh, kw) = arguments.image, arguments.filters
    keys: dict[str, Any] = {"n": n, "c": c, "h": h, "w": w, "kh": kh, "kw": kw}
    keys |= {"stride": list(arguments.strides), "dilation": list(arguments.dilations), "padding": [*arguments.pads] * 2}
    if not arguments.is_depthwise:
        keys |= {"f": f, "groups": arguments.groups}
    program = _program({"op": arguments.kind, **keys})
    channels = ("c",) if arguments.is_depthwise else ("g", "f") if arguments.groups > 1 else ("f",)
    yield Anchor(
        node=node,
        kind=arguments.kind,
        axes=("n", *channels, "oh", "ow"),
        terms=program.text.partition(" = ")[2],
        sizes=program.sizes,
        shapes={"X": list(program.shapes["X"])},
        operands={"X": arguments.data, "W": arguments.weights},
        dims=(("n",), channels, ("oh",), ("ow",)) if arguments.dimensions == 2 else (("n",), channels, ("oh", "ow")),
        biases=() if arguments.bias is None else ((arguments.bias, 1),),
        multiply_adds=math.prod(program.sizes.values()),
    )


def _last_channels(node: Any, arguments: _Convolution, lanes: int) -> Iterator[Anchor]:
    """Convolutions that write images with channels last, and read them as they lie: vectors run along channels, and
    weights lie in panels of filters."""
    (n, c, _, _), (f, kh, kw), groups = arguments.image, arguments.filters, arguments.groups
    _, _, oh, ow = shape_of(node)
    depthwise = arguments.is_depthwise
    windows = {axis: extent for axis, extent in (("kh", kh), ("kw", kw)) if extent > 1 or depthwise}
    is_point = not windows and set(arguments.strides) == {1} and not any(arguments.pads)
    # Where windows are points, places of an image are one axis.
    places = {"o": oh * ow} if is_point else {"oh": oh, "ow": ow}
    image = _image(arguments, places, windows)
    group = {"g": groups} if groups > 1 and not depthwise else {}
    per_group = f // groups
    summed = [*windows] if depthwise else [*windows, "c"]
    # Nothing is left to pack where channels have a filter each.
    for width in [0] if depthwise else [0, *panel_widths(per_group, lanes)]:
        filters = {"c": c} if depthwise else {"p": per_group // width, "f": width} if width else {"f": per_group}
        if depthwise:
            weights, packing = [*windows, "c"], Packing((c, kh, kw), (1, 2, 0))
        else:
            weights = [*group, *[axis for axis in filters if axis != "f"], *summed, "f"]
            cut = (groups, per_group // (width or per_group), width or per_group, c // groups, kh, kw)
            packing = Packing(cut, (0, 1, 4, 5, 3, 2))
        channels = (*group, *filters)
        sizes = {"n": n, **places, **group, **filters, **windows, "c": c if depthwise else c // groups}
        yield Anchor(
            node=node,
            kind=arguments.kind,
            axes=("n", *places, *channels),
            terms=f"sum([{','.join(summed)}], X[{image.subscript}] * W[{','.join(weights)}])",
            sizes=sizes,
            shapes={"X": image.shape},
            operands={"X": arguments.data, "W": arguments.weights},
            formats={"X": LAST if image.is_last else FIRST},
            packings={"W": packing},
            dims=(("n",), channels, *((("o",),) if is_point else (("oh",), ("ow",)))),
            biases=() if arguments.bias is None else ((arguments.bias, 1),),
            multiply_adds=math.prod(sizes.values()),
            memory_format=LAST,
        )


class _Image(NamedTuple):
    """Images that a convolution reads: text of the subscript, extents as they lie, and whether channels do so last."""

    subscript: str
    shape: tuple[int, ...]
    is_last: bool


def _image(arguments: _Convolution, places: Mapping[str, int], windows: Mapping[str, int]) -> _Image:
    n, c, h, w = arguments.image
    value = arguments.data.meta["val"]
    # What is dense in neither order is copied into this one.
    is_last = has_last_channels(value) or not value.is_contiguous()
    has_groups = arguments.groups > 1 and not arguments.is_depthwise
    channels = {"g": arguments.groups, "c": c // arguments.groups} if has_groups else {"c": c}
    space: dict[str, int] = {}
    if "o" in places:
        space["o"] = h * w
    else:
        axes = zip(
            places, ("kh", "kw"), (h, w), arguments.strides, arguments.dilations, arguments.pads, strict=True
        )  # fmt: skip
        for place, window, extent, stride, dilation, pad in axes:
            within = f" + {dilation}*{window}" if window in windows else ""
            space[f"{stride}*{place}{within} - {pad}"] = extent
    dimensions = {"n": n, **space, **channels} if is_last else {"n": n, **channels, **space}
    subscript = ",".join(dimensions) + (" | pad=0" if any(arguments.pads) else "")
    return _Image(subscript, tuple(dimensions.values()), is_last)


def _program(data: dict[str, Any]) -> Program:
    """A named operator in the language."""
    try:
        operator_from_data(data)
    except InputError as error:
        raise UnsupportedError(f"{error.field} {error.problem}") from None
    import msgspec

    return msgspec.convert(data, NAMED_OPERATORS[data["op"]]).program()
