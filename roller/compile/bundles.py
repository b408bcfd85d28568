"""Compiled operators as bundles: what their manifests say, and the files beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen import staged_directory
from codegen.bundle.manifest import to_json
from codegen.bundle.records import (
    FORMAT,
    MANIFEST,
    Argument,
    Bundle,
    KernelRecord,
    LaunchRecord,
    Manifest,
    VerificationRecord,
)
from codegen.bundle.reference import ReferenceKernel, reference_kernel
from codegen.compile.request import BuiltKernel
from codegen.generators import GENERATORS, Generator
from codegen.verify.result import tolerance_of
from hal.spec.device import DeviceSpec
from roller.compile.pipeline import CompiledOperator, RankedKernel, entry_name
from roller.construct.program import Program
from sokoban.kernel.problem import tensors_of
from sokoban.language.expression import statement_text
from sokoban.schedule.attention import AttentionSchedule
from sokoban.schedule.attention_gradient import GradientSchedule
from sokoban.schedule.pair import PairSchedule
from sokoban.schedule.patches import Schedule
from sokoban.schedule.tile import TileSchedule


def write_bundle(compiled: CompiledOperator, device: DeviceSpec, out: Path) -> Bundle:
    """Write ``out/<name>/`` whole or not at all.

    Returns:
        The bundle: the folder and the manifest that lies in it.
    """
    generator = _generator(device)
    reference = _reference(compiled, generator)
    record = manifest(compiled, device, reference)
    target = out / compiled.expr.name
    out.mkdir(parents=True, exist_ok=True)
    with staged_directory(target) as directory:
        for rank, kernel in enumerate(compiled.kernels, start=1):
            files = _files(rank, kernel, generator)
            for file, (part, built) in zip(files, kernel.parts, strict=True):
                (directory / file.source).write_text(built.source)
                if file.binary is not None and built.binary is not None:
                    (directory / file.binary).write_bytes(built.binary)
                (directory / file.schedule).write_bytes(to_json(part.schedule_json))
        if reference is not None:
            (directory / reference.record.source).write_text(reference.source)
        (directory / MANIFEST).write_bytes(to_json(record))
    return Bundle(target, record)


def manifest(compiled: CompiledOperator, device: DeviceSpec, reference: ReferenceKernel | None) -> Manifest:
    """The manifest of a compiled operator; ``reference`` is what its kernels are judged by on the device."""
    tensors = (*compiled.expr.inputs, compiled.expr.output)
    return Manifest(
        format=FORMAT,
        name=compiled.expr.name,
        device=device.name,
        architecture=device.architecture,
        statements=tuple(statement_text(statement) for statement in compiled.expr.statements),
        axes=dict(compiled.expr.sizes),
        fused_axes={name: tuple(axes) for name, axes in compiled.form.fused},
        accumulate=compiled.expr.accumulate,
        arguments=tuple(
            Argument(
                name=tensor.name,
                role="output" if tensor is tensors[-1] else "input",
                dtype=tensor.dtype,
                shape=tensor.caller_shape,
            )
            for tensor in tensors
        ),
        notes=(device.code_generator_reason,) if device.code_generator_reason else (),
        kernels=tuple(_record(rank, kernel, device) for rank, kernel in enumerate(compiled.kernels, start=1)),
        reference=None if reference is None else reference.record,
        allow_tf32=compiled.expr.allow_tf32,
    )


def _generator(device: DeviceSpec) -> Generator:
    """What the device's code generator writes."""
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


def _record(rank: int, kernel: RankedKernel, device: DeviceSpec) -> KernelRecord:
    """The record of a rank; the general fields of a chain are those of its longest launch."""
    files = list(_files(rank, kernel, _generator(device)))
    longest = max(range(len(files)), key=lambda number: kernel.parts[number][0].estimate.seconds)
    (part, built), program, file = kernel.parts[longest], kernel.program, files[longest]
    checked = kernel.built.verification
    return KernelRecord(
        rank=rank,
        **_built(built, file),
        seconds=_rounded(kernel.seconds),
        bound=program.estimate.bound,
        stage_seconds={name: _rounded(value) for name, value in program.estimate.stage_seconds.items()},
        tiles=_tiles(part.schedule, device),
        policy=program.policy,
        verified=None if checked is None else checked.passed,
        verification=None
        if checked is None
        else VerificationRecord(
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
        ),
        launches=tuple(_launches(kernel, files)),
        workspace=_workspace(program),
        tolerance=_tolerance(program),
    )


def _built(built: BuiltKernel, file: _Files) -> dict[str, Any]:
    """What every record says of a compiled kernel, its architecture included."""
    return {
        "entry": built.entry,
        "source": file.source,
        "binary": file.binary,
        "schedule": file.schedule,
        "grid": built.grid,
        "block": built.block,
        "shared_bytes": built.shared_bytes,
        "dynamic_shared_bytes": built.dynamic_shared_bytes,
        "registers": built.registers,
        "spill_bytes": built.spill_bytes,
        "architecture": built.architecture,
        "tensor_maps": built.tensor_maps,
    }


def _workspace(program: Program) -> dict[str, int]:
    return {tensor.name: tensor.size_bytes for tensor in program.workspace}


def _tolerance(program: Program) -> float | None:
    """The error that a chain's results may have where it is more than any program's of their dtype."""
    if program.tolerance is None:
        return None
    tolerance = float(f"{program.tolerance:.3g}")
    return tolerance if tolerance > tolerance_of(program.form.expr) else None


def _launches(kernel: RankedKernel, files: Sequence[_Files]) -> list[LaunchRecord]:
    """A record per launch of a chain; none for a kernel that does it alone."""
    program = kernel.program
    if len(program.parts) == 1:
        return []
    return [
        LaunchRecord(
            label=part.label,
            **_built(built, file),
            seconds=_rounded(part.estimate.seconds),
            bound=part.estimate.bound,
            tensors=tuple(tensor.name for tensor in tensors_of(part.problem)),
        )
        for (part, built), file in zip(kernel.parts, files, strict=True)
    ]


def _tiles(schedule: Schedule, device: DeviceSpec) -> dict[str, dict[str, int]]:
    """Tiles at each memory layer, by axis."""
    if isinstance(schedule, AttentionSchedule):
        return {
            device.registers.name: {"row": schedule.rows // schedule.warps, "key": schedule.keys},
            device.shared.name: {"row": schedule.rows, "key": schedule.keys},
        }
    if isinstance(schedule, GradientSchedule):
        return {
            device.registers.name: {"row": schedule.rows // schedule.warps, "walked": schedule.step},
            device.shared.name: {"row": schedule.rows, "walked": schedule.step},
        }
    if isinstance(schedule, PairSchedule):
        return {
            device.registers.name: {"row": schedule.rows // schedule.warps, "middle": schedule.step},
            device.shared.name: {"row": schedule.rows, "middle": schedule.step},
        }
    if not isinstance(schedule, TileSchedule):
        return {}
    block = {**schedule.block_of, **schedule.step_of}
    return {device.registers.name: dict(schedule.register_tile), device.shared.name: block}


@dataclass(frozen=True)
class _Files:
    """Names of one launch's files."""

    source: str
    binary: str | None
    schedule: str


def _files(rank: int, kernel: RankedKernel, generator: Generator) -> Iterator[_Files]:
    """``kernel_1.cu`` and so on; ``kernel_1_part_2.cu`` where there are several launches."""
    is_single = len(kernel.parts) == 1
    for number, (_, built) in enumerate(kernel.parts, start=1):
        stem = f"kernel_{rank}" if is_single else f"kernel_{rank}_part_{number}"
        binary = f"{stem}.{generator.binary_suffix}" if built.binary is not None else None
        yield _Files(f"{stem}.{generator.source_suffix}", binary, f"{stem}.schedule.json")


def _rounded(seconds: float) -> float:
    """Six significant digits: enough for any estimate, and the same on every machine.

    >>> _rounded(1.23456789e-6)
    1.23457e-06
    """
    return float(f"{seconds:.6g}")


def _error_figure(error: float | None) -> float | None:
    """A measured error for a manifest: upper bound of its power of ten, since CPUs differ in the last bits.

    >>> _error_figure(3.1e-7), _error_figure(0.0), _error_figure(math.inf)
    (1e-06, 0.0, None)
    """
    if error is None or not math.isfinite(error) or error == 0.0:
        return None if error is None or error != 0.0 else 0.0
    return float(f"1e{math.ceil(math.log10(error))}")
