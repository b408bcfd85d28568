"""Operators of a suite as PyTorch computes them, and what may follow them in the same kernel."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hal.support.errors import InputError

#: Of an element, by type: machines with a GPU lack what the language imports.
DTYPE_BYTES = {"float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "float64": 8}

Tensor = Any
Spec = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An operator with its sizes.

    Attributes:
        inputs: shape of each input as a bundle's kernel takes it, in the kernel's order.
        output: its shape.
        leading: per input the dimension that belongs to the output's first one, None where all of it is needed; None
            instead of the whole if the output cannot be taken apart.
        flop: multiplications and additions; one per element of the output where there is no sum.
        dtype: type of the inputs that are neither numbers nor scales; float32 where the operator names none.
        output_dtype: that of the output where it is another.
        numbers: inputs of int32 that number something, and how many there are of it.
        are_numbers_ordered: whether they come in order.
        scales: inputs of float32 that are positive.
    """

    suite: str
    spec: Spec
    inputs: Mapping[str, tuple[int, ...]]
    output: tuple[int, ...]
    leading: Mapping[str, int | None] | None
    flop: float
    run: Callable[[Mapping[str, Tensor]], Callable[[], Tensor]] = field(repr=False)
    dtype: str = ""
    output_dtype: str = ""
    numbers: Mapping[str, int] = field(default_factory=dict)
    are_numbers_ordered: bool = False
    scales: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.dtype or str(self.spec.get("dtype", "float32")))
        object.__setattr__(self, "output_dtype", self.output_dtype or self.dtype)

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def op(self) -> str:
        return str(self.spec["op"])

    def dtype_of(self, name: str, dtype: str = "") -> str:
        """Type of an input of a kernel whose own type is `dtype`, the operator's by default."""
        return "int32" if name in self.numbers else "float32" if name in self.scales else dtype or self.dtype

    @property
    def compulsory_bytes(self) -> int:
        """Inputs and output once, each in its own type."""
        inputs = sum(DTYPE_BYTES[self.dtype_of(name)] * math.prod(shape) for name, shape in self.inputs.items())
        return inputs + DTYPE_BYTES[self.output_dtype] * math.prod(self.output)

    def bind(self, tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        """The library's call on these tensors, which may be a part along the first dimension; gives the output."""
        return self.run(tensors)

    def part(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        """The inputs of rows `start` to `stop` of the output."""
        assert self.leading is not None
        parts = {}
        for name, tensor in tensors.items():
            dimension = self.leading[name]
            parts[name] = tensor if dimension is None else tensor.narrow(dimension, start, stop - start)
        return parts


def torch_module() -> Any:
    """PyTorch, imported when it is needed."""
    return importlib.import_module("torch")


def functional_module() -> Any:
    """Its functions of networks."""
    return importlib.import_module("torch.nn.functional")


@dataclass(frozen=True)
class Epilogue:
    """Operations behind a product or a convolution; `bias` is the output's dimension that a bias runs along."""

    steps: tuple[Any, ...]
    bias: int | None
    residual: bool

    def inputs(self, output: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of what it reads besides the output."""
        shapes = {} if self.bias is None else {"bias": (output[self.bias],)}
        return shapes | ({"residual": output} if self.residual else {})

    def leading(self) -> dict[str, int | None]:
        """Of each of these the dimension that belongs to the output's first one, None where all is needed."""
        dimensions: dict[str, int | None] = {} if self.bias is None else {"bias": 0 if self.bias == 0 else None}
        return dimensions | ({"residual": 0} if self.residual else {})

    def apply(self, value: Tensor, tensors: Mapping[str, Tensor], skip_bias: bool) -> Tensor:
        """The steps one after another; a bias that the library has added already is left out."""
        for step in self.steps:
            if isinstance(step, str):
                value = function_of(step)(value)
            elif step["function"] == "bias_add" and not skip_bias:
                assert self.bias is not None
                value = value + tensors["bias"].view(-1, *[1] * (value.dim() - 1 - self.bias))
            elif step["function"] == "residual_add":
                value = value + tensors["residual"]
            elif step["function"] == "scale":
                value = value * step["value"]
        return value

    @property
    def bias_first(self) -> bool:
        """True if a bias is added before anything else."""
        return bool(self.steps) and not isinstance(self.steps[0], str) and self.steps[0]["function"] == "bias_add"


def epilogue_of(spec: Spec, axes: Sequence[str]) -> Epilogue:
    """The epilogue of an operator whose output has these axes.

    Raises:
        InputError: it has two biases or two residuals.
    """
    steps = tuple(spec.get("epilogue", ()))
    named = [step for step in steps if not isinstance(step, str)]
    biases = [step["axis"] for step in named if step["function"] == "bias_add"]
    residuals = [step for step in named if step["function"] == "residual_add"]
    if len(biases) > 1 or len(residuals) > 1:
        raise InputError("epilogue", "has two biases or two residuals", "measure such an operator in two steps")
    return Epilogue(steps, axes.index(biases[0]) if biases else None, bool(residuals))


def function_of(name: str) -> Callable[..., Tensor]:
    """PyTorch's function of this name."""
    torch, functional = torch_module(), functional_module()
    if name in ("relu", "gelu", "silu"):
        return getattr(functional, name)
    names = {"min": "minimum", "max": "maximum"}
    return getattr(torch, names.get(name, name))
