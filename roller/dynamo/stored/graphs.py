"""Frozen graphs of a processor as they were compiled before: Inductor's code, the kernels that it calls, and what its
constants follow from. One that is stored needs neither AOTAutograd nor the passes that freeze, price and prove.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, autograd_cache_key
from torch._functorch._aot_autograd.schemas import AOTConfig, OutputType, PlainTensorMeta
from torch._guards import TracingContext, tracing
from torch._inductor.codecache import BypassFxGraphCache
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from codegen.bundle.reader import read_bundle
from hal.support.errors import InputError
from hal.support.store import Store, digest
from roller.dynamo.constants import is_looked_up, storages_of, use_huge_pages
from roller.dynamo.kernels import KernelShelf
from roller.dynamo.operators import RegionOperator, definition_of, region_operator
from roller.dynamo.rewriting import Decision
from roller.dynamo.stored.derivations import Derivations, Origin, UnknownOriginError, computed, is_copied, tensors_of

#: Folder of a shelf that holds graphs.
GRAPHS = "graphs"


@dataclass(frozen=True)
class StoredGraph:
    """A compiled graph.

    Attributes:
        decisions: about its sums of products.
        operators: of ours that its code calls.
        constants: of its code, by name.
        looked_up: names of constants of which it reads a few rows, tables of embeddings.
        code: Inductor's.
    """

    decisions: tuple[Decision, ...]
    operators: tuple[RegionOperator, ...]
    constants: dict[str, Origin]
    looked_up: frozenset[str]
    code: CompiledFxGraph

    def loaded(self, parameters: Mapping[str, Any], shelf: KernelShelf) -> Callable[..., Any]:
        """The code as a function of the graph's inputs, parameters excepted.

        Args:
            parameters: of the graph, by name.
            shelf: where its kernels are.

        Raises:
            InputError: a kernel is gone, or cannot be loaded on this machine.
            KeyError: a parameter is missing.
        """
        code = copy.copy(self.code)
        code.constants, filled = computed(self.constants, parameters)
        for each in self.operators:
            region_operator(read_bundle(shelf.folder / each.kernel), each.shape, each.memory_format, each.formats)
        staying = self.looked_up.union(name for name, origin in self.constants.items() if is_copied(origin))
        moving = [tensor for name, tensor in code.constants.items() if name not in staying]
        use_huge_pages(moving, storages_of(parameters.values()))
        code.after_deserialization(CompiledFxGraphConstants())

        def run(*inputs: Any) -> Any:
            filled.result()
            return code(list(inputs))

        return run


@dataclass(frozen=True)
class CompiledGraph:
    """A graph as it runs in this process.

    Attributes:
        run: a function of its inputs, parameters excepted.
        stored: what another process could load; None where there is no such thing.
        shelf: where its kernels are; None where nothing is stored.
    """

    run: Callable[..., Any]
    stored: StoredGraph | None = None
    shelf: KernelShelf | None = None


@dataclass
class Recording:
    """A graph on its way to compiled code.

    Attributes:
        derivations: of its constants.
        input_count: how many tensors it is called with, besides parameters.
        graphs: stored ones, as the compiler finished them.
    """

    derivations: Derivations
    input_count: int
    graphs: list[StoredGraph | None] = field(default_factory=list)

    @property
    def stored(self) -> StoredGraph | None:
        """The graph, where it is one and can be stored."""
        return self.graphs[0] if len(self.graphs) == 1 else None

    def finish(self, module: Any, inputs: Sequence[Any], code: Any, decisions: Sequence[Decision]) -> None:
        """Record a graph that Inductor compiled, once kernels are in it and its constants are folded."""
        self.graphs.append(self._stored(module, inputs, code, decisions))

    def _stored(self, module: Any, inputs: Sequence[Any], code: Any, decisions: Sequence[Decision]) -> Any:
        context = TracingContext.try_get()
        if context is None or not isinstance(code, CompiledFxGraph) or len(inputs) != self.input_count:
            return None
        if not _is_function(context.fw_metadata, module) or any(decision.has_failed for decision in decisions):
            return None
        names = {name: getattr(module, own) for name, own in code.frozen_param_names.items()}
        try:
            tensors = {**(code.constants or {}), **names}
            constants = {name: self.derivations.origin(tensor) for name, tensor in tensors.items()}
        except UnknownOriginError:
            return None
        stored = copy.copy(code)
        stored.prepare_for_serialization()
        stored.constants, stored.frozen_param_names = {}, {}
        definitions = {definition_of(node.target) for node in module.graph.nodes}
        operators = tuple(each for each in definitions if each is not None)
        tables = {node.target for node in module.graph.find_nodes(op="get_attr") if is_looked_up(node)}
        looked_up = frozenset(name for name, own in code.frozen_param_names.items() if own in tables)
        return StoredGraph(tuple(decisions), operators, constants, looked_up, stored)


def _is_function(metadata: Any, module: Any) -> bool:
    """True for graphs that write to no input, and whose outputs are tensors of their own."""
    (end,) = [node for node in module.graph.nodes if node.op == "output"]
    return (
        not any(each.mutates_data or each.mutates_metadata for each in metadata.input_info)
        and all(each.output_type is OutputType.non_alias for each in metadata.output_info)
        and all(isinstance(each, PlainTensorMeta) for each in metadata.subclass_inp_meta)
        and len(end.args[0]) == len(metadata.output_info)
        and not metadata.tokens
        and metadata.grad_enabled_mutation is None
    )


class GraphStore:
    """Compiled graphs of a shelf's device, by all that they follow from.

    Args:
        shelf: of kernels.
        options: of the backend, as far as its decisions follow from them.
    """

    def __init__(self, shelf: KernelShelf, *options: Any) -> None:
        self._shelf, self._options = shelf, options
        self._store = Store(shelf.folder / GRAPHS)

    def key(self, module: Any, inputs: Sequence[Any]) -> str | None:
        """The key of a graph; None where its code does not follow from what a key can hold."""
        if any(not isinstance(each, torch.Tensor) or each._has_symbolic_sizes_strides for each in inputs):
            return None
        own = [*module.parameters(), *module.buffers()]
        config = AOTConfig(
            fw_compiler=None, bw_compiler=None, partition_fn=None, decompositions={}, num_params_buffers=len(own),
            aot_id=0, keep_inference_input_mutations=True,
        )  # fmt: skip
        with ExitStack() as stack:
            if TracingContext.try_get() is None:
                stack.enter_context(tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))))
            try:
                key, _ = autograd_cache_key(module, inputs, config)
            except (BypassAOTAutogradCache, BypassFxGraphCache):
                return None
        return digest(key, self._shelf.surroundings, repr(self._options))

    def load(self, key: str, module: Any) -> CompiledGraph | None:
        """A graph whose parameters are a module's; None where it is not stored whole."""
        data = self._store.read(key)
        if data is None:
            return None
        try:
            graph: StoredGraph = pickle.loads(data)
            return CompiledGraph(graph.loaded(tensors_of(module), self._shelf), graph, self._shelf)
        except (InputError, OSError, AttributeError, ImportError, KeyError, pickle.UnpicklingError):
            self._store.remove(key)
            return None

    @contextmanager
    def recorded(self, key: str, module: Any, inputs: Sequence[Any]) -> Any:
        """A block that compiles a graph, which is stored afterwards where it can be."""
        recording = Recording(Derivations(module), len(inputs))
        with recording.derivations.recorded():
            yield recording
        if recording.stored is not None:
            self._store.write(key, pickle.dumps(recording.stored))
            self._store.trim()
