"""Bundles: a directory per operator with a manifest and the files of its ranked kernels.

``manifest.json`` holds everything a caller needs to launch a kernel; its JSON Schema is generated from the types here
(:func:`manifest_schema`). A bundle depends on the operator, the device and the compilers alone: no dates, no times, no
paths, so that two runs give the same bytes.
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


class KernelRecord(Struct, frozen=True, kw_only=True):
    """One kernel of a bundle.

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


class Manifest(Struct, frozen=True, kw_only=True):
    """``manifest.json``.

    Attributes:
        name: the operator's name, also the directory's.
        device, architecture: what it was compiled for.
        statements: the operator as expressions over ``axes``.
        fused_axes: axes of the tiles that stand for several of ``axes``.
        arguments: in launch order, the output last.
        notes: what a reader should know, such as why there is no binary.
        kernels: by rank.
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
