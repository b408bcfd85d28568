"""`torch.compile(model, backend="roller")`.

Dynamo captures graphs, AOTAutograd makes them functional, differentiates and decomposes them, Inductor's driver folds
what never changes (batch norms of inference into the weights before them), and :mod:`roller.dynamo.rewriting` puts
kernels in before what is left goes to Inductor, or runs as it is.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch._inductor.compile_fx
import torch._inductor.constant_folding
import torch._inductor.fx_passes.freezing_patterns
import torch._inductor.pattern_matcher
from torch._dynamo.exc import RestartAnalysis
from torch._guards import CompileContext
from torch._inductor.freezing_utils import enter_freezing
from torch._inductor.output_code import OutputCode

from codegen.compile.toolchain import toolchain
from hal.catalog import all_devices, load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from hal.this_cpu import THIS_CPU
from roller.dynamo.constants import constant_of, is_looked_up, on_real_tensors, storages_of, use_huge_pages
from roller.dynamo.frozen import FrozenGraph
from roller.dynamo.garbage import leave_out_older_objects
from roller.dynamo.kernels import ON_GPU, ON_PROCESSOR, KernelShelf, is_processor
from roller.dynamo.prices import GraphPrice
from roller.dynamo.reserve import reserve_while_tracing
from roller.dynamo.rewriting import Decision, predicted, rewrite
from roller.dynamo.stored.graphs import CompiledGraph, GraphStore, Recording
from roller.dynamo.stored.probes import remembered_probes
from roller.dynamo.stored.sources import begin_torch_key

log = logging.getLogger("roller.backend")

#: Who runs what no kernel of ours computes.
Fallback = Literal["inductor", "eager"]

#: Sizes for which a function of the model gets kernels; with one more they stay open, as Inductor has them. Kernels are
#: of one size, and a graph for each would be compiled until Dynamo compiles no more (``recompile_limit``, 8).
MOST_SIZES = 3

#: A function of the decisions about a graph, called once it is rewritten.
GraphListener = Callable[[Sequence[Decision]], None]


def backend(
    *,
    device: str = "auto",
    fallback: Fallback = "inductor",
    cache: Path | str | None = None,
    jobs: int | None = None,
    freeze: bool = True,
    competes: bool = True,
    emulate: bool = False,
) -> RollerBackend:
    """A backend of `torch.compile` with options: ``torch.compile(model, backend=roller.backend(fallback="eager"))``.

    Args:
        device: what kernels are compiled for, by the name of a board or ``cpu``; ``auto`` takes what a graph's tensors
            lie on.
        fallback: who runs the rest of a graph, Inductor or PyTorch operator by operator.
        cache: folder of compiled kernels; below ``~/.cache/roller`` by default.
        jobs: processes that compile; as many as there are cores by default.
        freeze: take parameters as constants where no gradients are recorded, as ``torch._inductor.config.freezing``
            does. Where a parameter is written to afterwards, what follows from it is computed anew.
        competes: leave to the library what it does faster, as expected or, on processors where the two are expected to
            take about as long, as timed while the graph is compiled; without, all that can be taken is.
        emulate: run kernels of a GPU on the processor, thread by thread: for tests of small models.

    Raises:
        InputError: an option has a value that it does not take.
    """
    if fallback not in get_args(Fallback):
        raise InputError("fallback", f"{fallback!r} runs nothing", f"use one of {', '.join(get_args(Fallback))}")
    if device != "auto":
        load_device(device)
    folder = None if cache is None else Path(cache)
    return RollerBackend(
        device=device, fallback=fallback, cache=folder, jobs=jobs, freeze=freeze, competes=competes, emulate=emulate
    )


@dataclass(kw_only=True, eq=False)
class RollerBackend:
    """The backend as Dynamo calls it, with the options of :func:`backend`.

    With a list of ``prices`` nothing is compiled: graphs run operator by operator, and the list gets their times.
    """

    device: str = "auto"
    fallback: Fallback = "inductor"
    cache: Path | None = None
    jobs: int | None = None
    freeze: bool = True
    competes: bool = True
    emulate: bool = False
    listeners: list[GraphListener] = field(default_factory=list)
    prices: list[GraphPrice] | None = None

    def __call__(
        self, module: Any, inputs: Sequence[Any], options: Mapping[str, Any] | None = None, mode: str | None = None
    ) -> Callable[..., Any]:
        """A graph of Dynamo's as a function of its inputs.

        Args:
            options: what `torch.compile` was given, arguments of :func:`backend`.

        Raises:
            InputError: there is no such option, or a mode was given.
        """
        if mode is not None:
            raise InputError("mode", f"{mode!r} is Inductor's", "leave it out: the backend has options alone")
        if options:
            return _with_options(options)(module, inputs)
        if not self.freeze or torch.is_grad_enabled():
            return self.compiled(module, inputs)
        try:
            return FrozenGraph.of_module(self._frozen, module, inputs)
        except (InputError, RestartAnalysis):
            raise
        except Exception as error:  # whatever PyTorch cannot fold, it may compile as it is
            log.warning("a graph's parameters stay its inputs: %s", _first_line(error))
            return replace(self, freeze=False).compiled(module, inputs)

    def _frozen(self, module: Any, inputs: Sequence[Any]) -> CompiledGraph:
        """A graph module whose parameters are its own, from the store where it was compiled before."""
        tensors = [
            each for each in (*module.parameters(), *module.buffers(), *inputs) if isinstance(each, torch.Tensor)
        ]
        device, _ = self._device({tensor.device.type for tensor in tensors})
        is_stored = self.fallback == "inductor" and self.prices is None and not self.emulate
        if device is None or not is_processor(device) or not is_stored:
            return CompiledGraph(self.compiled(module, inputs))
        shelf = KernelShelf.of(device, self.cache, self.jobs)
        store = GraphStore(shelf, self.competes)
        key = store.key(module, inputs)
        if key is None:
            return CompiledGraph(self.compiled(module, inputs))
        with remembered_probes():
            found = store.load(key, module)
        if found is not None:
            if found.stored is not None:
                self._report(found.stored.decisions)
            return found
        with store.recorded(key, module, inputs) as recording:
            code = self.compiled(module, inputs, recording)
        return CompiledGraph(code, recording.stored, shelf)

    def compiled(self, module: Any, inputs: Sequence[Any], recording: Recording | None = None) -> Callable[..., Any]:
        """A graph module as a function; it is Inductor's from now on."""
        module.recompile()
        theirs = storages_of((*module.parameters(), *module.buffers()))
        open_sizes = self.prices is None and _sizes_stay_open(module, inputs)
        # Its cache of graphs knows Inductor alone, and would give its code for a graph of ours, or ours for one of its.
        with (
            torch._functorch.config.patch(enable_autograd_cache=False),
            remembered_probes(),
            _unpacked_weights() as packing,
        ):
            code: Callable[..., Any] = torch._inductor.compile_fx.compile_fx(  # type: ignore[assignment]
                module,
                inputs,
                inner_compile=partial(self._inner, packing, theirs, recording, open_sizes),
                config_patches={
                    "freezing": self.freeze,
                    # Kernels read dense tensors: no copies into another order and back.
                    "layout_optimization": False,
                    # Code that holds numbers would hold those of parameters.
                    "always_keep_tensor_constants": self.freeze,
                },
            )
        return code

    def _report(self, decisions: Sequence[Decision]) -> None:
        for listener in self.listeners:
            listener(decisions)

    def _inner(
        self,
        packing: Sequence[Any],
        theirs: Collection[int],
        recording: Recording | None,
        open_sizes: bool,
        module: Any,
        inputs: Sequence[Any],
        **options: Any,
    ) -> Any:
        """A functional graph of one device as code.

        Args:
            packing: patterns for the weights of what stays.
            theirs: addresses of the memory of parameters.
            open_sizes: whether it is called with other sizes, too.
        """
        shelf = None if open_sizes else self._shelf(module)
        decisions: list[Decision] = []
        if open_sizes:
            decisions = [Decision(name="graph", functions="", shape=(), reason="its sizes change from call to call")]
            self._report(decisions)
        if shelf is not None and self.prices is not None:
            decisions, price = predicted(module, shelf, parameters=len(theirs), competes=self.competes)
            self.prices.append(price)
            self._report(decisions)
            return InterpretedGraph(module)
        if shelf is not None:
            decisions = self._rewritten(module, shelf)
            self._report(decisions)
        if module.graph.find_nodes(op="get_attr"):
            for pattern in packing if self.fallback == "inductor" and _can_be_packed(module) else ():
                pattern.apply(module.graph)
            torch._inductor.pattern_matcher.stable_topological_sort(module.graph)
            module.graph.lint()
            module.recompile()
            with enter_freezing():
                torch._inductor.constant_folding.constant_fold(module)
            with on_real_tensors():
                constants = module.graph.find_nodes(op="get_attr")
                use_huge_pages((constant_of(module, each) for each in constants if not is_looked_up(each)), theirs)
        if self.fallback == "eager":
            return InterpretedGraph(module)
        code = torch._inductor.compile_fx.compile_fx_inner(module, inputs, **options)
        if recording is not None:
            recording.finish(module, inputs, code, decisions)
        return code

    def _rewritten(self, module: Any, shelf: KernelShelf) -> list[Decision]:
        """Kernels put into a graph module; it stays as it was where that fails, as a line of warning says."""
        before = copy.deepcopy(module.graph)
        try:
            return rewrite(module, shelf, emulated=self.emulate, competes=self.competes)
        except Exception as error:  # whatever goes wrong with kernels must not keep the model from running
            reason = _first_line(error)
            log.warning("a graph stays with PyTorch: %s", reason)
            module.graph = before
            return [Decision(name="graph", functions="", shape=(), reason=reason, has_failed=True)]

    def _shelf(self, module: Any) -> KernelShelf | None:
        """Kernels of the device that a graph's tensors lie on; None where there is none, as a line of warning says."""
        values = (node.meta.get("val") for node in module.graph.nodes)
        kinds = {value.device.type for value in values if isinstance(value, torch.Tensor)}
        device, reason = self._device(kinds)
        if device is None:
            log.warning("a graph on %s stays with PyTorch: %s", " and ".join(sorted(kinds)), reason)
            return None
        return KernelShelf.of(device, self.cache, self.jobs)

    def _device(self, kinds: set[str]) -> tuple[DeviceSpec | None, str]:
        """The device of a graph's kernels, or why there is none."""
        if self.device != "auto":
            device = load_device(self.device)
            fitting = ON_PROCESSOR if is_processor(device) or self.emulate else ON_GPU
            return (
                (device, "") if kinds <= {fitting} else (None, f"kernels for {device.name} take tensors on {fitting}")
            )
        if kinds == {ON_PROCESSOR}:
            return load_device(THIS_CPU), ""
        board = _board_at_hand() if kinds == {ON_GPU} else None
        return board, "" if board else "no known board; name it with roller.backend(device=...)"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _can_be_packed(module: Any) -> bool:
    """True for graphs whose constants oneDNN packs: of 64 bits Inductor's patterns (2.13) end in an error."""
    constants = (constant_of(module, each) for each in module.graph.find_nodes(op="get_attr"))
    # Branches of `torch.cond` are graphs.
    return all(each.dtype is not torch.float64 for each in constants if isinstance(each, torch.Tensor))


def _sizes_stay_open(module: Any, inputs: Sequence[Any]) -> bool:
    """True for a graph of Dynamo's whose sizes are symbols, where they were marked to change (``mark_dynamic``), or
    where :data:`MOST_SIZES` graphs of the same function have been compiled before."""
    if not any(
        isinstance(each, torch.SymInt) or (isinstance(each, torch.Tensor) and each._has_symbolic_sizes_strides)
        for each in inputs
    ):
        return False
    arguments = (node.meta.get("grapharg") for node in module.graph.find_nodes(op="placeholder"))
    examples = (getattr(argument, "example", None) for argument in arguments)
    if any(getattr(each, "_dynamo_dynamic_indices", None) for each in examples):
        return True
    compilation = CompileContext.current_compile_id()
    return compilation is not None and (compilation.frame_compile_id or 0) >= MOST_SIZES


@contextmanager
def _unpacked_weights() -> Iterator[Sequence[Any]]:
    """A block in which Inductor leaves products and convolutions of a graph that it freezes what they are.

    Otherwise they become calls of oneDNN, on weights that nothing else reads, before kernels of ours can take their
    place. The block gets the patterns that do so.
    """
    patterns = torch._inductor.fx_passes.freezing_patterns
    # Patterns register themselves once a process: into the list that is put back.
    patterns.lazy_init()
    packing, patterns.pass_patterns = patterns.pass_patterns, []
    try:
        yield packing
    finally:
        patterns.pass_patterns = packing


def _board_at_hand() -> DeviceSpec | None:
    """The catalogue's device that PyTorch calls its GPU; None where it has none of that name."""
    title = torch.cuda.get_device_name().casefold()
    boards = (board for board in all_devices() if not is_processor(board))
    return next((board for board in boards if board.title.casefold() in title or title in board.title.casefold()), None)


def _with_options(options: Mapping[str, Any]) -> RollerBackend:
    accepted = list(signature(backend).parameters)
    for option in options:
        if option not in accepted:
            raise InputError(f"options.{option}", "is no option of the backend", f"use {', '.join(accepted)}")
    return backend(**options)


@dataclass
class InterpretedGraph(OutputCode):
    """A graph that PyTorch runs operator by operator, as Inductor's driver takes code."""

    module: Any = None

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self._boxed_call = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.module(*inputs)

    def post_compile(self, *_: Any) -> None:
        """Nothing is left to do."""

    def set_triton_bundle(self, *_: Any) -> None:
        """There is none."""


# The first compilation would import these.
for _name in (
    "hal.microbench.cpu",
    "tomllib",
    "torch.distributed.tensor.experimental._func_map",
    "torch.export._trace",
    "torch.utils.cpp_extension",
):
    with suppress(ImportError):  # which of them there are changes from release to release
        import_module(_name)

# Sources of PyTorch and ours are part of the keys of graphs: threads read what is not known while Dynamo traces.
begin_torch_key()
threading.Thread(target=toolchain, daemon=True).start()

leave_out_older_objects()
reserve_while_tracing()

#: The entry point ``roller`` of ``torch_dynamo_backends``.
roller = RollerBackend()
