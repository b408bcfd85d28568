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

from codegen.lower import lower
from codegen.opencl_runner import OpenClError, opencl_available, run_opencl
from codegen.targets import KERNEL_SUFFIX, LoweringError, opencl_source
from codegen.verification import Verification
from sokoban.expression import Axis, Statement, Tensor, TensorExpr, loads
from sokoban.kernel_form import KernelForm
from sokoban.reference import evaluate, random_inputs
from sokoban.schedule import TileSchedule

#: Largest accepted relative error by dtype of the output (narrowest dtype that takes part).
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}

#: What stands for infinity in the narrowest dtype.
LARGEST_HALF = 65504.0

#: Elements behind every buffer that no kernel may touch.
GUARD_ELEMENTS = 256


def verify(form: KernelForm, schedule: TileSchedule, *, seed: int = 0, full_size: bool = False) -> Verification:
    """Run one schedule on a cut-down problem and compare with the reference.

    With ``full_size`` the whole problem is run and compared with the operator as its author wrote it, before any
    normalisation.
    """
    small = form if full_size else cut_down(form, schedule)
    dtypes = {tensor.dtype for tensor in (*form.expr.inputs, form.expr.output)}
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    notes = []
    if schedule.instruction != "fma":
        from codegen.lower_wmma import tile_twin

        schedule = tile_twin(schedule, small)
        notes.append("scalar twin of the Tensor Core tiling")
    if dtypes & {"float16", "bfloat16"}:
        notes.append("float32 twin of half-precision storage")
        tolerance = TOLERANCE["float32"]
    method = "opencl" + (f" ({', '.join(notes)})" if notes else "")
    sizes = dict(small.sizes)
    missing = opencl_available()
    if missing is not None:
        return Verification(False, "none", None, tolerance, sizes, f"not run: {missing}")
    try:
        error, reason = _run(small, schedule, seed, tolerance, against_source=full_size)
    except (OpenClError, LoweringError) as problem:
        return Verification(False, method, None, tolerance, sizes, str(problem))
    return Verification(not reason, method, error, tolerance, sizes, reason)


def _run(
    form: KernelForm, schedule: TileSchedule, seed: int, tolerance: float, *, against_source: bool
) -> tuple[float, str]:
    inputs = random_inputs(form.expr, seed)
    widened = _widen(form)
    lowered = lower(widened, schedule, entry="verify", dynamic_shared=False)
    names = [tensor.name for tensor in (*widened.expr.inputs, widened.expr.output)]
    source = opencl_source(lowered, names)
    output = widened.expr.output
    expected = _source_value(form, inputs) if against_source else evaluate(form.expr, inputs)
    arrays = [_guarded(inputs[tensor.name], tensor) for tensor in widened.expr.inputs]
    arrays.append(_guarded(np.full(output.shape, np.nan), output))
    run_opencl(
        source,
        lowered.entry + KERNEL_SUFFIX,
        arrays,
        [blocks * threads for blocks, threads in zip(lowered.grid, lowered.block, strict=True)],
        lowered.block,
        output_indices=[len(arrays) - 1],
    )
    result = arrays[-1][: output.element_count].reshape(expected.shape).astype(np.float64)
    unwritten = int(np.isnan(result).sum() - np.isnan(expected).sum())
    if unwritten > 0:
        return float("inf"), f"{unwritten} of {result.size} outputs not written, or read outside a tensor"
    if not np.isnan(arrays[-1][output.element_count :]).all():
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
