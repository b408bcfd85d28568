"""Bundles: a directory per operator with a manifest and the files of its ranked kernels.

``manifest.json`` holds everything a caller needs to launch a kernel; its JSON Schema is generated from the types here
(:func:`manifest_schema`). A bundle depends on the operator, the device and the compilers alone: no dates, no times, no
paths, so that two runs give the same bytes. ``roller profile`` adds measured times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

FORMAT = 1


class Argument(Struct, frozen=True, kw_only=True):
    """One kernel argument, a pointer: ``shape`` as the caller shapes it, row-major and contiguous."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]


class VerificationRecord(Struct, frozen=True, kw_only=True):
    """Whether the tiling was run on a cut-down problem, how, and how far it was from the float64 reference."""

    passed: bool
    method: str
    relative_error: float | None
    tolerance: float
    axis_sizes: dict[str, int]
    reason: str


class ProfileRecord(Struct, frozen=True, kw_only=True):
    """What ``roller profile`` found out about a kernel.

    Attributes:
        predicted_rank: its rank when it was compiled.
        spread_seconds: distance between the quartiles of the repeated measurements; None where it was struck out.
        repeats: how many measurements; ``launches``: launches in each, over rotating copies of the tensors.
        prediction_error: (predicted - measured) / measured; None where it was struck out.
        relative_error: largest error of an output as in :class:`VerificationRecord`; None where nothing ran.
        tolerance: the bound it was held to; None where the bundle has no reference.
        struck_out: why its time does not count; empty where it does.
        loaded: ``cubin``, what the source was compiled for on the spot, such as ``NVRTC for sm_90``, or ``library``.
        board: name of the GPU or processor; ``capability`` its compute capability, such as ``9.0``, or its threads.
        versions: of the software that took part: ``cupy``, ``driver``, ``runtime``; ``python``, ``numpy``.
    """

    predicted_rank: int
    spread_seconds: float | None
    repeats: int
    launches: int
    prediction_error: float | None
    relative_error: float | None
    tolerance: float | None
    struck_out: str
    loaded: str
    board: str
    capability: str
    versions: dict[str, str]


class ReferenceLaunch(Struct, frozen=True, kw_only=True):
    """One kernel of the reference; its parameters are pointers to ``tensors``, the one it writes last."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    tensors: list[str]


class ReferenceRecord(Struct, frozen=True, kw_only=True):
    """The operator as plain float64 kernels, to check others on the device.

    Attributes:
        source: file name beside the manifest.
        launches: to be run in this order.
        workspace: float64 elements of every tensor that they write, the output among them.
        tolerance: largest relative error that counts as right.
        ranges: least and largest value of test data for every input.
    """

    source: str
    launches: list[ReferenceLaunch]
    workspace: dict[str, int]
    tolerance: float
    ranges: dict[str, list[float]]


class LaunchRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One kernel of several that together compute the operator.

    Attributes:
        label: what it computes, in words.
        entry, source, binary, schedule, grid, block, shared_bytes, dynamic_shared_bytes, registers, spill_bytes:
            as in :class:`KernelRecord`.
        seconds, bound: predicted time of this launch, and the stage that sets it.
        tensors: what its parameters point to, arguments or tensors of the workspace, the one it writes last.
        zero_output: it adds to that one, which has to be cleared before.
        architecture: as in :class:`KernelRecord`.
    """

    label: str
    entry: str
    source: str
    binary: str | None
    schedule: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    dynamic_shared_bytes: int
    registers: int | None
    spill_bytes: int | None
    seconds: float
    bound: str
    tensors: list[str]
    zero_output: bool = False
    architecture: str | None = None


class KernelRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One way to compute the operator: a kernel, or several launched one after the other.

    With ``launches`` the operator is those, in this order, over the arguments and a workspace; what else is said of
    entry, files, extents, registers and tiles is then of the longest of them.

    Attributes:
        rank: 1 is the best.
        entry: function name in the source and the binary.
        source, binary, schedule: file names beside the manifest; ``binary`` None where the device only gets source.
        grid, block: launch extents (x, y, z).
        shared_bytes: shared memory per block; ``dynamic_shared_bytes`` of it is given at launch.
        registers, spill_bytes: per thread, as the device compiler reports them; None without a binary.
        seconds: predicted time, launch included; ``bound`` the stage that sets it; ``stage_seconds`` every stage.
        tiles: tile at each memory layer, by axis.
        policy: how construction came to it.
        verified: True only if the check ran and passed; None where it was not asked for.
        zero_output: the kernel adds to its output, which therefore has to be cleared before each launch.
        profiled_seconds: median measured time; None before ``roller profile`` and where a kernel was struck out.
        profile: the rest of what was measured.
        launches: empty for a kernel that does it alone.
        workspace: bytes of every tensor between the launches, by name.
        tolerance: relative error of its results that counts as right where that is more than the reference's.
        architecture: what its binary was compiled for, ``sm_90a``; None where it is the manifest's.
    """

    rank: int
    entry: str
    source: str
    binary: str | None
    schedule: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    dynamic_shared_bytes: int
    registers: int | None
    spill_bytes: int | None
    seconds: float
    bound: str
    stage_seconds: dict[str, float]
    tiles: dict[str, dict[str, int]]
    policy: str
    verified: bool | None
    verification: VerificationRecord | None
    zero_output: bool = False
    profiled_seconds: float | None = None
    profile: ProfileRecord | None = None
    launches: list[LaunchRecord] = []
    workspace: dict[str, int] = {}
    tolerance: float | None = None
    architecture: str | None = None


class Manifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``manifest.json``.

    Attributes:
        name: the operator's name, also the directory's.
        device, architecture: what it was compiled for.
        statements: the operator as expressions over ``axes``.
        fused_axes: axes of the tiles that stand for several of ``axes``.
        allow_tf32: products of float32 may round their operands to TensorFloat-32.
        arguments: in launch order, the output last.
        notes: what a reader should know, such as why there is no binary.
        kernels: by rank: as predicted, and by measured time once they are profiled.
        reference: how to compute the right result on the device; None where that cannot be said in CUDA C.
        profiling_seconds: how long ``roller profile`` took on a processor for so many kernels (wall clock, checks
            included, imports not); empty before, and of GPUs.
    """

    format: int
    name: str
    device: str
    architecture: str
    statements: list[str]
    axes: dict[str, int]
    fused_axes: dict[str, list[str]]
    accumulate: str
    arguments: list[Argument]
    notes: list[str]
    kernels: list[KernelRecord]
    reference: ReferenceRecord | None = None
    allow_tf32: bool = False
    profiling_seconds: dict[int, float] = {}


def to_json(value: object) -> bytes:
    """Indented JSON with a final newline; keys in declaration order."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a bundle directory.

    Raises:
        OSError: it cannot be read.
        msgspec.ValidationError: it is not a manifest of this format.
    """
    return msgspec.json.decode((directory / "manifest.json").read_bytes(), type=Manifest)


def manifest_schema() -> dict[str, Any]:
    """JSON Schema of ``manifest.json``."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Manifest)}
