"""Bundles written: which file holds what, what parameters of kernels point to, and the manifest over all of it.

Whoever makes a bundle comes here, compilation (:mod:`roller.compile.bundles`) and proof (:mod:`codegen.verify.trial`)
alike, so that a kernel is proved with the arguments that a user launches it with.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codegen.built import BuiltKernel
from codegen.bundle.manifest import to_json
from codegen.bundle.records import (
    MANIFEST,
    Argument,
    KernelRecord,
    LaunchRecord,
    Manifest,
    VerificationRecord,
)
from codegen.bundle.reference import ReferenceKernel
from codegen.generators import Generator
from codegen.launch_shape import SIZE_PARAMETER
from codegen.tir.lowered import LoweringError, identifier
from sokoban.kernel.problem import Problem
from sokoban.language.expression import Tensor


@dataclass(frozen=True, kw_only=True)
class BuiltLaunch:
    """One kernel of a program as it was built.

    Attributes:
        problem: what it computes; its tensors are the kernel's parameters, in their order.
        built: text and machine code.
        schedule: how, as JSON data.
        label: what it computes, in words.
        seconds, bound: predicted time, and the stage that sets it.
    """

    problem: Problem
    built: BuiltKernel
    schedule: Mapping[str, Any]
    label: str = ""
    seconds: float = 0.0
    bound: str = ""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of what its parameters point to, the tensor that it writes last."""
        return tuple(tensor.name for tensor in self.problem.tensors)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the text's parameters: by the tensors, or by the parts that they play; the size at launch last."""
        size = () if self.built.launch is None else (SIZE_PARAMETER,)
        return (*map(identifier, self.problem.parameters), *size)


@dataclass(frozen=True, kw_only=True)
class BuiltRank:
    """One way to compute an operator as it was built: its launches in order, and what is known of all together.

    Attributes:
        launches: at least one.
        workspace: bytes of every tensor between them, by name.
        seconds, bound, stage_seconds, tiles, policy, tolerance, verification: as in
            :class:`codegen.bundle.records.KernelRecord`.
    """

    launches: tuple[BuiltLaunch, ...]
    workspace: Mapping[str, int]
    seconds: float = 0.0
    bound: str = ""
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    tiles: Mapping[str, dict[str, int]] = field(default_factory=dict)
    policy: str = ""
    tolerance: float | None = None
    verification: VerificationRecord | None = None

    @property
    def longest(self) -> int:
        """Position of the launch that takes longest."""
        return max(range(len(self.launches)), key=lambda number: self.launches[number].seconds)


@dataclass(frozen=True)
class LaunchFiles:
    """Names of one launch's files: ``kernel_1.cu`` and so on; ``kernel_1_part_2.cu`` where there are several."""

    source: str
    binary: str | None
    schedule: str

    @staticmethod
    def of(rank: int, build: BuiltRank, generator: Generator) -> Iterator[LaunchFiles]:
        """Those of every launch of a rank."""
        for number, launch in enumerate(build.launches, start=1):
            stem = f"kernel_{rank}" if len(build.launches) == 1 else f"kernel_{rank}_part_{number}"
            binary = f"{stem}.{generator.binary_suffix}" if launch.built.binary is not None else None
            yield LaunchFiles(f"{stem}.{generator.source_suffix}", binary, f"{stem}.schedule.json")


def arguments_of(tensors: Sequence[Tensor], launched: Collection[str] = ()) -> tuple[Argument, ...]:
    """Arguments of a launch: an operator's inputs in order, then its output; ``launched`` those whose first dimension
    is a size that is known at launch."""
    return tuple(
        Argument(
            name=tensor.name,
            role="output" if tensor is tensors[-1] else "input",
            dtype=tensor.dtype,
            shape=tensor.caller_shape,
            ends_at_launch=tensor.name in launched,
        )
        for tensor in tensors
    )


def kernel_record(rank: int, build: BuiltRank, arguments: Sequence[Argument], generator: Generator) -> KernelRecord:
    """The record of a rank; the general fields of several launches are those of the longest.

    Launches are listed where there are several, and where the parameters of the only one are not ``arguments`` in their
    order.

    Raises:
        LoweringError: a kernel's text takes other parameters than the tensors of its problem.
    """
    files = tuple(LaunchFiles.of(rank, build, generator))
    for launch, file in zip(build.launches, files, strict=True):
        _check_signature(launch, file.source)
    launch, file = build.launches[build.longest], files[build.longest]
    names = tuple(argument.name for argument in arguments)
    is_alone = len(build.launches) == 1 and launch.tensors == names
    verification = build.verification
    return KernelRecord(
        rank=rank,
        **_built(launch.built, file),
        seconds=rounded(build.seconds),
        bound=build.bound,
        stage_seconds={name: rounded(value) for name, value in build.stage_seconds.items()},
        tiles=dict(build.tiles),
        policy=build.policy,
        verified=True if verification is not None and verification.passed else None,
        verification=verification,
        launches=() if is_alone else tuple(map(_launch_record, build.launches, files)),
        workspace=dict(build.workspace),
        tolerance=build.tolerance,
    )


def write_files(directory: Path, manifest: Manifest, builds: Sequence[BuiltRank], generator: Generator) -> None:
    """Sources, binaries, schedules and the manifest into a folder that is there."""
    for rank, build in enumerate(builds, start=1):
        for launch, file in zip(build.launches, LaunchFiles.of(rank, build, generator), strict=True):
            (directory / file.source).write_text(launch.built.source)
            if file.binary is not None and launch.built.binary is not None:
                (directory / file.binary).write_bytes(launch.built.binary)
            (directory / file.schedule).write_bytes(to_json(launch.schedule))
    (directory / MANIFEST).write_bytes(to_json(manifest))


def write_reference(directory: Path, reference: ReferenceKernel) -> None:
    """The operator as plain CUDA C into a folder that is there."""
    (directory / reference.record.source).write_text(reference.source)


def _launch_record(launch: BuiltLaunch, file: LaunchFiles) -> LaunchRecord:
    return LaunchRecord(
        label=launch.label,
        **_built(launch.built, file),
        seconds=rounded(launch.seconds),
        bound=launch.bound,
        tensors=launch.tensors,
    )


def _built(built: BuiltKernel, file: LaunchFiles) -> dict[str, Any]:
    """Fields that every record has of a compiled kernel, its architecture included."""
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
        "launch": built.launch,
    }


def signature_of(source: str, entry: str) -> tuple[str, ...] | None:
    """Names of the parameters of a kernel in its CUDA or OpenCL text, without what marks them as pointers or maps; None
    where the text has no such function.

    >>> signature_of("__global__ void __launch_bounds__(32) f_kernel(float* A_ptr, const X B_map) {", "f_kernel")
    ('A', 'B')
    """
    match = re.search(rf"\b{re.escape(entry)}\(([^)]*)\)\s*\{{", source)
    if match is None:
        return None
    names = (text.split()[-1].lstrip("*") for text in match[1].split(",") if text.strip())
    return tuple(re.sub(r"_(?:ptr|map)$", "", name) for name in names)


def _check_signature(launch: BuiltLaunch, source: str) -> None:
    """Raises LoweringError where a text's parameters are not the tensors that its launch binds."""
    if source.endswith((".cu", ".cl")):
        signature = signature_of(launch.built.source, launch.built.entry)
        if signature not in (None, launch.parameters):
            raise LoweringError(f"{launch.built.entry}: the text takes {signature}, not {launch.parameters}")


def rounded(seconds: float) -> float:
    """Six significant digits: enough for any estimate, and the same on every machine.

    >>> rounded(1.23456789e-6)
    1.23457e-06
    """
    return float(f"{seconds:.6g}")
