"""What an operator computes, as operators that Roller can price, with its arithmetic and the bytes it cannot avoid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

#: Which pass of an operator. A convolution's gradients, of its data and of its weights, are told apart.
Direction = Literal["forward", "backward", "backward data", "backward weights"]

#: Kinds of work that multiply matrices, by matrix units where a board has any.
PRODUCT_KINDS = ("convolution", "matrix product", "attention")


@dataclass(frozen=True)
class WorkPart:
    """One of Roller's operators, as in op.json, and the direction to price it in."""

    data: dict[str, Any]
    direction: Direction = "forward"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one call of an operator computes.

    Attributes:
        kind: ``convolution``, ``matrix product``, ``element-wise``...
        parts: Roller's operators, run one after the other.
        flops: arithmetic operations, a multiply-add being two.
        bytes: of all tensors read and written, each once.
        dtype: element type.
        assumed: what had to be guessed, in words; empty where the trace says everything.
    """

    kind: str
    parts: tuple[WorkPart, ...]
    flops: float
    bytes: float
    dtype: str = "float32"
    assumed: str = field(default="", compare=False)

    @property
    def direction(self) -> Direction:
        """Direction of all parts; ``backward`` where they differ."""
        ways = {part.direction for part in self.parts}
        return ways.pop() if len(ways) == 1 else "backward"
