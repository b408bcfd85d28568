"""A predicted step as a trace: what PyTorch's profiler would have written on the board.

Operators, launches and kernels stand in it with sizes, types and sequence numbers, so that the task graph is built from
it as from a recording, and every pass and report works on it. Gradients run on the thread that called ``backward``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daydream.capture.captured import Capture, CapturedOperator
from daydream.graph.graph import Phase
from daydream.memory.predicted import memory_events
from daydream.operators.inputs import RecordedTensor
from daydream.prediction.step import PredictedStep
from daydream.trace.dtypes import element_bytes
from daydream.trace.trace import NONE, Category, ThreadName, Trace

_HOST, _STREAM = 0, 1

#: What the calls around kernels are called.
_LAUNCH, _WAIT = "cudaLaunchKernel", "cudaDeviceSynchronize"

#: Seconds between the last launch and the wait for the device.
_INSTANT = 1e-9

#: Share of an operator's time on the host that the call itself takes, which launches.
_CALL_SHARE = 0.3


@dataclass(eq=False)
class _Events:
    """Columns of the trace that is written."""

    names: dict[str, int] = field(default_factory=dict)
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def add(
        self,
        name: str,
        category: Category,
        start: float,
        end: float,
        arguments: Mapping[str, Any] | None = None,
        *,
        thread: int = _HOST,
        correlation: int = NONE,
        external: int = NONE,
        sequence: int = NONE,
    ) -> None:
        """An event; times are seconds."""
        code = self.names.setdefault(name, len(self.names))
        place = (code, int(category), 1e6 * start, 1e6 * (end - start), thread, correlation, external, sequence)
        self.rows.append((*place, dict(arguments or {})))


def predicted_trace(step: PredictedStep) -> Trace:
    """The trace of one step, named ``ProfilerStep#0``."""
    events = _Events()
    ends = np.cumsum(step.host)
    length = step.step_seconds
    events.add("ProfilerStep#0", Category.ANNOTATION, 0.0, length)
    _modules(events, step.capture, ends)
    _phases(events, step.capture, ends)
    _operators(events, step, ends)
    host_end = float(ends[-1]) if len(ends) else 0.0
    if len(step.kernels) and length > host_end:
        # Times that are rounded must not put the call into the launch before it.
        events.add(_WAIT, Category.RUNTIME, min(host_end + _INSTANT, length), length)
    return _trace(step, events)


def _modules(events: _Events, capture: Capture, ends: np.ndarray[Any, Any]) -> None:
    """A range for every stretch of operators of one module, inside those of the modules around it."""
    paths = [
        None if operator.module == NONE else capture.modules[operator.module].path for operator in capture.operators
    ]
    open_ranges: list[tuple[str, float]] = []
    for position, operator in enumerate(capture.operators):
        path = paths[position] if operator.phase == Phase.FORWARD else None
        begin = float(ends[position - 1]) if position else 0.0
        around = _around(path)
        while open_ranges and open_ranges[-1][0] not in around:
            name, since = open_ranges.pop()
            events.add(f"nn.Module: {name}", Category.PYTHON, since, begin)
        open_names = {name for name, _ in open_ranges}
        open_ranges += [(name, begin) for name in around if name not in open_names]
    finish = float(ends[-1]) if len(ends) else 0.0
    for name, since in reversed(open_ranges):
        events.add(f"nn.Module: {name}", Category.PYTHON, since, finish)


def _around(path: str | None) -> list[str]:
    """The paths of a module and of those around it, the outermost first.

    >>> _around("layer1.0.conv1")
    ['layer1', 'layer1.0', 'layer1.0.conv1']
    """
    parts = path.split(".") if path else []
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _phases(events: _Events, capture: Capture, ends: np.ndarray[Any, Any]) -> None:
    """Ranges of autograd's functions, and of the optimizer's step."""
    begins = np.concatenate([[0.0], ends[:-1]])
    position, operators = 0, capture.operators
    while position < len(operators):
        first = position
        operator = operators[first]
        while position < len(operators) and _same_range(operator, operators[position]):
            position += 1
        start, end = float(begins[first]), float(ends[position - 1])
        if operator.phase == Phase.UPDATE:
            events.add(f"Optimizer.step#{_optimizer(capture)}.step", Category.ANNOTATION, start, end)
        elif operator.phase == Phase.BACKWARD:
            forward = operators[operator.forward].name if operator.forward != NONE else "AccumulateGrad"
            name = f"autograd::engine::evaluate_function: {forward.removeprefix('aten::')}"
            events.add(name, Category.OPERATOR, start, end, sequence=operator.forward)


def _optimizer(capture: Capture) -> str:
    """The optimizer's class, as the profiler names its step; the divisions of its update decide."""
    stems = {each.name for each in capture.operators if each.phase == Phase.UPDATE}
    return "Adam" if any("addcdiv" in stem or "adam" in stem for stem in stems) else "SGD"


def _same_range(first: CapturedOperator, other: CapturedOperator) -> bool:
    if first.phase != other.phase:
        return False
    return first.phase != Phase.BACKWARD or (first.forward, first.module) == (other.forward, other.module)


def _operators(events: _Events, step: PredictedStep, ends: np.ndarray[Any, Any]) -> None:
    """Operators with their launches on the host, and kernels on the stream."""
    kernel = 0
    launched, starts, seconds = step.launched.tolist(), step.starts.tolist(), step.seconds.tolist()
    for position, (operator, price) in enumerate(zip(step.capture.operators, step.prices, strict=True)):
        # To the last bit where the module and the function around it begin, so that it is inside them.
        begin_host, end = float(ends[position - 1]) if position else 0.0, float(ends[position])
        host = float(step.host[position])
        sequence = position if operator.phase == Phase.FORWARD else operator.forward
        arguments = operator_arguments(operator)
        events.add(
            operator.name, Category.OPERATOR, begin_host, end, arguments, external=position + 1, sequence=sequence
        )
        for each in price.kernels:
            correlation = kernel + 1
            call = _CALL_SHARE * host / len(price.kernels)
            shared = {"correlation": correlation, "external": position + 1}
            events.add(_LAUNCH, Category.RUNTIME, launched[kernel] - call, launched[kernel], None, **shared)
            kernel_arguments = {"model": each.model, "bound": each.bound}
            begin = starts[kernel]
            events.add(
                each.name, Category.KERNEL, begin, begin + seconds[kernel], kernel_arguments, thread=_STREAM, **shared
            )
            kernel += 1


def operator_arguments(operator: CapturedOperator) -> dict[str, Any]:
    """Sizes, types, strides and values as the profiler writes them, those of results as it does not."""
    inputs = operator.inputs
    lists = inputs.lists or ((),) * len(inputs.tensors)
    columns: dict[str, list[Any]] = {"Input Dims": [], "Input type": [], "Input Strides": []}
    for tensor, members, value in zip(inputs.tensors, lists, inputs.values, strict=True):
        dims, kind, strides = _written(tensor, members, value)
        for column, entry in zip(columns.values(), (dims, kind, strides), strict=True):
            column.append(entry)
    columns["Concrete Inputs"] = list(inputs.values)
    columns["Output Dims"] = [list(tensor.dims) for tensor in operator.outputs]
    columns["Output type"] = [tensor.dtype for tensor in operator.outputs]
    columns["Output Strides"] = [list(tensor.strides) for tensor in operator.outputs]
    return dict(columns)


def _written(
    tensor: RecordedTensor | None, members: Sequence[RecordedTensor], value: str
) -> tuple[list[Any], str | list[str], list[Any]]:
    if tensor is not None:
        return list(tensor.dims), tensor.dtype, list(tensor.strides)
    if members:
        dims, strides = [list(each.dims) for each in members], [list(each.strides) for each in members]
        return dims, [each.dtype for each in members], strides
    return [], ("Scalar" if value else ""), []


def _trace(step: PredictedStep, events: _Events) -> Trace:
    rows = sorted(events.rows, key=lambda row: (row[2], -row[3]))
    name, category, start, duration, thread, correlation, external, sequence, arguments = zip(*rows, strict=True)
    capture = step.capture
    kinds = np.array(category, np.int64)
    return Trace(
        path=capture.title,
        names=tuple(events.names),
        threads=(
            ThreadName(1, 1, label="predicted host"),
            ThreadName(0, 7, device=0, label="stream 7"),
        ),
        name=np.array(name, np.int64),
        category=kinds,
        start_us=np.array(start, np.float64),
        duration_us=np.array(duration, np.float64),
        thread=np.array(thread, np.int64),
        correlation=np.array(correlation, np.int64),
        external=np.array(external, np.int64),
        sequence=np.array(sequence, np.int64),
        forward_thread=np.full(len(rows), NONE),
        bytes=np.full(len(rows), np.nan),
        arguments=tuple(arguments),
        forward_backward=np.empty((0, 2), np.int64),
        memory=memory_events(step.memory, 1e6 * (np.cumsum(step.host) - step.host), 1e6 * np.cumsum(step.host)),
        devices=({"id": 0, "name": step.device.name},),
        metadata={
            **({} if capture.batch is None else {"batch": capture.batch}),
            "predicted": {"model": capture.title, "dtype": capture.dtype, "device": step.device.name},
            "gradients": _gradients(capture),
            "memory": _memory(step),
        },
    )


def _memory(step: PredictedStep) -> list[list[Any]]:
    """Bytes, first and last operator, kind and module of everything that the step holds.

    The events of :attr:`Trace.memory` tell less: neither kinds nor what there is before the step.
    """
    allocations = step.memory.footprint.held
    return [
        [each.bytes, each.born, each.died, each.kind.value, step.memory.path_of(each)]
        for each in allocations
        if each.bytes
    ]


def _gradients(capture: Capture) -> list[dict[str, Any]]:
    """The gradients in the order in which they are complete, as `daydream record` keeps them."""
    complete = sorted((each for each in capture.parameters if each.order != NONE), key=lambda each: each.order)
    return [
        {
            "name": each.name,
            "module": each.name.rpartition(".")[0],
            "bytes": each.tensor.bytes,
            "elements": each.tensor.elements,
            "dtype": {2: "float16", 4: "float32"}.get(element_bytes(each.tensor.dtype), "float32"),
            "order": order,
        }
        for order, each in enumerate(complete)
    ]
