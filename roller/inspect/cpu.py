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
class CpuInspection:
    """Figures read from the assembly of a bundle's kernel.

    Attributes:
        name: operator and rank.
        architecture: the processor that it was compiled for.
        source: file of the assembly in the manifest's folder.
        scratch_bytes: scratch memory of a thread.
        hot: its hottest loop; None where it has no loop.
    """

    name: str
    architecture: str
    source: str
    scratch_bytes: int
    hot: LoopMix | None


def inspect_cpu(directory: Path, rank: int | None) -> CpuInspection:
    """The kernel of a rank, 1 by default.

    Raises:
        InputError: there is none, or its assembly is not of x86-64.
    """
    bundle, rank = read_bundle(directory), rank or 1
    kernel = next((kernel for kernel in bundle.kernels if kernel.rank == rank), None)
    if kernel is None:
        raise InputError("--rank", f"{bundle.name} has {len(bundle.kernels)} kernels", "ask for one of those")
    if bundle.architecture.startswith(_OTHER_ASSEMBLY):
        problem = f"is for {bundle.architecture}, and only assembly of x86-64 is read"
        raise InputError(str(directory), problem, f"read {directory / kernel.source} yourself")
    hot = hottest_loop((directory / kernel.source).read_text("utf-8"), f"{kernel.entry}_blocks")
    name = f"{bundle.name} rank {rank}"
    return CpuInspection(name, bundle.architecture, kernel.source, kernel.dynamic_shared_bytes, hot)


def is_cpu_bundle(path: Path) -> bool:
    """True if a path is a bundle of kernels for processors, by the files that it holds."""
    return path.is_dir() and any(path.glob(f"kernel_*{SHARED_OBJECT_SUFFIX}"))


def cpu_text(inspection: CpuInspection) -> str:
    """Text that ``roller inspect`` prints of a CPU kernel."""
    head = f"{inspection.name}: assembly for {inspection.architecture} in {inspection.source}, "
    head += f"{inspection.scratch_bytes} bytes of scratch memory a thread"
    hot = inspection.hot
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


def cpu_json(inspection: CpuInspection) -> str:
    """Line that ``roller inspect --json`` prints of a CPU kernel."""
    data = asdict(inspection)
    if inspection.hot is not None:
        data["hot"]["multiply_add_share"] = round(inspection.hot.multiply_add_share, 4)
    return msgspec.json.encode(data).decode()
