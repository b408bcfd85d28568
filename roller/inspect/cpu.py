"""``roller inspect`` of kernels for processors: their assembly lies in the bundle, so nothing is disassembled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from codegen.bundle.reader import read_bundle
from codegen.bundle.records import SHARED_OBJECT_SUFFIX
from hal.support.errors import InputError
from roller.inspect.assembly import LoopMix, hottest_loop

#: Architectures, by how their names begin, whose assembly is not read.
_OTHER_ASSEMBLY = ("neoverse", "apple", "cortex", "aarch64", "generic-rv")


@dataclass(frozen=True)
class LibraryInspection:
    """A kernel of a bundle: its name and file, and its hottest loop, None where it has no loop."""

    name: str
    architecture: str
    source: str
    scratch_bytes: int
    hot: LoopMix | None


def inspect_library(directory: Path, rank: int | None) -> LibraryInspection:
    """The kernel of a rank, 1 by default.

    Raises:
        InputError: there is none, or its assembly is not of x86-64.
    """
    bundle, wanted = read_bundle(directory), rank or 1
    kernel = next((kernel for kernel in bundle.kernels if kernel.rank == wanted), None)
    if kernel is None:
        raise InputError("--rank", f"{bundle.name} has {len(bundle.kernels)} kernels", "ask for one of those")
    if bundle.architecture.startswith(_OTHER_ASSEMBLY):
        problem = f"is for {bundle.architecture}, and only assembly of x86-64 is read"
        raise InputError(str(directory), problem, f"read {directory / kernel.source} yourself")
    hot = hottest_loop((directory / kernel.source).read_text("utf-8"), f"{kernel.entry}_blocks")
    name = f"{bundle.name} rank {wanted}"
    return LibraryInspection(name, bundle.architecture, kernel.source, kernel.dynamic_shared_bytes, hot)


def is_library_bundle(path: Path) -> bool:
    """Whether a path is a bundle of kernels for processors, by the files that it holds."""
    return path.is_dir() and any(path.glob(f"kernel_*{SHARED_OBJECT_SUFFIX}"))


def library_text(found: LibraryInspection) -> str:
    """The page."""
    head = f"{found.name}: assembly for {found.architecture} in {found.source}, {found.scratch_bytes} bytes of scratch "
    head += "memory a thread"
    hot = found.hot
    if hot is None:
        return f"{head}\nno loop"
    width = f"vectors of {hot.vector_bits} bits at most" if hot.vector_bits else "no vectors"
    spills = (
        f"{hot.spills} of them the stack: values that found no register" if hot.spills else "none of them the stack"
    )
    return (
        f"{head}\nhottest loop: {hot.instructions} instructions, {hot.multiply_adds} of them multiply-adds "
        f"({hot.multiply_add_share:.0%}), {hot.arithmetic - hot.multiply_adds} other arithmetic; {width}\n"
        f"{hot.memory} instructions touch memory, {spills}"
    )


def library_json(found: LibraryInspection) -> str:
    """One line of JSON."""
    data = asdict(found)
    if found.hot is not None:
        data["hot"]["multiply_add_share"] = round(found.hot.multiply_add_share, 4)
    return msgspec.json.encode(data).decode()
