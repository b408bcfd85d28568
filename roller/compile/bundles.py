"""Compiled operators as bundles: their manifests, and the other files."""

from __future__ import annotations

import math
from pathlib import Path

from codegen.bundle.records import FORMAT, Bundle, Manifest, VerificationRecord
from codegen.bundle.reference import ReferenceKernel, reference_kernel
from codegen.bundle.writer import BuiltLaunch, BuiltRank, arguments_of, kernel_record, write_files, write_reference
from codegen.generators import GENERATORS, Generator
from codegen.tolerance import tolerance_of
from codegen.verify.result import Verification
from hal.spec.device import DeviceSpec
from hal.support.atomic import staged_directory
from roller.compile.pipeline import CompiledOperator
from roller.compile.ranked import RankedKernel, entry_name
from roller.construct.program import Program
from sokoban.language.expression import statement_text
from sokoban.language.launch_size import has_rows


class WrongKernelError(RuntimeError):
    """No kernel of an operator computes it; the message says what ran the first one and how far off it was."""


def write_bundle(compiled: CompiledOperator, device: DeviceSpec, out: Path) -> Bundle:
    """Write ``out/<name>/`` whole or not at all.

    Returns:
        The bundle: the folder and the manifest that lies in it.

    Raises:
        WrongKernelError: every kernel of the operator failed its verification.
        LoweringError: a kernel takes other parameters than its launch gives.
    """
    if compiled.error:
        raise WrongKernelError(f"{compiled.expr.name}: {compiled.error}")
    generator = _generator(device)
    reference = _reference(compiled, generator)
    builds = _builds(compiled, device)
    record = manifest(compiled, device, reference)
    target = out / compiled.expr.name
    out.mkdir(parents=True, exist_ok=True)
    with staged_directory(target) as directory:
        write_files(directory, record, builds, generator)
        if reference is not None:
            write_reference(directory, reference)
    return Bundle(target, record)


def manifest(compiled: CompiledOperator, device: DeviceSpec, reference: ReferenceKernel | None) -> Manifest:
    """The manifest of a compiled operator; ``reference`` is what its kernels are judged by on the device."""
    expr, generator = compiled.expr, _generator(device)
    tensors = (*expr.inputs, expr.output)
    arguments = arguments_of(tensors, {tensor.name for tensor in tensors if has_rows(expr, tensor)})
    return Manifest(
        format=FORMAT,
        name=expr.name,
        device=device.name,
        architecture=device.architecture,
        statements=tuple(statement_text(statement) for statement in expr.statements),
        axes=dict(expr.sizes),
        fused_axes={name: tuple(axes) for name, axes in compiled.form.fused},
        accumulate=expr.accumulate,
        arguments=arguments,
        notes=_notes(compiled, device),
        kernels=tuple(
            kernel_record(rank, build, arguments, generator)
            for rank, build in enumerate(_builds(compiled, device), start=1)
        ),
        reference=None if reference is None else reference.record,
        allow_tf32=expr.allow_tf32,
        launch_size=compiled.launch_size,
    )


def _notes(compiled: CompiledOperator, device: DeviceSpec) -> tuple[str, ...]:
    """Notes for the reader: why there are no binaries, and that nothing was proved."""
    notes = [device.code_generator_reason] if device.code_generator_reason else []
    checks = [kernel.built.verification for kernel in compiled.kernels]
    if not any(check is not None and check.passed for check in checks):
        reasons = [check.reason for check in checks if check is not None]
        notes.append(f"unverified: {reasons[0] if reasons else 'no kernel was run against the reference'}")
    return tuple(notes)


def _generator(device: DeviceSpec) -> Generator:
    """Languages that the device's code generator writes."""
    assert device.code_generator is not None, "the device has kernels"
    return GENERATORS[device.code_generator]


def _reference(compiled: CompiledOperator, generator: Generator) -> ReferenceKernel | None:
    """The operator as plain CUDA C, by which ``roller profile`` judges its kernels; None where that cannot be said."""
    if not generator.has_reference:
        return None
    try:
        return reference_kernel(compiled.expr, entry_name(compiled.expr.name))
    except ValueError:  # a dtype that the reference does not know
        return None


def _builds(compiled: CompiledOperator, device: DeviceSpec) -> list[BuiltRank]:
    return [_build(kernel, device) for kernel in compiled.kernels]


def _build(kernel: RankedKernel, device: DeviceSpec) -> BuiltRank:
    """A ranked kernel as the writer of bundles takes it."""
    program, priced = kernel.program, kernel.priced or kernel.program
    longest = max((part for part, _ in kernel.parts), key=lambda part: part.estimate.seconds)
    return BuiltRank(
        launches=tuple(
            BuiltLaunch(
                problem=part.problem,
                built=built,
                schedule=part.schedule_json,
                label=part.label,
                seconds=part.estimate.seconds,
                bound=part.estimate.bound,
            )
            for part, built in kernel.parts
        ),
        workspace={tensor.name: tensor.size_bytes for tensor in program.workspace},
        seconds=kernel.seconds,
        bound=priced.estimate.bound,
        stage_seconds=priced.estimate.stage_seconds,
        tiles=longest.schedule.tiles(device),
        policy=program.policy,
        tolerance=_tolerance(program),
        verification=_verification(kernel.built.verification),
    )


def _verification(checked: Verification | None) -> VerificationRecord | None:
    if checked is None:
        return None
    return VerificationRecord(
        passed=checked.passed,
        method=checked.method,
        relative_error=_error_figure(checked.relative_error),
        tolerance=checked.tolerance,
        axis_sizes=dict(checked.axis_sizes),
        reason=checked.reason,
        engine=checked.engine,
        checks=checked.checks,
        seeds=checked.seeds,
        needless=checked.needless,
        sizes=checked.sizes,
    )


def _tolerance(program: Program) -> float | None:
    """The error that a chain's results may have where it is more than any program's of their dtype."""
    if program.tolerance is None:
        return None
    tolerance = float(f"{program.tolerance:.3g}")
    return tolerance if tolerance > tolerance_of(program.form.expr) else None


def _error_figure(error: float | None) -> float | None:
    """A measured error for a manifest: upper bound of its power of ten, since CPUs differ in the last bits.

    >>> _error_figure(3.1e-7), _error_figure(0.0), _error_figure(math.inf)
    (1e-06, 0.0, None)
    """
    if error is None or not math.isfinite(error) or error == 0.0:
        return None if error is None or error != 0.0 else 0.0
    return float(f"1e{math.ceil(math.log10(error))}")
