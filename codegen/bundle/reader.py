"""Bundles read on a GPU's machine: by Python's own JSON, since nothing but NumPy and CuPy is there."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from codegen.bundle.records import FORMAT, ITEM_BYTES, MANIFEST, Bundle, KernelRecord, LaunchRecord, Manifest
from hal.support.errors import InputError

_REMEDY = "give a folder that roller compile wrote"


def read_bundle(directory: Path | str, *, runs_opencl: bool = False) -> Bundle:
    """The bundle in a folder; ``runs_opencl``: whether the caller launches OpenCL kernels.

    Raises:
        InputError: there is none, it is not of this format, it is for OpenCL, or a file of it is missing.
    """
    folder = Path(directory)
    bundle = Bundle(folder, _manifest(folder, manifest_data(folder)))
    if bundle.kernels[0].source.endswith(".cl") and not runs_opencl:
        raise InputError(str(folder), "holds OpenCL kernels", "launch them with an OpenCL host; CuPy runs CUDA")
    files = [part.file for kernel in bundle.kernels for part in kernel.parts(bundle.arguments)]
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
    folders = sorted(path.parent for path in directory.glob(f"*/{MANIFEST}") if not path.parent.name.startswith("."))
    if not folders:
        raise InputError(str(directory), f"holds no {MANIFEST}, nor does a folder in it", _REMEDY)
    return folders


def _manifest(folder: Path, data: dict[str, Any]) -> Manifest:
    """The manifest of a folder from its JSON data, with names of files and tensors checked.

    Raises:
        InputError: it is damaged.
    """
    try:
        manifest: Manifest = _typed(Manifest, data)
        problem = _problem(manifest)
    except KeyError as error:
        problem = f"lacks {error}"
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"is damaged: {error}"
    if problem:
        raise InputError(str(folder / MANIFEST), problem, "compile the operator again")
    return manifest


#: Type of a value in a manifest -> what a complaint calls it.
_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _typed(kind: Any, value: Any) -> Any:
    """JSON data as a value of the type that a record declares.

    >>> _typed(tuple[int, ...], [1, 2]), _typed(float | None, 3), _typed(dict[int, str], {"4": "a"})
    ((1, 2), 3.0, {4: 'a'})

    Raises:
        KeyError: a record lacks a field.
        TypeError, ValueError: a value is of another type.
    """
    origin, parameters = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**_members(kind, _of_kind(dict, "an object", value)))
    if origin is UnionType:
        (alternative,) = (parameter for parameter in parameters if parameter is not NoneType)
        return None if value is None else _typed(alternative, value)
    if origin is tuple:
        items = _of_kind(list, "a list", value)
        if parameters[-1] is not ... and len(items) != len(parameters):
            raise ValueError(f"{items!r} where {len(parameters)} numbers should stand")
        return tuple(_typed(parameters[0], item) for item in items)
    if origin is dict:
        pairs = _of_kind(dict, "an object", value).items()
        return {parameters[0](key): _typed(parameters[1], member) for key, member in pairs}
    if kind is float and type(value) is int:
        return float(value)
    return _of_kind(kind, _WORDS[kind], value)


def _members(record: Any, data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record that its JSON has; what it has besides is left alone."""
    kinds = _kinds(record)
    members = {}
    for field in fields(record):
        if field.name in data:
            members[field.name] = _typed(kinds[field.name], data[field.name])
        elif field.default is MISSING and field.default_factory is MISSING:
            raise KeyError(field.name)
    return members


@lru_cache(maxsize=16)
def _kinds(record: Any) -> dict[str, Any]:
    """The types of a record's fields."""
    return get_type_hints(record)


def _of_kind(kind: type, word: str, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} where {word} should stand")
    return value


def _problem(manifest: Manifest) -> str:
    """Problem of a manifest whose values are all of the right type; empty where there is none."""
    if not manifest.kernels or not manifest.arguments or manifest.arguments[-1].role != "output":
        return "has no kernel or no output"
    for argument in manifest.arguments:
        if argument.dtype not in ITEM_BYTES:
            return f"is damaged: argument of unknown dtype {argument.dtype!r}"
    names = [argument.name for argument in manifest.arguments]
    for kernel in manifest.kernels:
        for launch in kernel.launches:
            unknown = [name for name in launch.tensors if name not in {*names, *kernel.workspace}]
            if unknown or not launch.tensors:
                strange = unknown[0] if unknown else "nothing"
                return f"is damaged: a launch of {strange!r}, no argument and no workspace"
        if kernel.launches and kernel.launches[-1].tensors[-1] != names[-1]:
            return f"is damaged: the last launch of kernel {kernel.rank} does not write {names[-1]}"
    problem = _size_problem(manifest)
    if problem:
        return problem
    # A manifest names nothing outside its own folder.
    outside = next((name for name in _files(manifest) if Path(name).name != name), None)
    return "" if outside is None else f"is damaged: {outside!r} is no file name"


def _size_problem(manifest: Manifest) -> str:
    """Problem of what a manifest says of a size that is known at launch; empty where there is none."""
    record = manifest.launch_size
    takes_size = any(part.launch for kernel in manifest.kernels for part in kernel.parts(manifest.arguments))
    if record is None:
        ends = any(argument.ends_at_launch for argument in manifest.arguments)
        return "is damaged: launch_size is missing" if takes_size or ends else ""
    ranks, next_size = {kernel.rank for kernel in manifest.kernels}, 1
    for sizes in record.ranges:
        if not 1 <= sizes.first <= next_size or sizes.last < sizes.first or sizes.rank not in ranks:
            return f"is damaged: sizes {sizes.first} to {sizes.last} of launch_size"
        next_size = sizes.last + 1
    if record.multiple < 1 or next_size - 1 != manifest.axes.get(record.axis):
        return "is damaged: launch_size does not go up to the largest size"
    return ""


def _files(manifest: Manifest) -> list[str]:
    """Names of the files with sources and binaries."""
    launches: list[KernelRecord | LaunchRecord] = []
    for kernel in manifest.kernels:
        launches += [kernel, *kernel.launches]
    names = [name for launch in launches for name in (launch.source, launch.binary) if name is not None]
    return [*names, *([manifest.reference.source] if manifest.reference else [])]


def choose_kernel(bundle: Bundle, rank: int | None) -> KernelRecord:
    """The kernel of a rank; without one the fastest measured kernel, or else the one that leads the ranking.

    Raises:
        InputError: no kernel has that rank, or a profile struck all of them out.
    """
    if rank is not None:
        ranked = [kernel for kernel in bundle.kernels if kernel.rank == rank]
        if not ranked:
            raise InputError("rank", f"{bundle.name} has no kernel of rank {rank}", f"it has {len(bundle.kernels)}")
        return ranked[0]
    measured = [kernel for kernel in bundle.kernels if kernel.profiled_seconds is not None]
    if measured:
        return min(measured, key=lambda kernel: kernel.profiled_seconds or 0.0)
    usable = [kernel for kernel in bundle.kernels if not kernel.struck_out]
    if not usable:
        reason = bundle.kernels[0].struck_out
        raise InputError(str(bundle.directory), f"all kernels were struck out: {reason}", "ask for one by its rank")
    return min(usable, key=lambda kernel: kernel.rank)
