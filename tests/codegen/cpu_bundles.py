"""Bundles of CPU kernels made by hand: of schedules that tests choose, without construction and its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from codegen import staged_directory
from codegen.bundle.manifest import to_json
from codegen.bundle.records import FORMAT, MANIFEST, Argument, KernelRecord, Manifest
from codegen.cpu.shared_object import SharedObject
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import statement_text
from sokoban.schedule.tile import TileSchedule


@dataclass(frozen=True)
class CpuKernel:
    """A built kernel, the schedule it was built from, and the time said to be predicted for it, in seconds."""

    built: SharedObject
    schedule: TileSchedule
    seconds: float


def write_cpu_bundle(
    directory: Path, form: KernelForm, kernels: Sequence[CpuKernel], *, device: str, architecture: str
) -> Path:
    """The folder that ``roller compile`` would leave for these kernels, best first."""
    source = form.source
    tensors = (*source.inputs, source.output)
    arguments = tuple(
        Argument(name=t.name, role="output" if t is tensors[-1] else "input", dtype=t.dtype, shape=t.caller_shape)
        for t in tensors
    )
    with staged_directory(directory) as folder:
        manifest = Manifest(
            format=FORMAT, name=source.name, device=device, architecture=architecture,
            statements=tuple(statement_text(statement) for statement in source.statements), axes=dict(source.sizes),
            fused_axes={name: tuple(parts) for name, parts in form.fused}, accumulate=source.accumulate,
            arguments=arguments, notes=(),
            kernels=tuple(_write(folder, rank, kernel) for rank, kernel in enumerate(kernels, start=1)),
        )  # fmt: skip
        (folder / MANIFEST).write_bytes(to_json(manifest))
    return directory


def _write(folder: Path, rank: int, kernel: CpuKernel) -> KernelRecord:
    """The files of one kernel: library, assembly, schedule."""
    built, stem = kernel.built, f"kernel_{rank}"
    (folder / f"{stem}.so").write_bytes(built.data)
    (folder / f"{stem}.s").write_text(built.assembly, "utf-8")
    (folder / f"{stem}.schedule.json").write_bytes(to_json(kernel.schedule.to_json()))
    return KernelRecord(
        rank=rank, entry=built.entry, source=f"{stem}.s", binary=f"{stem}.so", schedule=f"{stem}.schedule.json",
        grid=(built.blocks, 1, 1), block=(1, 1, 1), shared_bytes=built.scratch_bytes,
        dynamic_shared_bytes=built.scratch_bytes, registers=None, spill_bytes=None, seconds=kernel.seconds,
        bound="compute", stage_seconds={}, tiles={}, policy="made up", verified=None, verification=None,
    )  # fmt: skip
