"""Verdicts on mutants: each is run as verification runs a kernel, and is noticed, harmless, needless or missed."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from bench.mutants.corpus import Specimen, with_other_edges
from bench.mutants.mutations import SYNC_KINDS, Mutation
from bench.mutants.variants import one_text
from codegen.tolerance import judge, output_widths
from codegen.verify.emulator import Emulation, EmulatorError, run_cuda_on_cpu
from codegen.verify.gpu import emulated_kernel, is_guard_written

#: What may become of a mutant. *Needless*: a synchronization was taken out that the checker called needless.
VERDICTS = ("noticed", "harmless", "needless", "missed")

#: A mutant hangs after so many times the steps of its kernel, or, where it takes none, after so many seconds.
MOST_STEPS, TIMEOUT_S = 10, 30.0

#: Mutants that are compiled as one text: of few lines many, as a compiler's start is most of what they take.
MOST_VARIANTS, MOST_LINES = 24, 6000

#: What tells by which check the emulator has noticed something.
_CHECKS = (
    ("race", r"\brace\b|unordered"),
    ("hang", r"still running"),
    ("deadlock", r"wait for each other|waits? for|never"),
    ("written twice", r"written (?:twice|again|more than once)"),
    ("unwritten", r"not written|never written|nobody wrote|before it was written"),
    ("access", r"outside an array|beyond|behind the end|not aligned|aligned|no multiple of"),
    ("seeds differ", r"differ"),
    ("compiler", r"g\+\+:"),
)


@dataclass(frozen=True, kw_only=True)
class MutantOutcome:
    """Outcome of one mutant.

    Attributes:
        operator, device, rank, part: whose kernel it was.
        kernel: its kind.
        kind, change: the mutation.
        line: its line in the kernel's text, and ``before`` the text that was changed.
        verdict: one of :data:`VERDICTS`.
        by: which check noticed it, or how it was shown to be harmless.
        message: what the check said.
    """

    operator: str
    device: str
    rank: int
    part: int
    kernel: str
    kind: str
    change: str
    line: int
    before: str
    verdict: str
    by: str
    message: str = ""

    @property
    def is_sync(self) -> bool:
        """True if a synchronization was changed."""
        return self.kind in SYNC_KINDS


class _MutantRun(NamedTuple):
    """A variant that was run: why it failed (empty: it did not), its output with its guard, the emulation."""

    reason: str
    flat: np.ndarray | None = None
    emulation: Emulation | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Mutants of a kernel that are compiled as one text, whose variant 0 is the kernel itself.

    Attributes:
        specimen: the kernel.
        mutations: what is changed in variants 1, 2, ...
    """

    specimen: Specimen
    mutations: tuple[Mutation, ...]

    def sources(self) -> list[str]:
        """The variants' texts."""
        source = self.specimen.kernel.source
        return [source, *(mutation.applied(source) for mutation in self.mutations)]

    def variants(self) -> _Variants:
        """The variants, ready to run."""
        sources = self.sources()
        return _Variants(self.specimen, sources, one_text(self.specimen.text, sources))


@dataclass(frozen=True)
class _Variants:
    """A kernel's variants as one text."""

    specimen: Specimen
    sources: Sequence[str]
    text: str

    def run(self, number: int, most_steps: int | None = None) -> _MutantRun:
        """One variant."""
        kernel = self.specimen.kernel
        chosen = np.array([number], np.int32)
        try:
            emulation = run_cuda_on_cpu(
                self.text,
                kernel.entry,
                [*kernel.arguments, chosen],
                kernel.grid,
                kernel.block,
                [len(kernel.arguments) - 1],
                kernel.dynamic_shared_bytes,
                optimized=kernel.optimized,
                extents=[*(tensor.element_count for tensor in kernel.tensors), 1],
                most_steps=most_steps,
                timeout_s=TIMEOUT_S,
                maps=kernel.maps,
            )
        except EmulatorError as error:
            return _MutantRun(str(error))
        return _MutantRun("", kernel.values(emulation.outputs[0]), emulation)


def batches_of(specimen: Specimen, mutations: Sequence[Mutation]) -> Iterator[Batch]:
    """Mutations of a kernel, as many at a time as make a text of moderate length."""
    lines = specimen.kernel.source.count("\n") - specimen.text.prelude.count("\n")
    count = max(1, min(MOST_VARIANTS, MOST_LINES // lines))
    for first in range(0, len(mutations), count):
        yield Batch(specimen=specimen, mutations=tuple(mutations[first : first + count]))


def drawn(specimen: Specimen, kinds: Sequence[str], sample: int, draw: random.Random) -> list[Mutation]:
    """The mutations of a kernel that are tried: all of synchronizations, of the others ``sample`` (0: all of them),
    kinds taken in turn."""
    chosen = [each for each in specimen.mutations if each.kind in kinds and each.kind in SYNC_KINDS]
    others = [each for each in specimen.mutations if each.kind in kinds and each.kind not in SYNC_KINDS]
    if sample == 0 or len(others) <= sample:
        return chosen + others
    by_kind = {kind: [each for each in others if each.kind == kind] for kind in kinds}
    for queue in by_kind.values():
        draw.shuffle(queue)
    picked: list[Mutation] = []
    while len(picked) < sample:
        for queue in by_kind.values():
            if queue and len(picked) < sample:
                picked.append(queue.pop())
    return chosen + picked


def outcomes_of(batch: Batch, lowering: threading.Lock) -> list[MutantOutcome]:
    """Run a batch: first the kernel as it is, then its mutants; what survives is shown to be harmless, or missed.

    Args:
        lowering: held while a kernel is lowered, which one thread may do at a time.

    Raises:
        EmulatorError: the kernel itself does not pass.
    """
    specimen, variants = batch.specimen, batch.variants()
    unchanged = variants.run(0)
    if unchanged.flat is None or unchanged.emulation is None:
        raise EmulatorError(f"{specimen.label}: {unchanged.reason}")
    needless = {each.line for each in unchanged.emulation.needless}
    limit = MOST_STEPS * unchanged.emulation.steps
    outcomes, survivors = [], []
    for number, mutation in enumerate(batch.mutations, start=1):
        run = variants.run(number, limit)
        by, message = _noticed(specimen, unchanged, run, lowering)
        line = specimen.text.line_of(mutation.start)
        verdict = "noticed" if by else "missed"
        if not by and mutation.kind in SYNC_KINDS and line in needless:
            verdict, by = "needless", "the checker"
        outcomes.append(_outcome(specimen, mutation, verdict, by, message))
        if verdict == "missed" and run.emulation is not None and run.emulation.trace == unchanged.emulation.trace:
            survivors.append(number - 1)
    for position, by in _harmless(batch, survivors, lowering):
        outcomes[position] = replace(outcomes[position], verdict="harmless", by=by)
    return outcomes


def _outcome(specimen: Specimen, mutation: Mutation, verdict: str, by: str, message: str) -> MutantOutcome:
    case, source = specimen.case, specimen.kernel.source
    return MutantOutcome(
        operator=case.operator,
        device=case.device,
        rank=case.rank,
        part=specimen.part,
        kernel=specimen.kind,
        kind=mutation.kind,
        change=mutation.change,
        line=specimen.text.line_of(mutation.start),
        before=source[mutation.start : mutation.end],
        verdict=verdict,
        by=by,
        message=message,
    )


def _noticed(specimen: Specimen, unchanged: _MutantRun, run: _MutantRun, lowering: threading.Lock) -> tuple[str, str]:
    """By which check a mutant was noticed, and what it said; two empty texts where it was not."""
    if run.flat is None:
        names = (name for name, pattern in _CHECKS if re.search(pattern, run.reason))
        return next(names, "rule"), run.reason
    kernel, case = specimen.kernel, specimen.case
    if is_guard_written(run.flat, kernel.output):
        return "guard", "written behind the end of the output"
    assert unchanged.flat is not None
    if np.array_equal(run.flat, unchanged.flat, equal_nan=True):
        return "", ""
    try:
        values = _final(specimen, run.flat[: kernel.output.element_count], lowering)
    except EmulatorError as error:
        return "a later kernel", str(error)
    _, reason = judge(values, case.expected, case.tolerance, output_widths(case.form.expr))
    return ("unwritten" if "not written" in reason else "value" if reason else ""), reason


def _final(specimen: Specimen, values: np.ndarray, lowering: threading.Lock) -> np.ndarray:
    """Result of the last kernel of a case where a mutant has computed ``values`` in its place."""
    values_by_name = dict(specimen.known)
    values_by_name[specimen.kernel.output.name] = values.reshape(specimen.kernel.output.shape)
    trial = specimen.case.trial
    for launch in trial.launches[specimen.part + 1 :]:
        with lowering:
            # Other mutants come to the same later kernel, which is compiled once.
            kernel = emulated_kernel(trial, launch, values_by_name)
            output = kernel.output
            values = kernel.run().flat[: output.element_count]
        values_by_name[output.name] = values.reshape(output.shape)
    return values


def _harmless(batch: Batch, survivors: Sequence[int], lowering: threading.Lock) -> Iterator[tuple[int, str]]:
    """Which of some mutants make the same accesses with the same values on a problem with other edges, too, if there
    is one, and how that was shown."""
    if not survivors:
        return
    with lowering:
        other = with_other_edges(batch.specimen)
    if other is None:
        for position in survivors:
            yield position, "same accesses and values, on the one problem of this text"
        return
    again = [other.mutations[batch.mutations[position].site] for position in survivors]
    variants = Batch(specimen=other, mutations=tuple(again)).variants()
    unchanged = variants.run(0).emulation
    for number, position in enumerate(survivors, start=1):
        emulation = variants.run(number).emulation
        if unchanged is not None and emulation is not None and emulation.trace == unchanged.trace:
            yield position, "same accesses and values"


def judged(
    batches: Sequence[Batch], pool: Executor, advance: Callable[[int], None]
) -> Iterator[list[MutantOutcome] | str]:
    """Outcomes of all batches, in their order; of one whose kernel fails by itself the reason."""
    lowering = threading.Lock()

    def run(batch: Batch) -> list[MutantOutcome] | str:
        try:
            return outcomes_of(batch, lowering)
        except EmulatorError as error:
            return str(error)
        finally:
            advance(len(batch.mutations))

    # The first one alone: it sets up what all others share.
    yield from map(run, batches[:1])
    yield from pool.map(run, batches[1:])


def counted(outcomes: Iterable[MutantOutcome]) -> Mapping[str, int]:
    """Number of outcomes with each verdict."""
    verdicts = [outcome.verdict for outcome in outcomes]
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS}
