"""The compile pipeline: operator -> programs -> kernels built in parallel -> ranked -> bundle on disk."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from codegen.built import BuiltKernel
from codegen.bundle.records import SizeRecord
from codegen.compile.build import build_kernel, verify_chain, verify_schedule
from codegen.compile.cache import KnownFirst
from codegen.compile.request import BuildRequest, BuiltProgram
from codegen.target import Target
from codegen.verify.engines import ORDER_SEEDS, engine_for
from codegen.verify.result import Verification
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.algorithms import ALGORITHMS
from roller.compile.ranked import RankedKernel, StruckOut, entry_name
from roller.compile.sized import check_of, searches_in, sized_kernels
from roller.construct.construct import construct
from roller.construct.program import Program
from roller.programs import Programs, find_programs, finders, form_on
from roller.sizes import SizedPrograms
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import TensorExpr
from sokoban.model.compiled import worthwhile_blocks
from sokoban.search.search import SearchResult, search

#: Programs constructed beyond those asked for, built only where some of those fail or spill.
SPARES = 4

#: How much longer than the first a program may be expected to take and have its registers squeezed, which costs a
#: second compilation and makes of every fourth kernel one that is 4 % faster in the mean. Ten kernels for each of the
#: 119 operators are mostly within a twentieth of each other, or behind another algorithm: on V100 and A100 every bound
#: from 1.05 to 1.3, on operators of even and of odd numbers alike, saves 48 of 266 compilations, 6 of which would have
#: found something, and leaves every first rank what it is.
SQUEEZED_REACH = 1.25


@dataclass(frozen=True, kw_only=True)
class CompiledOperator:
    """An operator's kernels, best first, and how they came about.

    Attributes:
        kernels: none of them failed a verification; empty where all that were built did.
        total_seconds: from the parsed operator to the last kernel; other operators may have run meanwhile.
        failures: why some programs gave no kernel.
        struck_out: programs whose kernels failed their verification, in the order in which they were tried.
        launch_size: a size that is known at launch, and which kernels are for which; None where all sizes are known.
    """

    expr: TensorExpr
    form: KernelForm
    programs: Programs
    kernels: tuple[RankedKernel, ...]
    total_seconds: float
    failures: tuple[str, ...]
    struck_out: tuple[StruckOut, ...] = ()
    launch_size: SizeRecord | None = None

    @property
    def error(self) -> str:
        """Why there is no kernel: which engine found how many wrong, and how far off the first was; empty where there
        are kernels."""
        if self.kernels or not self.struck_out:
            return ""
        first, count = self.struck_out[0], len(self.struck_out)
        tried = "the only kernel" if count == 1 else f"all {count} kernels tried"
        return f"{tried} failed verification by {first.verification.method}: {first.verification.reason}"


def compile_operators(
    expressions: Sequence[TensorExpr],
    device: DeviceSpec,
    *,
    top_k: int,
    verify: int,
    pool: Executor,
    method: str = "both",
    algorithms: Collection[str] = ALGORITHMS,
    ahead: int = 4,
) -> Iterator[CompiledOperator]:
    """Compile operators in order; the next ``ahead`` are queued while one is being built.

    Args:
        top_k: kernels per operator.
        verify: how many of them, from rank 1 down, are run against the reference. One that fails is struck out, and the
            next takes its rank and is run in its place; an operator may be left without kernels
            (:attr:`CompiledOperator.error`).
        pool: executes :func:`codegen.build_kernel` and :func:`sokoban.search.search.search`.
        method: who looks for programs, one of :data:`roller.programs.METHODS`.
        algorithms: which kinds of programs compete, some of :data:`roller.algorithms.ALGORITHMS`.

    Raises:
        InputError: an operator cannot be compiled; the message names it.
        BrokenProcessPool: a process of the pool died.
    """
    # All of them first: whatever is wrong with the last one is known before the first is written.
    jobs = [
        (_Job if expr.launch_size is None else _SizedJob)(expr, device, top_k, verify, pool, method, algorithms)
        for expr in expressions
    ]
    if jobs:
        # The pool is still loading its compilers.
        jobs[0].search_in_process()
    for position, job in enumerate(jobs):
        near = jobs[position : position + ahead + 1]
        for other in near:
            other.search_in_pool()
        for other in near:
            other.start()
        yield job.finish()


@dataclass(frozen=True)
class _Building:
    """A program under way: what was asked for, the kernels in the same order, and the check of all of them together."""

    program: Program
    requests: tuple[BuildRequest, ...]
    kernels: tuple[Future[BuiltKernel], ...]
    check: Future[Verification] | None = None

    @property
    def futures(self) -> tuple[Future[Any], ...]:
        """All that is being worked on."""
        return self.kernels if self.check is None else (*self.kernels, self.check)

    def result(self) -> BuiltProgram:
        """Outcome of the job; waits for it."""
        kernels = tuple(future.result() for future in self.kernels)
        # What cannot be built need not be right.
        is_checked = self.check is not None and not any(kernel.error for kernel in kernels)
        return BuiltProgram(kernels, self.check.result() if is_checked and self.check is not None else None)


class _Job:
    """One operator on its way through the pool."""

    def __init__(
        self,
        expr: TensorExpr,
        device: DeviceSpec,
        top_k: int,
        verify: int,
        pool: Executor,
        method: str,
        algorithms: Collection[str],
    ) -> None:
        start = time.perf_counter()
        self.algorithms, self.method = algorithms, method
        self.expr, self.device, self.top_k, self.verify, self.pool = expr, device, top_k, verify, pool
        self.form = form_on(expr, device)
        constructs, self.needs_search = finders(device, method)
        if self.form.is_composed:
            constructs, self.needs_search = True, False
        self.constructed = construct(self.form, device, top_k + SPARES) if constructs else None
        self.searched: Future[SearchResult] | None = None
        self.ranked: list[Program] = []
        self.building: list[_Building] = []
        self.failures: list[str] = []
        self.struck_out: list[StruckOut] = []
        self.seconds_before = time.perf_counter() - start

    def search_in_process(self) -> None:
        """Search in this process, if a search is wanted at all."""
        if self.needs_search:
            start = time.perf_counter()
            self.searched = Future()
            self.searched.set_result(search(self.form, self.device, self.top_k + SPARES))
            self.seconds_before += time.perf_counter() - start

    def search_in_pool(self) -> None:
        """Queue the search, once, if it is wanted."""
        if self.needs_search and self.searched is None:
            self.searched = self.pool.submit(search, self.form, self.device, self.top_k + SPARES)

    def _search_result(self) -> SearchResult | None:
        """Outcome of the search; waits for it. None where none was wanted."""
        if self.searched is None:
            return None
        with self._pool_named():
            return self.searched.result()

    def start(self) -> None:
        """Queue the first ``top_k`` programs, once."""
        if self.building:
            return
        self.started = time.perf_counter()
        self.programs = Programs.of(
            self.constructed, self._search_result(), top_k=self.top_k + SPARES, algorithms=self.algorithms,
            method=self.method,
        )  # fmt: skip
        self.ranked = self.programs.ranked(self.top_k, self.algorithms, SPARES)
        asked = self.ranked[: self.top_k]
        self.building += [self._submit(program, rank < self.verify) for rank, program in enumerate(asked)]

    def _submit(self, program: Program, verify: bool) -> _Building:
        entry, count = entry_name(self.expr.name), len(program.parts)
        entries = [entry] if count == 1 else [f"{entry}_part_{number}" for number in range(1, count + 1)]
        # The check needs no cubin and takes longer, so it runs while the kernel is compiled.
        check = _checked(program, (Target.of(self.device),), self.pool) if verify else None
        is_near = program.estimate.seconds <= SQUEEZED_REACH * self.ranked[0].estimate.seconds
        requests = tuple(
            BuildRequest(
                form=part.problem,
                schedule=part.schedule,
                entry=name,
                target=Target.of(self.device),
                worthwhile_blocks=(worthwhile_blocks(part.problem, part.schedule, self.device) if is_near else ()),
            )
            for part, name in zip(program.parts, entries, strict=True)
        )
        kernels = tuple(self.pool.submit(build_kernel, request) for request in requests)
        return _Building(program, requests, kernels, check)

    def finish(self) -> CompiledOperator:
        """Wait for the kernels, rank them, and build spares for those that fail."""
        with self._pool_named():
            return self._finish()

    @contextmanager
    def _pool_named(self) -> Iterator[None]:
        """A broken pool says at which operator it broke."""
        try:
            yield
        except BrokenProcessPool as error:
            raise BrokenProcessPool(f"{self.expr.name}: a build process died; try fewer --jobs") from error

    def _finish(self) -> CompiledOperator:
        kernels = self._proved()
        if not kernels and not self.struck_out:
            raise InputError(
                self.expr.name, f"no program could be built: {self.failures[0]}", "change the operator, or report it"
            )
        return CompiledOperator(
            expr=self.expr,
            form=self.form,
            programs=self.programs,
            kernels=tuple(kernels),
            total_seconds=self.seconds_before + time.perf_counter() - self.started,
            failures=tuple(self.failures),
            struck_out=tuple(self.struck_out),
        )

    def _proved(self) -> list[RankedKernel]:
        """The ``top_k`` best kernels, the first ``verify`` of which were run and found right."""
        kernels: list[RankedKernel] = []
        known = 0
        while True:
            self._build_spares()
            kernels = sorted(kernels + self._built(self.building[known:]), key=_order)
            known = len(self.building)
            due = [kernel for kernel in kernels[: self.top_k][: self.verify] if kernel.built.verification is None]
            if not due:
                return kernels[: self.top_k]
            checks = [_checked(kernel.program, (Target.of(self.device),), self.pool) for kernel in due]
            for kernel, check in zip(due, checks, strict=True):
                position = kernels.index(kernel)
                kernels[position : position + 1] = self._right(kernel, check.result())

    def _build_spares(self) -> None:
        """Wait for all programs, and begin a spare as soon as one has ended that does not build, is wrong, or spills
        and is expected to take longer than the spare; likewise where every kernel spills."""
        while True:
            ended = [each for each in self.building if all(future.done() for future in each.futures)]
            under_way = [future for each in self.building for future in each.futures if not future.done()]
            lost = [self._seconds_of_lost(each) for each in ended]
            if not under_way and all(lost):
                lost = [math.inf] * len(lost)
            # Spares are ordered by time: whichever program ends first, in the end the same ones are built.
            worst = sorted(filter(None, lost), reverse=True)
            spares = zip(self.ranked[self.top_k :], worst, strict=False)
            wanted = sum(spare.estimate.seconds < seconds for spare, seconds in spares)
            begun = len(self.building) - self.top_k
            more = [self._submit(program, False) for program in self.ranked[self.top_k :][max(begun, 0) : wanted]]
            self.building += more
            if not more and not under_way:
                return
            wait([*under_way, *(future for each in more for future in each.futures)], return_when=FIRST_COMPLETED)

    def _seconds_of_lost(self, building: _Building) -> float:
        """Time of a kernel that spills, infinite for one that was not built or is wrong; 0 for any other."""
        built = building.result()
        is_wrong = built.verification is not None and built.verification.is_wrong
        if built.error or is_wrong or any(building.program is each.program for each in self.struck_out):
            return math.inf
        return RankedKernel(building.program, built, self.device).seconds if built.spill_bytes else 0.0

    def _built(self, building: Sequence[_Building]) -> list[RankedKernel]:
        """The kernels of programs that were built, and are not known to be wrong."""
        kernels = []
        for each in building:
            built = each.result()
            if built.error:
                self.failures.append(built.error)
                continue
            kernel = RankedKernel(each.program, built, self.device)
            kernels += [kernel] if built.verification is None else self._right(kernel, built.verification)
        return kernels

    def _right(self, kernel: RankedKernel, verification: Verification) -> list[RankedKernel]:
        """A kernel with its verification; nothing where it failed, which strikes the program out."""
        if not verification.is_wrong:
            return [replace(kernel, built=replace(kernel.built, verification=verification))]
        self.struck_out.append(StruckOut(kernel.program, verification))
        if isinstance(self.pool, KnownFirst):
            building = next(each for each in self.building if each.program is kernel.program)
            for request in building.requests:
                self.pool.forget(build_kernel, request)
        return []


class _SizedJob(_Job):
    """An operator one of whose sizes is known at launch: all of its kernels are proved, or none."""

    def __init__(
        self,
        expr: TensorExpr,
        device: DeviceSpec,
        top_k: int,
        verify: int,
        pool: Executor,
        method: str,
        algorithms: Collection[str],
    ) -> None:
        self.expr, self.device, self.verify, self.pool = expr, device, verify, pool
        self.method, self.algorithms, self.form = method, algorithms, form_on(expr, device)
        SizedPrograms.check(expr, device)

    def search_in_process(self) -> None:
        """Nothing: its searches are many."""

    def search_in_pool(self) -> None:
        """Nothing: it begins all of them when it is its turn."""

    def start(self) -> None:
        """Nothing, likewise."""

    def _finish(self) -> CompiledOperator:
        sized = sized_kernels(
            self.expr, self.device, verify=self.verify > 0, pool=self.pool, method=self.method,
            algorithms=self.algorithms,
        )  # fmt: skip
        return CompiledOperator(
            expr=self.expr,
            form=self.form,
            programs=sized.programs.last,
            kernels=sized.kernels,
            total_seconds=sized.seconds,
            failures=sized.failures,
            struck_out=sized.struck_out,
            launch_size=sized.record,
        )


def _order(kernel: RankedKernel) -> tuple[bool, float]:
    """Spilling kernels rank below those that do not; then by predicted time, with the registers that they got."""
    return bool(kernel.built.spill_bytes), kernel.seconds


def verify_operators(
    expressions: Sequence[TensorExpr],
    device: DeviceSpec,
    *,
    top_k: int,
    pool: Executor,
    engine: str | None = None,
    order_seeds: Sequence[int] = ORDER_SEEDS,
    method: str = "both",
    algorithms: Collection[str] = ALGORITHMS,
    ahead: int = 8,
) -> Iterator[tuple[str, list[Verification]]]:
    """Run the best ``top_k`` programs of every operator against the reference, without compiling for the device.

    Args:
        engine: who runs them, as in :func:`codegen.verify.engines.engine_for`.
        order_seeds: of the orders in which the emulator runs threads, warps and blocks.
        method, algorithms: as in :func:`roller.programs.find_programs`.

    Raises:
        InputError: the engine does not run kernels of this device, or an operator has no program.
    """
    target = Target.of(device)
    how = (target, engine_for(target.generator, engine), tuple(order_seeds))
    started: list[tuple[str, list[Future[Verification]]]] = []
    for expr in expressions:
        if expr.launch_size is not None:
            sized = SizedPrograms.of(expr, device, method, algorithms, searches_in(pool, device))
            checks = [check_of(choice, expr, target, pool, tuple(order_seeds)) for choice in sized.rule().choices]
            started.append((expr.name, checks))
            continue
        form = form_on(expr, device)
        programs = find_programs(form, device, top_k, method, algorithms).ranked(top_k, algorithms)
        started.append((expr.name, [_checked(program, how, pool) for program in programs]))
        if len(started) > ahead:
            name, futures = started.pop(0)
            yield name, [future.result() for future in futures]
    for name, futures in started:
        yield name, [future.result() for future in futures]


def _checked(program: Program, how: tuple[Any, ...], pool: Executor) -> Future[Verification]:
    """The check of a program; ``how`` are the target, and the engine and its seeds where others are wanted."""
    check = program.check()
    if check is not None:
        return pool.submit(verify_chain, check, *how)
    return pool.submit(verify_schedule, program.form, program.main.tiles, *how)
