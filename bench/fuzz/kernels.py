"""The kernels of an operator on several devices, sorted by how they are lowered."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from bench.fuzz.productions import READS, attention_options, productions
from bench.fuzz.sound import OTHER_ORDERS, error_of_plain_sums, multiplied, shaken, unit_of
from codegen.compile.build import verify_chain, verify_schedule
from codegen.cpu.lower import KINDS as CPU_KINDS
from codegen.gpu.lower import KINDS
from codegen.target import Target
from codegen.tir.lowering import AnyRequest, LoweringRequest, chosen
from codegen.tolerance import HALF_UNITS, TF32_HALF_UNIT, relative_error
from codegen.verify.result import Verification
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.construct.program import Program
from roller.programs import find_programs, form_on
from sokoban.kernel.problem import Problem
from sokoban.language.expression import TensorExpr
from sokoban.language.gathers import index_tensors
from sokoban.language.named.attention import Attention
from sokoban.language.named.attention_gradient import AttentionGradient
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate, round_to_dtype
from sokoban.language.scatter import scatter_of
from sokoban.schedule.cutting import cut_down, resize
from sokoban.schedule.patches import Schedule
from sokoban.schedule.tile import TileSchedule

#: Boards and the processor whose kernels are run.
DEVICES = ("v100", "a100", "h100", "b200", "cpu")

#: Element types of kernels for processors.
CPU_DTYPES = ("float16", "float32", "float64")

#: Programs that construction is asked for: the later ones are of other kinds.
CANDIDATES = 30

#: Products of a matrix instruction that the emulator computes in the time of one point by multiply-adds.
MATRIX_POINTS = 8

#: Algorithms whose only lowerings say what they are.
ALGORITHMS_BY_LOWERING = frozenset({"direct", "flash", "fused pair", "line"})

#: Points of a problem that is run at most, and elements of a thread of a processor's kernel: LLVM takes seconds for
#: thousands of instructions.
MOST_POINTS = 2**22
MOST_ELEMENTS = 96


@dataclass(frozen=True)
class Kernel:
    """A program of an operator on a device, and which lowerings write it."""

    device: str
    rank: int
    program: Program
    lowerings: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Its lowerings and its algorithm in a word."""
        algorithm = self.program.algorithm
        return "+".join(dict.fromkeys((*self.lowerings, *({algorithm} - ALGORITHMS_BY_LOWERING))))

    @property
    def names(self) -> tuple[str, ...]:
        """Its lowerings and its algorithm."""
        return (*self.lowerings, self.program.algorithm)

    def productions(self) -> dict[str, list[str]]:
        """The productions that each lowering meets in it."""
        met: dict[str, set[str]] = {}
        names = list(self.lowerings)
        for name, part in zip(names, self.program.parts, strict=True):
            met.setdefault(name, set()).update(self._productions(part.problem))
        if self.program.algorithm not in ALGORITHMS_BY_LOWERING:
            met.setdefault(self.program.algorithm, set()).update(self._productions(self.program.form))
        return {name: sorted(met_names) for name, met_names in met.items()}

    def _productions(self, problem: Problem) -> frozenset[str]:
        """Those of what one kernel computes; of attention, what it is asked for."""
        source = self.program.form.source
        attention = source.operator_as(Attention) or source.operator_as(AttentionGradient)
        if attention is not None:
            return attention_options(attention, source.inputs[0].dtype)
        expr = getattr(problem, "expr", None)  # transforms of patches have none
        return frozenset(f"{READS} {tensor.dtype}" for tensor in source.inputs) if expr is None else productions(expr)

    def points(self) -> float:
        """Points of the problem that is run."""
        check = self.program.check()
        if check is not None:
            by_matrix = any(name.endswith(("warps", "groups")) for name in self.lowerings)
            return sum(_points(step.problem) for step in check.steps) / (MATRIX_POINTS if by_matrix else 1)
        form, schedule = self.program.form, self.program.main.tiles
        if self.device == "cpu":
            return math.prod(form.sizes.values())
        return _points(cut_down(form, schedule)) / (MATRIX_POINTS if schedule.uses_matrix else 1)

    def verify(self, engine: str | None, seeds: Sequence[int]) -> Verification:
        """Run it against the reference."""
        target = Target.of(device_of(self.device))
        check = self.program.check()
        if check is not None:
            return verify_chain(check, target, engine, seeds)
        return verify_schedule(self.program.form, self.program.main.tiles, target, engine, seeds)


def _points(problem: Problem) -> float:
    sizes = getattr(problem, "sizes", None)
    return math.prod(sizes.values()) if sizes else 1e5


@cache
def device_of(name: str) -> DeviceSpec:
    """A device of the catalog."""
    return load_device(name)


def kernels_of(expr: TensorExpr, device_name: str, method: str = "roller", count: int = CANDIDATES) -> list[Kernel]:
    """The programs of an operator on a device, best first.

    Raises:
        InputError: the device has no kernel for it.
    """
    device = device_of(device_name)
    places = {s.tensor for s in expr.statements if s.reduction is not None and s.reduction.is_place}
    places |= index_tensors(expr.statements).keys()
    scatters = [scatter_of(statement, expr.tensor_by_name) for statement in expr.statements]
    places |= {scatter.place.tensor for scatter in scatters if scatter is not None}
    stored = {tensor.dtype for tensor in expr.tensors if tensor.name not in places}
    if device_name == "cpu" and not stored <= set(CPU_DTYPES):
        raise InputError(expr.name, f"kernels for processors take {', '.join(CPU_DTYPES)}")
    if device_name == "cpu" and expr.accumulate != "float32" and "float16" in {t.dtype for t in expr.tensors}:
        raise InputError(expr.name, "kernels for processors compute float16 in float32")
    form = form_on(expr, device)
    programs = find_programs(form, device, count, method).ranked(count)
    target = Target.of(device)
    kernels = []
    for rank, program in enumerate(programs, start=1):
        names = tuple(_lowering(part.problem, part.schedule, target) for part in program.parts)
        kernels.append(Kernel(device_name, rank, program, names))
    return kernels


def _lowering(problem: Problem, schedule: Schedule, target: Target) -> str:
    request: AnyRequest = LoweringRequest(problem, schedule, "drawn", target)
    lowering = chosen(CPU_KINDS, request) if target.generator == "llvm" else chosen(KINDS, request)
    name = lowering.__name__
    if target.generator == "llvm":
        return name.removeprefix("codegen.")
    return name.removeprefix("codegen.gpu.").removesuffix(".kernel").removeprefix("matrix.")


def traits(kernel: Kernel) -> tuple[object, ...]:
    """Traits that separate kernels of one lowering."""
    schedule = kernel.program.main.schedule
    if not isinstance(schedule, TileSchedule):
        return (kernel.kind,)
    return (
        kernel.kind, schedule.stages > 1, schedule.asynchronous, bool(schedule.reduce_threads), bool(schedule.turned),
        len(schedule.cached), schedule.cluster, schedule.launched > 0, schedule.kept_columns > 0, schedule.raster > 0,
        any(count > 1 for _, count in schedule.vthreads),
    )  # fmt: skip


def is_quick(kernel: Kernel) -> bool:
    """True if it is built and run in seconds."""
    schedule = kernel.program.main.schedule
    if kernel.device == "cpu" and isinstance(schedule, TileSchedule):
        elements = math.prod([size for _, size in schedule.thread])
        if elements > MOST_ELEMENTS:
            return False
    return kernel.points() <= MOST_POINTS


#: Reasons of a verdict that are about values; a number that is none counts as one that was not written.
_OF_VALUES = ("relative error", "not written")


#: How often chance rounds what an operator makes, to see whether its result stays.
SOUND_DRAWS = 8


def outcome_of(kernel: Kernel, result: Verification) -> str:
    """``agrees``, ``wrong``, ``refused`` by the lowering, or ``unsound``: an operator that no arithmetic of its types
    computes as exactly as it is judged."""
    if result.passed:
        return "agrees"
    if result.relative_error is None:
        return "refused"
    if any(words in result.reason for words in _OF_VALUES) and not _is_sound(kernel, result):
        return "unsound"
    return "wrong"


def _is_sound(kernel: Kernel, result: Verification) -> bool:
    """True if the reference stays where it is however chance rounds: one draw in several finds the sum that cancels."""
    expr = resize(kernel.program.form, result.axis_sizes).expr
    if any(each.reduction is not None and each.reduction.is_place for each in expr.statements):
        return True  # places are drawn of what is exact
    if not all(_stays(kernel, expr, result, seed) for seed in range(SOUND_DRAWS)):
        return False
    plain = error_of_plain_sums(expr)
    is_plain = result.relative_error is not None and result.relative_error <= OTHER_ORDERS * plain
    return plain <= result.tolerance / 4 or not is_plain


def _stays(kernel: Kernel, expr: TensorExpr, result: Verification, seed: int) -> bool:
    """True if the reference stays where it is, to a quarter of the tolerance, when it is shaken, and when the result is
    rounded.

    What is stored between kernels in 16 bits, or multiplied by a matrix instruction, is off by half a unit of those,
    and what may be multiplied as TensorFloat-32 of that.
    What statements make must be numbers of the accumulator, and of the 16 bits that hold them, too.
    """
    dtypes = {stage.expr.output.name: stage.expr.output.dtype for stage in kernel.program.form.stages}
    if any("pair" in name for name in kernel.names):
        dtypes |= multiplied(expr)
    inputs = random_inputs(expr, 0)
    expected = evaluate(expr, inputs)
    units = {name: HALF_UNITS.get(dtype, 0.0) for name, dtype in dtypes.items()}
    if expr.allow_tf32:
        units |= {tensor.name: TF32_HALF_UNIT for tensor in expr.inputs if tensor.dtype == "float32"}
    moved, largest = shaken(expr, inputs, unit_of(expr.accumulate), seed, units)
    if expr.accumulate.startswith("float") and max(largest.values()) > float(np.finfo(expr.accumulate).max):
        return False
    with np.errstate(over="ignore"):
        in_halves = [
            round_to_dtype(np.array(largest.get(name, 0.0)), dtype)
            for name, dtype in dtypes.items()
            if dtype in HALF_UNITS
        ]
    if not np.all(np.isfinite(in_halves)):
        return False
    rounded = round_to_dtype(expected, expr.output.dtype)
    # Half a unit in the last place is what every rounding may change.
    return relative_error(moved, expected) <= result.tolerance / 4 and (
        relative_error(rounded, expected) <= result.tolerance / 2 + 1e-12
    )


def drawn(kernels: Sequence[Kernel], chance: random.Random, count: int) -> list[Kernel]:
    """Some kernels of as many kinds as there are: the first of all, then kinds at random."""
    by_kind: dict[str, dict[tuple[object, ...], list[Kernel]]] = {}
    for kernel in kernels:
        by_kind.setdefault(kernel.kind, {}).setdefault(traits(kernel), []).append(kernel)
    chosen_kernels: list[Kernel] = []
    kinds = list(by_kind)
    chance.shuffle(kinds)
    for turn in range(12 * count):
        if len(chosen_kernels) == count or not kinds:
            break
        groups = by_kind[kinds[turn % len(kinds)]]
        group = groups[chance.choice(list(groups))]
        kernel = chance.choice(group)
        if kernel not in chosen_kernels and is_quick(kernel):
            chosen_kernels.append(kernel)
    return chosen_kernels
