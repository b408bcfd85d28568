"""Calls of ATen operators in the profiler's spelling: names, sizes, types and values of their arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from daydream.operators.inputs import Inputs, RecordedTensor

#: Element types as the profiler spells them.
TYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "double", torch.float32: "float", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16",
    torch.int64: "long int", torch.int32: "int", torch.int16: "short int", torch.int8: "signed char",
    torch.uint8: "unsigned char", torch.bool: "bool",
    torch.complex64: "c10::complex<float>", torch.complex128: "c10::complex<double>",
    torch.float8_e4m3fn: "c10::Float8_e4m3fn", torch.float8_e5m2: "c10::Float8_e5m2",
}  # fmt: skip

#: Operators that only allocate.
_ALLOCATIONS = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh")
)


class OperatorTraits(NamedTuple):
    """What the schema of an operator says.

    Attributes:
        name: as the profiler writes it.
        overload: ``default`` where it has no other.
        parameters: names of the arguments in order.
        defaults: of the arguments, None where there is none.
        launches: whether a device runs kernels for it.
    """

    name: str
    overload: str
    parameters: tuple[str, ...]
    defaults: tuple[Any, ...]
    launches: bool


@cache
def traits_of(operator: Any) -> OperatorTraits:
    """What the schema of an ``OpOverload`` says."""
    schema = operator._schema
    # A result that shares an argument's memory and does not write it is a view.
    views = bool(schema.returns) and all(
        returned.alias_info is not None and not returned.alias_info.is_write for returned in schema.returns
    )
    return OperatorTraits(
        schema.name,
        schema.overload_name or "default",
        tuple(argument.name for argument in schema.arguments),
        tuple(argument.default_value if argument.has_default_value() else None for argument in schema.arguments),
        not views and schema.name not in _ALLOCATIONS and schema.name not in _VIEWS_BY_NAME,
    )


#: Operators that make views although their schemas do not say so, or move no data.
_VIEWS_BY_NAME = frozenset(
    f"aten::{name}" for name in ("_unsafe_view", "_reshape_alias", "detach", "set_", "resize_", "_local_scalar_dense")
)


def recorded_tensor(tensor: torch.Tensor) -> RecordedTensor:
    """Sizes, type and strides of a tensor."""
    return RecordedTensor(tuple(tensor.shape), TYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.stride()))


def ordered_arguments(traits: OperatorTraits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments of a call in the order of the schema."""
    values = list(args)
    for position in range(len(values), len(traits.parameters)):
        values.append(kwargs.get(traits.parameters[position], traits.defaults[position]))
    return values


def inputs_of_call(arguments: Sequence[Any]) -> Inputs:
    """The arguments of a call as the profiler records them."""
    tensors: list[RecordedTensor | None] = []
    values: list[str] = []
    lists: list[tuple[RecordedTensor, ...]] = []
    for argument in arguments:
        is_tensor = isinstance(argument, torch.Tensor)
        members = tensors_in(argument) if isinstance(argument, list | tuple) else ()
        tensors.append(recorded_tensor(argument) if is_tensor else None)
        lists.append(tuple(recorded_tensor(member) for member in members))
        values.append("" if is_tensor or lists[-1] or argument is None else value_text(argument))
    return Inputs(tuple(tensors), tuple(values), tuple(lists) if any(lists) else ())


def value_text(value: Any) -> str:
    """A value that is no tensor as the profiler's "Concrete Inputs" have it."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(value_text(each) for each in value) + "]"
    return str(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of an argument or a result, those of lists and mappings one after the other."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(member)
