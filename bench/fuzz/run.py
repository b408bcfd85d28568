"""One drawn operator from end to end: its kernels on every device, some of them run."""

from __future__ import annotations

import math
import os
import random
import time
import traceback
from collections.abc import Sequence
from typing import Any

from bench.fuzz.kernels import CANDIDATES, DEVICES, Kernel, device_of, drawn, kernels_of, outcome_of
from bench.fuzz.operators import Data, operator, target_of
from bench.fuzz.shrink import failure, shrunk
from bench.fuzz.sound import shaken, unit_of
from codegen.compile.build import build_kernel
from codegen.compile.request import BuildRequest
from codegen.target import Target
from codegen.tolerance import relative_error
from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate

#: Kernels of an operator that are run: so many, or one of every kind if those are more, up to the second number.
KERNELS = (2, 3)
#: One kernel in so many is run by its OpenCL twin, one operator in so many on the processor, and searched for.
OPENCL_EVERY, CPU_EVERY, SEARCH_EVERY = 8, 4, 10

#: Lowerings of matrix instructions that are seldom among the best programs.
MATRIX = ("wmma", "bulk")

#: Kernels that are tried where all that were chosen are refused.
MOST_OTHERS = 8

#: One operator in so many has a kernel built by the device's compiler.
BUILD_EVERY = 25

#: Points of an operator up to which its canonical form is compared with what was written, and by how much they may
#: differ: both are float64.
MOST_MEANING_POINTS, MOST_MEANING_ERROR = 2**20, 1e-8

Record = dict[str, Any]


def examined(number: int, seed: int = 0) -> Record:
    """The record of an operator: what it takes on every device, and what came of the kernels that were run."""
    target, chance = target_of(number), random.Random(f"{seed}/{number}/kernels")
    record = examined_data(operator(number, seed), chance, "" if target is None else target.lowering)
    return record | {"number": number}


def examined_data(data: Data, chance: random.Random, wanted: str = "") -> Record:
    """The record of any operator; a kernel by the lowering or algorithm ``wanted`` is run where it has one."""
    start, core = time.perf_counter(), _core_seconds()
    record: Record = {"took": {}, "refused": {}, "runs": []}
    try:
        expr = operator_from_data(data)
        kernels: list[Kernel] = []
        is_on_cpu = chance.randrange(CPU_EVERY) == 0 or wanted.startswith("cpu")
        devices = [name for name in DEVICES if name != "cpu" or is_on_cpu]
        for device in devices:
            is_searched = chance.randrange(SEARCH_EVERY) == 0 or wanted in MATRIX
            method = "both" if device != "cpu" and is_searched else "roller"
            try:
                some = kernels_of(expr, device, method, CANDIDATES * (4 if wanted in MATRIX else 1))
            except InputError as error:
                record["refused"][device] = str(error)
                continue
            record["took"][device] = some[0].kind
            kernels += some
        on_boards = [kernel for kernel in kernels if kernel.device != "cpu"]
        least, most = KERNELS
        chosen = drawn([kernel for kernel in kernels if wanted in kernel.names], chance, 1)
        others = [kernel for kernel in on_boards if kernel not in chosen]
        count = min(most, max(least, len({kernel.kind for kernel in on_boards})))
        chosen += drawn(others, chance, count - len(chosen))
        on_cpu = [kernel for kernel in kernels if kernel.device == "cpu" and kernel not in chosen]
        chosen += drawn(on_cpu, chance, 1)
        for form in _distinct_forms(chosen):
            distance = meaning_error(form)
            if distance > MOST_MEANING_ERROR:
                record["traceback"] = f"Meaning: the {form.kind} is {distance:.3g} off the operator as written"
        for kernel in chosen:
            record["runs"].append(run(kernel, chance))
        if record["runs"] and all(each["outcome"] == "refused" for each in record["runs"]):
            # What one lowering refuses, another one has to take.
            others = [kernel for kernel in on_boards if kernel not in chosen]
            record["runs"] += [run(kernel, chance) for kernel in drawn(others, chance, MOST_OTHERS)]
        # A refused kernel is no kernel.
        agreed = [kernel for kernel, each in zip(chosen, record["runs"], strict=False) if each["outcome"] == "agrees"]
        if agreed and chance.randrange(BUILD_EVERY) == 0:
            record["built"] = _built(chance.choice(agreed))
    except Exception:  # A fuzzer outlives what it finds.
        record["traceback"] = traceback.format_exc()
    record["seconds"] = round(time.perf_counter() - start, 3)
    record["core_seconds"] = round(_core_seconds() - core, 3)
    return record


def _core_seconds() -> float:
    """Time on a core of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def _distinct_forms(kernels: Sequence[Kernel]) -> list[KernelForm]:
    """The canonical forms of some kernels, one of a kind; devices differ in whether attention is written out."""
    return list({kernel.program.form.kind: kernel.program.form for kernel in kernels}.values())


def meaning_error(form: KernelForm) -> float:
    """Error of the canonical form, whose kernels are run against it, to the operator as its author wrote it.

    0 where that would take long, and where what changes in its last place on the way changes the result, too.
    """
    expr = form.source
    points = max(
        math.prod(expr.sizes[axis] for axis in (*s.axes, *(s.reduction.axes if s.reduction else ())))
        for s in expr.statements
    )
    if points > MOST_MEANING_POINTS:
        return 0.0
    values_by_name: dict[str, Any] = dict(random_inputs(expr, 0))
    expected = evaluate(expr, values_by_name)
    moved, _ = shaken(expr, values_by_name, unit_of("float64"), 0)
    if relative_error(moved, expected) > MOST_MEANING_ERROR / 10:
        return 0.0
    for kernel in form.stages or (form,):
        given = {tensor.name: values_by_name[tensor.name].reshape(tensor.shape) for tensor in kernel.expr.inputs}
        values_by_name[kernel.expr.output.name] = evaluate(kernel.expr, given)
    return relative_error(values_by_name[expr.output.name].reshape(expected.shape), expected)


def _built(kernel: Kernel) -> str:
    """Complaint of the device's own compiler about a kernel; empty where it takes it."""
    target = Target.of(device_of(kernel.device))
    for part in kernel.program.parts:
        request = BuildRequest(
            form=part.problem, schedule=part.schedule, entry="drawn", target=target, worthwhile_blocks=()
        )
        error = build_kernel(request).error
        if error:
            return f"{kernel.device} {kernel.kind}: {error}"
    return ""


def run(kernel: Kernel, chance: random.Random) -> Record:
    """The record of one kernel that was run."""
    start = time.perf_counter()
    engine = None
    if kernel.device != "cpu":
        engine = "opencl" if chance.randrange(OPENCL_EVERY) == 0 else "emulator"
    seeds = (0, chance.randrange(1, 1000), chance.randrange(1000, 10000))
    result = kernel.verify(engine, seeds)
    outcome = outcome_of(kernel, result)
    record: Record = {
        "device": kernel.device, "rank": kernel.rank, "kind": kernel.kind, "engine": result.engine or engine,
        "outcome": outcome, "met": kernel.productions(), "seconds": round(time.perf_counter() - start, 3),
    }  # fmt: skip
    if not result.passed:
        record["reason"] = result.reason
        record["seeds"] = seeds
    elif result.needless:
        record["needless"] = list(result.needless)
    return record


def shrunk_operator(data: Data, run_record: Record, seconds: float) -> Data:
    """An operator with a failing kernel made small."""
    fails = failure(run_record["device"], run_record["kind"], run_record["outcome"], run_record["engine"])
    return shrunk(data, fails, seconds) if fails(data) else data
