"""The table of ONNX operators: what each runs in PyTorch, and which of its inputs must be known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

#: Element types by their number in ``onnx.TensorProto``.
TYPES: Mapping[int, torch.dtype] = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 12: torch.uint32, 13: torch.uint64, 14: torch.complex64,
    15: torch.complex128, 16: torch.bfloat16, 17: torch.float8_e4m3fn, 19: torch.float8_e5m2,
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Call:
    """What an operator is told besides its inputs.

    Attributes:
        kind: of the operator, ``Conv``.
        attributes: of the node; strings decoded.
        version: of ONNX's operator set in the file.
        results: number of results that the node names.
        device: of its tensors: ``cpu`` where all inputs are known and it runs for real, else ``meta``.
        training: whether the step trains.
        floating: the type that stands for the file's own type of weights, which ``--dtype`` may have replaced.
        state: the module around the node, which keeps what a training step counts.
    """

    kind: str
    attributes: Mapping[str, Any]
    version: int
    results: int = 1
    device: str = "meta"
    training: bool = False
    floating: Callable[[torch.dtype], torch.dtype] = field(default=lambda dtype: dtype)
    state: Any = None

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or the default."""
        return self.attributes.get(name, default)

    def type_of(self, number: int) -> torch.dtype:
        """The type of a number in ``onnx.TensorProto``; ValueError for those that PyTorch lacks."""
        if number not in TYPES:
            raise ValueError(f"element type {number} is not supported")
        return self.floating(TYPES[number])


Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator in PyTorch.

    Attributes:
        function: takes the call and the inputs, None for those left out; returns one tensor or all results.
        known: positions of inputs that are read as numbers, ``None`` for all from the second on.
        scalars: whether constants of one element may be plain numbers.
        weights: positions of inputs that are weights where they come from the file.
    """

    function: Function
    known: tuple[int, ...] | None = ()
    scalars: bool = False
    weights: tuple[int, ...] = ()

    def reads_number(self, position: int) -> bool:
        """Whether the input at this position is read as numbers."""
        return position > 0 if self.known is None else position in self.known


OPERATORS: dict[str, Operator] = {}


def operator(
    *kinds: str, known: tuple[int, ...] | None = (), scalars: bool = False, weights: tuple[int, ...] = ()
) -> Callable[[Function], Function]:
    """Enters a function under ONNX's names."""

    def enter(function: Function) -> Function:
        for kind in kinds:
            OPERATORS[kind] = Operator(function, known, scalars, weights)
        return function

    return enter


def numbers(value: Any) -> list[Any]:
    """The numbers of a known input or of an attribute, in order.

    >>> numbers(torch.tensor([1, 2])), numbers([3]), numbers(4)
    ([1, 2], [3], [4])
    """
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            raise ValueError("the result's sizes depend on data")
        return list(value.reshape(-1).tolist())
    return list(value) if isinstance(value, Sequence) else [value]
