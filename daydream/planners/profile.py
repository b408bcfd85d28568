"""A profile of a step that never ran, for PyTorch's profile-guided estimation.

``torch._inductor.config.aten_distributed_optimizations.profile_guided_estimations_profile_path`` takes a Chrome trace
that ``torch.profiler`` wrote: operators with the sizes, strides and types of their arguments, and the kernels that bear
their "External id". What PyTorch looks up is an operator's name, sizes, strides and *one* type: of the node's result,
held against the first type of the event. So the events' first type is that of the result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from daydream.capture.captured import Capture
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.planners.collectives import CollectiveTimes
from daydream.planners.times import Call, OperatorTimes, calls_of, sized_inputs
from hal.support.atomic import write_atomic
from hal.support.errors import InputError

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: NCCL's names of the collectives that PyTorch looks up, by ours.
_NCCL = {
    "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "allreduce",
    "alltoall": "all_to_all",
}  # fmt: skip

#: Element types of collectives by NCCL's names.
_NCCL_TYPES: Mapping[str, str] = {"Float": "float32", "BFloat16": "bfloat16", "Half": "float16"}

#: Results of collectives in elements: two to an octave, from one to 2**31. PyTorch interpolates between them.
_ELEMENTS = np.unique(np.round(2.0 ** np.arange(0, 31.5, 0.5))).astype(np.int64)


def write_profile(
    path: str | os.PathLike[str],
    source: Capture | torch.fx.Graph | torch.fx.GraphModule,
    device: str | DeviceSpec,
    *,
    groups: Sequence[Sequence[int]] = (),
    node: str | None = None,
) -> int:
    """Write a profile in which every operator takes what the board's model says.

    Args:
        path: of the JSON file.
        source: a captured step, or an fx graph whose nodes have their values in ``meta``, as compiled graphs have.
        device: a board's name or its spec.
        groups: ranks that exchange data: for each group collectives of all sizes are written down too.
        node: name or file of the node that collectives run on; None takes the board's usual one.

    Returns:
        How many operators were written.

    Raises:
        InputError: there is no such board or node, a group does not fit it, or the file cannot be written.
    """
    times = OperatorTimes(device)
    events = _Events()
    calls = list(_captured(source) if isinstance(source, Capture) else _of_graph(source))
    times.price(call for _, call in calls)
    for event, call in calls:
        kernels = times.kernels(call)
        if kernels:
            events.add(event, kernels)
    operators = events.operators
    collectives = CollectiveTimes(times.device, node) if groups else None
    for group in groups:
        assert collectives is not None
        _add_group(events, collectives, sorted(group))
    document = {"schemaVersion": 1, "traceEvents": events.events, "traceName": f"predicted for {times.device.name}"}
    try:
        write_atomic(Path(path), json.dumps(document))
    except OSError as error:
        raise InputError(str(path), f"cannot be written: {error.strerror}") from error
    return operators


# What is written


class _Event(NamedTuple):
    """An operator as the profiler would write it: its name, its positional arguments, the type of its result."""

    name: str
    inputs: Inputs
    dtype: str


def _captured(step: Capture) -> Iterator[tuple[_Event, Call]]:
    for operator in step.operators:
        if operator.launches:
            positional = _positional(operator.name, operator.overload)
            inputs = Inputs(operator.inputs.tensors[:positional], operator.inputs.values[:positional])
            yield (
                _Event(operator.name, inputs, _first_type(operator.outputs)),
                (operator.name, operator.inputs, operator.outputs),
            )


def _of_graph(source: torch.fx.Graph | torch.fx.GraphModule) -> Iterator[tuple[_Event, Call]]:
    for node, call in calls_of(source.graph if isinstance(source, torch.fx.GraphModule) else source):
        assert isinstance(node.target, torch._ops.OpOverload)  # it has a call
        arguments = torch.fx.node.map_arg(list(node.args), lambda argument: argument.meta.get("val"))
        yield _Event(node.target._schema.name, sized_inputs(arguments), _first_type(call[2])), call


def _first_type(outputs: Sequence[RecordedTensor]) -> str:
    return outputs[0].dtype if outputs else ""


@cache
def _positional(name: str, overload: str) -> int | None:
    """Number of an operator's arguments that come by position; None, all of them, where its schema is not known."""
    try:
        schema = torch._C._get_schema(name, "" if overload == "default" else overload)
    except RuntimeError:
        return None
    return sum(not argument.kwarg_only for argument in schema.arguments)


class _Events:
    """Events of a Chrome trace, one operator after the other; its times are microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.operators = 0
        self._clock = 0.0
        self._numbers = count(1)

    def add(self, event: _Event, kernels: Sequence[tuple[str, float]]) -> None:
        """An operator with its kernels: names and milliseconds."""
        tensors = event.inputs.tensors
        types = ["" if tensor is None else tensor.dtype for tensor in tensors]
        number = next(self._numbers)
        arguments = {
            "External id": number,
            "Input Dims": [[] if tensor is None else list(tensor.dims) for tensor in tensors],
            "Input Strides": [[] if tensor is None else list(tensor.strides) for tensor in tensors],
            "Input type": [event.dtype, *types[1:]],
            "Concrete Inputs": list(event.inputs.values),
        }
        total = sum(milliseconds for _, milliseconds in kernels) * 1e3
        self._append("cpu_op", event.name, total, arguments)
        for name, milliseconds in kernels:
            self._append("kernel", name, milliseconds * 1e3, {"External id": number})
            self._clock += milliseconds * 1e3
        self.operators += 1

    def add_collective(self, milliseconds: float, arguments: dict[str, Any]) -> None:
        """A kernel of NCCL."""
        name = f"ncclDevKernel_{arguments['Collective name']}"
        self._append("kernel", name, milliseconds * 1e3, {"External id": next(self._numbers), **arguments})
        self._clock += milliseconds * 1e3

    def _append(self, category: str, name: str, microseconds: float, arguments: dict[str, Any]) -> None:
        thread = (
            {"pid": 0, "tid": 7, "cat": category} if category == "kernel" else {"pid": 1, "tid": 1, "cat": category}
        )
        times = {"ts": self._clock, "dur": microseconds}
        self.events.append({"ph": "X", **thread, "name": name, **times, "args": arguments})


def _add_group(events: _Events, collectives: CollectiveTimes, ranks: Sequence[int]) -> None:
    for kind, name in _NCCL.items():
        for spelled, dtype in _NCCL_TYPES.items():
            element = getattr(torch, dtype).itemsize
            message = _ELEMENTS * element * (len(ranks) if kind == "reduce_scatter" else 1)
            times = collectives.milliseconds(kind, message.astype(np.float64), len(ranks), dtype)
            if times is None:
                raise InputError("groups", f"{len(ranks)} ranks do not fit a node of {collectives.place}")
            for elements, milliseconds in zip(_ELEMENTS.tolist(), times.tolist(), strict=True):
                given = {"all_gather": elements // len(ranks), "reduce_scatter": elements * len(ranks)}.get(
                    kind, elements
                )
                arguments = {
                    "Collective name": name,
                    "Process Group Ranks": json.dumps(list(ranks)),
                    "Group size": len(ranks),
                    "In msg nelems": given,
                    "Out msg nelems": elements,
                    "dtype": spelled,
                }
                events.add_collective(milliseconds, arguments)
