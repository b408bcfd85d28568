"""Proof that a schedule for processors computes the right thing: its library run on this one and compared.

Small operators run whole, others cut down as :mod:`codegen.verify.gpu` cuts them. What was compiled for another
processor is verified by a twin: the same schedule with vectors of the same width, compiled for the one at hand.
"""

from __future__ import annotations

import _ctypes
import ctypes
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from codegen.bundle.records import LaunchRecord
from codegen.cpu.kernel import cpu_kernel
from codegen.generators import linker
from codegen.target import Target
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import LoweringRequest
from codegen.tolerance import judge, tolerance_of
from codegen.verify.chain import ChainCheck
from codegen.verify.engines import CHECKS
from codegen.verify.guards import guarded, numbers
from codegen.verify.result import NOT_RUN, Verification
from codegen.verify.trial import Step, Trial, trial_of
from hal.microbench.cpu.native import host_architecture
from sokoban.kernel.form import KernelForm
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.schedule.cutting import cut_down
from sokoban.schedule.tile import TileSchedule

#: Points of an operator's loops up to which it is run whole.
FULL_SIZE_POINTS = 2**21

#: Bytes before and behind the scratch memory of a thread that no kernel may touch.
_GUARD_BYTES = 1 << 16

#: At most so many portions of a kernel's blocks, and so many threads whose scratch memory they use in turn.
_PORTIONS, _WORKERS = 64, 2

#: Every byte of scratch memory and guards: NaN in every float type.
_POISON = 0xFF

_TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_PARALLEL_FOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def verify_cpu(
    form: KernelForm, schedule: TileSchedule, target: Target, *, seed: int = 0, full_size: bool = False
) -> Verification:
    """Run one schedule on this processor and compare with the reference.

    Args:
        target: the processor that it is for.
        seed: of the inputs.
        full_size: run the whole problem however large it is.
    """
    is_full_size = full_size or math.prod(form.sizes.values()) <= FULL_SIZE_POINTS
    small = form if is_full_size else cut_down(form, schedule, vector=target.lanes)
    return _verified(small, [(small, schedule)], target, seed, tolerance_of(form.expr))


def verify_cpu_chain(check: ChainCheck, target: Target, *, seed: int = 0) -> Verification:
    """Run the kernels of a chain one after the other on this processor and compare what the last one writes with the
    reference. What one writes the next one reads: an element that was not written poisons the result."""
    steps = [(step.problem, step.schedule) for step in check.steps]
    return _verified(check.form, steps, target, seed, max(tolerance_of(check.form.expr), check.tolerance or 0.0))


def _verified(form: KernelForm, steps: Sequence[Step], target: Target, seed: int, accepted: float) -> Verification:
    """Outcome for kernels that compute ``form``, by the largest relative error that is ``accepted``."""
    sizes = dict(form.sizes)
    if linker() is None:
        reason = "not run: there is no C compiler to link with; install gcc or clang"
        return Verification(
            passed=False, method=NOT_RUN, relative_error=None, tolerance=accepted, axis_sizes=sizes, reason=reason
        )
    host = host_architecture()
    method = "native" if target.architecture == host else f"native (compiled for {host})"
    verdict = partial(
        Verification,
        method=method,
        tolerance=accepted,
        axis_sizes=sizes,
        engine="native",
        checks=CHECKS["native"],
    )
    inputs = random_inputs(form.expr, seed)
    values = dict(inputs)
    twin = replace(target, architecture=host)
    try:
        built = [cpu_kernel(LoweringRequest(*step, "verify", twin), needs_vectors=False) for step in steps]
        trial = trial_of(form, steps, built, twin)
    except LoweringError as refused:
        return verdict(passed=False, relative_error=None, reason=str(refused))
    for launch in trial.launches:
        output = launch.bind(trial.tensors)[-1]
        flat, problem = _run(trial, launch, values)
        if not problem and not np.isnan(flat[output.element_count :]).all():
            problem = "written behind the end of the output"
        if problem:
            return verdict(passed=False, relative_error=math.inf, reason=problem)
        values[output.name] = flat[: output.element_count].reshape(output.shape)
    error, reason = judge(values[trial.bundle.output.name].ravel(), evaluate(form.expr, inputs), accepted)
    return verdict(passed=not reason, relative_error=error, reason=reason)


def _run(trial: Trial, launch: LaunchRecord, values_by_name: Mapping[str, Any]) -> tuple[Any, str]:
    """The output with its guard, and what was wrong on the way.

    The blocks run in this thread, last ones first, as if several threads had taken them.
    """
    tensors = launch.bind(trial.tensors)
    values = launch.bind({**values_by_name, tensors[-1].name: np.full(tensors[-1].shape, np.nan)})
    arrays = [guarded(array, tensor) for array, tensor in zip(values, tensors, strict=True)]
    room = _WORKERS * launch.dynamic_shared_bytes
    scratch = np.full(room + 2 * _GUARD_BYTES + 64, _POISON, np.uint8)
    start = _GUARD_BYTES + -(scratch.ctypes.data + _GUARD_BYTES) % 64
    pointers = (ctypes.c_void_p * (len(arrays) + 1))(
        *(array.ctypes.data for array in arrays), scratch.ctypes.data + start
    )
    with tempfile.TemporaryDirectory(prefix="roller-verify-") as folder:
        path = Path(folder) / launch.file
        path.write_bytes(trial.binary(launch))
        loaded = ctypes.CDLL(str(path))
        try:
            function = loaded[launch.entry]
            function.argtypes, function.restype = (_PARALLEL_FOR, ctypes.c_void_p), ctypes.c_int32
            function(_PARALLEL_FOR(_in_turn), pointers)
        finally:
            # No thread of its pool was started.
            _ctypes.dlclose(loaded._handle)
    untouched = (scratch[:start] == _POISON).all() and (scratch[start + room :] == _POISON).all()
    return numbers(arrays[-1], tensors[-1].dtype), "" if untouched else "written outside the scratch memory"


def _in_turn(task: int, state: int, count: int) -> None:
    run = _TASK(task)
    portion = -(-count // _PORTIONS)
    for number in reversed(range(-(-count // portion))):
        run(state, number % _WORKERS, number * portion, min(count, (number + 1) * portion))
