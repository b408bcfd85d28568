"""Constants of a frozen graph as what they follow from: functions of parameters, recorded while they are folded.

A graph that was compiled before gets its constants from the parameters at hand, by the same functions.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.constant_folding
import torch._inductor.freezing  # noqa: F401, takes the name that is patched below while it is what it was
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakTensorKeyDictionary

from roller.dynamo.constants import constant_of, dense_copies, on_real_tensors

#: Elements of the largest tensor that is kept as it is where it follows from no parameter.
_MOST_ELEMENTS = 4096

#: A tensor as another one with the same numbers, in an order of its elements.
_CLONE = "aten.clone.default"


class UnknownOriginError(ValueError):
    """A constant of which nothing says what it follows from."""


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter or buffer of a graph module, by its name."""

    name: str


@dataclass(frozen=True, eq=False)
class Literal:
    """A tensor of the graph's own."""

    tensor: Any


@dataclass(frozen=True, eq=False)
class Derived:
    """A function of other constants.

    Attributes:
        function: of PyTorch, such as ``aten.mul.Tensor``; ``getitem`` takes one of several results.
        arguments: with origins in the place of tensors.
        keywords: likewise.
    """

    function: str
    arguments: Any
    keywords: Any


#: Where a constant comes from.
Origin = Parameter | Literal | Derived


class Derivations:
    """Origins of the constants of a graph module, from its parameters on.

    Args:
        module: before it is compiled.
    """

    def __init__(self, module: Any) -> None:
        self._origins: Any = WeakTensorKeyDictionary()
        for name, tensor in tensors_of(module).items():
            self._origins.setdefault(tensor, Parameter(name))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """A block in which constants that Inductor folds are recorded."""
        folding = torch._inductor.constant_folding
        replace = folding.replace_node_with_constant

        def recording(module: Any, node: Any, constant: Any = None, name: str | None = None) -> None:
            if constant is not None:
                try:
                    self._origins[constant] = self._of_node(module, node)
                except UnknownOriginError:
                    self._origins[constant] = None
            replace(module, node, constant, name)

        with patch.object(folding, "replace_node_with_constant", recording):
            yield

    def origin(self, tensor: Any) -> Origin:
        """Where a constant comes from.

        Raises:
            UnknownOriginError: nothing was recorded of it.
        """
        origin: Origin | None = self._origins.get(tensor)
        if origin is None:
            raise UnknownOriginError("a constant that follows from no parameter")
        return origin

    def _of_node(self, module: Any, node: Any) -> Origin:
        if node.op == "get_attr":
            tensor = constant_of(module, node)
            if tensor not in self._origins and tensor.numel() <= _MOST_ELEMENTS and not tensor.is_mkldnn:
                self._origins[tensor] = Literal(tensor)
            return self.origin(tensor)
        if node.op != "call_function":
            raise UnknownOriginError(f"a node that is {node.op}")
        is_function = isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
        if not is_function and node.target is not operator.getitem:
            raise UnknownOriginError(f"{node.target} is no function of PyTorch")

        def origin_of(each: Any) -> Any:
            return self._of_node(module, each) if isinstance(each, torch.fx.Node) else each

        arguments, keywords = map_aggregate((node.args, dict(node.kwargs)), origin_of)
        return Derived("getitem" if node.target is operator.getitem else str(node.target), arguments, keywords)


def tensors_of(module: Any) -> dict[str, Any]:
    """Parameters and buffers of a module by name; a tensor has as many as lead to it."""
    named = (module.named_parameters, module.named_buffers)
    return dict(chain.from_iterable(each(remove_duplicate=False) for each in named))


def is_copied(origin: Origin) -> bool:
    """True for what :func:`computed` writes into memory of its own choice, where it fits."""
    return isinstance(origin, Derived) and origin.function == _CLONE


def computed(origins: Mapping[str, Origin], parameters: Mapping[str, Any]) -> tuple[dict[str, Any], Future[None]]:
    """Tensors of origins, by the same names, from parameters; copies lie together, and a thread writes their numbers.

    Returns:
        The tensors, and what is done once all have their numbers.

    Raises:
        KeyError: a parameter is missing.
    """
    values: dict[Origin, Any] = {}
    # Weights in the order that kernels read are copies, and most of all bytes: each is written once.
    copied = {each: None for each in origins.values() if isinstance(each, Derived) and is_copied(each)}

    def value_of(origin: Any) -> Any:
        if not isinstance(origin, Origin):
            return origin
        if origin not in values:
            match origin:
                case Parameter(name):
                    values[origin] = parameters[name]
                case Literal(tensor):
                    values[origin] = tensor
                case Derived(function, arguments, keywords):
                    places, names = map_aggregate((arguments, keywords), value_of)
                    values[origin] = _function(function)(*places, **names)
        return values[origin]

    with on_real_tensors():
        sources = [value_of(each.arguments[0]) for each in copied]
        orders = [each.keywords.get("memory_format") or torch.preserve_format for each in copied]
        # Before there are copies: none of the others may read one whose numbers are still to come.
        for origin in origins.values():
            if origin not in copied:
                value_of(origin)
        copies, filled = dense_copies(list(zip(sources, orders, strict=True)))
        values.update(zip(copied, copies, strict=True))
        return {name: values[origin] for name, origin in origins.items()}, filled


def _function(name: str) -> Any:
    return operator.getitem if name == "getitem" else reduce(getattr, name.split("."), torch.ops)
