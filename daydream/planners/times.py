"""Milliseconds of operators as PyTorch's planners meet them: a call that is dispatched, a node of an fx graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from daydream.capture.pytorch.arguments import (
    OperatorTraits,
    inputs_of_call,
    ordered_arguments,
    recorded_tensor,
    tensors_in,
    traits_of,
)
from daydream.operators.calls import operator_prices
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.planners.private import private
from hal.support.errors import InputError

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: An operator's name, its arguments and its results.
Call = tuple[str, Inputs, tuple[RecordedTensor, ...]]

#: Elements along a dimension whose length PyTorch does not know, as its own estimators take it.
UNKNOWN_SIZE = 4096

#: Namespaces of operators that exchange data between boards.
COMMUNICATION = ("_c10d_functional", "c10d", "c10d_functional", "symm_mem")

#: Namespaces of operators that run on no device.
_ELSEWHERE = (*COMMUNICATION, "prim", "profiler")


class OperatorTimes:
    """Times of operators on a board, each distinct call priced once.

    A hundred calls priced together take hardly longer than one: whoever knows more of them says so by :meth:`price`.

    Args:
        device: a board's name or its spec.

    Raises:
        InputError: there is no such board, or it runs no library whose kernels are modelled.
    """

    def __init__(self, device: str | DeviceSpec) -> None:
        from hal.catalog import load_device

        self.device = load_device(device) if isinstance(device, str) else device
        if self.device.compute_capability is None:
            problem = f"{self.device.name} runs no cuBLAS and no cuDNN, whose kernels are modelled"
            raise InputError("device", problem, "name an NVIDIA board")
        self._kernels: dict[Call, tuple[tuple[str, float], ...]] = {}

    def __reduce__(self) -> tuple[type[OperatorTimes], tuple[DeviceSpec]]:
        # The compiler pickles its hooks into the keys of its cache: of one board they must always be the same.
        return OperatorTimes, (self.device,)

    @property
    def priced(self) -> Collection[Call]:
        """The distinct calls that were priced so far."""
        return self._kernels.keys()

    def price(self, calls: Iterable[Call | None]) -> None:
        """Prices those of the calls that have no price yet, all at once."""
        missing = [call for call in dict.fromkeys(calls) if call is not None and call not in self._kernels]
        for call, price in zip(missing, operator_prices(missing, self.device) if missing else [], strict=True):
            self._kernels[call] = tuple((kernel.name, kernel.seconds * 1e3) for kernel in price.kernels)

    def kernels(self, call: Call) -> tuple[tuple[str, float], ...]:
        """Name and milliseconds of every kernel that the call launches; none for views and allocations."""
        if call not in self._kernels:
            self.price([call])
        return self._kernels[call]

    def milliseconds(self, call: Call | None) -> float:
        """Time on the device; 0 where nothing is launched."""
        return sum(each for _, each in self.kernels(call)) if call is not None else 0.0

    def of_node(self, node: torch.fx.Node) -> float:
        """Time of a node of an fx graph. The first node of a graph that is asked for has all of them priced."""
        call = node_call(node)
        if call not in self._kernels:
            self.price([call, *(each for _, each in calls_of(node.graph))])
        return self.milliseconds(call)


# Calls


def dispatched_call(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Call | None:
    """The call of an ``OpOverload``; None where it launches nothing, or exchanges data between boards.

    Sizes that are symbols take the value that they have as a hint.
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace in _ELSEWHERE:
        return None
    traits = traits_of(operator)
    if not traits.launches:
        return None
    name, arguments = _of_gpu(traits, ordered_arguments(traits, args, kwargs))
    outputs = tuple(_sized(recorded_tensor(tensor)) for tensor in tensors_in(result))
    return name, sized_inputs(arguments), outputs


def node_call(node: torch.fx.Node) -> Call | None:
    """The call that a node of an fx graph stands for, by the values in its ``meta``.

    None for placeholders, Python functions and what :func:`dispatched_call` has none for.
    """
    if node.op != "call_function" or "val" not in node.meta:
        return None
    values = torch.fx.node.map_arg((list(node.args), dict(node.kwargs)), lambda argument: argument.meta.get("val"))
    return dispatched_call(node.target, *values, node.meta["val"])


def calls_of(graph: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, Call]]:
    """Nodes of a graph that launch something, with their calls."""
    for node in graph.nodes:
        call = node_call(node)
        if call is not None:
            yield node, call


def sized_inputs(arguments: Sequence[Any]) -> Inputs:
    """Arguments as the profiler records them, with the hints of sizes that are symbols."""
    inputs = inputs_of_call([_hinted(argument) for argument in arguments])
    return replace(
        inputs,
        tensors=tuple(None if tensor is None else _sized(tensor) for tensor in inputs.tensors),
        lists=tuple(tuple(_sized(tensor) for tensor in members) for members in inputs.lists),
    )


# Symbolic sizes


def hint(size: Any) -> int:
    """A size that may be a symbol as a number.

    >>> hint(8)
    8
    """
    if type(size) is int:
        return size
    return int(private("torch.fx.experimental.symbolic_shapes", "optimization_hint")(size, fallback=UNKNOWN_SIZE))


def _sized(tensor: RecordedTensor) -> RecordedTensor:
    if all(type(size) is int for size in (*tensor.dims, *tensor.strides)):
        return tensor
    return replace(
        tensor, dims=tuple(hint(size) for size in tensor.dims), strides=tuple(hint(step) for step in tensor.strides)
    )


def _hinted(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return hint(value)
    if isinstance(value, list | tuple):
        return [_hinted(each) for each in value]
    return value


# What runs on a GPU where a CPU, or the compiler, has an operator of its own

_CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_HALVES = (torch.float16, torch.bfloat16)


def _of_gpu(traits: OperatorTraits, arguments: list[Any]) -> tuple[str, list[Any]]:
    """Name and arguments of what a GPU runs in place of operators that processors or the compiler have."""
    if traits.name == "prims::convert_element_type":
        return "aten::_to_copy", arguments
    if traits.name == _CPU_ATTENTION:
        query, key, value, dropout, causal, mask, scale = arguments
        if mask is None and query.dtype in _HALVES:
            name = "aten::_scaled_dot_product_flash_attention"
            return name, [query, key, value, dropout, causal, False, scale]
        name = "aten::_scaled_dot_product_efficient_attention"
        return name, [query, key, value, mask, False, dropout, causal, scale]
    if traits.name == f"{_CPU_ATTENTION}_backward":
        gradient, query, key, value, out, sums, dropout, causal, mask, scale = arguments
        operands = [gradient, query, key, value]
        if mask is None and query.dtype in _HALVES:
            name = "aten::_scaled_dot_product_flash_attention_backward"
            lengths = [None, None, query.shape[2], key.shape[2]]
            return name, [*operands, out, sums, *lengths, dropout, causal, None, None, scale]
        name = "aten::_scaled_dot_product_efficient_attention_backward"
        asked = [True, True, True, False]
        return name, [*operands, mask, out, sums, None, None, dropout, asked, causal, scale]
    return traits.name, arguments
