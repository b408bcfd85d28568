"""CPU kernels as a bundle: the folder that other kernels get, with shared libraries for cubins.

In the manifest a launch's ``grid`` is the number of blocks, its ``block`` one thread, and the memory given at launch is
the scratch memory of a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from codegen.atomic import staged_directory
from codegen.bundle import FORMAT, Argument, KernelRecord, Manifest, to_json
from codegen.cpu_build import BuiltLibrary
from sokoban.expression import statement_text
from sokoban.kernel_form import KernelForm
from sokoban.schedule import TileSchedule


@dataclass(frozen=True)
class CpuKernel:
    """A built kernel, the schedule it was built from, and the time predicted for it in seconds."""

    built: BuiltLibrary
    schedule: TileSchedule
    seconds: float


def write_cpu_bundle(
    directory: Path, form: KernelForm, kernels: Sequence[CpuKernel], *, device: str, architecture: str
) -> Path:
    """Write the kernels of one operator, best first, into ``directory``, which appears whole or not at all."""
    source = form.source
    tensors = (*source.inputs, source.output)
    arguments = [
        Argument(
            name=tensor.name,
            role="output" if tensor is tensors[-1] else "input",
            dtype=tensor.dtype,
            shape=tensor.caller_shape,
        )
        for tensor in tensors
    ]
    with staged_directory(directory) as folder:
        records = [_write(folder, rank, kernel) for rank, kernel in enumerate(kernels, start=1)]
        manifest = Manifest(
            format=FORMAT,
            name=source.name,
            device=device,
            architecture=architecture,
            statements=[statement_text(statement) for statement in source.statements],
            axes=dict(source.sizes),
            fused_axes={name: list(parts) for name, parts in form.fused},
            accumulate=source.accumulate,
            arguments=arguments,
            notes=[],
            kernels=records,
        )
        (folder / "manifest.json").write_bytes(to_json(manifest))
    return directory


def _write(folder: Path, rank: int, kernel: CpuKernel) -> KernelRecord:
    """The files of one kernel: library, assembly, schedule."""
    built, schedule = kernel.built, kernel.schedule
    stem = f"kernel_{rank:02d}"
    (folder / f"{stem}.so").write_bytes(built.library)
    (folder / f"{stem}.s").write_text(built.assembly, "utf-8")
    (folder / f"{stem}.json").write_bytes(to_json(schedule.to_json()))
    return KernelRecord(
        rank=rank,
        entry=built.entry,
        source=f"{stem}.s",
        binary=f"{stem}.so",
        schedule=f"{stem}.json",
        grid=(built.blocks, 1, 1),
        block=(1, 1, 1),
        shared_bytes=built.scratch_bytes,
        dynamic_shared_bytes=built.scratch_bytes,
        registers=None,
        spill_bytes=None,
        seconds=kernel.seconds,
        bound="",
        stage_seconds={},
        tiles={"block": dict(schedule.block), "thread": dict(schedule.thread), "step": dict(schedule.step)},
        policy="",
        verified=None,
        verification=None,
    )
