"""One network, compiled by everybody and run in turns, in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

from bench.backend.networks import NETWORKS
from hal.catalog import load_device
from hal.this_cpu import THIS_CPU
from roller.dynamo.backend import backend
from roller.dynamo.explanation import predict_model
from roller.dynamo.rewriting import Decision
from roller.dynamo.streaming import reading_bandwidth

#: Clocks in seconds: of the wall, and of all threads of this process, which other programs stop less.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}

#: Calls of a turn at least, and seconds that they fill; the first quarter does not count. A network of a few
#: milliseconds takes five or six calls until caches hold what it finds there when it runs by itself.
CALLS, TURN_SECONDS = 4, 0.1


def first_tensor(outputs: Any) -> Any:
    """The first tensor of a network's outputs."""
    return outputs if isinstance(outputs, torch.Tensor) else next(iter(outputs.values()))


def difference(result: Any, expected: Any) -> float:
    """Largest difference, relative to the largest number; networks that begin with a head of zeros give zeros."""
    return float((result - expected).abs().max()) / (float(expected.abs().max()) or 1.0)


def _seconds(function: Callable[..., Any], inputs: tuple[Any, ...]) -> float:
    """Time of the second of two calls by the clock."""
    function(*inputs)
    start = time.perf_counter()
    function(*inputs)
    return time.perf_counter() - start


def measured(
    *, name: str, batch: int, rounds: int, rivals: list[str], cache: Path, competes: bool, clock: str
) -> dict[str, Any]:
    """Times of a network in milliseconds by rival and as predicted before, the error of ours, seconds of compiling, and
    what ours took."""
    torch.manual_seed(0)
    now = CLOCKS[clock]
    network, inputs = NETWORKS[name](batch)
    price = predict_model(network, *inputs, device="cpu", cache=cache, competes=competes).price
    decisions: list[Decision] = []
    ours = backend(device="cpu", cache=cache, competes=competes)
    ours.listeners.append(decisions.extend)
    makers: dict[str, Callable[[], Any]] = {
        "eager": lambda: network,
        "roller": lambda: torch.compile(network, backend=ours),
        "inductor": lambda: torch.compile(network),
        "inductor, frozen": lambda: torch.compile(network, options={"freezing": True}),
        "inductor, max-autotune": lambda: torch.compile(network, mode="max-autotune"),
    }
    functions: dict[str, Any] = {}
    compile_seconds: dict[str, float] = {}
    with torch.no_grad():
        expected = first_tensor(network(*inputs))
        for rival in rivals:
            start = time.perf_counter()
            functions[rival] = makers[rival]()
            # Dynamo takes parameters for constants where the configuration says so while it captures.
            with torch._inductor.config.patch(freezing="frozen" in rival):
                result = first_tensor(functions[rival](*inputs))
            compile_seconds[rival] = time.perf_counter() - start
            if rival == "roller":
                error = difference(result, expected)
            print(f"{name}: {rival} compiled in {compile_seconds[rival]:.1f} s", file=sys.stderr, flush=True)
        times: dict[str, list[float]] = {rival: [] for rival in rivals}
        calls = {
            rival: max(CALLS, round(TURN_SECONDS / _seconds(function, inputs))) for rival, function in functions.items()
        }
        for turn in range(rounds):
            for rival in [*rivals[turn % len(rivals) :], *rivals[: turn % len(rivals)]]:
                for call in range(calls[rival]):
                    start = now()
                    functions[rival](*inputs)
                    if call >= calls[rival] // CALLS:
                        times[rival].append((now() - start) * 1e3)
    taken = [decision for decision in decisions if decision.is_taken]
    total = sum(decision.multiply_adds for decision in decisions)
    return {
        "network": name,
        "batch": batch,
        "milliseconds": {rival: statistics.median(values) for rival, values in times.items()},
        "predicted_milliseconds": {part: seconds * 1e3 for part, seconds in asdict(price).items()},
        "memory_gigabytes_per_second": reading_bandwidth(load_device(THIS_CPU)) / 1e9,
        "error": error,
        "compile_seconds": compile_seconds,
        "taken": len(taken),
        "products": len(decisions),
        "share": sum(decision.multiply_adds for decision in taken) / max(1, total),
        "kernel_milliseconds": sum(decision.seconds for decision in taken) * 1e3,
    }


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    # On fewer cores than there are the device is one of so many: what it reaches in memory is measured with them.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0), reverse=True)[: arguments.pop("threads")])
    with tempfile.TemporaryDirectory() as folder:
        if arguments["cache"] is None:
            # Nothing compiled before, and the processor measured now: others take some of its memory's rate.
            os.environ["XDG_CACHE_HOME"] = folder
        arguments["cache"] = Path(arguments["cache"] or folder)
        print(json.dumps(measured(**arguments)))
