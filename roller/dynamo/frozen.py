"""Graphs whose parameters are constants of their code, made anew where one is another tensor or was written to.

Dynamo hands parameters to a graph as inputs. Where no gradients are recorded they are the same tensors at every call,
and what can be computed from them alone is computed once: batch norms in weights, weights in the order that kernels
read.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any, Protocol

import torch
from torch._dynamo.aot_compile_types import SerializableCallable
from torch._dynamo.source import is_from_unspecialized_param_buffer_source

from roller.dynamo.constants import Snapshot
from roller.dynamo.stored.graphs import CompiledGraph
from roller.dynamo.stored.packages import GraphPackage, parameter_name

log = logging.getLogger("roller.backend")

#: Sets of parameters that a graph was called with one after another and that have not come back: as many blocks of a
#: model may be alike. And calls for each set after which one that had come back is forgotten.
MOST_ONCE, MOST_ROUNDS = 128, 16

#: A graph module and its inputs -> its code.
Compiler = Callable[[Any, Sequence[Any]], CompiledGraph]


class GraphSource(Protocol):
    """A graph before its parameters are known."""

    @property
    def positions(self) -> Sequence[int]:
        """Where parameters are among the graph's inputs."""

    @property
    def other_positions(self) -> Sequence[int]:
        """Where the others are."""

    @property
    def own(self) -> Sequence[Any]:
        """Tensors of the graph's own."""

    def code(self, parameters: Sequence[Any], inputs: Sequence[Any]) -> Callable[..., Any]:
        """The graph with some parameters as a function of its other inputs.

        Args:
            parameters: in the order of their positions.
            inputs: examples of the others.
        """

    def package(self) -> GraphPackage | None:
        """The graph for another process, once it is compiled; None where it cannot leave this one."""


@dataclass
class FrozenCode:
    """Code with some parameters for constants.

    Attributes:
        parameters: in the order of their positions.
        constants: tensors whose numbers are constants of the code, when it was made.
        code: a function of the other inputs.
        is_new: true before its first call.
        calls: how many there were.
        last_call: the number of the latest, among those of all parameters.
        returns: true where others were called between two calls of this one.
    """

    parameters: list[Any]
    constants: Snapshot
    code: Callable[..., Any]
    is_new: bool = True
    calls: int = 0
    last_call: int = 0
    returns: bool = False


class FrozenCodes:
    """Code of a graph by its parameters: of blocks that are called in turn all, of parameters that take the place of
    others the latest alone, since the constants of each take as much memory as its parameters."""

    def __init__(self) -> None:
        self._codes: dict[tuple[int, ...], FrozenCode] = {}
        self._latest: FrozenCode | None = None
        self._left: set[tuple[int, ...]] = set()
        self._call = 0

    def __len__(self) -> int:
        return len(self._codes)

    def find(self, parameters: Sequence[Any]) -> FrozenCode | None:
        """The code with these parameters; None where there is none."""
        latest = self._latest
        # Hundreds of parameters a call: in loops of C.
        if latest is not None and all(map(is_, parameters, latest.parameters)):
            return latest
        return self._codes.get(tuple(map(id, parameters)))

    def put(self, frozen: FrozenCode) -> None:
        """Keep code, in the place of that with the same parameters."""
        key, latest = tuple(map(id, frozen.parameters)), self._latest
        before = self._codes.get(key)
        if before is not None:
            frozen.returns = before.returns
            self._codes[key] = frozen
            return
        frozen.returns = key in self._left
        # Called more than once and then left: other parameters have taken its place, unless it comes back.
        if latest is not None and latest.calls > 1 and not latest.returns:
            self._leave(latest)
        once = [code for code in self._codes.values() if not code.returns]
        if len(once) >= MOST_ONCE:
            self._leave(once[0])
        for code in list(self._codes.values()):
            if code.returns and self._call - code.last_call > MOST_ROUNDS * len(self._codes):
                self._leave(code)
        self._codes[key] = frozen

    def count(self, frozen: FrozenCode) -> None:
        """Note a call of some code."""
        self._call += 1
        frozen.returns = frozen.returns or (frozen.calls > 0 and frozen is not self._latest)
        frozen.calls, frozen.last_call, self._latest = frozen.calls + 1, self._call, frozen

    def _leave(self, frozen: FrozenCode) -> None:
        key = tuple(map(id, frozen.parameters))
        if len(self._left) >= MOST_ONCE:
            self._left.clear()
        if self._codes.pop(key, None) is not None:
            self._left.add(key)


class FrozenGraph(SerializableCallable):
    """A graph of Dynamo's as a function of its inputs, parameters among them.

    One graph serves all blocks of a model that are alike, where something in them ends a graph, so that it is called
    with the parameters of each in turn. PyTorch can write it to a file where its source has a package, for another
    process (``aot_compile`` of a compiled model's ``forward``).

    Args:
        source: the graph.
    """

    def __init__(self, source: GraphSource) -> None:
        self._source = source
        self._codes = FrozenCodes()
        self._parameters_of, self._others_of = _places(source.positions), _places(source.other_positions)

    @staticmethod
    def of_module(compiler: Compiler, module: Any, inputs: Sequence[Any]) -> FrozenGraph:
        """A graph of Dynamo's, compiled with the parameters that it was captured with.

        Args:
            compiler: of graph modules whose parameters are their own; it may take the module apart.
            module: the graph.
            inputs: examples of what it is called with.
        """
        source = ModuleSource(compiler, module)
        graph = FrozenGraph(source)
        graph._compile(source.parameters, inputs)
        return graph

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The graph's outputs."""
        given = self._parameters_of(arguments)
        frozen = self._codes.find(given)
        if frozen is not None and not frozen.constants.holds():
            log.warning("parameters were written to since their graph was compiled: its constants are made anew")
            frozen = None
        if frozen is None:
            frozen = self._compile(list(given), arguments)
        self._codes.count(frozen)
        outputs = frozen.code(*self._others_of(arguments))
        if frozen.is_new:
            frozen.is_new = False
            # What the graph itself writes to, statistics of a batch norm in training, is no constant of its code.
            frozen.constants = frozen.constants.unwritten()
        return outputs

    def _compile(self, parameters: list[Any], inputs: Sequence[Any]) -> FrozenCode:
        constants = Snapshot([*parameters, *self._source.own])
        code = self._source.code(parameters, [inputs[position] for position in self._source.other_positions])
        frozen = FrozenCode(parameters, constants, code)
        self._codes.put(frozen)
        return frozen

    def package(self) -> GraphPackage | None:
        """The graph for another process; None where it cannot leave this one."""
        return self._source.package()

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        """A graph as PyTorch writes it.

        Raises:
            RuntimeError: it cannot leave this process.
        """
        package = fn.package()
        if package is None:
            raise RuntimeError(
                'the graph cannot be written to a file: those of processors can, with fallback="inductor" and without'
                " tensors besides parameters; compile it in each process"
            )
        return bytes(package.to_bytes())

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> FrozenGraph:
        """A graph as PyTorch reads it.

        Raises:
            RuntimeError: it was compiled for another processor, or by another release.
        """
        return FrozenGraph(GraphPackage.from_bytes(data))


class ModuleSource:
    """A graph module of Dynamo's.

    Args:
        compiler: of graph modules whose parameters are their own.
        module: the graph.
    """

    def __init__(self, compiler: Compiler, module: Any) -> None:
        self._compiler, self._module = compiler, module
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        found = {position: _parameter(node) for position, node in enumerate(placeholders)}
        parameters = {position: tensor for position, tensor in found.items() if tensor is not None}
        self.positions, self.parameters = list(parameters), list(parameters.values())
        self.other_positions = [position for position in found if position not in parameters]
        self.own = [*module.parameters(), *module.buffers()]
        self._compiled: CompiledGraph | None = None

    def code(self, parameters: Sequence[Any], inputs: Sequence[Any]) -> Callable[..., Any]:
        """As :class:`GraphSource` has it. Code of the module itself is written by who compiles it: one that is found in
        a store needs none."""
        module = torch.fx.GraphModule(self._module, copy.deepcopy(self._module.graph))
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        for number, (position, tensor) in enumerate(zip(self.positions, parameters, strict=True)):
            node, name = placeholders[position], parameter_name(number)
            if isinstance(tensor, torch.nn.Parameter):
                module.register_parameter(name, tensor)
            else:
                module.register_buffer(name, tensor)
            with module.graph.inserting_before(node):
                constant = module.graph.get_attr(name)
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            module.graph.erase_node(node)
        self._compiled = self._compiler(module, inputs)
        return self._compiled.run

    def package(self) -> GraphPackage | None:
        """As :class:`GraphSource` has it."""
        if self._compiled is None or self._compiled.stored is None or self._compiled.shelf is None or self.own:
            return None
        return GraphPackage.of(
            self._compiled.stored, self._compiled.shelf, tuple(self.positions), tuple(self.other_positions)
        )


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
