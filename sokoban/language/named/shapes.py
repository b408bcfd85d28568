"""Operators on a tensor of any shape: reduction, element-wise functions, normalization along a line, transposition.

Their axes are ``i0``, ``i1``, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from msgspec import Meta

from hal.support.errors import InputError
from sokoban.language.expression import PLACE_REDUCTIONS
from sokoban.language.functions import FUNCTIONS
from sokoban.language.named.base import Operator, Program, Shape, Size, by

#: Functions of one tensor, and of two.
UNARY, BINARY = (
    tuple(name for name, function in FUNCTIONS.items() if function.is_elementwise and function.arity == arity)
    for arity in (1, 2)
)

if TYPE_CHECKING:
    Unary: TypeAlias = str
    Binary: TypeAlias = str
else:
    Unary, Binary = Literal[UNARY], Literal[BINARY]


class Reduce(Operator, tag="reduce", kw_only=True, frozen=True):
    """``function`` over ``axes`` of a tensor; the reduced dimensions are gone from the output."""

    function: Literal["sum", "mean", "max", "min", "argmax", "argmin"]
    shape: Shape
    axes: Annotated[tuple[int, ...], Meta(min_length=1)]

    def program(self) -> Program:
        names = _axis_names(self.shape)
        reduced = [_dimension(axis, self.shape, f"axes[{i}]") for i, axis in enumerate(self.axes)]
        if len(set(reduced)) < len(reduced):
            raise InputError("axes", f"{list(self.axes)} names a dimension twice", "name every dimension once")
        if self.function in PLACE_REDUCTIONS and len(reduced) > 1:
            raise InputError("axes", f"{self.function} is a place along one dimension, not {len(reduced)}", "name one")
        sizes = dict(zip(names, self.shape, strict=True))
        output_axes = tuple(name for dimension, name in enumerate(names) if dimension not in reduced)
        if not output_axes:
            sizes["one"], output_axes = 1, ("one",)
        over = ",".join(names[dimension] for dimension in sorted(reduced))
        text = f"Y[{','.join(output_axes)}] = {self.function}([{over}], X[{','.join(names)}])"
        stem = f"reduce_{self.function}_{by(self.shape)}_axis{by(sorted(reduced))}"
        return Program(text=text, sizes=sizes, output="Y", axes=output_axes, stem=stem)


class ScanOperator(Operator, tag="scan", kw_only=True, frozen=True):
    """A cumulative ``function`` along one dimension."""

    function: Literal["sum", "prod", "max", "min"]
    shape: Shape
    axis: int = -1
    reverse: bool = False
    exclusive: bool = False

    def program(self) -> Program:
        line = _line(self.shape, self.axis)
        if self.exclusive and self.function in ("max", "min"):
            problem = f"of no values there is no {self.function}"
            raise InputError("exclusive", problem, "remove it, or use sum or prod")
        options = ", reverse" * self.reverse + ", exclusive" * self.exclusive
        text = f"Y[{line.full}] = cum{self.function}({line.axis}, X[{line.full}]{options})"
        sizes = {name: size for name, size in line.sizes.items() if name in line.names}
        words = "_reverse" * self.reverse + "_exclusive" * self.exclusive
        stem = f"scan_{self.function}_{by(self.shape)}_axis{line.dimension}{words}"
        return Program(text=text, sizes=sizes, output="Y", axes=line.names, stem=stem)


class TopK(Operator, tag="topk", kw_only=True, frozen=True):
    """The ``k`` largest or smallest elements along one dimension, in their order, or their places.

    Of equal elements the first comes first, NaN before all. The dimension of the result is ``r``.
    """

    shape: Shape
    k: Size
    axis: int = -1
    largest: bool = True
    result: Literal["values", "indices"] = "values"

    def program(self) -> Program:
        line = _line(self.shape, self.axis)
        length = self.shape[line.dimension]
        if self.k > length:
            raise InputError(
                "k", f"{self.k} of {length} elements along dimension {line.dimension}", f"use 1 to {length}"
            )
        function = ("arg" if self.result == "indices" else "") + ("max" if self.largest else "min")
        axes = tuple("r" if name == line.axis else name for name in line.names)
        text = f"Y[{','.join(axes)}] = {function}([{line.axis}], X[{line.full}], r)"
        sizes = {name: size for name, size in line.sizes.items() if name in line.names}
        words = "_smallest" * (not self.largest) + "_indices" * (self.result == "indices")
        stem = f"topk_{by(self.shape)}_axis{line.dimension}_k{self.k}{words}"
        return Program(text=text, sizes=sizes | {"r": self.k}, output="Y", axes=axes, stem=stem)


class Elementwise(Operator, tag="elementwise", kw_only=True, frozen=True):
    """A function of each element, of two tensors' elements (NumPy broadcasting), or of element and number."""

    function: Unary | Binary
    shape: Shape | None = None
    shapes: Annotated[tuple[Shape, ...], Meta(min_length=1, max_length=2)] | None = None
    scalar: bool = False
    value: float | None = None

    def program(self) -> Program:
        shapes = self._input_shapes()
        common = _broadcast(shapes)
        names = _axis_names(common)
        operands = [
            f"{tensor}[{_broadcast_index(shape, common)}]" for tensor, shape in zip(("X", "X2"), shapes, strict=False)
        ]
        stem = f"elementwise_{self.function}_" + "_".join(by(shape) for shape in dict.fromkeys(shapes))
        if self.scalar:
            value = 2.0 if self.value is None else self.value
            operands.append(f"{value!r}")
            stem += f"_scalar{value:g}".replace("+", "")
        text = f"Y[{','.join(names)}] = {self.function}({', '.join(operands)})"
        return Program(text=text, sizes=dict(zip(names, common, strict=True)), output="Y", axes=names, stem=stem)

    def _input_shapes(self) -> list[tuple[int, ...]]:
        binary = self.function in BINARY
        if (self.shape is None) == (self.shapes is None):
            raise InputError(
                "shape", "exactly one of shape and shapes is needed", "write shape for operands of one shape"
            )
        if not binary and self.scalar:
            raise InputError("scalar", f"{self.function} takes one operand", "remove scalar")
        if self.value is not None and not self.scalar:
            raise InputError("value", "is only used with a scalar operand", 'add "scalar": true or remove value')
        count = 2 if binary and not self.scalar else 1
        if self.shapes is None:
            assert self.shape is not None
            return [self.shape] * count
        if len(self.shapes) != count:
            raise InputError("shapes", f"{self.function} reads {count} tensor(s), got {len(self.shapes)} shape(s)")
        return list(self.shapes)


class Softmax(Operator, tag="softmax", kw_only=True, frozen=True):
    """``exp(x - max) / sum(exp(x - max))`` along one dimension."""

    shape: Shape
    axis: int = -1

    def program(self) -> Program:
        line = _line(self.shape, self.axis)
        text = (
            f"Peak[{line.left}] = max({line.axis}, X[{line.full}])\n"
            f"E[{line.full}] = exp(X[{line.full}] - Peak[{line.read}])\n"
            f"Total[{line.left}] = sum({line.axis}, E[{line.full}])\n"
            f"Y[{line.full}] = E[{line.full}] / Total[{line.read}]"
        )
        stem = f"softmax_{by(self.shape)}_axis{line.dimension}"
        return Program(text=text, sizes=line.sizes, output="Y", axes=line.names, stem=stem)


class LayerNorm(Operator, tag="layer_norm", kw_only=True, frozen=True):
    """``(x - mean) / sqrt(variance + eps) * gamma + beta`` along one dimension."""

    shape: Shape
    axis: int = -1
    eps: Annotated[float, Meta(ge=0)] = 1e-5

    def program(self) -> Program:
        line = _line(self.shape, self.axis)
        axis, count = line.axis, self.shape[line.dimension]
        text = (
            f"Sum[{line.left}] = sum({axis}, X[{line.full}])\n"
            f"Centred[{line.full}] = X[{line.full}] - Sum[{line.read}] / {count}\n"
            f"Squares[{line.left}] = sum({axis}, Centred[{line.full}] * Centred[{line.full}])\n"
            f"Y[{line.full}] = Centred[{line.full}] * rsqrt(Squares[{line.read}] / {count} + {self.eps!r})"
            f" * gamma[{axis}] + beta[{axis}]"
        )
        stem = f"layer_norm_{by(self.shape)}_axis{line.dimension}"
        return Program(text=text, sizes=line.sizes, output="Y", axes=line.names, stem=stem)


class Transpose(Operator, tag="transpose", kw_only=True, frozen=True):
    """``Y`` has dimension ``perm[d]`` of ``X`` as its dimension ``d``, as in NumPy; i0, i1, ... are Y's axes."""

    shape: Shape
    perm: tuple[int, ...]

    def program(self) -> Program:
        if sorted(self.perm) != list(range(len(self.shape))):
            wanted = f"use each of 0 to {len(self.shape) - 1} once"
            raise InputError("perm", f"{list(self.perm)} does not order the {len(self.shape)} dimensions", wanted)
        names = _axis_names(self.shape)
        sizes = {names[i]: self.shape[source] for i, source in enumerate(self.perm)}
        index = [names[self.perm.index(dimension)] for dimension in range(len(self.shape))]
        text = f"Y[{','.join(names)}] = X[{','.join(index)}]"
        return Program(
            text=text, sizes=sizes, output="Y", axes=names, stem=f"transpose_{by(self.shape)}_perm{by(self.perm)}"
        )


def _axis_names(shape: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"i{dimension}" for dimension in range(len(shape)))


def _dimension(axis: int, shape: Sequence[int], where: str) -> int:
    if not -len(shape) <= axis < len(shape):
        raise InputError(where, f"dimension {axis} of a tensor with {len(shape)}", f"use 0 to {len(shape) - 1}")
    return axis % len(shape)


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The common shape of tensors, as NumPy broadcasts them.

    >>> _broadcast([(7, 1), (5, 1, 3)])
    (5, 7, 3)
    """
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    common = tuple(max(extents) for extents in zip(*aligned, strict=True))
    if any(extent not in (1, size) for shape in aligned for extent, size in zip(shape, common, strict=True)):
        first, second = (list(shape) for shape in shapes)
        raise InputError(
            "shapes", f"{first} and {second} do not broadcast", "from the right, extents must be equal or one of them 1"
        )
    return common


def _broadcast_index(shape: tuple[int, ...], common: tuple[int, ...]) -> str:
    """The index that reads a tensor of ``shape`` over the axes of the ``common`` shape.

    >>> _broadcast_index((7, 1), (5, 7, 3))
    'i1,0'
    """
    skipped = len(common) - len(shape)
    return ",".join(
        "0" if extent == 1 and common[skipped + d] != 1 else f"i{skipped + d}" for d, extent in enumerate(shape)
    )


@dataclass(frozen=True)
class _Line:
    """Names for a reduction along one dimension whose result is read back for every element."""

    names: tuple[str, ...]
    dimension: int
    sizes: Mapping[str, int]

    @property
    def axis(self) -> str:
        return self.names[self.dimension]

    @property
    def full(self) -> str:
        return ",".join(self.names)

    @property
    def left(self) -> str:
        """Left-hand side of the reduction's result."""
        return ",".join(name for name in self.names if name != self.axis) or "one"

    @property
    def read(self) -> str:
        """Index that reads the reduction's result."""
        return "0" if self.left == "one" else self.left


def _line(shape: tuple[int, ...], axis: int) -> _Line:
    dimension = _dimension(axis, shape, "axis")
    names = _axis_names(shape)
    sizes = dict(zip(names, shape, strict=True))
    return _Line(names, dimension, sizes if len(shape) > 1 else {**sizes, "one": 1})
