"""Base of every named operator: its keys, the program that it writes, and the epilogue after that."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypeAlias

from msgspec import Meta, Struct

from hal.support.errors import InputError
from sokoban.language.checks import MAX_AXIS_SIZE
from sokoban.language.functions import FUNCTIONS
from sokoban.language.names import unused_name

#: Sizes of axes and shapes of tensors in JSON.
Size = Annotated[int, Meta(ge=1, le=MAX_AXIS_SIZE)]
Shape = Annotated[tuple[Size, ...], Meta(min_length=1, max_length=8)]
DType = Literal["float16", "bfloat16", "float32", "float64"]
#: Element types of the operands of a matrix product, and of its result.
OperandDType = Literal["float16", "bfloat16", "float32", "float64", "int8", "float8_e4m3fn", "float8_e5m2"]
OutputDType = Literal["float16", "bfloat16", "float32", "float64", "int32"]
#: Element types of a tensor of an expression.
AnyDType = Literal["float16", "bfloat16", "float32", "float64", "int8", "int32", "float8_e4m3fn", "float8_e5m2"]
Accumulate = Literal["float32", "float64", "int32"]

if TYPE_CHECKING:
    Activation: TypeAlias = str
else:
    Activation = Literal[tuple(name for name, function in FUNCTIONS.items() if function.is_activation)]


class BiasAdd(Struct, tag_field="function", tag="bias_add", forbid_unknown_fields=True, frozen=True):
    """Adds the vector ``bias`` along one axis of the output."""

    axis: str


class ResidualAdd(Struct, tag_field="function", tag="residual_add", forbid_unknown_fields=True, frozen=True):
    """Adds the tensor ``residual``, which has the output's shape."""


class Scale(Struct, tag_field="function", tag="scale", forbid_unknown_fields=True, frozen=True):
    """Multiplies by a number."""

    value: float


EpilogueStep = Activation | BiasAdd | ResidualAdd | Scale
#: Words of a derived name for the steps that are no functions.
STEP_WORDS = {"bias_add": "bias", "residual_add": "residual", "scale": "scale"}


@dataclass(frozen=True, kw_only=True)
class Program:
    """Program of a named operator: a text of the language and what the text does not say.

    Attributes:
        text: statements of the language.
        sizes: elements of every axis.
        output: name of the output.
        axes: axes of the output, in order.
        stem: derived name of the operator, without its types.
        shapes: shapes of inputs that the text does not tell, by tensor.
        external_shapes: the caller's shapes of tensors, where they differ.
        bias_axes: an axis name of the interface -> the axes that index it, where a grouped operator splits it.
        dtypes: dtypes of the tensors that have another than ``default_dtype``.
        default_dtype: dtype of all other tensors; None stands for the operator's own.
    """

    text: str
    sizes: Mapping[str, int]
    output: str
    axes: tuple[str, ...]
    stem: str
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    external_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    bias_axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    default_dtype: str | None = None


class Operator(Struct, tag_field="op", forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Keys that every operator takes.

    Each operator adds its own, and ``program()``: itself in the expression language, or an InputError where its keys
    contradict each other. :data:`sokoban.language.named.NamedOperator` is the type that has both.

    ``allow_tf32``: products of float32 may round their operands to TensorFloat-32.
    """

    name: str | None = None
    dtype: DType = "float32"
    accumulate: Accumulate | None = None
    allow_tf32: bool = False
    epilogue: tuple[EpilogueStep, ...] = ()


class NamedProgram(Protocol):
    """An :class:`Operator` as the language sees it: the keys that all have, and the program that it writes."""

    @property
    def dtype(self) -> str:
        """Element type of the tensors that the program says nothing of."""

    @property
    def accumulate(self) -> Accumulate | None:
        """The dtype of the arithmetic; None for the usual one."""

    @property
    def allow_tf32(self) -> bool:
        """True if products of float32 may round their operands."""

    @property
    def epilogue(self) -> tuple[EpilogueStep, ...]:
        """Steps behind the program, in order."""

    def program(self) -> Program:
        """The operator in the expression language, without its epilogue."""


# Epilogues


def with_epilogue(program: Program, steps: Sequence[EpilogueStep]) -> Program:
    """The program with one more statement ``Out[...] = ...`` that applies ``steps`` in order to its output."""
    if not steps:
        return program
    taken = set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", program.text)) | set(program.sizes)
    axes = ",".join(program.axes)
    value = f"{program.output}[{axes}]"
    external = dict(program.external_shapes)
    words = []
    for position, step in enumerate(steps):
        if isinstance(step, BiasAdd):
            split = program.bias_axes.get(step.axis, (step.axis,) if step.axis in program.axes else ())
            if not split:
                usable = ", ".join(
                    axis for axis in program.axes if axis not in program.bias_axes or program.bias_axes[axis]
                )
                raise InputError(f"epilogue[{position}].axis", f"no axis {step.axis!r}", f"use one of {usable}")
            tensor = taken_name("bias", taken)
            value = f"{value} + {tensor}[{','.join(split)}]"
            if len(split) > 1:
                external[tensor] = [math.prod(program.sizes[axis] for axis in split)]
        elif isinstance(step, ResidualAdd):
            tensor = taken_name("residual", taken)
            value = f"{value} + {tensor}[{axes}]"
            if program.output in external:
                external[tensor] = external[program.output]
        else:
            value = f"({value}) * {step.value!r}" if isinstance(step, Scale) else f"{step}({value})"
        words.append(step if isinstance(step, str) else STEP_WORDS[tag_of(step)])
    output = taken_name("Out", taken)
    if program.output in external:
        external[output] = external.pop(program.output)
    return replace(
        program, text=f"{program.text}\n{output}[{axes}] = {value}", output=output,
        external_shapes=external, stem="_".join([program.stem, *words]),
    )  # fmt: skip


# Names


def tag_of(struct: Struct | type[Struct]) -> str:
    """The word that names a struct in JSON: ``matmul``, ``bias_add``."""
    return str(struct.__struct_config__.tag)


def by(value: int | Sequence[int]) -> str:
    """Extents within a name.

    >>> by(64), by([64, 32])
    ('64', '64x32')
    """
    return str(value) if isinstance(value, int) else "x".join(map(str, value))


def taken_name(stem: str, taken: set[str]) -> str:
    """A name like ``stem`` that is not yet in ``taken``, and is added to it."""
    name = unused_name(stem, taken)
    taken.add(name)
    return name
