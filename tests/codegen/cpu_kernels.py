"""Helpers for tests of CPU kernels: operators in one line, schedules for them, and running what was built."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np

from codegen.cpu.lower import lower
from codegen.cpu.shared_object import SharedObject, build_shared_object
from codegen.target import Target
from codegen.tir.lowering import LoweringRequest
from hal.microbench.cpu.native import host_architecture
from hal.microbench.cpu.topology import read_topology
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operators_from_json
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.schedule.tile import TileSchedule, sizes

GUARD_ELEMENTS = 64


def form_of(**fields: Any) -> KernelForm:
    """The operator of these JSON fields in canonical form."""
    return kernel_form(operators_from_json(json.dumps([{"name": "op", **fields}]), "test")[0])


def vector_bytes() -> int:
    return read_topology().simd_bits // 8


def schedule_for(
    form: KernelForm,
    *,
    vector_axis: str = "",
    step: dict[str, int] | None = None,
    tile: dict[str, int] | None = None,
    cached: bool = True,
) -> TileSchedule:
    """Register tiles of up to four rows of two vectors, or as ``tile`` has them, blocks of two tiles a side,
    everything cached or nothing."""
    lanes = vector_bytes() // 4
    vector_axis = vector_axis or form.final.axes[-1]
    rows, thread, block = 4, {}, {}
    for axis in reversed(form.spatial):
        size = form.sizes[axis]
        if form.kind == "rows":
            thread[axis], block[axis] = 1, 2 * lanes if axis == form.final.axes[-1] else 3
            continue
        thread[axis] = min((tile or {}).get(axis, 2 * lanes if axis == vector_axis else rows), size)
        block[axis] = 2 * thread[axis]
        rows = rows if axis == vector_axis else max(1, rows // thread[axis])
    steps = {axis: (step or {}).get(axis, form.sizes[axis]) for axis in form.reduced}
    names = tuple(load.tensor for load in form.body_loads) if cached and form.reduction and form.kind == "tile" else ()
    return TileSchedule(block=sizes(block), thread=sizes(thread), step=sizes(steps), cached=names)


def host() -> Target:
    """This machine."""
    return Target("llvm", host_architecture(), vector_bytes() // 4)


def built(form: KernelForm, schedule: TileSchedule) -> SharedObject:
    """The schedule compiled for this machine."""
    lowered = lower(LoweringRequest(form, schedule, "op", host()))
    return build_shared_object(lowered, host_architecture(), len(form.expr.inputs) + 1)


def error_of(form: KernelForm, library: SharedObject, folder: Path) -> float:
    """Largest error of the kernel's output over the largest element, against the operator as it was written.

    The output starts as NaN and is followed by elements that must stay so.
    """
    path = folder / "op.so"
    path.write_bytes(library.data)
    loaded = ctypes.CDLL(str(path))
    loaded.roller_threads.restype = ctypes.c_int64
    inputs = random_inputs(form.source, 1)
    arrays = [np.ascontiguousarray(inputs[t.name], t.dtype) for t in form.source.inputs]
    output = form.expr.output
    result = np.full(output.element_count + GUARD_ELEMENTS, np.nan, output.dtype)
    scratch = np.full(loaded.roller_threads() * library.scratch_bytes + 64, 255, np.uint8)
    scratch_at = scratch.ctypes.data + -scratch.ctypes.data % 64
    pointers = (ctypes.c_void_p * (len(arrays) + 2))(*(a.ctypes.data for a in (*arrays, result)), scratch_at)
    assert loaded.op(None, pointers) == 0
    assert np.isnan(result[output.element_count :]).all(), "nothing beyond the output is written"
    wanted = evaluate(form.source, inputs).ravel()
    return float(np.abs(result[: output.element_count] - wanted).max() / np.abs(wanted).max())
