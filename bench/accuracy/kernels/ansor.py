"""The programs that Ansor measured on a V100, as schedules of ours.

:func:`load_logs` gives them as tables. A *tiled* program is one schedule of one operator. Of the flat ones, average
pooling is two kernels (window sums, then a division), everything else is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.table import Bools, Floats, Ints, ScheduleTable, product

TILED = ("conv", "depthwise", "matmul")
FLAT = ("pooling", "reduction", "elementwise")

#: Our axis -> its name in the columns, outermost first; spatial axes, then reduced ones.
_AXES: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "conv": ({"n": "n", "f": "f", "oh": "y", "ow": "x"}, {"c": "rc", "kh": "ry", "kw": "rx"}),
    "depthwise": ({"n": "n", "c": "c", "oh": "y", "ow": "x"}, {"kh": "ry", "kw": "rx"}),
    "matmul": ({"m": "m", "n": "n"}, {"k": "rk"}),
}

#: Our tensor -> the input that the columns call so.
_TENSORS: Mapping[str, Mapping[str, str]] = {
    "conv": {"X": "data", "W": "kernel"},
    "depthwise": {"X": "data", "W": "kernel"},
    "matmul": {"A": "a", "B": "b"},
}

Columns = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel of every program of a log.

    Attributes:
        name: empty, or which of a program's kernels this is (``sum``, ``division``).
        operator: the operator file's content.
        table: a schedule per program.
    """

    name: str
    operator: Mapping[str, Any]
    table: ScheduleTable


@dataclass(frozen=True, eq=False, kw_only=True)
class Log:
    """The measured programs of one operator, in the order in which Ansor tried them.

    Attributes:
        kind: the data file it is from (``conv``, ``pooling`` ...).
        file: name of the tuning log.
        operator_id: name in the Roller paper (``C8``); empty for operators that are not in it.
        trial: line in the log, from 0.
        measured: kernel time in seconds, all kernels of the program together.
        structure: ``tiled``, ``flat`` or ``cross_thread``, by program.
        kernels: what a program consists of; times add up.
    """

    kind: str
    file: str
    operator_id: str
    trial: Ints
    measured: Floats
    structure: np.ndarray[Any, Any]
    kernels: tuple[Kernel, ...]

    @property
    def label(self) -> str:
        """The name in the paper, or the log's."""
        return self.operator_id or self.file.removesuffix(".log").removeprefix("ansor_")


def load_logs(directory: Path, kinds: Sequence[str] = TILED) -> list[Log]:
    """The logs of ``v100_schedules`` in ``directory``, of some kinds, in the order of the files."""
    return [log for kind in kinds for log in _logs_of(directory, kind)]


def _logs_of(directory: Path, kind: str) -> Iterator[Log]:
    columns = read_columns(directory / f"{kind}.csv.gz")
    names, first = np.unique(columns["file"], return_index=True)
    for name in names[np.argsort(first)]:
        rows = np.flatnonzero(columns["file"] == name)
        part = {column: values[rows] for column, values in columns.items()}
        yield Log(
            kind=kind,
            file=str(name),
            operator_id=str(part["op_id"][0] or ""),
            trial=part["trial"].astype(np.int64),
            measured=part["cost_ms"] * 1e-3,
            structure=part["structure"],
            kernels=tuple(kernels_of(kind, part)),
        )


def read_columns(path: Path) -> dict[str, Any]:
    """A CSV file as one NumPy array per column; empty cells of numeric columns are NaN."""
    from pyarrow import csv

    table = csv.read_csv(path)
    return {name: table[name].to_numpy() for name in table.column_names}


def kernels_of(kind: str, columns: Columns) -> list[Kernel]:
    """The kernels of the programs of one log, from its columns."""
    if kind in TILED:
        return [_tiled(kind, columns)]
    return {"pooling": _pooling, "reduction": _reduction, "elementwise": _elementwise}[kind](columns)


# Tiled programs


def operator_data(kind: str, columns: Columns) -> dict[str, Any]:
    """The operator of a tiled log, as an operator file has it."""
    first = {name: values[0] for name, values in columns.items()}
    if kind == "matmul":
        return {"op": "matmul", **{key: int(first[key]) for key in ("m", "n", "k")}}
    keys = ("n", "c", "h", "w", "f", "kh", "kw") if kind == "conv" else ("n", "c", "h", "w", "kh", "kw")
    out: dict[str, Any] = {"op": "conv2d" if kind == "conv" else "depthwise_conv2d"}
    out |= {key: int(first[key]) for key in keys}
    return out | {"stride": int(first["stride"]), "padding": _padding(first)}


def _padding(first: Columns) -> str | list[int]:
    """Zeros on each side [top, left, bottom, right]: where TensorFlow says SAME, Ansor pads by kernel - 1 in total,
    kernel // 2 of it before, whatever the stride."""
    if first["padding"] == "VALID":
        return "VALID"
    before, total = [int(first[k]) // 2 for k in ("kh", "kw")], [int(first[k]) - 1 for k in ("kh", "kw")]
    return [*before, total[0] - before[0], total[1] - before[1]]


@cache
def _form(operator: str, fuse: bool) -> KernelForm:
    return kernel_form(operator_from_data(json.loads(operator)), fuse=fuse)


def _tiled(kind: str, columns: Columns) -> Kernel:
    operator = operator_data(kind, columns)
    form = _form(json.dumps(operator), False)
    spatial, reduced = _AXES[kind]
    count = len(columns["trial"])

    def factors(axis: str, parts: Sequence[str]) -> Ints:
        return product([columns[f"{axis}_{part}"].astype(np.int64) for part in parts], count)

    inputs = _TENSORS[kind]
    table = ScheduleTable(
        form=form,
        block={axis: factors(name, ("vt", "thr", "in1", "in2")) for axis, name in spatial.items()},
        thread={axis: factors(name, ("in1", "in2")) for axis, name in spatial.items()},
        vthreads={axis: factors(name, ("vt",)) for axis, name in spatial.items()},
        step={axis: factors(name, ("mid", "in")) for axis, name in reduced.items()},
        reduce_threads=np.ones(count, dtype=np.int64),
        cached={tensor: np.ones(count, dtype=np.bool_) for tensor in inputs},
        padding={tensor: np.zeros(count, dtype=np.int64) for tensor in inputs},
        # Ansor's programs store their results one by one.
        vector={tensor: columns[f"vec_{name}"].astype(np.int64) for tensor, name in inputs.items()}
        | {form.expr.output.name: np.ones(count, dtype=np.int64)},
        unroll=columns["unroll_max_step"].astype(np.int64),
        inner_thread={axis: factors(name, ("in2",)) for axis, name in spatial.items()},
        inner_step={axis: factors(name, ("in",)) for axis, name in reduced.items()},
    )
    assert tuple(table.block) == form.spatial and tuple(table.step) == form.reduced
    written = _writes_out_steps(table)
    return Kernel("", operator, replace(table, branches=dict.fromkeys(inputs, written)))


def _writes_out_steps(table: ScheduleTable) -> Bools:
    """Programs whose loop over steps TVM writes out: all statements of the kernel are at most ``unroll_max_step``, the
    copies of a thread and its multiply-adds (``UnrollLoop`` counts stores)."""
    statements = table.accumulators * table.thread_points
    for load in table.form.body_loads:
        elements, vector = product(table.extents(load), table.count), table.vector[load.tensor]
        statements = statements + vector * np.ceil(elements / (table.threads_per_block * vector))
    return (table.step_count > 1) & (table.step_count * statements <= table.unroll)


# Flat programs


def _flat(name: str, operator: Mapping[str, Any], threads: Ints, unroll: Ints | None = None) -> Kernel:
    """One output per thread along the single output axis, nothing staged; a reduction is walked by its thread alone."""
    form = _form(json.dumps(operator), True)
    (axis,) = form.spatial
    count = len(threads)
    ones = np.ones(count, dtype=np.int64)
    tensors = dict.fromkeys(load.tensor for load in form.body_loads)
    table = ScheduleTable(
        form=form,
        block={axis: threads.astype(np.int64)},
        thread={axis: ones},
        vthreads={axis: ones},
        step={axis: np.full(count, form.sizes[axis], dtype=np.int64) for axis in form.reduced},
        reduce_threads=ones,
        cached={tensor: np.zeros(count, dtype=np.bool_) for tensor in tensors},
        padding={tensor: np.zeros(count, dtype=np.int64) for tensor in tensors},
        vector=dict.fromkeys((*tensors, form.expr.output.name), ones),
        unroll=np.zeros(count, dtype=np.int64) if unroll is None else unroll.astype(np.int64),
    )
    return Kernel(name, operator, table)


def _elementwise(columns: Columns) -> list[Kernel]:
    operator = {"op": "elementwise", "function": "relu", "shape": _shape(columns["shape"][0])}
    return [_flat("", operator, columns["threads_per_block"])]


def _shape(text: str) -> list[int]:
    """``128x42`` -> ``[128, 42]``"""
    return [int(extent) for extent in str(text).split("x")]


def _pooling(columns: Columns) -> list[Kernel]:
    """Window sums or maxima; for averages a division of the sums after that.

    A block takes neighbours of the flattened output, which no tile of rows and columns is. The operator is therefore
    written over the flattened output ``i``: its window starts at ``s*s*i`` of the flattened input where windows of
    stride s cover it (so that the input is read once in all), at ``s*kh*i`` where they leave rows out.
    """
    first = {name: values[0] for name, values in columns.items()}
    kh, kw, stride, width = (int(first[key]) for key in ("kh", "kw", "stride", "w"))
    outputs = int(first["outputs"])
    function = "max" if first["pool"] == "max" else "sum"
    step = stride * min(stride, kh)
    operator: dict[str, Any] = {
        "expr": f"S[i] = {function}([kh,kw], X[{step}*i + {width}*kh + kw])",
        "sizes": {"i": outputs, "kh": kh, "kw": kw},
    }
    if kh == kw == 1:
        operator = {"expr": f"S[i] = X[{step}*i]", "sizes": {"i": outputs}}
    unroll = columns["unroll_max_step"]
    if function == "max":
        return [_flat("", operator, columns["sum_threads"], unroll)]
    division = {"op": "elementwise", "function": "div", "shape": [outputs], "scalar": True, "value": float(kh * kw)}
    return [
        _flat("sum", operator, columns["sum_threads"], unroll),
        _flat("division", division, columns["div_threads"], unroll),
    ]


def _reduction(columns: Columns) -> list[Kernel]:
    """One thread per output, or (``cross_thread``) one block per output whose threads share the reduction."""
    axes = [int(axis) for axis in str(columns["axes"][0]).split()]
    operator = {"op": "reduce", "function": "sum", "shape": _shape(columns["shape"][0]), "axes": axes}
    threads = columns["threads_per_block"].astype(np.int64)
    shared = columns["structure"] == "cross_thread"
    kernel = _flat("", operator, np.where(shared, 1, threads), columns["unroll_max_step"])
    table = replace(kernel.table, reduce_threads=np.where(shared, threads, 1))
    return [replace(kernel, table=table)]
