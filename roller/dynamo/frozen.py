"""Graphs whose parameters are constants of their code, made anew where one is another tensor or was written to.

Dynamo hands parameters to a graph as inputs. Where no gradients are recorded they are the same tensors at every call,
and what can be computed from them alone is computed once: batch norms in weights, weights in the order that kernels
read.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch._dynamo.source import is_from_unspecialized_param_buffer_source

log = logging.getLogger("roller.backend")

#: A graph module and its inputs -> its code.
Compiler = Callable[[Any, Sequence[Any]], Callable[..., Any]]


class FrozenGraph:
    """A graph of Dynamo's as a function of its inputs, parameters among them.

    Args:
        compiler: of graph modules whose parameters are their own; it may take the module apart.
        module: the graph.
        inputs: examples of what it is called with.
    """

    _code: Callable[..., Any]
    _parameters: list[Any]
    _own: list[Any]
    _watched: list[Any]
    _versions: list[int]
    _is_new: bool

    def __init__(self, compiler: Compiler, module: Any, inputs: Sequence[Any]) -> None:
        self._compiler, self._module = compiler, module
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        parameters = {position: _parameter(node) for position, node in enumerate(placeholders)}
        self._positions = [position for position, tensor in parameters.items() if tensor is not None]
        self._others = [position for position in range(len(placeholders)) if position not in set(self._positions)]
        self._parameters_of, self._others_of = _places(self._positions), _places(self._others)
        own = [*module.parameters(), *module.buffers()]
        self._compile([parameters[position] for position in self._positions], own, inputs)

    def __call__(self, *arguments: Any) -> Any:
        """The graph's outputs."""
        # Hundreds of parameters a call: in loops of C.
        given = self._parameters_of(arguments)
        if not all(map(is_, given, self._parameters)) or _versions(self._watched) != self._versions:
            log.warning("parameters have changed since their graph was compiled: its constants are made anew")
            self._compile(list(given), self._own, arguments)
        outputs = self._code(*self._others_of(arguments))
        if self._is_new:
            self._is_new = False
            # What the graph itself writes to, statistics of a batch norm in training, is no constant of its code.
            now = _versions(self._watched)
            pairs = zip(self._watched, self._versions, now, strict=True)
            self._watched = [tensor for tensor, before, after in pairs if before == after]
            self._versions = _versions(self._watched)
        return outputs

    def _compile(self, parameters: list[Any], own: list[Any], inputs: Sequence[Any]) -> None:
        self._parameters, self._own, self._is_new = parameters, own, True
        # Tensors of inference mode count no versions.
        self._watched = [tensor for tensor in (*parameters, *own) if not tensor.is_inference()]
        self._versions = _versions(self._watched)
        module = torch.fx.GraphModule(self._module, copy.deepcopy(self._module.graph))
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        for number, (position, tensor) in enumerate(zip(self._positions, parameters, strict=True)):
            node, name = placeholders[position], f"roller_parameter_{number}"
            if isinstance(tensor, torch.nn.Parameter):
                module.register_parameter(name, tensor)
            else:
                module.register_buffer(name, tensor)
            with module.graph.inserting_before(node):
                constant = module.graph.get_attr(name)
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            module.graph.erase_node(node)
        module.recompile()
        self._code = self._compiler(module, [inputs[position] for position in self._others])


def _versions(tensors: Sequence[Any]) -> list[int]:
    return list(map(attrgetter("_version"), tensors))


def _places(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the elements of a sequence at some positions."""
    if len(positions) < 2:
        return lambda values: [values[position] for position in positions]
    return itemgetter(*positions)


def _parameter(node: Any) -> Any:
    """The parameter or buffer that an input of a graph is; None where it is anything else."""
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    if source is None or not is_from_unspecialized_param_buffer_source(source):
        return None
    tensor = argument.example
    return tensor if isinstance(tensor, torch.Tensor) else None
