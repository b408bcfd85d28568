"""Copies that operators make of their arguments before their own kernels, which want memory in order.

They are part of the operator: a trace shows them as operators of their own, a capture does not show them at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from daydream.operators.inputs import RecordedTensor
from daydream.operators.traffic import is_contiguous, scattered
from daydream.operators.work import Moved, Work, WorkPart

#: Instructions per element: its place in a tensor that does not fill its memory, by divisions by each size.
COPY_INSTRUCTIONS = 38.0


def contiguous_copy(tensor: RecordedTensor, *, channels_last: bool = False) -> WorkPart:
    """The copy of a tensor into memory in order."""
    order = (1, *range(len(tensor.dims) - 1, 1, -1), 0) if channels_last else range(len(tensor.dims) - 1, -1, -1)
    strides, step = [0] * len(tensor.dims), 1
    for axis in order:
        strides[axis] = step
        step *= tensor.dims[axis]
    reads = scattered(tensor, replace(tensor, strides=tuple(strides)))
    moved = Moved(
        kernel="elementwise_kernel",
        bytes=2.0 * tensor.bytes,
        outputs=float(tensor.elements),
        instructions=COPY_INSTRUCTIONS,
        model="element-wise",
        again=reads.again,
        between=reads.between,
        scattered=reads.sectors,
    )
    return WorkPart({}, moved=moved)


def with_copies(work: Work, tensors: Iterable[RecordedTensor | None], *, channels_last: bool = False) -> Work:
    """The work with the copies of those tensors before it that do not fill their memory in order."""
    copies = tuple(
        contiguous_copy(tensor, channels_last=channels_last)
        for tensor in tensors
        if tensor is not None and not is_contiguous(tensor, channels_last=channels_last)
    )
    return replace(work, parts=(*copies, *work.parts)) if copies else work
