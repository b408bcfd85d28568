"""Proof of kernels that take a size at launch: one text, launched for several sizes.

The operator is cut down as for every proof, for a small largest size. Its bundle says what the bundle of the whole
operator says (which arguments end at the size, how many blocks a size takes), and its launches are bound, and their
grids worked out, by what the runtimes use. Tensors are as long as the size says, each with a guard behind it that may
neither be read nor written, whatever the kernel was written for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from codegen.bundle.records import SizeRange, SizeRecord
from codegen.target import Target
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import LoweringRequest
from codegen.tolerance import exact_tolerance, judge
from codegen.verify.chain import Step
from codegen.verify.emulator import EmulatorError, emulator_available
from codegen.verify.engines import CHECKS, ORDER_SEEDS
from codegen.verify.result import NOT_RUN, Verification
from codegen.verify.trial import Sized, Trial, trial_of
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import Tensor
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.schedule.cutting import resize


@dataclass(frozen=True)
class SizesCheck:
    """Kernels to be run for several sizes against the reference.

    Attributes:
        form: the operator as a whole, cut down, of the largest size.
        steps: its kernels in order, whose problems know their launch axes.
        axis: of the author's, whose size is known at launch.
        multiple: of which every size is one.
        sizes: that are run.
        tolerance: largest accepted relative error; None for that of the operator's dtype.
    """

    form: KernelForm
    steps: tuple[Step, ...]
    axis: str
    multiple: int
    sizes: tuple[int, ...]
    tolerance: float | None = None


def sizes_to_run(tiles: Sequence[int], multiple: int, most: int) -> tuple[int, ...]:
    """Sizes at which kernels of some ``tiles`` along the axis may go wrong, all of them multiples and none above
    ``most``: the smallest, the last of the first tile, one tile, the first of the next, a prime, the largest.

    >>> sizes_to_run([64], 1, 137), sizes_to_run([64], 8, 136)
    ((1, 63, 64, 65, 113, 137), (8, 56, 64, 72, 136))
    """
    wanted = {1, most // multiple}
    for tile in tiles:
        wanted |= {(tile - 1) // multiple, -(-tile // multiple), tile // multiple + 1}
    if multiple == 1:
        wanted.add(max((n for n in (2, 3, 5, 7, 13, 31, 61, 113, 251, 509, 1021) if n < most), default=1))
    return tuple(sorted(count * multiple for count in wanted if 0 < count * multiple <= most))


def verify_sizes(
    check: SizesCheck, target: Target, order_seeds: Sequence[int] = ORDER_SEEDS, *, seed: int = 0
) -> Verification:
    """Run kernels for every size of a check, in several orders of threads each, and compare with the reference.

    Args:
        check: what is run.
        target: whose CUDA text is emulated.
        order_seeds: of the orders in which the emulator runs threads, warps and blocks.
        seed: of the inputs.
    """
    tolerance = max(exact_tolerance(check.form.expr), check.tolerance or 0.0)
    judged = partial(Verification, tolerance=tolerance, axis_sizes=dict(check.form.sizes), sizes=check.sizes)
    missing = emulator_available()
    if missing is not None:
        return judged(passed=False, method=NOT_RUN, relative_error=None, reason=f"not run: {missing}")
    method, seeds = "cuda, emulated", tuple(order_seeds)
    verdict = partial(judged, method=method, engine="emulator", checks=CHECKS["emulator"], seeds=seeds)
    try:
        trial = _trial(check, target)
    except LoweringError as error:
        return verdict(passed=False, relative_error=None, reason=str(error))
    worst = 0.0
    needless: list[set[str]] = []
    for size in check.sizes:
        figure, reason, places = _run(check, trial, size, seeds, seed, tolerance)
        if reason:
            return verdict(passed=False, relative_error=figure, reason=f"{check.axis} = {size}: {reason}")
        worst = max(worst, figure or 0.0)
        needless.append(set(places))
    return verdict(passed=True, relative_error=worst, reason="", needless=tuple(sorted(set.intersection(*needless))))


def _trial(check: SizesCheck, target: Target) -> Trial:
    """The bundle that is run, written and read back.

    Raises:
        LoweringError: a schedule cannot be lowered.
    """
    from codegen.gpu.sources import cuda_kernel  # TVM, which a command that only plans its proofs does without

    steps = [(step.problem, step.schedule) for step in check.steps]
    entries = ["verify"] if len(steps) == 1 else [f"verify_part_{number}" for number in range(1, len(steps) + 1)]
    built = [cuda_kernel(LoweringRequest(*step, entry, target))[1] for step, entry in zip(steps, entries, strict=True)]
    most = _largest(check)
    sizes = SizeRange(first=1, last=most, rank=1, seconds=0.0, best_seconds=0.0)
    record = SizeRecord(axis=check.axis, multiple=check.multiple, ranges=(sizes,))
    outer = {tensor.name for tensor in (*check.form.inputs, check.form.output)}
    tensors = tuple(name for name in _tensors_with(check.form) if name in outer)
    return trial_of(check.form, steps, built, target, Sized(record, tensors))


def _largest(check: SizesCheck) -> int:
    """The size that the kernels are written for."""
    launch = check.form.launch_axis
    assert launch is not None
    return check.form.sizes[launch.name] // launch.elements


def _tensors_with(form: KernelForm) -> tuple[str, ...]:
    """Tensors whose first dimension is the launch axis."""
    assert form.launch_axis is not None
    axis = form.launch_axis.name
    longer, shapes = resize(form, {**form.sizes, axis: 2 * form.sizes[axis]}), form.expr.tensor_by_name
    return tuple(tensor.name for tensor in longer.expr.tensors if tensor.shape != shapes[tensor.name].shape)


def _run(
    check: SizesCheck, trial: Trial, size: int, seeds: Sequence[int], seed: int, tolerance: float
) -> tuple[float | None, str, list[str]]:
    """Error of the results for a size, what is wrong with them, and which synchronizations ordered nothing."""
    from codegen.verify.gpu import emulated_kernel, is_guard_written

    launch = check.form.launch_axis
    assert launch is not None
    form = resize(check.form, {**check.form.sizes, launch.name: size * launch.elements})
    kernel = trial.bundle.kernels[0]
    of_size = {tensor.name: tensor for tensor in (*form.expr.inputs, form.expr.output)}
    tensors = {name: _with_elements(tensor, of_size) for name, tensor in trial.tensors.items()}
    trial = replace(trial, tensors=tensors)
    inputs = random_inputs(form.expr, seed)
    values: dict[str, np.ndarray] = dict(inputs)
    needless = []
    try:
        for number, step in enumerate(trial.launches, start=1):
            output = step.bind(tensors)[-1]
            running = emulated_kernel(trial, step, values, size, fills=output.name not in kernel.workspace)
            ran = running.run(seeds)
            values[output.name] = ran.flat[: output.element_count]
            where = f"kernel {number}, " if len(trial.launches) > 1 else ""
            needless += [f"{where}line {place.line}: {place.text.strip()}" for place in ran.needless]
            if is_guard_written(ran.flat, output):
                return math.inf, f"written behind the end of {output.name}", []
    except EmulatorError as error:
        return math.inf, str(error), []
    result = values[trial.bundle.output.name]
    figure, reason = judge(result, evaluate(form.expr, inputs), tolerance)
    return figure, reason, needless


def _with_elements(tensor: Tensor, of_size: Mapping[str, Tensor]) -> Tensor:
    """A kernel's tensor with as many elements as the operator's has for a size; one of the workspace as it is."""
    whole = of_size.get(tensor.name)
    return tensor if whole is None else replace(whole, dtype=tensor.dtype)
