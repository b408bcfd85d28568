"""One drawn operator from end to end: its kernels on every device, some of them run."""

from __future__ import annotations

import random
import time
import traceback
from typing import Any

from bench.fuzz.kernels import DEVICES, Kernel, drawn, kernels_of, outcome_of
from bench.fuzz.operators import Data, operator
from bench.fuzz.shrink import failure, shrunk
from hal.support.errors import InputError
from sokoban.language.operators import operator_from_data

#: Kernels of an operator that are run.
KERNELS = 3
#: One kernel in so many is run by its OpenCL twin, one operator in so many on the processor, and searched for.
OPENCL_EVERY, CPU_EVERY, SEARCH_EVERY = 8, 6, 10

Record = dict[str, Any]


def examined(number: int, seed: int = 0) -> Record:
    """The record of an operator: what it takes on every device, and what came of the kernels that were run."""
    return examined_data(operator(number, seed), random.Random(f"{seed}/{number}/kernels")) | {"number": number}


def examined_data(data: Data, chance: random.Random) -> Record:
    """The record of any operator."""
    start = time.perf_counter()
    record: Record = {"took": {}, "refused": {}, "runs": []}
    try:
        expr = operator_from_data(data)
        kernels: list[Kernel] = []
        devices = [name for name in DEVICES if name != "cpu" or chance.randrange(CPU_EVERY) == 0]
        for device in devices:
            method = "both" if device != "cpu" and chance.randrange(SEARCH_EVERY) == 0 else "roller"
            try:
                some = kernels_of(expr, device, method)
            except InputError as error:
                record["refused"][device] = str(error)
                continue
            record["took"][device] = some[0].kind
            kernels += some
        chosen = drawn([kernel for kernel in kernels if kernel.device != "cpu"], chance, KERNELS)
        chosen += drawn([kernel for kernel in kernels if kernel.device == "cpu"], chance, 1)
        for kernel in chosen:
            record["runs"].append(run(kernel, chance))
    except Exception:  # A fuzzer outlives what it finds.
        record["traceback"] = traceback.format_exc()
    record["seconds"] = round(time.perf_counter() - start, 3)
    return record


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
