"""Proof that a schedule computes the right thing: the same tiling on a small problem, executed and compared.

The operator is cut down to at most two full tiles plus the remainder on every axis, so that inner tiles, edges and
partial steps all occur, and lowered exactly as for the device but for OpenCL. A CPU runs it with real work-groups,
barriers and local memory; the float64 reference judges. Outputs are poisoned first, and every buffer is followed by a
guard that must stay untouched and, where it is read, poisons the result.

What cannot run so is verified by a twin: half-precision tensors are widened to float32 where the OpenCL device has no
half arithmetic, and a Tensor Core tiling is run with scalar multiply-adds. The result says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from codegen.cuda_emulator import EmulatorError, emulator_available, run_cuda_on_cpu
from codegen.lower import lower
from codegen.opencl_runner import OpenClError, opencl_available, run_opencl
from codegen.prelude import strip_prelude
from codegen.targets import KERNEL_SUFFIX, LoweringError, cuda_source, opencl_source
from codegen.verification import TOLERANCE, Verification
from sokoban.expression import Axis, Statement, Tensor, TensorExpr, loads
from sokoban.kernel_form import KernelForm
from sokoban.reference import evaluate, random_inputs
from sokoban.schedule import TileSchedule

#: What stands for infinity in the narrowest dtype.
LARGEST_HALF = 65504.0

#: Elements behind every buffer that no kernel may touch.
GUARD_ELEMENTS = 256


def verify(
    form: KernelForm, schedule: TileSchedule, *, seed: int = 0, full_size: bool = False, engine: str = "opencl"
) -> Verification:
    """Run one schedule on a cut-down problem and compare with the reference.

    With ``full_size`` the whole problem is run and compared with the operator as its author wrote it, before any
    normalisation. ``engine`` is ``"opencl"``, or ``"emulator"``: the CUDA text itself, thread by thread on the CPU,
    shuffles, matrix instructions and half precision included.
    """
    small = form if full_size else cut_down(form, schedule)
    dtypes = {tensor.dtype for tensor in (*form.expr.inputs, form.expr.output)}
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    sizes = dict(small.sizes)
    notes = []
    if engine == "emulator":
        missing = emulator_available()
        method = "cuda, emulated"
    else:
        missing = opencl_available()
        if schedule.instruction != "fma":
            from codegen.lower_wmma import tile_twin

            schedule = tile_twin(schedule, small)
            notes.append("scalar twin of the Tensor Core tiling")
        if dtypes & {"float16", "bfloat16"}:
            notes.append("float32 twin of half-precision storage")
            tolerance = TOLERANCE["float32"]
        method = "opencl" + (f" ({', '.join(notes)})" if notes else "")
    if missing is not None:
        return Verification(False, "none", None, tolerance, sizes, f"not run: {missing}")
    inputs = random_inputs(small.expr, seed)
    expected = _source_value(small, inputs) if full_size else evaluate(small.expr, inputs)
    try:
        run = _run_emulated if engine == "emulator" else _run_opencl
        flat = run(small, schedule, inputs)
    except (OpenClError, EmulatorError, LoweringError) as problem:
        return Verification(False, method, None, tolerance, sizes, str(problem))
    error, reason = _judge(flat, expected, tolerance)
    return Verification(not reason, method, error, tolerance, sizes, reason)


def _run_opencl(form: KernelForm, schedule: TileSchedule, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output with its guard, computed by OpenCL in float32 or float64."""
    widened = _widen(form)
    lowered = lower(widened, schedule, entry="verify", dynamic_shared=False)
    tensors = (*widened.expr.inputs, widened.expr.output)
    source = opencl_source(lowered, [tensor.name for tensor in tensors])
    arrays = [_guarded(inputs[tensor.name], tensor) for tensor in tensors[:-1]]
    arrays.append(_guarded(np.full(tensors[-1].shape, np.nan), tensors[-1]))
    run_opencl(
        source,
        lowered.entry + KERNEL_SUFFIX,
        arrays,
        [blocks * threads for blocks, threads in zip(lowered.grid, lowered.block, strict=True)],
        lowered.block,
        output_indices=[len(arrays) - 1],
    )
    return arrays[-1]


def _run_emulated(form: KernelForm, schedule: TileSchedule, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output with its guard, computed by the kernel's own CUDA text in its own dtypes."""
    lowered = lower(form, schedule, entry="verify")
    tensors = (*form.expr.inputs, form.expr.output)
    source = strip_prelude(cuda_source(lowered, "sm_80", [tensor.name for tensor in tensors]))
    arrays = [_stored(_guarded(inputs[tensor.name], tensor), tensor.dtype) for tensor in tensors[:-1]]
    output = tensors[-1]
    arrays.append(_stored(_guarded(np.full(output.shape, np.nan), output), output.dtype))
    (result,) = run_cuda_on_cpu(
        source,
        lowered.entry + KERNEL_SUFFIX,
        arrays,
        lowered.grid,
        lowered.block,
        [len(arrays) - 1],
        lowered.dynamic_shared_bytes,
    )
    if output.dtype == "bfloat16":
        return (result.astype(np.uint32) << 16).view(np.float32)
    return result


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as a kernel stores them; NumPy has no bfloat16, whose bits are the upper half of a float32's."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def _judge(flat: np.ndarray, expected: np.ndarray, tolerance: float) -> tuple[float, str]:
    """Relative error of an output with its guard, and what is wrong with it (empty where nothing is)."""
    result = flat[: expected.size].reshape(expected.shape).astype(np.float64)
    unwritten = int(np.isnan(result).sum() - np.isnan(expected).sum())
    if unwritten > 0:
        return float("inf"), f"{unwritten} of {result.size} outputs not written, or read outside a tensor"
    if not np.isnan(flat[expected.size :]).all():
        return float("inf"), "written behind the end of the output"
    error = relative_error(result, expected)
    return error, "" if error <= tolerance else f"relative error {error:.3g} is above {tolerance:.3g}"


def _source_value(form: KernelForm, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output of the operator as written, whose tensors are those of the form in other shapes."""
    given = {tensor.name: inputs[tensor.name].reshape(tensor.shape) for tensor in form.source.inputs}
    return evaluate(form.source, given)


def relative_error(result: np.ndarray, expected: np.ndarray) -> float:
    """Largest ``|result - expected| / (|expected| + rms(expected))``: elements near zero are judged by the others.

    Infinities have to be infinite or the largest finite number of the same sign, which kernels write for them; what
    the reference finds undefined is not judged.
    """
    finite = np.isfinite(expected)
    infinite = np.isinf(expected)
    if not (np.isfinite(result) | ~finite).all():
        return float("inf")
    if not (np.sign(expected[infinite]) * result[infinite] > LARGEST_HALF / 2).all():
        return float("inf")
    scale = float(np.sqrt(np.mean(np.square(expected[finite])))) if finite.any() else 0.0
    denominator = np.abs(expected[finite]) + max(scale, 1e-30)
    return float(np.max(np.abs(result[finite] - expected[finite]) / denominator, initial=0.0))


def _guarded(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    """The values flat, in the tensor's dtype, followed by a guard of NaN."""
    dtype = np.float64 if tensor.dtype == "float64" else np.float32
    return np.concatenate([values.astype(dtype).ravel(), np.full(GUARD_ELEMENTS, np.nan, dtype=dtype)])


def _widen(form: KernelForm) -> KernelForm:
    """The same form with half-precision tensors in float32."""
    expr = form.expr
    tensors = tuple(
        replace(tensor, dtype="float32") if tensor.dtype in ("float16", "bfloat16") else tensor
        for tensor in expr.tensors
    )
    return replace(form, expr=TensorExpr(expr.name, expr.axes, tensors, expr.statements, expr.accumulate))


def cut_down(form: KernelForm, schedule: TileSchedule) -> KernelForm:
    """The same operator on axes of at most two full tiles plus the remainder."""
    tiles = {**schedule.block_of, **schedule.step_of}
    if form.kind == "rows" or schedule.reduce_threads:
        # Columns are dealt to the threads in vectors of up to four.
        dealt = 4 * max([count for _, count in schedule.reduce_threads] or [1])
        tiles |= dict.fromkeys((*form.columns, *form.reduced), dealt)
    sizes = {axis: _cut(size, tiles.get(axis, 1)) for axis, size in form.sizes.items()}
    return resize(form, sizes)


def _cut(size: int, tile: int) -> int:
    """``min(size, 2 * tile + size % tile)``: 1000 in tiles of 64 becomes 168."""
    return min(size, 2 * tile + size % tile)


def resize(form: KernelForm, sizes: Mapping[str, int]) -> KernelForm:
    """The form over other axis sizes. A tensor keeps how far it extends beyond (or falls short of) its accesses."""
    expr = form.expr
    old = expr.sizes
    reach: dict[str, list[tuple[int, int]]] = {}
    for statement in expr.statements:
        for load in loads(statement.value):
            ends = [(index.bounds(old)[1], index.bounds(sizes)[1]) for index in load.indices]
            known = reach.setdefault(load.tensor, ends)
            reach[load.tensor] = [(max(a, b), max(x, y)) for (a, x), (b, y) in zip(known, ends, strict=True)]
    written = {statement.tensor: statement for statement in expr.statements}
    tensors = []
    for tensor in expr.tensors:
        if tensor.name in written:
            shape = tuple(sizes[axis] for axis in written[tensor.name].axes)
        else:
            ends = reach[tensor.name]
            shape = tuple(max(1, extent - was + now) for extent, (was, now) in zip(tensor.shape, ends, strict=True))
        tensors.append(Tensor(tensor.name, shape, tensor.dtype))
    axes = tuple(Axis(axis.name, sizes[axis.name]) for axis in expr.axes)
    statements: tuple[Statement, ...] = expr.statements
    small = TensorExpr(expr.name, axes, tuple(tensors), statements, expr.accumulate)
    return KernelForm(form.source, small, form.kind, form.reductions, form.final, form.fused)
