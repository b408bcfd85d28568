"""Proof that a schedule computes the right thing: the same tiling on a small problem, executed and compared.

The operator is cut down to at most two full tiles plus the remainder on every axis, so that inner tiles, edges and
partial steps all occur, and lowered exactly as for the device but for OpenCL. A CPU runs it with real work-groups,
barriers and local memory; the float64 reference judges. Outputs are poisoned first, and every buffer is followed by a
guard that must stay untouched and, where it is read, poisons the result.

What cannot run so is verified by a twin: half-precision tensors are widened to float32 where the OpenCL device has no
half arithmetic, and a Tensor Core tiling is run with scalar multiply-adds. The result says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from codegen.gpu.lower import lower
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import KERNEL_SUFFIX, cuda_source, opencl_source
from codegen.target import Target
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import LoweringRequest
from codegen.verify.chain import ChainCheck
from codegen.verify.emulator import EmulatorError, emulator_available, run_cuda_on_cpu
from codegen.verify.guards import guarded
from codegen.verify.opencl import OpenClError, opencl_available, run_opencl
from codegen.verify.result import TOLERANCE, Verification, judge, tolerance_of
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.patches import PatchTransform
from sokoban.kernel.problem import Problem, tensors_of
from sokoban.language.expression import FLOAT8_DTYPES, INTEGER_DTYPES
from sokoban.language.reference import evaluate, random_inputs
from sokoban.schedule.cutting import cut_down
from sokoban.schedule.patches import Schedule
from sokoban.schedule.tile import TileSchedule, sizes

#: Turns of the innermost loop that a kernel makes in the time in which it is optimised: 0.2 to 0.5 s on one core.
_TURNS_WORTH_OPTIMIZING = 4e6

#: What kernels are lowered for to run them here: by OpenCL, and as CUDA text by the emulator.
_OPENCL, _EMULATED = Target("opencl-source", "", 1), Target("cuda", "sm_80", 32)


def tile_twin(schedule: TileSchedule, form: KernelForm) -> TileSchedule:
    """The scalar twin of a matrix schedule: same block, steps, staging and padding, computed by multiply-adds.

    It has as many threads wherever a warp's tile divides among 32 of them, which it does for multiples of 16.
    """
    roles = form.roles
    assert roles is not None
    rows, columns = schedule.block_of[roles.m], schedule.block_of[roles.n]
    elements = rows * columns // schedule.threads_per_block
    choices = [
        (elements // width, width)
        for width in range(1, elements + 1)
        if elements % width == 0 and columns % width == 0 and rows % (elements // width) == 0
    ]
    height, width = min(choices, key=lambda choice: (abs(choice[0] - choice[1]), choice[0]))
    thread = {axis: 1 for axis, _ in schedule.block} | {roles.m: height, roles.n: width}
    return replace(schedule, thread=sizes(thread), instruction=Instruction.FMA)


def verify(
    form: KernelForm, schedule: TileSchedule, *, seed: int = 0, full_size: bool = False, engine: str = "opencl"
) -> Verification:
    """Run one schedule on a cut-down problem and compare with the reference.

    With ``full_size`` the whole problem is run and compared with the operator as its author wrote it, before any
    normalisation. ``engine`` is ``"opencl"``, or ``"emulator"``: the CUDA text itself, thread by thread on the CPU,
    shuffles, matrix instructions and half precision included.
    """
    small = form if full_size else cut_down(form, schedule)
    reference = _source_value if full_size else _value
    return _verified(small, [(small, schedule)], None, reference, seed, engine)


def verify_chain(check: ChainCheck, *, seed: int = 0, engine: str = "opencl") -> Verification:
    """Run the kernels of a chain one after the other and compare what the last one writes with the reference.

    What one writes the next one reads, guards and all: an element that was not written poisons the result.
    """
    steps = [(step.problem, step.schedule) for step in check.steps]
    return _verified(check.form, steps, check.tolerance, _value, seed, engine)


_Inputs = Mapping[str, np.ndarray]


class _Plan(NamedTuple):
    """How kernels are run: by what, as which twins, and how exact they have to be.

    Attributes:
        steps: the kernels, or their twins.
        run: computes one kernel's output, with its guard.
        method: how the result calls it.
        tolerance: largest accepted relative error.
        missing: why nothing runs here; None where it does.
    """

    steps: Sequence[tuple[Problem, Schedule]]
    run: Callable[[Problem, Schedule, _Inputs], np.ndarray]
    method: str
    tolerance: float
    missing: str | None


def _emulator_plan(form: KernelForm, steps: Sequence[tuple[Problem, Schedule]]) -> _Plan:
    """The kernels' own CUDA text, thread by thread."""
    return _Plan(steps, _run_emulated, "cuda, emulated", tolerance_of(form.expr), emulator_available())


def _opencl_plan(form: KernelForm, steps: Sequence[tuple[Problem, Schedule]]) -> _Plan:
    """OpenCL, with twins for matrix instructions and for narrow floats."""
    dtypes = {tensor.dtype for tensor in (*form.expr.inputs, form.expr.output)}
    notes = []
    if any(isinstance(schedule, TileSchedule) and schedule.uses_matrix for _, schedule in steps):
        steps = [(problem, _scalar(problem, schedule)) for problem, schedule in steps]
        notes.append("scalar twin of the Tensor Core tiling")
    if dtypes & {"float16", "bfloat16"}:
        notes.append("float32 twin of half-precision storage")
    if dtypes & set(FLOAT8_DTYPES):
        notes.append("float32 twin of eight-bit floats")
    # Twins round to nothing narrower than float32.
    is_widened = bool(dtypes & {"float16", "bfloat16", *FLOAT8_DTYPES}) or form.expr.allow_tf32
    tolerance = TOLERANCE["float32"] if is_widened else tolerance_of(form.expr)
    method = "opencl" + (f" ({', '.join(notes)})" if notes else "")
    return _Plan(steps, _run_opencl, method, tolerance, opencl_available())


def _verified(
    form: KernelForm,
    steps: Sequence[tuple[Problem, Schedule]],
    tolerance: float | None,
    reference: Callable[[KernelForm, _Inputs], np.ndarray],
    seed: int,
    engine: str,
) -> Verification:
    """The kernels of ``steps``, run in order, against the reference of ``form``."""
    plan = (_opencl_plan if engine == "opencl" else _emulator_plan)(form, steps)
    accepted = max(plan.tolerance, tolerance or 0.0)
    verdict = partial(Verification, method=plan.method, tolerance=accepted, axis_sizes=dict(form.sizes))
    if plan.missing is not None:
        return verdict(passed=False, method="none", relative_error=None, reason=f"not run: {plan.missing}")
    inputs = random_inputs(form.expr, seed)
    expected = reference(form, inputs)
    known = dict(inputs)
    try:
        for problem, schedule in plan.steps:
            flat = plan.run(problem, schedule, known)
            output = tensors_of(problem)[-1]
            known[output.name] = flat[: output.element_count]
            if not np.isnan(flat[output.element_count :]).all():
                written = "the output" if output.name == form.expr.output.name else output.name
                return verdict(passed=False, relative_error=math.inf, reason=f"written behind the end of {written}")
    except (OpenClError, EmulatorError, LoweringError) as error:
        return verdict(passed=False, relative_error=None, reason=str(error))
    error_figure, reason = judge(known[form.expr.output.name], expected, accepted)
    return verdict(passed=not reason, relative_error=error_figure, reason=reason)


def _scalar(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule with multiply-adds in place of matrix instructions."""
    if not isinstance(schedule, TileSchedule) or not isinstance(problem, KernelForm) or not schedule.uses_matrix:
        return schedule

    return tile_twin(schedule, problem)


def _value(form: KernelForm, inputs: _Inputs) -> np.ndarray:
    return evaluate(form.expr, inputs)


def _run_opencl(problem: Problem, schedule: Schedule, inputs: _Inputs) -> np.ndarray:
    """The output with its guard, computed by OpenCL in float32 or float64."""
    widened = _widen(problem)
    lowered = lower(LoweringRequest(widened, schedule, "verify", _OPENCL))
    tensors = tensors_of(widened)
    source = opencl_source(lowered, [tensor.name for tensor in tensors])
    arrays = [guarded(inputs[tensor.name], tensor) for tensor in tensors[:-1]]
    arrays.append(guarded(np.full(tensors[-1].shape, np.nan), tensors[-1]))
    run_opencl(
        source,
        lowered.entry + KERNEL_SUFFIX,
        arrays,
        [blocks * threads for blocks, threads in zip(lowered.grid, lowered.block, strict=True)],
        lowered.block,
        output_indices=[len(arrays) - 1],
        optimized=_turns(problem) > _TURNS_WORTH_OPTIMIZING,
    )
    return _with_nan(arrays[-1], tensors[-1].dtype)


def _turns(problem: Problem) -> float:
    """How often what is innermost is computed: every point of every axis, every product of a patch's transform."""
    if isinstance(problem, PatchTransform):
        return problem.points * problem.patch * problem.transformed * (problem.patch + problem.transformed)
    return math.prod(problem.sizes.values())


def _run_emulated(problem: Problem, schedule: Schedule, inputs: _Inputs) -> np.ndarray:
    """The output with its guard, computed by the kernel's own CUDA text in its own dtypes."""
    lowered = lower(LoweringRequest(problem, schedule, "verify", _EMULATED))
    tensors = tensors_of(problem)
    source = strip_prelude(cuda_source(lowered, _EMULATED.architecture, [tensor.name for tensor in tensors]))
    arrays = [_stored(guarded(inputs[tensor.name], tensor), tensor.dtype) for tensor in tensors[:-1]]
    output = tensors[-1]
    arrays.append(_stored(guarded(np.full(output.shape, np.nan), output), output.dtype))
    emulation = run_cuda_on_cpu(
        source,
        lowered.entry + KERNEL_SUFFIX,
        arrays,
        lowered.grid,
        lowered.block,
        [len(arrays) - 1],
        lowered.dynamic_shared_bytes,
        optimized=_turns(problem) > _TURNS_WORTH_OPTIMIZING,
        extents=[tensor.element_count for tensor in tensors],
    )
    (result,) = emulation.outputs
    if output.dtype == "bfloat16":
        return (result.astype(np.uint32) << 16).view(np.float32)
    return _with_nan(result, output.dtype)


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as a kernel stores them; NumPy has no bfloat16, whose bits are the upper half of a float32's."""
    if dtype in FLOAT8_DTYPES:
        import ml_dtypes

        return values.astype(getattr(ml_dtypes, dtype))
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def _source_value(form: KernelForm, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output of the operator as written, whose tensors are those of the form in other shapes."""
    given = {tensor.name: inputs[tensor.name].reshape(tensor.shape) for tensor in form.source.inputs}
    return evaluate(form.source, given)


def _with_nan(values: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers of ``dtype`` with NaN in place of what stands for it among integers (:func:`_guarded`)."""
    if dtype not in INTEGER_DTYPES:
        return values
    return np.where(values == np.iinfo(dtype).min, np.nan, values.astype(np.float64))


def _widen(form: Problem) -> Problem:
    """The same problem with tensors of narrower floats in float32; patch transforms have none."""
    if isinstance(form, PatchTransform):
        return form
    expr = form.expr
    tensors = tuple(
        replace(tensor, dtype="float32") if tensor.dtype in ("float16", "bfloat16", *FLOAT8_DTYPES) else tensor
        for tensor in expr.tensors
    )
    return replace(form, expr=replace(expr, tensors=tensors))
