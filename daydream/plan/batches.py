"""A captured step at another batch, from two that were captured: sizes grow equally with every sample."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypeVar

from daydream.capture.captured import Capture, CapturedOperator
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.plan.units import Units

_INTEGER = re.compile(r"(?<![\w.])\d+(?![\w.])")

_Tensor = TypeVar("_Tensor", RecordedTensor, RecordedTensor | None)


def at_batch(first: Units, second: Units, batch: int) -> Units | None:
    """The units of a step whose every size is on the line through those of two other batches.

    Args:
        first: the step at one batch.
        second: at another.
        batch: samples.

    Returns:
        The units; None where the two steps are not the same operators one by one, or a size would be no integer.
    """
    a, b = first.capture, second.capture
    if a.batch is None or b.batch is None or len(a.operators) != len(b.operators) or a.parameters != b.parameters:
        return None
    if len(a.storages) != len(b.storages):
        return None
    line = _Line(batch - a.batch, b.batch - a.batch)
    try:
        operators = tuple(map(line.operator, a.operators, b.operators))
        storages = tuple(
            replace(one, bytes=line.size(one.bytes, other.bytes))
            for one, other in zip(a.storages, b.storages, strict=True)
        )
    except _UnlikeError:
        return None
    capture: Capture = replace(a, operators=operators, storages=storages, batch=batch)
    return replace(first, capture=capture)


class _UnlikeError(Exception):
    """Two operators are not one at two batches."""


class _Line:
    """Values on a line: ``share`` of ``whole`` samples from the first step to the second."""

    def __init__(self, share: int, whole: int) -> None:
        self._share, self._whole = share, whole
        self._texts: dict[tuple[str, str], str] = {}

    def size(self, one: int, other: int) -> int:
        """An integer."""
        steps, rest = divmod((other - one) * self._share, self._whole)
        if rest or one + steps < 0:
            raise _UnlikeError
        return one + steps

    def operator(self, one: CapturedOperator, other: CapturedOperator) -> CapturedOperator:
        """An operator with its arguments and results."""
        if (one.name, one.phase, one.module, one.read, one.made, one.freed) != (
            other.name, other.phase, other.module, other.read, other.made, other.freed,
        ):  # fmt: skip
            raise _UnlikeError
        if one.inputs == other.inputs and one.outputs == other.outputs:
            return one
        outputs = tuple(map(self._tensor, one.outputs, other.outputs))
        return replace(one, inputs=self._inputs(one.inputs, other.inputs), outputs=outputs)

    def _inputs(self, one: Inputs, other: Inputs) -> Inputs:
        tensors = tuple(map(self._tensor, one.tensors, other.tensors))
        lists = tuple(tuple(map(self._tensor, *pair)) for pair in zip(one.lists, other.lists, strict=True))
        return Inputs(tensors, tuple(map(self._text, one.values, other.values)), lists)

    def _tensor(self, one: _Tensor, other: _Tensor) -> _Tensor:
        if one is None or other is None or one == other:
            return one
        if one.dtype != other.dtype or len(one.dims) != len(other.dims):
            raise _UnlikeError
        dims, strides = (
            tuple(map(self.size, getattr(one, name), getattr(other, name))) for name in ("dims", "strides")
        )
        return RecordedTensor(dims, one.dtype, strides)

    def _text(self, one: str, other: str) -> str:
        """A value as text, the integers in it by themselves; those of other numbers are no sizes."""
        if one == other:
            return one
        if (one, other) not in self._texts:
            sizes = map(self.size, *(map(int, _INTEGER.findall(text)) for text in (one, other)))
            unlike = _INTEGER.sub("#", one) != _INTEGER.sub("#", other)
            self._texts[one, other] = one if unlike else _INTEGER.sub(lambda _: str(next(sizes)), one)
        return self._texts[one, other]
