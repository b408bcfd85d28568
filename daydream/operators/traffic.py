"""Traffic of operators: bytes by each tensor's own type, repetition, and the order of elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from daydream.operators.inputs import DTYPES, Dims, Inputs, RecordedTensor
from daydream.trace.dtypes import element_bytes

Outputs = tuple[RecordedTensor, ...]

#: Neighbours of a result that a block makes, blocks that stand for all of a kernel, and what a read takes out of L2.
_BLOCK, _SAMPLED_BLOCKS, SECTOR_BYTES = 512, 8, 32


class Call(NamedTuple):
    """An operator with its arguments and, where it was captured, its results; a trace has none."""

    name: str
    inputs: Inputs
    outputs: Outputs

    @property
    def stem(self) -> str:
        """The name without namespace, in place or not.

        >>> Call("aten::add_", Inputs(()), ()).stem
        'add'
        """
        return self.name.rpartition("::")[2].removesuffix("_")

    @property
    def dtype(self) -> str | None:
        """Type of the first result as Roller names it."""
        return DTYPES.get(self.outputs[0].dtype) if self.outputs else None


def tensors_of(inputs: Inputs) -> list[RecordedTensor]:
    """All tensors among the arguments, those of lists included."""
    return [*(tensor for tensor in inputs.tensors if tensor is not None), *(t for each in inputs.lists for t in each)]


def stored_bytes(tensor: RecordedTensor) -> int:
    """Bytes in memory: dimensions that repeat the same elements (stride 0) count once.

    >>> stored_bytes(RecordedTensor((8, 5, 3), "float", (0, 3, 1)))
    60
    """
    if 0 not in tensor.strides or not tensor.elements:
        return tensor.bytes
    sizes = [size for size, step in zip(tensor.dims, tensor.strides, strict=True) if step]
    return math.prod(sizes) * element_bytes(tensor.dtype)


def moved_bytes(inputs: Inputs, outputs: Sequence[RecordedTensor]) -> float:
    """Bytes of all inputs and results once."""
    return float(sum(stored_bytes(tensor) for tensor in tensors_of(inputs)) + sum(tensor.bytes for tensor in outputs))


class Repeated(NamedTuple):
    """Repetition of an operand.

    Attributes:
        again: bytes that are read again where no cache keeps them.
        between: bytes of all tensors that pass between two reads of an element: what a cache has to hold.
    """

    again: float
    between: float


def repeated(tensor: RecordedTensor, dims: Dims, element: int) -> Repeated:
    """Repetition of an element-wise operator's input over a result of these dimensions.

    ``element`` are the bytes that all tensors have per element of the result. The mask of each image below is read
    again for each of its 16 heads, and between two reads pass 64 x 64 elements of all tensors.

    >>> repeated(RecordedTensor((2, 1, 64, 64), "float"), (2, 16, 64, 64), element=12)
    Repeated(again=491520.0, between=49152.0)
    """
    rank = len(dims)
    missing = rank - len(tensor.dims)
    if missing < 0:
        return Repeated(0.0, 0.0)
    strides = tensor.strides or (1,) * len(tensor.dims)
    repeats = [True] * missing + [
        step == 0 or size < result_size
        for size, step, result_size in zip(tensor.dims, strides, dims[missing:], strict=True)
    ]
    # Dimensions of one element count as neither.
    axes = [axis for axis in range(rank) if dims[axis] > 1]
    elements = math.prod(dims[axis] for axis in axes if not repeats[axis])
    while axes and not repeats[axes[0]]:
        axes.pop(0)
    times = 1
    while axes and repeats[axes[0]]:
        times *= dims[axes.pop(0)]
    # What repeats further inside is read again at once.
    again = float((times - 1) * elements * element_bytes(tensor.dtype))
    return Repeated(again, float(math.prod(dims[axis] for axis in axes) * element) if again else 0.0)


def most_repeated(call: Call, dims: Dims) -> Repeated:
    """The operand of which the most is read again; numbers stay in registers."""
    tensors = [tensor for tensor in call.inputs.tensors if tensor is not None and tensor.elements > 1]
    element = sum(element_bytes(tensor.dtype) for tensor in (*tensors, *call.outputs))
    return max((repeated(tensor, dims, element) for tensor in tensors), default=Repeated(0.0, 0.0))


def is_dense_like(tensor: RecordedTensor, other: RecordedTensor) -> bool:
    """True if two tensors of the same dimensions lie in memory in the same order; those of unknown strides do."""
    if not tensor.strides or not other.strides:
        return True
    pairs = zip(tensor.dims, tensor.strides, other.strides, strict=True)
    return tensor.dims == other.dims and all(mine == theirs for size, mine, theirs in pairs if size > 1)


def is_channels_last(tensor: RecordedTensor) -> bool:
    """True if images lie in memory pixel by pixel (NHWC); ``c10::MemoryFormat``'s rule for ambiguous sizes.

    >>> is_channels_last(RecordedTensor((8, 64, 7, 7), "float", (3136, 1, 448, 64)))
    True
    >>> is_channels_last(RecordedTensor((8, 64, 1, 1), "float", (64, 1, 1, 1)))
    False
    """
    if len(tensor.dims) != 4 or len(tensor.strides) != 4 or tensor.strides[1] == 0:
        return False
    least = 0
    for axis in (1, 3, 2, 0):
        step = tensor.strides[axis]
        if step < least or (axis == 0 and least == tensor.strides[1]):
            return False
        least = step * max(tensor.dims[axis], 1)
    return True


def is_contiguous(tensor: RecordedTensor, *, channels_last: bool = False) -> bool:
    """True if a tensor fills its memory in order; tensors of unknown strides do.

    >>> [is_contiguous(RecordedTensor((8, 64), "float", strides)) for strides in ((64, 1), (96, 1))]
    [True, False]
    """
    if not tensor.strides:
        return True
    axes = (1, *range(len(tensor.dims) - 1, 1, -1), 0) if channels_last else range(len(tensor.dims) - 1, -1, -1)
    step = 1
    for axis in axes:
        if tensor.dims[axis] > 1 and tensor.strides[axis] != step:
            return False
        step *= tensor.dims[axis]
    return True


class Scattered(NamedTuple):
    """Reads of a tensor in another order than it lies in.

    Attributes:
        sectors: of 32 bytes that the blocks of a kernel touch, each for itself.
        again: bytes of them that come from memory another time where no cache keeps them.
        between: bytes that pass between two reads of a sector: what a cache has to hold.
    """

    sectors: float
    again: float
    between: float


def scattered(source: RecordedTensor, result: RecordedTensor) -> Scattered:
    """Reads of a kernel from a source in the order of a result of its dimensions.

    A block makes 512 neighbours of the result; what these share of a sector comes out of L1. Of a large tensor a few
    blocks stand for all. An image in NHWC read for one in NCHW takes a sector for every element, and comes back to it
    with the next channel:

    >>> sizes, last, first = (8, 64, 32, 32), (65536, 1, 2048, 64), (65536, 1024, 32, 1)
    >>> scattered(RecordedTensor(sizes, "float", last), RecordedTensor(sizes, "float", first))
    Scattered(sectors=524288.0, again=14680064.0, between=36864.0)
    """
    nothing = Scattered(0.0, 0.0, 0.0)
    if source.dims != result.dims or len(source.strides) != len(result.strides) or not result.strides:
        return nothing
    axes = sorted((axis for axis, size in enumerate(result.dims) if size > 1), key=lambda axis: -result.strides[axis])
    if not axes:
        return nothing
    blocks = -(-result.elements // _BLOCK)
    first = np.linspace(0, blocks - 1, min(blocks, _SAMPLED_BLOCKS)).astype(np.int64) * _BLOCK
    places = np.minimum(first[:, None] + np.arange(_BLOCK), result.elements - 1)
    indices = np.unravel_index(places, [result.dims[axis] for axis in axes])
    offsets = sum(index * source.strides[axis] for index, axis in zip(indices, axes, strict=True))
    size = element_bytes(source.dtype)
    touched = np.sort(offsets * size // SECTOR_BYTES, axis=1)
    sectors = float(1 + (np.diff(touched, axis=1) > 0).sum(axis=1).mean()) * blocks
    again = max(SECTOR_BYTES * sectors - stored_bytes(source), 0.0)
    # The other elements of a sector follow along the axis on which the source is dense.
    dense = min(axes, key=lambda axis: source.strides[axis] or result.elements)
    between = result.strides[dense] * (SECTOR_BYTES * sectors / result.elements + element_bytes(result.dtype))
    return Scattered(sectors, again, between)
