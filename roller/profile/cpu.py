"""Measuring the kernels of one bundle on this machine's cores: the reference, checks, timing in turns.

NumPy computes the reference, so that no compiler is needed.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.bundle.manifest import read_manifest
from codegen.bundle.operators import operator_of
from codegen.bundle.records import Bundle, KernelRecord
from codegen.runtime.cpu import CpuOperator
from codegen.tolerance import judge, tolerance_of
from hal.microbench.cpu.topology import Topology, read_topology
from hal.support.errors import InputError
from roller.profile.measurement import Board, Measurement
from sokoban.language.random_data import input_ranges
from sokoban.language.reference import evaluate

Array = NDArray[Any]

#: What a measurement says was loaded: the shared object.
LOADED = "library"

#: The inputs of all sets together fill the private caches so many times: nothing of a set is left in them when its turn
#: comes again. The last level is shared with whoever else uses the machine, and is not flushed.
CACHE_FILLS = 2

#: Least and greatest number of sets.
FEWEST_SETS, MOST_SETS = 2, 16

#: A call that takes so long is long enough for its threads to be awake and its code to be in the caches.
LONG_CALL_SECONDS = 1e-3

#: However slow kernels are, they have so many rounds.
FEWEST_ROUNDS = 3

#: A kernel that takes so many times as long as the fastest, in its best round too, is out after so many rounds.
HOPELESS, SIFTED_AFTER = 1.5, 5


@dataclass(frozen=True)
class CpuMeasureOptions:
    """Options of a measurement.

    Attributes:
        rounds: in each every kernel has a turn.
        turn_seconds: how long a turn takes; one call at least.
        warmup_seconds: the first kernel runs this long before anything is timed, until the clock is steady.
    """

    rounds: int = 30
    turn_seconds: float = 4e-3
    warmup_seconds: float = 0.03

    @property
    def kernel_seconds(self) -> float:
        """Time for one kernel; slow ones get fewer rounds, so that they do with it."""
        return self.rounds * self.turn_seconds


def this_board() -> Board:
    """This machine's processor, with as many threads as share the work."""
    topology = _cores()
    threads = len(topology.cpus)
    fewer = os.environ.get("ROLLER_NUM_THREADS", "")
    if fewer.isdigit() and int(fewer):
        threads = min(threads, int(fewer))
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    return Board(topology.title or topology.architecture, f"{threads} threads", versions)


@lru_cache(maxsize=1)
def _cores() -> Topology:
    """The cores of this process, before any thread of it was kept on one."""
    return read_topology()


def private_bytes() -> int:
    """Bytes of the largest cache that a core has alone, all cores together; 0 where the system does not say."""
    cores = _cores()
    return len(cores.cpus) * max((cache.size_bytes for cache in cores.caches if cache.private), default=0)


def rotating_sets(input_bytes: int, private_bytes: int) -> int:
    """Sets of inputs that take turns, so that nothing of one is left in the private caches when its turn comes again.

    Args:
        input_bytes: bytes of one set.
        private_bytes: bytes of the private caches of all cores together.

    >>> rotating_sets(input_bytes=100_000, private_bytes=400_000)
    8
    """
    wanted = math.ceil(CACHE_FILLS * private_bytes / max(1, input_bytes))
    return max(FEWEST_SETS, min(MOST_SETS, wanted))


def pin_to(cpu: int) -> None:
    """Keep this thread on a processor, where the system allows it."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, {cpu})


@dataclass
class _Contender:
    """A kernel that is right: its calls in turn over the sets of inputs; seconds of one call, round by round."""

    kernel: KernelRecord
    calls: Iterator[Callable[[], Array]]
    error: float
    seconds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def turn(self, seconds: float) -> None:
        """Calls one after the other for about so long; a first one, not timed if calls are short, wakes the threads."""
        clock = time.perf_counter
        until = clock() + seconds
        start = clock()
        next(self.calls)()
        once = clock() - start
        times = [once] if once >= LONG_CALL_SECONDS else []
        while not times or clock() < until:
            call = next(self.calls)
            start = clock()
            call()
            times.append(clock() - start)
        self.seconds.append(median(times))
        self.counts.append(len(times))

    def measurement(self, tolerance: float) -> Measurement:
        """Its times, which count."""
        launches = int(median(self.counts))
        return Measurement.timed(
            self.seconds, launches=launches, relative_error=self.error, tolerance=tolerance, loaded=LOADED
        )


class CpuBench:
    """An operator's inputs and its reference result.

    Args:
        pinned: the calling thread stays on a core of its own from the first timing on.

    Raises:
        InputError: the manifest's operator cannot be read back.
    """

    def __init__(self, bundle: Bundle, options: CpuMeasureOptions, *, pinned: bool = False) -> None:
        self.bundle, self.options, self.pinned = bundle, options, pinned
        self.expr = operator_of(read_manifest(bundle.directory))
        self.limit = tolerance_of(self.expr)
        first = self._inputs()
        # A caller's filters of a depthwise convolution have a dimension of one that the operator does not know.
        values = {
            tensor.name: array.reshape(tensor.shape) for tensor, array in zip(self.expr.inputs, first, strict=True)
        }
        self.expected = evaluate(self.expr, values).reshape(bundle.output.shape)
        count = rotating_sets(sum(array.nbytes for array in first), private_bytes())
        self.sets = [first, *([array.copy() for array in first] for _ in range(count - 1))]
        self.out = np.empty(bundle.output.shape, bundle.output.dtype)
        self.judged = _Judge(self.expected, self.out)

    def _inputs(self) -> list[Array]:
        """Test data, the same on every run, in the shapes that callers give."""
        ranges = input_ranges(self.expr)
        arrays = []
        for number, argument in enumerate(self.bundle.inputs):
            low, high = ranges[argument.name]
            values = np.random.default_rng([0, number]).random(argument.shape, dtype=np.float32)
            arrays.append((values * np.float32(high - low) + np.float32(low)).astype(argument.dtype))
        return arrays

    def measure(self, kernels: Sequence[KernelRecord], running: Callable[[int], object]) -> dict[int, Measurement]:
        """Check the kernels and time those that are right, by rank; ``running`` is called with the rank of a kernel
        before it runs, which may end the process."""
        measurements: dict[int, Measurement] = {}
        contenders = []
        for kernel in kernels:
            running(kernel.rank)
            contender = self._checked(kernel)
            if isinstance(contender, Measurement):
                measurements[kernel.rank] = contender
            else:
                contenders.append(contender)
        return measurements | self._timed(contenders, running)

    def _limit(self, kernel: KernelRecord) -> float:
        return max(self.limit, kernel.tolerance or 0.0)

    def _checked(self, kernel: KernelRecord) -> _Contender | Measurement:
        """A kernel that is right on an output full of NaN, or of the least integer, or why it cannot be timed."""
        self.out.fill(np.nan if self.out.dtype.kind == "f" else np.iinfo(self.out.dtype).min)
        try:
            operator = CpuOperator(self.bundle, kernel)
            calls = [operator.bound(*arrays, out=self.out) for arrays in self.sets]
            calls[0]()
        except InputError as problem:
            return _refused(str(problem), self._limit(kernel))
        error, reason = self.judged(self._limit(kernel))
        return (
            _refused(reason, self._limit(kernel), error)
            if reason
            else _Contender(kernel, itertools.cycle(calls), error)
        )

    def _timed(self, contenders: list[_Contender], running: Callable[[int], object]) -> dict[int, Measurement]:
        """Rounds of turns, another kernel first each time, and a last check of what each wrote under load."""
        if not contenders:
            return {}
        if self.pinned:
            # Now that the pool has its threads, whose cores it chose among those of this one.
            pin_to(_cores().cpus[0])
        rounds, measurements = self._rounds(contenders), {}
        remaining = list(contenders)
        for number in range(rounds):
            first = number % len(remaining)
            for contender in (*remaining[first:], *remaining[:first]):
                running(contender.kernel.rank)
                contender.turn(self.options.turn_seconds)
                if number + 1 == rounds:
                    measurements[contender.kernel.rank] = self._result(contender)
            if number + 1 == SIFTED_AFTER < rounds:
                best = min(median(contender.seconds) for contender in remaining)
                hopeless = [contender for contender in remaining if min(contender.seconds) > HOPELESS * best]
                for contender in hopeless:
                    measurements[contender.kernel.rank] = contender.measurement(self._limit(contender.kernel))
                remaining = [contender for contender in remaining if contender not in hopeless]
        return measurements

    def _result(self, contender: _Contender) -> Measurement:
        limit = self._limit(contender.kernel)
        error, reason = self.judged(limit)
        if reason:
            return _refused(f"after {len(contender.seconds)} timed runs: {reason}", limit, error)
        return contender.measurement(limit)

    def _rounds(self, contenders: Sequence[_Contender]) -> int:
        """Number of rounds there is time for; warms the clock on the way."""
        until = time.perf_counter() + self.options.warmup_seconds
        calls, once = contenders[0].calls, 0.0
        while not once or time.perf_counter() < until:
            start = time.perf_counter()
            next(calls)()
            once = time.perf_counter() - start
        possible = int(self.options.kernel_seconds / max(once, self.options.turn_seconds))
        return max(FEWEST_ROUNDS, min(self.options.rounds, possible))


class _Judge:
    """Judgement of outputs in few passes over them: large ones would take longer to judge than to compute."""

    def __init__(self, expected: Array, out: Array) -> None:
        self.expected, self.out = expected, out
        self.finite = bool(np.isfinite(expected).all())
        if self.finite:
            scale = np.abs(expected) + max(float(np.sqrt(np.mean(np.square(expected)))), 1e-30)
            self.weights = (1.0 / scale).astype(out.dtype)
            self.wanted = expected.astype(out.dtype)
            self.difference = np.empty_like(out)

    def __call__(self, limit: float) -> tuple[float, str]:
        """Relative error as :func:`codegen.verify.result.relative_error` defines it, and what is wrong, if anything."""
        if self.finite:
            np.subtract(self.out, self.wanted, out=self.difference)
            np.multiply(self.difference, self.weights, out=self.difference)
            np.abs(self.difference, out=self.difference)
            error = float(self.difference.max(initial=0.0))
            if error <= limit:  # not so if anything is no number
                return error, ""
        return judge(self.out, self.expected, limit)


def _refused(reason: str, tolerance: float, error: float | None = None) -> Measurement:
    return Measurement.refused(reason, tolerance=tolerance, loaded=LOADED, relative_error=error)
