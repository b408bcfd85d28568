"""Operators one of whose sizes is known at launch, compiled: a few kernels, and which is launched for which size."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

from codegen.built import BuiltKernel
from codegen.bundle.records import SizeRecord
from codegen.bundle.writer import rounded
from codegen.compile.build import build_kernel, verify_schedule
from codegen.compile.request import BuildRequest, BuiltProgram
from codegen.target import Target
from codegen.verify.engines import ORDER_SEEDS
from codegen.verify.result import Verification
from codegen.verify.sizes import verify_sizes
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.compile.ranked import RankedKernel, StruckOut, entry_name
from roller.sizes import PROGRAMS, Candidate, Choice, SizedPrograms, SizeRule
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import TensorExpr
from sokoban.model.compiled import worthwhile_blocks
from sokoban.search.search import SearchResult, search

#: A kernel that takes this much longer as it was compiled than it was priced at is priced anew, and others compete.
SLOWER = 1.02

#: How often kernels are chosen anew, at most.
MOST_ROUNDS = 6


@dataclass(frozen=True)
class _Building:
    """A kernel under way, and its check."""

    choice: Choice
    kernels: tuple[Future[BuiltKernel], ...]
    check: Future[Verification] | None


@dataclass(frozen=True, kw_only=True)
class SizedKernels:
    """Kernels of an operator by rank, and the sizes that each is for.

    Attributes:
        programs: the candidates.
        rule: which of them were chosen.
        kernels: of the choices, in their order.
        failures: why some candidates gave no kernel.
        struck_out: those that failed their verification.
        seconds: of all of it.
    """

    programs: SizedPrograms
    rule: SizeRule
    kernels: tuple[RankedKernel, ...]
    failures: tuple[str, ...]
    struck_out: tuple[StruckOut, ...]
    seconds: float

    @property
    def record(self) -> SizeRecord:
        """Record of the size in the manifest."""
        size = self.programs.size
        ranges = tuple(
            replace(each, seconds=rounded(each.seconds), best_seconds=rounded(each.best_seconds))
            for each in self.rule.ranges
        )
        return SizeRecord(axis=size.axis, multiple=size.multiple, ranges=ranges)


def searches_in(pool: Executor, device: DeviceSpec) -> Callable[[KernelForm], Callable[[], SearchResult]]:
    """Searches in the processes of a pool."""

    def begin(form: KernelForm) -> Callable[[], SearchResult]:
        return pool.submit(search, form, device, PROGRAMS).result

    return begin


def sized_kernels(
    expr: TensorExpr,
    device: DeviceSpec,
    *,
    verify: bool,
    pool: Executor,
    method: str,
    algorithms: Collection[str],
) -> SizedKernels:
    """Kernels of an operator one of whose sizes is known at launch, built and proved.

    Candidates that cannot be built or fail their verification are refused, and kernels chosen anew, as they are where
    the compiler made a kernel slower than it was priced.

    Raises:
        InputError: the operator or the device takes no such size, or no kernel is left for some size.
    """
    start = time.perf_counter()
    programs = SizedPrograms.of(expr, device, method, algorithms, searches_in(pool, device))
    built: dict[tuple[Candidate, int], RankedKernel | None] = {}
    failures: list[str] = []
    struck_out: list[StruckOut] = []
    for _ in range(MOST_ROUNDS):
        rule = programs.rule()
        new = [choice for choice in rule.choices if (choice.candidate, choice.last) not in built]
        if not new:
            break
        for building in [_submit(choice, expr, device, verify, pool) for choice in new]:
            kernel = _finished(building, programs, device, failures, struck_out)
            built[building.choice.candidate, building.choice.last] = kernel
    # Kernels of the last choice that some round has built, whatever they were priced at since.
    kernels = [built.get((choice.candidate, choice.last)) for choice in rule.choices]
    if any(kernel is None for kernel in kernels):
        reason = failures[-1] if failures else struck_out[-1].verification.reason
        raise InputError(expr.name, f"no set of kernels could be built: {reason}", "change the operator, or report it")
    return SizedKernels(
        programs=programs,
        rule=rule,
        kernels=tuple(kernel for kernel in kernels if kernel is not None),
        failures=tuple(failures),
        struck_out=tuple(struck_out),
        seconds=time.perf_counter() - start,
    )


def _submit(choice: Choice, expr: TensorExpr, device: DeviceSpec, verify: bool, pool: Executor) -> _Building:
    program, target, entry = choice.written, Target.of(device), entry_name(expr.name)
    names = [entry] if len(program.parts) == 1 else [f"{entry}_part_{n + 1}" for n in range(len(program.parts))]
    requests = [
        BuildRequest(
            form=part.problem, schedule=part.schedule, entry=name, target=target,
            worthwhile_blocks=worthwhile_blocks(priced.problem, priced.schedule, device),
        )
        for part, priced, name in zip(program.parts, choice.priced.parts, names, strict=True)
    ]  # fmt: skip
    check = check_of(choice, expr, target, pool) if verify else None
    return _Building(choice, tuple(pool.submit(build_kernel, request) for request in requests), check)


def check_of(
    choice: Choice,
    expr: TensorExpr,
    target: Target,
    pool: Executor,
    order_seeds: Sequence[int] = ORDER_SEEDS,
) -> Future[Verification]:
    """The check of a kernel: for several sizes, or for the one that it is for."""
    assert expr.launch_size is not None
    check = choice.check(expr.launch_size)
    if check is not None:
        return pool.submit(verify_sizes, check, target, order_seeds)
    program = choice.written
    return pool.submit(verify_schedule, program.form, program.main.tiles, target, None, order_seeds)


def _finished(
    building: _Building,
    programs: SizedPrograms,
    device: DeviceSpec,
    failures: list[str],
    struck_out: list[StruckOut],
) -> RankedKernel | None:
    """The kernel; None where it cannot be built or is wrong, which refuses the candidate."""
    choice, candidate = building.choice, building.choice.candidate
    kernels = tuple(future.result() for future in building.kernels)
    error = next((kernel.error for kernel in kernels if kernel.error), "")
    verification = building.check.result() if building.check is not None and not error else None
    if error:
        failures.append(error)
    elif verification is not None and verification.is_wrong:
        struck_out.append(StruckOut(choice.written, verification))
    else:
        kernel = RankedKernel(choice.written, BuiltProgram(kernels, verification), device, priced=choice.priced)
        factor = kernel.seconds / choice.priced.estimate.seconds
        if factor > SLOWER * programs.factors.get(candidate, 1.0):
            programs.factors[candidate] = factor
        return kernel
    programs.refused.add(candidate)
    return None
