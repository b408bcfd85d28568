"""Times of a library's operators: the face of this package.

An operator is its JSON object (``{"op": "matmul", ...}`` or ``{"expr": ...}``) or an expression. It becomes the calls
that PyTorch makes for it, an epilogue included, and those are priced together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.library.calls import PEER_REDUCE, LibraryCall, PricedCall, price
from roller.library.layers import layer_calls
from roller.library.named_calls import named_calls
from roller.library.parts import directed
from roller.library.recognise import recognise
from roller.library.streaming.elementwise import Direction
from sokoban.language.collectives import collective_from_data, is_collective
from sokoban.language.expression import TensorExpr
from sokoban.language.layers import is_layer
from sokoban.language.operators import operator_from_data

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class LibraryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Time of an operator.

    Attributes:
        seconds: device time, all kernels.
        call_seconds: of the framework calls one after the other, each between two GPU events on an idle device.
        bound: the longest part of the longest call.
        kernel: the kernel or algorithm of the longest call; ``none`` where nothing is launched, ``roofline`` where the
            operator is none that the libraries are known to have.
        kernels: how many are launched.
        parts: the calls in order.
    """

    seconds: float
    call_seconds: float
    bound: str
    kernel: str
    kernels: int
    parts: tuple[PricedCall, ...]


def library_calls(operator: Mapping[str, Any] | TensorExpr, direction: Direction = "forward") -> list[LibraryCall]:
    """The calls for one operator or for its backward pass: the gradients of all its operands.

    Raises:
        InputError: the JSON object is no operator, or there is no such direction.
    """
    if direction not in DIRECTIONS:
        raise InputError("direction", f"there is no {direction!r}", f"use one of {', '.join(DIRECTIONS)}")
    if isinstance(operator, TensorExpr):
        return directed(recognise(operator), direction)
    if is_collective(operator):
        return [_collective_call(operator, direction)]
    if is_layer(operator):
        return layer_calls(operator, direction)
    calls = named_calls(operator) if isinstance(operator, dict) else None
    return directed(recognise(operator_from_data(operator)) if calls is None else calls, direction)


def _collective_call(data: Mapping[str, Any], direction: Direction) -> LibraryCall:
    collective = collective_from_data(data)
    if direction != "forward":
        raise InputError(
            "direction", "a collective has no backward pass of its own", "write the collective of its gradient"
        )
    name = PEER_REDUCE if collective.kernels == "vllm" else collective.op
    variant = name if collective.node is None else f"{name}@{collective.node}"
    sizes = (float(collective.bytes), float(collective.ranks))
    return LibraryCall(kind="collective", label=collective.op, sizes=sizes, dtype=collective.dtype, variant=variant)


def library_time(
    operator: Mapping[str, Any] | TensorExpr, device: DeviceSpec, direction: Direction = "forward"
) -> LibraryEstimate:
    """Time of one operator; see :func:`library_times`."""
    return library_times([operator], device, direction)[0]


def library_times(
    operators: Sequence[Mapping[str, Any] | TensorExpr],
    device: DeviceSpec,
    direction: Direction | Sequence[Direction] = "forward",
) -> list[LibraryEstimate]:
    """Time of every operator, priced together: ten thousand in about a second.

    Args:
        operators: JSON objects, as :func:`sokoban.language.operators.operator_from_data` reads them, or expressions.
        device: an NVIDIA board.
        direction: forward or backward, one for all or one each.

    Raises:
        InputError: an operator cannot be read (``field`` starts with its position), or the board runs no such library.
    """
    directions = [direction] * len(operators) if isinstance(direction, str) else list(direction)
    if len(directions) != len(operators):
        raise InputError("direction", f"{len(directions)} for {len(operators)} operators", "give one, or one each")
    called: list[list[LibraryCall]] = []
    for position, (operator, way) in enumerate(zip(operators, directions, strict=True)):
        try:
            called.append(library_calls(operator, way))
        except InputError as error:
            raise error.within(f"[{position}]") from error.__cause__
    return priced(called, device)


def priced(called: Sequence[Sequence[LibraryCall]], device: DeviceSpec) -> list[LibraryEstimate]:
    """Times of operators whose calls are known, one list of calls for each.

    Raises:
        InputError: the board runs no such library.
    """
    prices = iter(price([call for calls in called for call in calls], device))
    return [_together(tuple(next(prices) for _ in calls)) for calls in called]


def _together(parts: tuple[PricedCall, ...]) -> LibraryEstimate:
    longest = max(parts, key=lambda part: part.seconds)
    return LibraryEstimate(
        seconds=sum(part.seconds for part in parts),
        call_seconds=sum(part.call_seconds for part in parts),
        bound=longest.bound,
        kernel=longest.kernel,
        kernels=sum(part.kernels for part in parts),
        parts=parts,
    )
