"""The kernels of an operator on several devices, sorted by how they are lowered."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from bench.fuzz.productions import attention_options, productions
from codegen.compile.build import verify_chain, verify_schedule
from codegen.cpu.lower import KINDS as CPU_KINDS
from codegen.gpu.lower import KINDS
from codegen.target import Target
from codegen.tir.lowering import AnyRequest, LoweringRequest, chosen
from codegen.tolerance import HALF_UNITS, relative_error
from codegen.verify.result import Verification
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.construct.program import Program
from roller.programs import find_programs, form_on
from sokoban.kernel.problem import Problem
from sokoban.kernel.stages import part_of
from sokoban.language.expression import Call, Constant, Reduction, Scan, TensorExpr, Value, loads
from sokoban.language.functions import FUNCTIONS, expanded
from sokoban.language.named.attention import Attention
from sokoban.language.named.attention_gradient import AttentionGradient
from sokoban.language.reference import evaluate, random_inputs, round_to_dtype
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
        return frozenset(f"reads {tensor.dtype}" for tensor in source.inputs) if expr is None else productions(expr)

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
    if any(each.reduction is not None and each.reduction.is_place for each in kernel.program.form.expr.statements):
        return True  # places are drawn of what is exact
    return all(_stays(kernel, result, seed) for seed in range(SOUND_DRAWS))


def _stays(kernel: Kernel, result: Verification, seed: int) -> bool:
    """True if the reference stays where it is, to a quarter of the tolerance, when inputs and what statements make of
    them change as rounding changes them, and when the result is rounded.

    A unit of the accumulator's last place wherever a function gives a value, of a sum of n terms half of sqrt(n) units,
    and of what is stored between kernels in 16 bits, or multiplied by a matrix instruction, half a unit of those. What
    statements make must be numbers of the accumulator, too.
    """
    form = kernel.program.form
    expr = resize(form, result.axis_sizes).expr
    inputs = random_inputs(expr, 0)
    unit = 2.0**-52 if expr.accumulate == "float64" else 2.0**-23
    stored = {stage.expr.output.name: HALF_UNITS.get(stage.expr.output.dtype, 0.0) for stage in form.stages}
    if any("pair" in name for name in kernel.names):
        stored |= _multiplied(expr)
    chance = np.random.default_rng(seed)

    def moved(values: Any, by: float = unit) -> Any:
        return values * (1 + by * chance.uniform(-1, 1, values.shape))

    expected, values_by_name = evaluate(expr, inputs), {name: moved(values) for name, values in inputs.items()}
    largest = float(np.finfo(expr.accumulate).max) if expr.accumulate.startswith("float") else math.inf
    for statement in expr.statements:
        count = math.prod(expr.sizes[axis] for axis in statement.reduction.axes) if statement.reduction else 1
        count = expr.sizes[statement.scan.axis] if statement.scan else count
        by = max(unit, math.sqrt(count) * unit / 2, stored.get(statement.tensor, 0.0))
        rounded_inside = replace(statement, value=_rounded_inside(statement.value, unit, chance))
        values = evaluate(part_of(expr, (rounded_inside,)), values_by_name)
        if (np.abs(values[np.isfinite(values)]) > largest).any():
            return False
        values_by_name[statement.tensor] = moved(values, by)
    rounded = round_to_dtype(expected, expr.output.dtype)
    # Half a unit in the last place is what every rounding may change.
    return relative_error(values_by_name[expr.output.name], expected) <= result.tolerance / 4 and (
        relative_error(rounded, expected) <= result.tolerance / 2 + 1e-12
    )


def _multiplied(expr: TensorExpr) -> dict[str, float]:
    """Half a unit of the operands of a product by matrix instructions, by the statements that are factors of it."""
    made = {statement.tensor for statement in expr.statements}
    units: dict[str, float] = {}
    for statement in expr.statements:
        read = () if statement.reduction is None else loads(statement.value)
        others = (expr.tensor_by_name[load.tensor].dtype for load in read if load.tensor not in made)
        half = max((HALF_UNITS.get(dtype, 0.0) for dtype in others), default=0.0)
        units |= {load.tensor: half for load in read if load.tensor in made}
    return units


def _rounded_inside(value: Value, unit: float, chance: np.random.Generator) -> Value:
    """A value in which every function's result is off by a part of a unit, as rounding has it: 1 + erf(x) of a large
    negative x, in a GELU, has no digits left."""
    if isinstance(value, Reduction | Scan):
        return replace(value, body=_rounded_inside(value.body, unit, chance))
    if not isinstance(value, Call):
        return value
    if FUNCTIONS[value.function].value is not None:
        return _rounded_inside(expanded(value), unit, chance)
    call = Call(value.function, tuple(_rounded_inside(each, unit, chance) for each in value.arguments))
    if not FUNCTIONS[value.function].is_elementwise:
        return call
    return Call("mul", (call, Constant(1 + unit * chance.uniform(-1, 1))))


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
