"""The questions that kernels of all kinds answer for themselves, and the answers of most of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

from sokoban.kernel.statements import widened_tensors
from sokoban.language.expression import Statement, Tensor, TensorExpr, statement_text


class _HasTensors(Protocol):
    @property
    def inputs(self) -> tuple[Tensor, ...]: ...

    @property
    def output(self) -> Tensor: ...


@dataclass(frozen=True)
class LaunchAxis:
    """The axis of a kernel whose size is known at launch.

    Attributes:
        name: of the axis.
        elements: of it for each of the size, where it is fused with others.
    """

    name: str
    elements: int = 1


_K = TypeVar("_K", bound="Kernel")
_E = TypeVar("_E", bound="ExpressionKernel")


class Kernel:
    """A kernel of a program, whatever it computes: it has ``inputs`` and an ``output``."""

    #: Whether its text in OpenCL C reads and writes 16-bit floats as they are.
    KEEPS_NARROW_FLOATS: ClassVar[bool] = True

    @property
    def tensors(self: _HasTensors) -> tuple[Tensor, ...]:
        """Its tensors in the order of its parameters: the inputs, then the output."""
        return (*self.inputs, self.output)

    @property
    def parameters(self: _HasTensors) -> tuple[str, ...]:
        """Names of its parameters: those of its tensors."""
        return tuple(tensor.name for tensor in (*self.inputs, self.output))

    @property
    def schedule_numbers(self) -> Mapping[str, Any]:
        """Numbers of the problem that its schedule has in files."""
        return {}

    def widened(self: _K) -> _K:
        """The kernel as OpenCL C has it: with narrower floats in float32 where its text cannot read them."""
        return self


class ExpressionKernel(Kernel):
    """A kernel that computes an expression: a frozen dataclass with the field ``expr``."""

    expr: TensorExpr

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that it reads, in order of first use."""
        return self.expr.inputs

    @property
    def output(self) -> Tensor:
        """The tensor that it writes."""
        return self.expr.output

    @property
    def stated(self) -> tuple[Statement, ...]:
        """The statements by which it is described."""
        return self.expr.statements

    def widened(self: _E) -> _E:
        """The kernel with narrower floats in float32 where its text in OpenCL C cannot read them."""
        if self.KEEPS_NARROW_FLOATS:
            return self
        return replace(self, expr=replace(self.expr, tensors=widened_tensors(self.expr.tensors)))  # type: ignore[type-var]

    def statement_text(self) -> str:
        """Computation of the kernel, as the expression language writes it."""
        return "; ".join(statement_text(statement) for statement in self.stated)
