"""Proof that a schedule computes the right thing: the same tiling on a small problem, executed and compared.

The operator is cut down to a few full tiles plus the remainder on every axis, so that inner tiles, edges and partial
steps all occur, and lowered exactly as for the device. The float64 reference judges. Outputs are poisoned first, and
every buffer is followed by a guard that must stay untouched and, where it is read, poisons the result.

The engine ``"emulator"`` runs the kernel's own CUDA text, thread by thread and in several orders, and holds every
access against every other (:mod:`codegen.verify.emulator`). ``"opencl"`` runs the same tiling lowered for OpenCL, with
real work-groups, barriers and local memory, but by a twin where it must: half-precision tensors are widened to float32,
and a Tensor Core tiling is run with scalar multiply-adds. The result says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from codegen.built import BuiltKernel
from codegen.bundle.records import LaunchRecord
from codegen.gpu.sources import cuda_kernel, opencl_kernel
from codegen.target import Target
from codegen.tensor_map import TensorMap
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import AnyRequest, LoweringRequest
from codegen.tolerance import TOLERANCE, exact_tolerance, judge, output_widths, tolerance_of
from codegen.verify.chain import ChainCheck
from codegen.verify.emulator import EmulatorError, Synchronization, emulator_available, run_cuda_on_cpu
from codegen.verify.engines import CHECKS, ORDER_SEEDS, engine_for
from codegen.verify.guards import guarded, numbers
from codegen.verify.opencl import OpenClError, opencl_available, run_opencl
from codegen.verify.result import NOT_RUN, Verification
from codegen.verify.trial import Step, Trial, trial_of
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import FLOAT8_DTYPES, Tensor
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.schedule.cutting import cut_down
from sokoban.schedule.tile import TileSchedule

#: Turns of the innermost loop that a kernel makes in the time in which it is optimised: 0.2 to 0.5 s on one core.
_TURNS_WORTH_OPTIMIZING = 4e6

#: What kernels are lowered for to run them here: by OpenCL, and by the emulator where no board is named.
_OPENCL, EMULATED = Target("opencl-source", "", 1), Target("cuda", "sm_80", 32)


def verify(
    form: KernelForm,
    schedule: TileSchedule,
    *,
    seed: int = 0,
    full_size: bool = False,
    engine: str | None = None,
    target: Target = EMULATED,
    order_seeds: Sequence[int] = ORDER_SEEDS,
) -> Verification:
    """Run one schedule on a cut-down problem and compare with the reference.

    Args:
        seed: of the inputs.
        full_size: run the whole problem and compare with the operator as its author wrote it, before any
            normalisation.
        engine: ``"emulator"`` or ``"opencl"``; None for the emulator, or OpenCL where g++ is missing.
        target: whose CUDA text is emulated.
        order_seeds: of the orders in which the emulator runs threads, warps and blocks.
    """
    small = form if full_size else cut_down(form, schedule)
    if schedule.launched and not full_size:
        # Blocks that have several tiles, however few are left.
        schedule = replace(schedule, launched=schedule.cluster)
    reference = _source_value if full_size else _value
    return _verified(small, _plan(small, [(small, schedule)], engine, target, order_seeds), reference, seed)


def verify_chain(
    check: ChainCheck,
    *,
    seed: int = 0,
    engine: str | None = None,
    target: Target = EMULATED,
    order_seeds: Sequence[int] = ORDER_SEEDS,
) -> Verification:
    """Run the kernels of a chain one after the other and compare what the last one writes with the reference.

    What one writes the next one reads, guards and all: an element that was not written poisons the result. What else
    is said is as for :func:`verify`.
    """
    steps = [(step.problem, step.schedule) for step in check.steps]
    plan = _plan(check.form, steps, engine, target, order_seeds)
    return _verified(check.form, plan._replace(tolerance=max(plan.tolerance, check.tolerance or 0.0)), _value, seed)


_Inputs = Mapping[str, np.ndarray]


class _Plan(NamedTuple):
    """Plan of running kernels: by what, as which twins, and how exact they have to be.

    Attributes:
        steps: the kernels, or their twins.
        target: what they are lowered for.
        build: makes the text of one of them.
        run: runs a launch of the bundle that they make.
        engine: the engine that it is run by, and ``method`` how the result calls that.
        tolerance: largest accepted relative error.
        missing: why nothing runs here; None where it does.
    """

    steps: Sequence[Step]
    target: Target
    build: Callable[[AnyRequest], BuiltKernel]
    run: Callable[[Trial, LaunchRecord, _Inputs], KernelOutput]
    engine: str
    method: str
    tolerance: float
    missing: str | None
    seeds: tuple[int, ...] = ()

    def trial(self, form: KernelForm) -> Trial:
        """The bundle that is run.

        Raises:
            LoweringError: a schedule cannot be lowered.
        """
        return _trial(form, self.steps, self.target, self.build)


class KernelOutput(NamedTuple):
    """Values that a kernel wrote.

    Attributes:
        flat: the output with its guard, NaN where nothing was written.
        needless: barriers, waits and fences of its text that ordered nothing.
    """

    flat: np.ndarray
    needless: tuple[Synchronization, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EmulatedKernel:
    """A kernel's CUDA text, and what a run of it on the CPU takes. A changed text is a kernel of its own.

    Attributes:
        source: the text, without what only NVRTC needs.
        entry: name of the ``__global__`` function in it.
        arguments: one flat array per parameter, in the parameter's dtype, with its guard; the output is the last one.
        grid, block: launch extents (x, y, z).
        dynamic_shared_bytes: size of ``extern __shared__`` memory.
        optimized: whether its run is long enough to be worth an optimising compilation.
        tensors: what the arguments hold.
        maps: of those that it takes as tensor maps.
        size: that is known at launch, its last parameter; None where it takes none.
        fills: whether it writes every element of the output.
    """

    source: str
    entry: str
    arguments: tuple[np.ndarray, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared_bytes: int
    optimized: bool
    tensors: tuple[Tensor, ...]
    maps: tuple[TensorMap, ...] = ()
    size: int | None = None
    fills: bool = True

    @property
    def output(self) -> Tensor:
        """The tensor that it writes."""
        return self.tensors[-1]

    def run(self, seeds: Sequence[int] = ORDER_SEEDS) -> KernelOutput:
        """Values that it writes when threads, warps and blocks run in the orders that ``seeds`` draw.

        Raises:
            EmulatorError: g++ refuses the text, or the kernel crashes, hangs or breaks a rule of CUDA.
        """
        size = [] if self.size is None else [np.array([self.size], np.int32)]
        emulation = run_cuda_on_cpu(
            self.source,
            self.entry,
            [*self.arguments, *size],
            self.grid,
            self.block,
            [len(self.arguments) - 1],
            self.dynamic_shared_bytes,
            optimized=self.optimized,
            seeds=seeds,
            extents=[*(tensor.element_count for tensor in self.tensors), *(1 for _ in size)],
            maps=self.maps,
            fills=self.fills,
        )
        return KernelOutput(self.values(emulation.outputs[0]), emulation.needless)

    def values(self, result: np.ndarray) -> np.ndarray:
        """The output as numbers."""
        return numbers(result, self.output.dtype)


def _plan(form: KernelForm, steps: Sequence[Step], engine: str | None, target: Target, seeds: Sequence[int]) -> _Plan:
    """The kernels as an engine runs them."""
    engine = engine or engine_for(EMULATED.generator)
    return _opencl_plan(form, steps) if engine == "opencl" else _emulator_plan(form, steps, target, seeds)


def _emulator_plan(form: KernelForm, steps: Sequence[Step], target: Target, seeds: Sequence[int]) -> _Plan:
    """The kernels' own CUDA text, thread by thread."""

    def run(trial: Trial, launch: LaunchRecord, inputs: _Inputs) -> KernelOutput:
        return emulated_kernel(trial, launch, inputs).run(seeds)

    return _Plan(
        steps, _with_cuda(target), _cuda_text, run, "emulator", "cuda, emulated", exact_tolerance(form.expr),
        emulator_available(), tuple(seeds),
    )  # fmt: skip


def _opencl_plan(form: KernelForm, steps: Sequence[Step]) -> _Plan:
    """OpenCL, with twins for matrix instructions and for narrow floats."""
    dtypes = {tensor.dtype for tensor in (*form.expr.inputs, form.expr.output)}
    notes = []
    twins = [(problem, schedule.scalar_twin(problem)) for problem, schedule in steps]
    if twins != list(steps):
        notes.append("scalar twin of the Tensor Core tiling")
    is_widened = not all(problem.KEEPS_NARROW_FLOATS for problem, _ in steps)
    if is_widened and dtypes & {"float16", "bfloat16"}:
        notes.append("float32 twin of half-precision storage")
    if dtypes & set(FLOAT8_DTYPES):
        notes.append("float32 twin of eight-bit floats")
    # Twins round to nothing narrower than float32.
    is_widened = (is_widened and bool(dtypes & {"float16", "bfloat16", *FLOAT8_DTYPES})) or form.expr.allow_tf32
    tolerance = TOLERANCE["float32"] if is_widened else tolerance_of(form.expr)
    method = "opencl" + (f" ({', '.join(notes)})" if notes else "")
    widened = [(problem.widened(), schedule) for problem, schedule in twins]
    return _Plan(widened, _OPENCL, opencl_kernel, _run_opencl, "opencl", method, tolerance, opencl_available())


def _with_cuda(target: Target) -> Target:
    """A target whose text is CUDA: where it gets none, what another board would."""
    return target if target.architecture.startswith("sm_") else EMULATED


def _cuda_text(request: AnyRequest) -> BuiltKernel:
    return cuda_kernel(request)[1]


def _trial(
    form: KernelForm, steps: Sequence[Step], target: Target, build: Callable[[AnyRequest], BuiltKernel]
) -> Trial:
    entries = ["verify"] if len(steps) == 1 else [f"verify_part_{number}" for number in range(1, len(steps) + 1)]
    built = [build(LoweringRequest(*step, entry, target)) for step, entry in zip(steps, entries, strict=True)]
    return trial_of(form, steps, built, target)


def cuda_trial(form: KernelForm, steps: Sequence[Step], target: Target = EMULATED) -> Trial:
    """The bundle of CUDA texts of kernels that compute ``form``, as the emulator runs it.

    Raises:
        LoweringError: a schedule cannot be lowered.
    """
    return _trial(form, steps, _with_cuda(target), _cuda_text)


def _verified(
    form: KernelForm, plan: _Plan, reference: Callable[[KernelForm, _Inputs], np.ndarray], seed: int
) -> Verification:
    """The launches of a plan's bundle, run in order, against the reference of ``form``."""
    judged = partial(Verification, tolerance=plan.tolerance, axis_sizes=dict(form.sizes))
    if plan.missing is not None:
        return judged(passed=False, method=NOT_RUN, relative_error=None, reason=f"not run: {plan.missing}")
    checks = CHECKS[plan.engine]
    verdict = partial(judged, method=plan.method, engine=plan.engine, checks=checks, seeds=plan.seeds)
    inputs = random_inputs(form.expr, seed)
    values, needless = dict(inputs), []
    try:
        trial = plan.trial(form)
        for number, launch in enumerate(trial.launches, start=1):
            ran = plan.run(trial, launch, values)
            output = launch.bind(trial.tensors)[-1]
            values[output.name] = ran.flat[: output.element_count]
            where = f"kernel {number}, " if len(trial.launches) > 1 else ""
            needless += [f"{where}line {place.line}: {place.text.strip()}" for place in ran.needless]
            if is_guard_written(ran.flat, output):
                written = "the output" if output.name == form.expr.output.name else output.name
                return verdict(passed=False, relative_error=math.inf, reason=f"written behind the end of {written}")
    except EmulatorError as error:
        return verdict(passed=False, relative_error=math.inf, reason=str(error))
    except (OpenClError, LoweringError) as error:
        return verdict(passed=False, relative_error=None, reason=str(error))
    expected = reference(form, inputs)
    error_figure, reason = judge(values[trial.bundle.output.name], expected, plan.tolerance, output_widths(form.expr))
    return verdict(passed=not reason, relative_error=error_figure, reason=reason, needless=tuple(needless))


def _value(form: KernelForm, inputs: _Inputs) -> np.ndarray:
    return evaluate(form.expr, inputs)


def _run_opencl(trial: Trial, launch: LaunchRecord, inputs: _Inputs) -> KernelOutput:
    """The output computed by OpenCL, in float32 where its dtype is narrower and the kernel not a text of ours."""
    tensors, arrays = _arguments(trial, launch, inputs)
    run_opencl(
        trial.source(launch),
        launch.entry,
        arrays,
        [blocks * threads for blocks, threads in zip(launch.grid, launch.block, strict=True)],
        launch.block,
        output_indices=[len(arrays) - 1],
        optimized=_is_long(trial),
    )
    return KernelOutput(numbers(arrays[-1], tensors[-1].dtype))


def _arguments(
    trial: Trial, launch: LaunchRecord, inputs: _Inputs
) -> tuple[tuple[Tensor, ...], tuple[np.ndarray, ...]]:
    """Arguments of a launch, bound as its record says: tensors, and an array each with its guard; the output
    poisoned."""
    tensors = launch.bind(trial.tensors)
    poison = np.full(tensors[-1].shape, np.nan)
    values = launch.bind({**inputs, tensors[-1].name: poison})
    arrays = [guarded(array, tensor) for array, tensor in zip(values, tensors, strict=True)]
    return tensors, tuple(arrays)


def _is_long(trial: Trial) -> bool:
    """True if a kernel turns its innermost loop so often that optimising it pays."""
    return math.prod(trial.bundle.manifest.axes.values()) > _TURNS_WORTH_OPTIMIZING


def emulated_kernel(
    trial: Trial, launch: LaunchRecord, inputs: Mapping[str, np.ndarray], size: int | None = None, *, fills: bool = True
) -> EmulatedKernel:
    """A launch's CUDA text and what a run of it takes, by the values of what it reads; outputs are poisoned. ``size``
    is known at launch; not every element of the output is written where the kernel does not ``fill`` it."""
    tensors, arrays = _arguments(trial, launch, inputs)
    return EmulatedKernel(
        source=trial.source(launch),
        entry=launch.entry,
        arguments=arrays,
        grid=launch.grid_at(size),
        block=launch.block,
        dynamic_shared_bytes=launch.dynamic_shared_bytes,
        optimized=_is_long(trial),
        tensors=tensors,
        maps=launch.tensor_maps,
        size=size if launch.launch is not None else None,
        fills=fills,
    )


def is_guard_written(flat: np.ndarray, output: Tensor) -> bool:
    """True if something was written behind the end of an output."""
    return not np.isnan(flat[output.element_count :]).all()


def _source_value(form: KernelForm, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output of the operator as written, whose tensors are those of the form in other shapes."""
    given = {tensor.name: inputs[tensor.name].reshape(tensor.shape) for tensor in form.source.inputs}
    return evaluate(form.source, given)
