"""``roller inspect``: what a kernel's machine code consists of, without a GPU.

A kernel is a rank of a bundle, a CUDA source or a cubin. Of a bundle's kernel the schedule is known, so that what
RATIONAL assumed stands beside what the disassembly shows. Neither TVM nor a device is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from codegen.build import BuiltKernel
from codegen.bundle import Manifest, read_manifest
from codegen.device_compiler import CompileError, compile_cuda
from codegen.disassembly import HotLoop, disassemble, hottest_loop, readable_architecture
from codegen.sass import INSTRUCTION_BYTES, SassFunction
from codegen.sass_mix import CLASSES, Mix, mix_of
from hal import DeviceSpec, InputError
from roller.inspect_model import ModelView, density_record, model_view
from roller.text import count_text
from sokoban import KernelForm, TensorExpr, TileSchedule

#: Width of a bar that stands for all instructions.
BAR = 40


@dataclass(frozen=True, eq=False)
class Inspection:
    """One kernel.

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
        own: registers and spill bytes of the kernel as it is, where this is its source compiled again ``in_place_of``
            that.
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
    own: tuple[int | None, int | None] | None = None

    @property
    def mix(self) -> Mix:
        """Of the whole kernel."""
        return mix_of(self.function.reachable)

    @property
    def local_accesses(self) -> int:
        """Loads and stores of local memory: spills, and arrays that found no registers."""
        return self.mix.count("local memory")


# Finding the kernel


def inspect_path(path: Path, rank: int | None = None, architecture: str | None = None) -> list[Inspection]:
    """The kernels of a file (a cubin or a source may hold several) or one of a bundle.

    Raises:
        InputError: there is none, it does not compile, or there is no disassembler.
    """
    if path.is_dir():
        return [inspect_bundle(path, rank or 1, architecture)]
    if not path.is_file():
        raise InputError(str(path), "no such file", "give a bundle's folder, a .cu or a .cubin")
    beside = _rank_of(path)
    if beside is not None:
        return [inspect_bundle(path.parent, beside, architecture)]
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


def inspect_bundle(directory: Path, rank: int = 1, architecture: str | None = None) -> Inspection:
    """One kernel of a bundle; its source is compiled again where ``architecture`` or the disassembler ask for it.

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
    name, wanted = f"{record.name} rank {rank}", architecture or record.architecture
    if readable_architecture(wanted) == record.architecture and kernel.binary is not None:
        kernels = _read(name, (directory / kernel.binary).read_bytes(), kernel.registers, kernel.shared_bytes)
        found = replace(_entry(kernels, kernel.entry), spill_bytes=kernel.spill_bytes)
    else:
        source = (directory / kernel.source).read_text("utf-8")
        found = _entry(_compiled(source, name, wanted, kernel.dynamic_shared_bytes), kernel.entry)
        found = _with_own(found, record.architecture, kernel.registers, kernel.spill_bytes)
    view, reason = _view(record, directory / kernel.schedule, found.hot)
    return replace(found, model=view, model_reason=reason)


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
    wanted = architecture or device.architecture
    if readable_architecture(wanted) == device.architecture and built.binary is not None:
        kernels: Iterable[Inspection] = _read(name, built.binary, built.registers, built.shared_bytes)
        found = replace(_entry(kernels, built.entry), spill_bytes=built.spill_bytes)
    else:
        found = _entry(_compiled(built.source, name, wanted, built.dynamic_shared_bytes), built.entry)
        found = _with_own(found, device.architecture, built.registers, built.spill_bytes)
    return replace(found, model=model_view(form, device, schedule, found.hot), model_reason="")


def _with_own(found: Inspection, architecture: str, registers: int | None, spill_bytes: int | None) -> Inspection:
    """What the compiler said of the kernel for its own ``architecture``, which cannot be read."""
    return replace(found, own=(registers, spill_bytes)) if found.in_place_of == architecture else found


def _entry(kernels: Iterable[Inspection], entry: str) -> Inspection:
    """The kernel of this name; the first where none has it."""
    found = list(kernels)
    return next((kernel for kernel in found if kernel.function.name == entry), found[0])


def _rank_of(path: Path) -> int | None:
    """The rank of a file that a manifest beside it lists; None where there is none."""
    if not (path.parent / "manifest.json").is_file():
        return None
    kernels = _manifest(path.parent).kernels
    return next((kernel.rank for kernel in kernels if path.name in (kernel.source, kernel.binary)), None)


def _manifest(directory: Path) -> Manifest:
    try:
        return read_manifest(directory)
    except FileNotFoundError:
        remedy = "give the folder of one operator, such as out/matmul, a .cu or a .cubin"
        raise InputError(str(directory), "has no manifest.json", remedy) from None
    except msgspec.DecodeError as error:
        raise InputError(str(directory / "manifest.json"), f"is no manifest: {error}", "compile it again") from None


def _compiled(source: str, name: str, wanted: str, dynamic_shared: int = 0) -> list[Inspection]:
    """Compile a source for the architecture ``wanted``, or the next one that can be read, and read it."""
    architecture = readable_architecture(wanted)
    try:
        built = compile_cuda(source, architecture, name=name)
    except CompileError as error:
        raise InputError(name, f"does not compile for {architecture}: {error.reason}", "try another --arch") from None
    in_place_of = None if architecture == wanted else wanted
    kernels = _read(name, built.cubin, built.registers, built.shared_bytes + dynamic_shared)
    return [
        replace(found, architecture=architecture, in_place_of=in_place_of, spill_bytes=built.spill_bytes)
        for found in kernels
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
    from hal import load_device
    from sokoban import kernel_form
    from sokoban.schedule_json import schedule_from_json

    try:
        device = load_device(record.device)
        form = kernel_form(operator_of(record))
        schedule = schedule_from_json(msgspec.json.decode(schedule_file.read_bytes()), form)
        return model_view(form, device, schedule, hot), ""
    except InputError as error:
        return None, f"the schedule cannot be read back: {error}"


def operator_of(record: Manifest) -> TensorExpr:
    """The operator of a manifest.

    Raises:
        InputError: its statements are not those of this version of the language.
    """
    from sokoban.operators import operator_from_data

    data: dict[str, Any] = {
        "expr": "; ".join(record.statements),
        "sizes": record.axes,
        "dtypes": {argument.name: argument.dtype for argument in record.arguments},
        "shapes": _read_shapes(record),
        "name": record.name,
        "accumulate": record.accumulate,
    }
    return operator_from_data(data)


def _read_shapes(record: Manifest) -> dict[str, list[int]]:
    """The inputs' shapes as the statements read them: a caller's may have dimensions of one besides, such as the
    filters (c, 1, kh, kw) of a depthwise convolution."""
    shapes = {}
    for argument in record.arguments:
        read = re.search(rf"\b{re.escape(argument.name)}\[([^|\]]*)", " ".join(record.statements))
        if argument.role == "input" and read is not None:
            rank = len(read.group(1).split(","))
            whole = len(argument.shape) == rank
            shapes[argument.name] = [size for size in argument.shape if whole or size != 1]
    return {name: shape for name, shape in shapes.items() if shape}


# Showing it


def json_line(found: Inspection) -> str:
    """What ``roller inspect --json`` prints."""
    return msgspec.json.encode(record_of(found)).decode()


def record_of(found: Inspection) -> dict[str, Any]:
    """A kernel as JSON data."""
    hot, model = found.hot, found.model
    return {
        "name": found.name,
        "entry": found.function.name,
        "architecture": found.architecture,
        "in_place_of": found.in_place_of,
        "registers": found.registers,
        "shared_bytes": found.shared_bytes,
        "spill_bytes": found.spill_bytes,
        "local_accesses": found.local_accesses,
        "own_registers": found.own[0] if found.own else found.registers,
        "own_spill_bytes": found.own[1] if found.own else found.spill_bytes,
        "instructions": found.mix.total,
        "loops": [_loop_record(found.function, position) for position in range(len(found.function.loops))],
        "hot_loop": {
            "address": hot.address,
            "depth": hot.depth,
            "instructions": hot.mix.total,
            "bytes": hot.code_bytes,
            "multiply_add_share": round(hot.mix.share("multiply-adds"), 4),
            "classes": dict(hot.mix.counts),
            "kinds": {name: dict(kinds) for name, kinds in hot.mix.kinds.items()},
        },
        "density": {
            "assumed": density_record(model.assumed) if model else None,
            "found": density_record(model.found) if model else None,
            "reason": model.reason if model else found.model_reason,
        },
        "banks": [
            {"tensor": use.tensor, "bytes": use.bytes, "passes": round(use.passes, 3), "least": use.least}
            for use in (model.banks if model else ())
        ],
    }


def _loop_record(function: SassFunction, position: int) -> dict[str, Any]:
    loop = function.loops[position]
    code = function.body(loop)
    address = function.instructions[function.blocks[loop.header].first].address
    return {
        "address": address,
        "depth": loop.depth,
        "instructions": len(code),
        "bytes": INSTRUCTION_BYTES * len(code),
        "multiply_adds": mix_of(code).count("multiply-adds"),
    }


def inspection_text(found: Inspection, *, listing: bool = False) -> str:
    """A kernel told on a page; with ``listing`` the code of its hottest loop behind it."""
    parts = ["\n".join(_head(found)), "\n".join(_loop_lines(found)), "\n".join(_mix_lines(found.hot))]
    parts += ["\n".join(_density_lines(found)), "\n".join(_bank_lines(found))]
    if listing:
        parts.append("\n".join(_listing(found.hot)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(found: Inspection) -> Iterator[str]:
    yield f"{found.name}: {found.function.name} for {found.architecture}"
    if found.in_place_of:
        yield f"  compiled from its source for {found.architecture}: nvdisasm does not read {found.in_place_of}"
        if found.own is not None:
            registers, spilled = found.own
            yield f"  for {found.in_place_of} it has {registers} registers and {spilled or 'no'} bytes of spills"
    total = found.mix.total
    yield f"  {total} instructions, {total * INSTRUCTION_BYTES / 1000:.1f} kB of code"
    spills = "no spills"
    if found.spill_bytes:
        spills = f"{found.spill_bytes} bytes spilled per thread"
    elif found.local_accesses:
        spills = f"{count_text(found.local_accesses, 'instruction')} on local memory"
    yield f"  {found.registers} registers per thread, {found.shared_bytes} bytes of shared memory per block, {spills}"


def _loop_lines(found: Inspection) -> Iterator[str]:
    function = found.function
    if not function.loops:
        yield "No loop: what follows is the whole kernel"
        return
    yield "Loops; how often they turn is not in the code"
    yield f"  {'at':>7} {'depth':>5} {'instructions':>12} {'bytes':>7} {'multiply-adds':>13}"
    for position, loop in enumerate(function.loops):
        row = _loop_record(function, position)
        mark = "  the hottest" if loop is found.hot.loop else ""
        yield (
            f"  {row['address']:>#7x} {row['depth']:>5} {row['instructions']:>12} {row['bytes']:>7} "
            f"{row['multiply_adds']:>13}{mark}"
        )


def _mix_lines(hot: HotLoop) -> Iterator[str]:
    yield "The hottest loop" if hot.loop else "The kernel"
    for name in CLASSES:
        count = hot.mix.count(name)
        if count:
            share = hot.mix.share(name)
            kinds = ", ".join(f"{kind} {number}" for kind, number in hot.mix.kinds[name].items())
            bar = "█" * round(BAR * share) or "▏"
            yield f"  {name:13} {count:5} {100 * share:5.1f}%  {bar}  {kinds}"


def _density_lines(found: Inspection) -> Iterator[str]:
    model = found.model
    if model is None or model.assumed is None or model.found is None:
        yield f"No density to compare: {model.reason if model else found.model_reason}"
        return
    rows = (
        ("shared loads", model.assumed.shared_loads, model.found.shared_loads),
        ("fetch, addresses, loops", model.assumed.others, model.found.others),
        ("in all", model.assumed.total, model.found.total),
    )
    yield "Instructions of a step per arithmetic instruction"
    yield f"  {'':24} {'RATIONAL assumed':>16} {'found':>6}"
    for name, assumed, counted in rows:
        yield f"  {name:24} {assumed:16.3f} {counted:6.3f}"


def _bank_lines(found: Inspection) -> Iterator[str]:
    if found.model is None or not found.model.banks:
        return
    yield "Shared-memory banks, counted from the addresses of a warp"
    for use in found.model.banks:
        verdict = "no conflicts" if not use.conflicts else f"{use.conflicts:.3g} too many"
        passes = f"{use.passes:.3g} {'pass' if use.passes == 1 else 'passes'} per read"
        kinds = found.hot.mix.kinds.get("shared loads", {})
        other = (
            "" if f"LDS.{8 * use.bytes}" in kinds or any("LDSM" in kind for kind in kinds) else "; not so in the code"
        )
        yield f"  {use.tensor}: {use.bytes} bytes a lane{other}, {passes}, {use.least} at least: {verdict}"


def _listing(hot: HotLoop) -> Iterator[str]:
    yield "The code of the hottest loop" if hot.loop else "The code"
    for instruction in hot.instructions:
        yield f"  /*{instruction.address:04x}*/  {instruction.text}"
