"""Who computes an operator, each in a process of its own: NumPy/OpenBLAS, PyTorch, MetaSchedule's schedules, ours.

A rival is a function: an :class:`Operator` to a :class:`Prepared`, whose ``bind`` does beforehand what a network would
do once (weights in the library's layout) and gives a call without arguments.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.microbench.cpu.native import host_architecture
from hal.support.errors import InputError
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operator_from_data

Array = NDArray[np.float32]
#: What a call gives: an array of NumPy, or a tensor with a method ``numpy``. One that times itself gives seconds.
Call = Callable[[], Any]


class Unable(Exception):
    """A rival has nothing for an operator; the text says why, in one line."""


class NoRival(Exception):
    """An operator that a rival does not compete in; not an error."""


@dataclass(frozen=True)
class Operator:
    """An operator of the suite, and what the run says of everybody.

    Attributes:
        spec: its JSON.
        cpus: the processors of this process.
        options: what the command line says of a rival: ``tuned`` and ``trials`` of MetaSchedule, ``adapter`` of ours.
    """

    spec: Mapping[str, Any]
    cpus: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def expr(self) -> TensorExpr:
        """The operator's expression."""
        return operator_from_data(dict(self.spec))


@dataclass(frozen=True)
class Prepared:
    """An operator ready to be called.

    Attributes:
        bind: inputs by name, as the caller shapes them, to a call. All calls write the same output: PyTorch, which
            allocates it, gets the same memory each time.
        facts: what is known of it besides its time; keys as in `bench.cpu.results.Entry`.
        self_timed: the calls give their own seconds, and there is no output to check.
    """

    bind: Callable[[Mapping[str, Array]], Call]
    facts: Mapping[str, Any] = field(default_factory=dict)
    self_timed: bool = False


Rival = Callable[[Operator], Prepared]


# NumPy


def numpy_rival(operator: Operator) -> Prepared:
    """Matrix products by OpenBLAS, further functions of an epilogue by NumPy in place."""
    spec = operator.spec
    if spec.get("op") not in ("matmul", "batch_matmul"):
        raise NoRival  # of NumPy's functions only matrix products run on several threads
    steps = [_numpy_step(step) for step in spec.get("epilogue", ())]
    out = np.empty(operator.expr.output.caller_shape, np.float32)

    def bind(inputs: Mapping[str, Array]) -> Call:
        a = inputs["A"].swapaxes(-1, -2) if spec.get("transpose_a") else inputs["A"]
        b = inputs["B"].swapaxes(-1, -2) if spec.get("transpose_b") else inputs["B"]

        def run() -> Array:
            np.matmul(a, b, out=out)
            for step in steps:
                step(out, inputs)
            return out

        return run

    return Prepared(bind, {"detail": openblas_kernels()})


def _numpy_step(step: Any) -> Callable[[Array, Mapping[str, Array]], object]:
    if step == "relu":
        return lambda out, inputs: np.maximum(out, 0.0, out=out)
    if isinstance(step, Mapping) and step["function"] == "bias_add" and step["axis"] == "n":
        return lambda out, inputs: np.add(out, inputs["bias"], out=out)
    if isinstance(step, Mapping) and step["function"] == "residual_add":
        return lambda out, inputs: np.add(out, inputs["residual"], out=out)
    raise Unable(f"has no function {step if isinstance(step, str) else step['function']} of arrays")


def openblas_kernels() -> str:
    """The kernels that NumPy's OpenBLAS has chosen, ``SkylakeX``; empty for another BLAS."""
    libraries = Path(np.__file__).parent.with_name("numpy.libs")
    for library in sorted(libraries.glob("libscipy_openblas64_*")):
        name = ctypes.CDLL(str(library)).scipy_openblas_get_corename64_
        name.restype = ctypes.c_char_p
        return str(name().decode())
    return ""


def blas_environment(avx512: Sequence[str]) -> dict[str, str]:
    """OpenBLAS reads this when it is loaded. Its own choice is AVX2 kernels on some processors that have AVX-512."""
    return {"OPENBLAS_CORETYPE": "SkylakeX"} if {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= set(avx512) else {}


# PyTorch


def torch_rival(operator: Operator) -> Prepared:
    """The library's call on tensors in the operator's own layout."""
    return _torch(operator, lambda bind, tensors: bind(tensors))


def torch_other_layout(operator: Operator) -> Prepared:
    """Convolutions and pools in the other layout, the way there and back counted: it pays for some."""
    spec = dict(operator.spec)
    layout = spec.get("layout")
    if layout not in ("NCHW", "NHWC"):
        raise NoRival
    if any(isinstance(step, Mapping) and step["function"] == "residual_add" for step in spec.get("epilogue", ())):
        raise Unable("a residual would have to be turned too")

    def turned(bind: Callable[[Mapping[str, Any]], Call], tensors: Mapping[str, Any]) -> Call:
        torch = importlib.import_module("torch")
        # The same values under the same indices: only the order in memory is another one.
        order, back = ((0, 3, 1, 2), (0, 2, 3, 1)) if layout == "NHWC" else ((0, 1, 2, 3), (0, 1, 2, 3))
        there = torch.contiguous_format if layout == "NHWC" else torch.channels_last
        turned_tensors = dict(tensors)
        if layout == "NCHW" and "W" in turned_tensors:
            turned_tensors["W"] = turned_tensors["W"].contiguous(memory_format=there)

        def run() -> Any:
            turned_input = tensors["X"].permute(order).contiguous(memory_format=there).permute(back)
            return bind({**turned_tensors, "X": turned_input})().contiguous()

        return run

    return _torch(operator, turned)


def _torch(
    operator: Operator, use: Callable[[Callable[[Mapping[str, Any]], Call], Mapping[str, Any]], Call]
) -> Prepared:
    from bench.calls.operators import problem

    torch = importlib.import_module("torch")
    torch.set_num_threads(len(operator.cpus))
    call = problem("cpu", operator.spec)

    def bind(inputs: Mapping[str, Array]) -> Call:
        return use(call.bind, {name: torch.from_numpy(array) for name, array in inputs.items()})

    return Prepared(bind)


# MetaSchedule


def metaschedule_rival(operator: Operator) -> Prepared:
    """The best schedule of a search that ``bench.cpu.tune`` has kept."""
    from bench.cpu.tuned import read_tuned, search_in

    trials, path = int(operator.options["trials"]), Path(operator.options["tuned"])
    tuning = search_in(read_tuned(path), operator.spec, trials) if path.exists() else None
    if tuning is None:
        raise Unable(f"not tuned over {trials} trials here: python -m bench.cpu.tune")
    if tuning.trace is None:
        raise Unable(f"none of {tuning.tried} candidates ran")
    from bench.cpu.metaschedule import compiled

    expr = operator.expr
    function = compiled(expr, tuning.trace, host_architecture(), len(operator.cpus))
    facts = {"detail": f"tuned {tuning.day}"}
    tvm = importlib.import_module("tvm")
    out = tvm.runtime.tensor(np.full(expr.output.shape, np.nan, np.float32))

    def bind(inputs: Mapping[str, Array]) -> Call:
        tensors = [tvm.runtime.tensor(inputs[tensor.name].reshape(tensor.shape)) for tensor in expr.inputs]

        def run() -> Any:
            function(*tensors, out)
            return out

        return run

    return Prepared(bind, facts)


# The bandwidth limit


def bandwidth_limit(operator: Operator) -> Prepared:
    """Reading and writing the operator's compulsory bytes, every core its share: what no kernel can go below.

    As many bytes as are written are copied by the C library's ``memmove``, the rest is read by vector loads.
    """
    from hal.microbench.cpu.cores import Cores
    from hal.microbench.cpu.machine import Machine
    from hal.microbench.cpu.native import loops
    from hal.microbench.cpu.topology import read_topology
    from hal.microbench.sampling import Settings

    expr, topology = operator.expr, read_topology()
    cores = Cores(operator.cpus)
    machine = Machine(topology, cores, loops(topology.lanes, topology.vector_registers), Settings())
    written = expr.output.size_bytes // cores.count
    read = sum(tensor.size_bytes for tensor in expr.inputs) // cores.count
    copied = min(read, written)
    room = copied + machine.turn_bytes - 1  # arrays are whole turns of the loops, and no longer than asked for
    targets, sinks = [machine.array(room) for _ in operator.cpus], [machine.array(4096) for _ in operator.cpus]

    def bind(inputs: Mapping[str, Array]) -> Call:
        sources = [(machine.array(room), machine.array(read - copied)) for _ in operator.cpus]

        def core(arrays: tuple[Array, Array], target: Array, sink: Array) -> Callable[[], object]:
            source, second = arrays

            def work() -> None:
                ctypes.memmove(target.ctypes.data, source.ctypes.data, copied)
                if read > copied:
                    machine.loops["read"](second.ctypes.data, sink.ctypes.data, second.size, 1)

            return work

        calls = [core(*each) for each in zip(sources, targets, sinks, strict=True)]
        return lambda: cores.seconds(calls)

    return Prepared(bind, self_timed=True)


# All


def ours(operator: Operator) -> Prepared:
    """Our kernel, by the adapter that the command line names (`bench.cpu.ours`)."""
    module, _, name = str(operator.options["adapter"]).partition(":")
    try:
        prepare: Rival = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError("--ours", str(error), "name it as module:function") from None
    return prepare(operator)


RIVALS: Mapping[str, Rival] = {
    "ours": ours,
    "openblas": numpy_rival,
    "torch": torch_rival,
    "torch-turned": torch_other_layout,
    "metaschedule-64": metaschedule_rival,
    "metaschedule-512": metaschedule_rival,
    "limit": bandwidth_limit,
}


def timed(calls: Iterator[Call], seconds: float, *, self_timed: bool) -> list[float]:
    """Seconds of calls one after the other for about so long, one at least; a first one, untimed, wakes the threads."""
    next(calls)()
    seconds_by_call: list[float] = []
    until = time.perf_counter() + seconds
    while not seconds_by_call or time.perf_counter() < until:
        call = next(calls)
        start = time.perf_counter()
        result = call()
        seconds_by_call.append(float(result) if self_timed else time.perf_counter() - start)
    return seconds_by_call
