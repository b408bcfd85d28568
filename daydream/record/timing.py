"""Times without the profiler: steps, and what PyTorch costs where somebody else's kernel is called as its operator."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from codegen.bundle.records import Argument

ROUNDS, CALLS = 15, 200


def custom_call_us(torch: Any) -> float:
    """Cost of a call of an operator that takes three tensors, allocates its small result and does nothing.

    In microseconds, the median of several rounds, by the way that `roller.torch_op` registers operators.
    """
    op = _empty(torch)
    tensor = torch.empty(16)
    return call_seconds(lambda: op(tensor, tensor, tensor)) * 1e6


def call_seconds(call: Callable[[], Any]) -> float:
    """The median time of a short call, in seconds."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - started) / CALLS)
    return statistics.median(rounds)


class _Nothing:
    """An operator of a processor's bundle, as it is registered with PyTorch, whose kernel returns at once."""

    inputs = tuple(Argument(name=name, role="input", dtype="float32", shape=(16,)) for name in ("A", "B", "C"))
    output = Argument(name="Out", role="output", dtype="float32", shape=(16,))

    def __init__(self) -> None:
        self._function: Any = ctypes.CDLL(None).labs
        self._function.argtypes = (ctypes.c_void_p,)
        self._pointers: Any = ctypes.c_void_p * (len(self.inputs) + 1)

    def run_on(self, team: int, threads: int) -> None:
        """It has no blocks to share out."""

    def run(self, *addresses: int) -> None:
        self._function(self._pointers(*addresses))


@cache
def _empty(torch: Any) -> Any:
    from codegen.runtime.torch_operator import define_on_cpu

    operator: Any = _Nothing()
    return define_on_cpu(torch, operator, "daydream::nothing")


class TimedSteps:
    """Times of steps without a profiler, and the cost of a custom operator's call.

    Attributes:
        wanted: how many; 0 for none.
        begun: whether they are under way.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.begun = False
        self._since = 0.0
        self._seconds: list[float] = []
        self._call_us: float | None = None

    def begin(self, torch: Any) -> None:
        """The first one starts."""
        self.begun = True
        self._call_us = custom_call_us(torch)
        self._since = time.perf_counter()

    def step(self) -> bool:
        """Say that a step is complete; True when there are enough. The first one, behind the profiler, is left out."""
        now = time.perf_counter()
        self._seconds.append(now - self._since)
        self._since = now
        return len(self._seconds) > self.wanted

    def metadata(self) -> dict[str, Any]:
        """Entries of a trace: `timed_seconds` of every step, and `custom_call_us`; nothing if not begun."""
        if self._call_us is None:
            return {}
        return {"timed_seconds": self._seconds[1:], "custom_call_us": round(self._call_us, 3)}
