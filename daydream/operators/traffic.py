"""What operators read and write: bytes by each tensor's own type, what is repeated, and how elements lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from daydream.operators.inputs import DTYPES, Dims, Inputs, RecordedTensor
from daydream.trace.dtypes import element_bytes

Outputs = tuple[RecordedTensor, ...]


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
    """Bytes that are read again for repeating an input, and bytes that a cache has to keep so that they are not."""

    again: float
    kept: float


def repeated(tensor: RecordedTensor, dims: Dims) -> Repeated:
    """How an input of an element-wise operator repeats over a result of these dimensions.

    A mask of 2 x 1 x 64 x 64 is read once per image as long as its part of one image stays in the cache.

    >>> repeated(RecordedTensor((2, 1, 64, 64), "float"), (2, 16, 64, 64))
    Repeated(again=491520.0, kept=16384.0)
    """
    rank = len(dims)
    if len(tensor.dims) > rank:
        return Repeated(0.0, 0.0)
    missing = rank - len(tensor.dims)
    strides = tensor.strides or (1,) * len(tensor.dims)
    repeats = [True] * missing + [
        step == 0 or size < whole for size, step, whole in zip(tensor.dims, strides, dims[missing:], strict=True)
    ]
    axes = [axis for axis in range(rank) if repeats[axis] and dims[axis] > 1]
    if not axes:
        return Repeated(0.0, 0.0)
    own = [1 if repeats[axis] else dims[axis] for axis in range(rank)]
    size = element_bytes(tensor.dtype)
    return Repeated(float((math.prod(dims) - math.prod(own)) * size), float(math.prod(own[axes[0] + 1 :]) * size))


def most_repeated(inputs: Inputs, dims: Dims) -> Repeated:
    """The input whose repeated part is the largest."""
    return max((repeated(tensor, dims) for tensor in inputs.tensors if tensor), key=lambda each: each.kept)


def is_dense_like(tensor: RecordedTensor, other: RecordedTensor) -> bool:
    """Whether two tensors of the same dimensions lie in memory in the same order; those of unknown strides do."""
    if not tensor.strides or not other.strides:
        return True
    pairs = zip(tensor.dims, tensor.strides, other.strides, strict=True)
    return tensor.dims == other.dims and all(mine == theirs for size, mine, theirs in pairs if size > 1)
