"""Bundles as they are read beside a GPU: by Python's own JSON, since nothing but NumPy and CuPy is there.

:mod:`codegen.bundle.manifest` has the whole manifest and its schema; here is what launching and profiling need of it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hal.support.errors import InputError

MANIFEST = "manifest.json"

#: The layout that this module reads; as `codegen.bundle.manifest.FORMAT`.
FORMAT = 1

#: Ending of binaries that processors run.
LIBRARY_SUFFIX = ".so"

#: dtype of a manifest -> bytes of an element.
ITEM_BYTES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

_REMEDY = "give a folder that roller compile wrote"


@dataclass(frozen=True)
class ArgumentEntry:
    """One parameter of a kernel: a pointer to a dense row-major tensor."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LaunchEntry:
    """One launch; fields as in :class:`codegen.bundle.manifest.LaunchRecord`."""

    entry: str
    source: str
    binary: str | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared_bytes: int
    tensors: tuple[str, ...]
    zero_output: bool
    architecture: str | None = None

    @property
    def file(self) -> str:
        """The file that it is loaded from where the board is the bundle's."""
        return self.binary or self.source


@dataclass(frozen=True, kw_only=True)
class KernelEntry:
    """One kernel; fields as in :class:`codegen.bundle.manifest.KernelRecord`. ``struck_out`` is why a profile refused
    it."""

    rank: int
    entry: str
    source: str
    binary: str | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared_bytes: int
    seconds: float
    zero_output: bool
    profiled_seconds: float | None
    struck_out: str
    predicted_rank: int
    launches: tuple[LaunchEntry, ...] = ()
    workspace: Mapping[str, int] = field(default_factory=dict)
    tolerance: float | None = None
    architecture: str | None = None

    def steps(self, arguments: Sequence[ArgumentEntry]) -> tuple[LaunchEntry, ...]:
        """Its launches in order: itself over all arguments, where it does it alone."""
        if self.launches:
            return self.launches
        names = tuple(argument.name for argument in arguments)
        return (
            LaunchEntry(
                entry=self.entry,
                source=self.source,
                binary=self.binary,
                grid=self.grid,
                block=self.block,
                dynamic_shared_bytes=self.dynamic_shared_bytes,
                tensors=names,
                zero_output=self.zero_output,
                architecture=self.architecture,
            ),
        )


@dataclass(frozen=True)
class ReferenceEntry:
    """The operator's reference; fields as in :class:`codegen.bundle.manifest.ReferenceRecord`.

    ``launches`` holds (entry, grid, block, names of the tensors) each.
    """

    source: str
    launches: tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[str, ...]], ...]
    workspace: Mapping[str, int]
    tolerance: float
    ranges: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class BundleEntry:
    """A bundle: its folder and what its manifest says; fields as in :class:`codegen.bundle.manifest.Manifest`."""

    directory: Path
    name: str
    device: str
    architecture: str
    arguments: tuple[ArgumentEntry, ...]
    kernels: tuple[KernelEntry, ...]
    reference: ReferenceEntry | None
    profiling_seconds: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_library(self) -> bool:
        """Whether its kernels are shared libraries for processors."""
        return (self.kernels[0].binary or "").endswith(LIBRARY_SUFFIX)

    @property
    def inputs(self) -> tuple[ArgumentEntry, ...]:
        return self.arguments[:-1]

    @property
    def output(self) -> ArgumentEntry:
        return self.arguments[-1]


def read_bundle(directory: Path | str) -> BundleEntry:
    """The bundle in a folder.

    Raises:
        InputError: there is none, it is not of this format, it is for OpenCL, or a file of it is missing.
    """
    folder = Path(directory)
    bundle = _bundle(folder, manifest_data(folder))
    files = [step.file for kernel in bundle.kernels for step in kernel.steps(bundle.arguments)]
    for name in [*files, *([bundle.reference.source] if bundle.reference else [])]:
        if not (folder / name).is_file():
            raise InputError(str(folder / name), "is missing", "copy the whole folder of the bundle")
    return bundle


def manifest_data(folder: Path) -> dict[str, Any]:
    """``manifest.json`` of a folder as it stands.

    Raises:
        InputError: there is none, or it is no JSON object of this format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(str(folder), f"holds no {MANIFEST}", _REMEDY)
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(str(path), f"is no JSON: {error}", _REMEDY) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(str(path), f"is no manifest of format {FORMAT}", "compile the operator again")
    return data


def find_bundles(directory: Path) -> list[Path]:
    """The bundle that a folder is, or those in it, by name.

    Raises:
        InputError: it is and holds none.
    """
    if (directory / MANIFEST).is_file():
        return [directory]
    found = sorted(path.parent for path in directory.glob(f"*/{MANIFEST}") if not path.parent.name.startswith("."))
    if not found:
        raise InputError(str(directory), f"holds no {MANIFEST}, nor does a folder in it", _REMEDY)
    return found


def _bundle(folder: Path, data: Mapping[str, Any]) -> BundleEntry:
    try:
        bundle = BundleEntry(
            directory=folder,
            name=_text(data["name"]),
            device=_text(data["device"]),
            architecture=_text(data["architecture"]),
            arguments=tuple(_argument(item) for item in data["arguments"]),
            kernels=tuple(_kernel(item, [item["name"] for item in data["arguments"]]) for item in data["kernels"]),
            reference=_reference(data.get("reference")),
            profiling_seconds={int(n): float(s) for n, s in data.get("profiling_seconds", {}).items()},
        )
    except KeyError as error:
        raise InputError(str(folder / MANIFEST), f"lacks {error}", "compile the operator again") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(str(folder / MANIFEST), f"is damaged: {error}", "compile the operator again") from None
    if not bundle.kernels or not bundle.arguments or bundle.output.role != "output":
        raise InputError(str(folder / MANIFEST), "has no kernel or no output", "compile the operator again")
    if bundle.kernels[0].source.endswith(".cl"):
        raise InputError(str(folder), "holds OpenCL kernels", "launch them with an OpenCL host; CuPy runs CUDA")
    return bundle


def _argument(data: Mapping[str, Any]) -> ArgumentEntry:
    dtype = _text(data["dtype"])
    if dtype not in ITEM_BYTES:
        raise ValueError(f"argument of unknown dtype {dtype!r}")
    return ArgumentEntry(_text(data["name"]), _text(data["role"]), dtype, tuple(map(int, data["shape"])))


def _kernel(data: Mapping[str, Any], arguments: Sequence[str]) -> KernelEntry:
    profile = data.get("profile") or {}
    workspace = {_text(name): int(count) for name, count in data.get("workspace", {}).items()}
    launches = tuple(_launch(item, {*arguments, *workspace}) for item in data.get("launches", []))
    if launches and launches[-1].tensors[-1] != arguments[-1]:
        raise ValueError(f"the last launch of kernel {data['rank']} does not write {arguments[-1]}")
    measured = data.get("profiled_seconds")
    return KernelEntry(
        rank=int(data["rank"]),
        entry=_text(data["entry"]),
        source=_file(data["source"]),
        binary=None if data["binary"] is None else _file(data["binary"]),
        grid=_extents(data["grid"]),
        block=_extents(data["block"]),
        dynamic_shared_bytes=int(data["dynamic_shared_bytes"]),
        seconds=float(data["seconds"]),
        zero_output=bool(data.get("zero_output", False)),
        profiled_seconds=_seconds(measured),
        struck_out=_text(profile.get("struck_out", "")),
        predicted_rank=int(profile.get("predicted_rank", data["rank"])),
        launches=launches,
        workspace=workspace,
        tolerance=None if data.get("tolerance") is None else float(data["tolerance"]),
        architecture=_optional(data.get("architecture")),
    )


def _launch(data: Mapping[str, Any], known: Collection[str]) -> LaunchEntry:
    tensors = _texts(data["tensors"])
    unknown = [name for name in tensors if name not in known]
    if unknown or not tensors:
        raise ValueError(f"a launch of {unknown[0] if unknown else 'nothing'!r}, no argument and no workspace")
    return LaunchEntry(
        entry=_text(data["entry"]),
        source=_file(data["source"]),
        binary=None if data["binary"] is None else _file(data["binary"]),
        grid=_extents(data["grid"]),
        block=_extents(data["block"]),
        dynamic_shared_bytes=int(data["dynamic_shared_bytes"]),
        tensors=tensors,
        zero_output=bool(data.get("zero_output", False)),
        architecture=_optional(data.get("architecture")),
    )


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)


def _optional(text: Any) -> str | None:
    return None if text is None else _text(text)


def _reference(data: Mapping[str, Any] | None) -> ReferenceEntry | None:
    if data is None:
        return None
    return ReferenceEntry(
        source=_file(data["source"]),
        launches=tuple(
            (_text(item["entry"]), _extents(item["grid"]), _extents(item["block"]), _texts(item["tensors"]))
            for item in data["launches"]
        ),
        workspace={_text(name): int(count) for name, count in data["workspace"].items()},
        tolerance=float(data["tolerance"]),
        ranges={_text(name): (float(low), float(high)) for name, (low, high) in data["ranges"].items()},
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where a text should stand")
    return value


def _texts(values: object) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r} where a list should stand")
    return tuple(map(_text, values))


def _file(value: object) -> str:
    """A file name beside the manifest: a manifest names nothing outside its own folder."""
    name = _text(value)
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no file name")
    return name


def _extents(values: Any) -> tuple[int, int, int]:
    x, y, z = map(int, values)
    return x, y, z


def choose_kernel(bundle: BundleEntry, rank: int | None) -> KernelEntry:
    """The kernel of a rank; without one the fastest measured kernel, or else the one that leads the ranking.

    Raises:
        InputError: no kernel has that rank, or a profile struck all of them out.
    """
    if rank is not None:
        found = [kernel for kernel in bundle.kernels if kernel.rank == rank]
        if not found:
            raise InputError("rank", f"{bundle.name} has no kernel of rank {rank}", f"it has {len(bundle.kernels)}")
        return found[0]
    measured = [kernel for kernel in bundle.kernels if kernel.profiled_seconds is not None]
    if measured:
        return min(measured, key=lambda kernel: kernel.profiled_seconds or 0.0)
    usable = [kernel for kernel in bundle.kernels if not kernel.struck_out]
    if not usable:
        reason = bundle.kernels[0].struck_out
        raise InputError(str(bundle.directory), f"all kernels were struck out: {reason}", "ask for one by its rank")
    return min(usable, key=lambda kernel: kernel.rank)
