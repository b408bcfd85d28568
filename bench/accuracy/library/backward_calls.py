"""Backward passes of single float32 calls, NeuSight's: what a call takes on the device, each timed alone.

The calls of one layer of a model were recorded with their shapes. Views launch nothing. No call is below the
framework's own work for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.accuracy.library.library import boards
from hal.spec.device import DeviceSpec
from hal.support.tables import new_table
from roller.library.calls import LibraryCall, price
from roller.library.parts import directed, elementwise, product, stream
from sokoban.language.expression import DTYPE_BYTES
from sokoban.schedule.table import Floats

Shape = tuple[int, ...]

#: Largest median error asked for of backward calls, in per cent.
BACKWARD_BAR = 10.0

#: What autograd takes for a call whose backward pass launches nothing, in seconds: nothing measured is below.
FLOOR_SECONDS = 11e-6

#: Functions of tensors by the name at the end of a recorded target -> the function of the expression language.
_ELEMENTWISE: Mapping[str, str] = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "tanh": "tanh", "gelu": "gelu", "max": "max",
    "where": "select", "masked_fill": "select", "lt": "add", "to": "neg", "bool": "neg", "contiguous": "neg",
    "reshape": "neg", "activation": "tanh", "activation_fn": "relu",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One recorded call.

    Attributes:
        target: function or module.
        inputs: shapes of its tensors; numbers are ``(1,)``.
        output: shape of its result.
        times: how often a step makes it.
        forward_seconds: measured, host included.
        backward_seconds: likewise; 0 where there is none.
    """

    target: str
    inputs: tuple[Shape, ...]
    output: Shape
    times: int
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """A measured model.

    Attributes:
        board: name in the data.
        label: model, direction and sizes.
        training: whether a step is forward and backward.
        measured: seconds of a step.
        calls: what a step consists of.
    """

    board: str
    label: str
    training: bool
    measured: float
    calls: tuple[RecordedCall, ...]


# The calls of a model


def read_runs(data: Path) -> list[Run]:
    """The runs whose calls were recorded, on one board."""
    import pyarrow.csv as csv
    import pyarrow.parquet as parquet

    directory = data / "models"
    recorded: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in parquet.read_table(directory / "neusight_operators.parquet").to_pylist():
        recorded.setdefault(_key(row), []).append(row)
    out = []
    for row in csv.read_csv(directory / "neusight_models.csv").to_pylist():
        rows = recorded.get(_key(row))
        if rows is None:
            continue
        training = row["mode"] == "training"
        label = f"{row['model']} {row['mode']} {row['batch']} x {row['sequence']}"
        calls = tuple(_calls(rows, int(float(row["layers"]))))
        out.append(Run(board=row["board"], label=label, training=training, measured=row["step_ms"] / 1e3, calls=calls))
    return out


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] or "" for name in ("board", "model", "mode", "sequence", "batch", "option"))


def _calls(rows: Sequence[Mapping[str, Any]], layers: int) -> Iterable[RecordedCall]:
    """The recorded layer stands for all of them; it ends with the addition after its last module."""
    inside = [position for position, row in enumerate(rows) if ".0." in row["target"]]
    first, last = inside[0], inside[-1]
    if rows[last + 1]["name"].startswith("add"):
        last += 1
    for position, row in enumerate(rows):
        yield RecordedCall(
            target=row["target"],
            inputs=tuple(tuple(shape) for shape in json.loads(row["input_shapes"])),
            output=tuple(int(size) for size in row["output_shape"].strip("()").split(",") if size.strip()),
            times=layers if first <= position <= last else 1,
            forward_seconds=row["forward_ms"] / 1e3,
            backward_seconds=row["backward_ms"] / 1e3,
        )


def library_calls(call: RecordedCall, device: DeviceSpec, *, training: bool) -> list[LibraryCall]:
    """Kernels that a recorded call launches forward: one, or none for views and whatever else moves no data."""
    name, count = call_kind(call.target), prod(call.output)
    inputs = call.inputs
    if name in ("addmm", "linear", "lm_head"):
        *rows, k = inputs[1] if name == "addmm" else inputs[0]
        # Weights are [n, k] in modules, [k, n] in the function; the head of a language model has no bias.
        return [replace(product(1, prod(rows), call.output[-1], k, "float32"), variant=_PRODUCTS.get(name, name))]
    if name in ("matmul", "bmm"):
        (*batch, m, k), n = inputs[0], inputs[1][-1]
        multiplied = product(prod(batch), m, n, k, "float32", batched=True)
        # Products of four dimensions first copy what is a view of the projections: all operands but the scores.
        views = [shape for shape in inputs if len(shape) == 4 and shape[-1] != shape[-2]]
        return [*(elementwise("neg", prod(shape), "float32", 1) for shape in views), multiplied]
    if name == "softmax":
        return [LibraryCall(kind="softmax", label=name, sizes=(count // call.output[-1], call.output[-1]))]
    if name == "layer_norm":
        return [LibraryCall(kind="layer_norm", label=name, sizes=(count // call.output[-1], call.output[-1]))]
    if name == "embedding":
        return [stream(name, "indexSelectLargeIndex", count, count, count, "float32")]
    if name == "dropout":
        # The mask is a byte per element.
        return [stream(name, "fused_dropout_kernel_vec", 1.25 * count, count, count, "float32")] if training else []
    if name == "pow":
        # The cube of a tensor is two products; only its gradient takes powers.
        return [replace(elementwise("mul", count, "float32", 1, number=True), label="pow (number)")]
    function = _ELEMENTWISE.get(name)
    if function is None or count < 2:
        return []
    tensors = [shape for shape in inputs if prod(shape) > 1]
    # Masks are a byte per element.
    tensors = tensors[name in ("where", "masked_fill") :]
    full = sum(_rereads(shape, call.output, device) for shape in tensors)
    return [elementwise(function, count, "float32", max(full, 1), number=len(tensors) < 2 and function in _NUMBERED)]


_PRODUCTS = {"lm_head": "matmul"}
_NUMBERED = ("add", "sub", "mul", "div", "max", "select")


def backward_calls(call: RecordedCall, device: DeviceSpec) -> list[LibraryCall]:
    """Kernels that the backward pass of a recorded call launches."""
    calls = directed(library_calls(call, device, training=True), "backward")
    if call_kind(call.target) != "dropout":
        return calls
    # The mask becomes floats, is scaled, and multiplies the gradient.
    count = prod(call.output)
    kernels = ((0.25 * count, "copy"), (count, "mul"), (2 * count, "mul"))
    return [stream(label, "vectorized_elementwise_kernel", read, count, count, "float32") for read, label in kernels]


def _rereads(shape: Shape, output: Shape, device: DeviceSpec) -> bool:
    """True if a tensor is read from memory for every element of the result: those that are repeated stay in L2 if the
    repeated part is small."""
    if prod(shape) == prod(output):
        return True
    padded = (1,) * (len(output) - len(shape)) + shape
    repeated = [axis for axis, (mine, all_) in enumerate(zip(padded, output, strict=True)) if mine < all_]
    if device.l2 is None:
        return True
    part = prod(padded[repeated[0] + 1 :]) * DTYPE_BYTES["float32"]
    return part > device.l2.capacity_bytes / 2


def call_kind(target: str) -> str:
    """The kind of a module or function.

    >>> call_kind("bert.encoder.layer.0.attention.self.query"), call_kind("<built-in method addmm of type object>")
    ('linear', 'addmm')
    """
    if target.startswith("<"):
        return target.split()[2 if target.startswith("<built-in") else 1].rstrip(">")
    last = target.rpartition(".")[2]
    kinds = {
        "layer_norm": ("norm", "ln_1", "ln_2", "ln_f"),
        "embedding": ("embed", "wte", "wpe"),
        "dropout": ("drop",),
        "linear": ("query", "key", "value", "dense", "classifier", "decoder", "relationship", "_proj", "fc1", "fc2"),
    }  # fmt: skip
    lowered = last.lower()
    return next((kind for kind, parts in kinds.items() if any(part in lowered for part in parts)), last)


# Predictions


def call_seconds(called: Sequence[Sequence[LibraryCall]], device: DeviceSpec) -> Floats:
    """Device time of recorded calls, whose library calls these are, priced together."""
    which = np.repeat(np.arange(len(called)), [len(calls) for calls in called])
    prices = price([call for calls in called for call in calls], device)
    return np.asarray(np.bincount(which, [each.seconds for each in prices], len(called)), dtype=np.float64)


def backward_times(runs: Sequence[Run]) -> dict[str, tuple[Floats, Floats]]:
    """Predicted and measured seconds of the calls whose backward pass was timed alone, by kind of call."""
    devices = _devices(runs)
    pairs_by_kind: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        timed = [call for call in run.calls if call.backward_seconds > 0] if run.board in devices else []
        if timed:
            device = devices[run.board]
            predicted = FLOOR_SECONDS + call_seconds([backward_calls(call, device) for call in timed], device)
            for call, seconds in zip(timed, predicted.tolist(), strict=True):
                pairs_by_kind.setdefault(call_kind(call.target), []).append((seconds, call.backward_seconds))
    return {name: tuple(np.array(pairs).T) for name, pairs in pairs_by_kind.items()}


def _devices(runs: Sequence[Run]) -> dict[str, DeviceSpec]:
    """Boards with a spec, by the name in the data."""
    names = {run.board.replace("_", " "): run.board for run in runs}
    return {names[name]: device for name, device in boards(names).items()}


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """The table of all kinds of calls; none where the recorded calls are missing."""
    del out
    if not (data / "models" / "neusight_operators.parquet").is_file():
        return []
    return [backward_table(backward_times(read_runs(data)))]


def backward_table(times: Mapping[str, tuple[Floats, Floats]]) -> Table:
    """A row per kind of call, and all together."""
    numbers = ("calls", "median error", "mean error", "predicted/measured", "asked")
    view = new_table(("call",), numbers, title="Backward passes of single calls")
    everything = tuple(np.concatenate([pair[side] for pair in times.values()] or [np.ones(0)]) for side in (0, 1))
    rows = {**times, "all": everything}
    for name, (predicted, measured) in rows.items():
        if not len(measured):
            continue
        errors = np.abs(predicted / measured - 1)
        ratio = np.exp(np.log(predicted / measured).mean())
        figures = (f"{np.median(errors):.1%}", f"{errors.mean():.1%}", f"{ratio:.2f}")
        asked = f"{BACKWARD_BAR:g}%" if name == "all" else ""
        view.add_row(name, str(len(measured)), *figures, asked, style="bold" if name == "all" else None)
    return view
