"""``roller inspect``: what a kernel's machine code consists of, without a GPU.

A kernel is a rank of a bundle, a CUDA source or a cubin. Of a bundle's kernel the schedule is known, so that what
RATIONAL assumed is compared with the disassembly. Neither TVM nor a device is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from codegen.built import BuiltKernel
from codegen.bundle.manifest import read_manifest
from codegen.bundle.operators import operator_of
from codegen.bundle.records import KernelRecord, LaunchRecord, Manifest
from codegen.gpu.source.nvrtc import CompileError, compile_cuda
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.inspect.disassembly import HotLoop, disassemble, hottest_loop, readable_architecture
from roller.inspect.mix import Mix, mix_of
from roller.inspect.model import ModelView, model_view
from roller.inspect.sass import SassFunction
from roller.text.quantities import count_text
from sokoban.kernel.form import KernelForm
from sokoban.schedule.tile import TileSchedule


class Resources(NamedTuple):
    """Resources of a kernel per thread, as its compiler reports them; None where it was not asked."""

    registers: int | None
    spill_bytes: int | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Inspection:
    """Figures read from the machine code of one kernel.

    Attributes:
        name: what it was given as, for a bundle ``matmul rank 1``.
        architecture: of the code that was read.
        in_place_of: the architecture that was asked for, where the disassembler does not read it; else None.
        function: the code.
        hot: its hottest loop.
        registers: per thread.
        shared_bytes: per block; without a bundle or a source the static part alone.
        spill_bytes: per thread, as the compiler says; None for a cubin by itself.
        model: what RATIONAL assumed; None where ``model_reason`` says why it is not known.
        as_built: registers and spills of the kernel that the bundle holds, where this is its source compiled again
            because the disassembler does not read ``in_place_of``; else None.
    """

    name: str
    architecture: str
    in_place_of: str | None
    function: SassFunction
    hot: HotLoop
    registers: int
    shared_bytes: int
    spill_bytes: int | None
    model: ModelView | None
    model_reason: str
    as_built: Resources | None = None

    @property
    def mix(self) -> Mix:
        """Instructions of the whole kernel."""
        return mix_of(self.function.reachable)

    @property
    def local_accesses(self) -> int:
        """Loads and stores of local memory: spills, and arrays that found no registers."""
        return self.mix.count("local memory")


# Finding the kernel


def inspect_path(path: Path, rank: int | None = None, architecture: str | None = None) -> list[Inspection]:
    """The kernels of a file (a cubin or a source may hold several) or those of one rank of a bundle.

    Raises:
        InputError: there is none, it does not compile, or there is no disassembler.
    """
    if path.is_dir():
        return inspect_bundle(path, rank or 1, architecture)
    if not path.is_file():
        raise InputError(str(path), "no such file", "give a bundle's folder, a .cu or a .cubin")
    bundle_rank = _rank_of(path)
    if bundle_rank is not None:
        return inspect_bundle(path.parent, bundle_rank, architecture, path.name)
    if rank is not None:
        raise InputError("--rank", f"{path} is one file, not a bundle", "leave it out")
    if path.suffix == ".cubin":
        if architecture is not None:
            raise InputError("--arch", "a cubin is what it was compiled for", "give the source (.cu) instead")
        return list(_read(path.name, path.read_bytes()))
    if path.suffix != ".cu":
        raise InputError(str(path), "is neither CUDA source nor a cubin", "give a bundle's folder, a .cu or a .cubin")
    if architecture is None:
        raise InputError("--arch", f"{path.name} is a source: for which architecture?", "add --arch sm_80")
    return _compiled(path.read_text("utf-8"), path.name, architecture)


def inspect_bundle(
    directory: Path, rank: int = 1, architecture: str | None = None, file: str | None = None
) -> list[Inspection]:
    """The kernel of a rank, or its kernels in the order of their launches; with ``file`` the one in this file alone.

    Sources are compiled again where ``architecture`` or the disassembler ask for it.

    Raises:
        InputError: as :func:`inspect_path`.
    """
    record = _manifest(directory)
    kernel = next((kernel for kernel in record.kernels if kernel.rank == rank), None)
    if kernel is None:
        problem = f"{directory} has {count_text(len(record.kernels), 'kernel')}, none of rank {rank}"
        raise InputError("--rank", problem, "ask for one of those")
    if not kernel.source.endswith(".cu"):
        raise InputError(str(directory), f"{kernel.source} is no CUDA source", "nvdisasm reads NVIDIA's code only")
    name = f"{record.name} rank {rank}"
    if not kernel.launches:
        inspection = _inspect_record(record, directory, name, kernel, architecture)
        view, reason = _view(record, directory / kernel.schedule, inspection.hot)
        return [replace(inspection, model=view, model_reason=reason)]
    reason = "the model's view is that of operators, and this is one kernel of several"
    return [
        replace(
            _inspect_record(record, directory, f"{name}, {launch.label}", launch, architecture), model_reason=reason
        )
        for launch in kernel.launches
        if file in (None, launch.source, launch.binary)
    ]


def _inspect_record(
    record: Manifest, directory: Path, name: str, kernel: KernelRecord | LaunchRecord, architecture: str | None
) -> Inspection:
    """One kernel that a manifest lists, without the model's view."""
    code = _Code(
        entry=kernel.entry,
        source=lambda: (directory / kernel.source).read_text("utf-8"),
        binary=None if kernel.binary is None else (directory / kernel.binary).read_bytes(),
        architecture=kernel.architecture or record.architecture,
        resources=Resources(kernel.registers, kernel.spill_bytes),
        shared_bytes=kernel.shared_bytes,
        dynamic_shared_bytes=kernel.dynamic_shared_bytes,
    )
    return _inspect_code(name, code, architecture)


def inspect_built(
    name: str,
    built: BuiltKernel,
    form: KernelForm,
    device: DeviceSpec,
    schedule: TileSchedule,
    architecture: str | None = None,
) -> Inspection:
    """A kernel that was just built for ``device``, in memory; its source is compiled again where need be.

    Raises:
        InputError: there is no disassembler, or the source does not compile for ``architecture``.
    """
    code = _Code(
        entry=built.entry,
        source=lambda: built.source,
        binary=built.binary,
        architecture=built.architecture or device.architecture,
        resources=Resources(built.registers, built.spill_bytes),
        shared_bytes=built.shared_bytes,
        dynamic_shared_bytes=built.dynamic_shared_bytes,
    )
    inspection = _inspect_code(name, code, architecture)
    return replace(inspection, model=model_view(form, device, schedule, inspection.hot), model_reason="")


@dataclass(frozen=True, eq=False, kw_only=True)
class _Code:
    """A kernel as it was built.

    Attributes:
        entry: its name.
        source: gives its CUDA C++, which only a new compilation needs.
        binary: its cubin; None where only source was made.
        architecture: what it was built for.
        resources: what the compiler said of it.
        shared_bytes: shared memory of a block, ``dynamic_shared_bytes`` of it given at launch.
    """

    entry: str
    source: Callable[[], str]
    binary: bytes | None
    architecture: str
    resources: Resources
    shared_bytes: int
    dynamic_shared_bytes: int


def _inspect_code(name: str, code: _Code, architecture: str | None) -> Inspection:
    """A kernel without the model's view: its cubin, or its source compiled for an ``architecture`` that can be read."""
    asked = architecture or code.architecture
    if readable_architecture(asked) == code.architecture and code.binary is not None:
        kernels: Iterable[Inspection] = _read(name, code.binary, code.resources.registers, code.shared_bytes)
        return replace(_entry(kernels, code.entry), spill_bytes=code.resources.spill_bytes)
    inspection = _entry(_compiled(code.source(), name, asked, code.dynamic_shared_bytes), code.entry)
    if inspection.in_place_of != code.architecture:
        return inspection
    # What the compiler said of the kernel for its own architecture, which cannot be read.
    return replace(inspection, as_built=code.resources)


def _entry(kernels: Iterable[Inspection], entry: str) -> Inspection:
    """The kernel of this name; the first where none has it."""
    inspections = list(kernels)
    return next((kernel for kernel in inspections if kernel.function.name == entry), inspections[0])


def _rank_of(path: Path) -> int | None:
    """The rank of a file that a manifest in its folder lists; None where there is none."""
    if not (path.parent / "manifest.json").is_file():
        return None
    for kernel in _manifest(path.parent).kernels:
        launches: list[KernelRecord | LaunchRecord] = [kernel, *kernel.launches]
        if any(path.name in (launch.source, launch.binary) for launch in launches):
            return kernel.rank
    return None


def _manifest(directory: Path) -> Manifest:
    try:
        return read_manifest(directory)
    except FileNotFoundError:
        remedy = "give the folder of one operator, such as out/matmul, a .cu or a .cubin"
        raise InputError(str(directory), "has no manifest.json", remedy) from None
    except msgspec.DecodeError as error:
        raise InputError(str(directory / "manifest.json"), f"is no manifest: {error}", "compile it again") from None


def _compiled(source: str, name: str, asked: str, dynamic_shared_bytes: int = 0) -> list[Inspection]:
    """Compile a source for the architecture ``asked``, or the next one that can be read, and read it."""
    architecture = readable_architecture(asked)
    try:
        built = compile_cuda(source, architecture, name=name)
    except CompileError as error:
        raise InputError(name, f"does not compile for {architecture}: {error.reason}", "try another --arch") from None
    in_place_of = None if architecture == asked else asked
    kernels = _read(name, built.cubin, built.registers, built.shared_bytes + dynamic_shared_bytes)
    return [
        replace(kernel, architecture=architecture, in_place_of=in_place_of, spill_bytes=built.spill_bytes)
        for kernel in kernels
    ]


def _read(
    name: str, cubin: bytes, registers: int | None = None, shared_bytes: int | None = None
) -> Iterator[Inspection]:
    """The kernels of a cubin; what the compiler reported counts where it holds one."""
    image = disassemble(cubin, name)
    single = len(image.functions) == 1
    for function in image.functions:
        yield Inspection(
            name=name if single else f"{name} {function.name}",
            architecture=image.architecture,
            in_place_of=None,
            function=function,
            hot=hottest_loop(function),
            registers=registers if registers is not None and single else function.registers,
            shared_bytes=shared_bytes if shared_bytes is not None and single else function.shared_bytes,
            spill_bytes=None,
            model=None,
            model_reason="the schedule is known for kernels of a bundle alone",
        )


# What the model assumed of a bundle's kernel


def _view(record: Manifest, schedule_file: Path, hot: HotLoop) -> tuple[ModelView | None, str]:
    """The model's view of a bundle's kernel, or why there is none."""
    from hal.catalog import load_device
    from roller.programs import form_on
    from sokoban.schedule.files import schedule_from_json

    try:
        device = load_device(record.device)
        form = form_on(operator_of(record), device)
        if form.is_composed:
            return None, "the model of what several products make counts steps of a block, not instructions of a loop"
        schedule = schedule_from_json(msgspec.json.decode(schedule_file.read_bytes()), form)
        return model_view(form, device, schedule, hot), ""
    except InputError as error:
        return None, f"the schedule cannot be read back: {error}"
