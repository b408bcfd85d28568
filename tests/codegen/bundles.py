"""Bundles made by hand: quick to write, with kernels that tests choose and the reference that the compiler writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from codegen.bundle.manifest import to_json
from codegen.bundle.records import FORMAT, MANIFEST, Argument, KernelRecord, LaunchRecord, Manifest
from codegen.bundle.reference import reference_kernel
from sokoban.language.operators import operator_from_data

#: ``Y[m, k] = 2 * X[m, k] + B[k]``.
DATA = {"expr": "Y[m,k] = 2 * X[m,k] + B[k]", "sizes": {"m": 5, "k": 8}, "name": "twice"}
ELEMENTS = 40

RIGHT = "if (i < 40) Y[i] = 2.0f * X[i] + B[i % 8];"
WRONG = "if (i < 40) Y[i] = 2.0f * X[i];"
PARTIAL = "if (i < 39) Y[i] = 2.0f * X[i] + B[i % 8];"
BEYOND = "if (i < 41) Y[i] = 2.0f * X[i % 40] + B[i % 8];"
SPOILS_INPUT = "if (i < 40) Y[i] = 2.0f * X[i] + B[i % 8]; if (i == 0) ((float*)B)[8] = 1.0f;"
ADDS = "if (i < 40) Y[i] += 2.0f * X[i] + B[i % 8];"


def kernel_source(body: str, dtype: str = "float") -> str:
    """A kernel whose thread ``i`` runs ``body``."""
    parameters = f"const {dtype}* __restrict__ X, const {dtype}* __restrict__ B, {dtype}* __restrict__ Y"
    head = f'extern "C" __global__ void __launch_bounds__(64) twice_kernel({parameters})'
    return f"{head} {{\n  int i = threadIdx.x;\n  {body}\n}}\n"


def kernel_record(rank: int, **changes: Any) -> KernelRecord:
    record = KernelRecord(
        rank=rank, entry="twice_kernel", source=f"kernel_{rank}.cu", binary=f"kernel_{rank}.cubin",
        schedule=f"kernel_{rank}.schedule.json", grid=(1, 1, 1), block=(64, 1, 1), shared_bytes=0,
        dynamic_shared_bytes=0, registers=8, spill_bytes=0, seconds=rank * 1e-6, bound="dram", stage_seconds={},
        tiles={}, policy="made up", verified=None, verification=None,
    )  # fmt: skip
    return replace(record, **changes)


def write_bundle(
    parent: Path,
    bodies: Sequence[str] = (RIGHT,),
    *,
    name: str = "twice",
    dtype: str = "float32",
    kernel: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A folder ``parent/name`` with a kernel per body, as ``roller compile`` would leave it.

    ``kernel`` changes fields of all kernels, ``changes`` of the manifest.
    """
    expr = operator_from_data({**DATA, "dtype": dtype})
    reference = reference_kernel(expr, "twice")
    arguments = tuple(
        Argument(name=tensor, role="output" if tensor == "Y" else "input", dtype=dtype, shape=shape)
        for tensor, shape in (("X", (5, 8)), ("B", (8,)), ("Y", (5, 8)))
    )
    manifest = Manifest(
        format=FORMAT, name=name, device="v100-sxm2-16gb", architecture="sm_70", statements=(), axes={"m": 5, "k": 8},
        fused_axes={}, accumulate="float32", arguments=arguments, notes=(),
        kernels=tuple(kernel_record(rank, **(kernel or {})) for rank in range(1, len(bodies) + 1)),
        reference=reference.record,
    )  # fmt: skip
    folder = parent / name
    folder.mkdir(parents=True)
    c_type = {"float32": "float", "bfloat16": "unsigned short"}[dtype]
    for rank, body in enumerate(bodies, start=1):
        (folder / f"kernel_{rank}.cu").write_text(f"// kernel {rank}\n{kernel_source(body, c_type)}")
        (folder / f"kernel_{rank}.cubin").write_bytes(b"\x7fELF")
    (folder / "reference.cu").write_text(reference.source)
    (folder / MANIFEST).write_bytes(to_json(replace(manifest, **changes)))
    return folder


DOUBLES = "if (i < 40) T[i] = 2.0f * X[i];"
ADDS_B = "if (i < 40) Y[i] = T[i] + B[i % 8];"


def write_chain(
    parent: Path, bodies: tuple[str, str] = (DOUBLES, ADDS_B), *, name: str = "twice", **kernel: Any
) -> Path:
    """The same operator as two launches over a workspace ``T``, whose threads ``i`` run ``bodies``; ``kernel`` changes
    fields of the record."""
    parts = (("doubles_kernel", ("X", "T")), ("adds_kernel", ("T", "B", "Y")))
    launches = tuple(
        LaunchRecord(
            label=entry, entry=entry, source=f"kernel_1_part_{number}.cu", binary=f"kernel_1_part_{number}.cubin",
            schedule=f"kernel_1_part_{number}.schedule.json", grid=(1, 1, 1), block=(64, 1, 1), shared_bytes=0,
            dynamic_shared_bytes=0, registers=8, spill_bytes=0, seconds=1e-6, bound="dram", tensors=tensors,
        )
        for number, (entry, tensors) in enumerate(parts, start=1)
    )  # fmt: skip
    changes: dict[str, Any] = {
        "source": "kernel_1_part_1.cu",
        "binary": "kernel_1_part_1.cubin",
        "entry": "doubles_kernel",
    }
    changes |= {"launches": launches, "workspace": {"T": 160}, **kernel}
    folder = write_bundle(parent, name=name, kernel=changes)
    for number, ((entry, tensors), body) in enumerate(zip(parts, bodies, strict=True), start=1):
        parameters = ", ".join(f"float* {tensor}" for tensor in tensors)
        head = f'extern "C" __global__ void __launch_bounds__(64) {entry}({parameters})'
        source = f"{head} {{\n  int i = threadIdx.x;\n  {body}\n}}\n"
        (folder / f"kernel_1_part_{number}.cu").write_text(source)
        (folder / f"kernel_1_part_{number}.cubin").write_bytes(b"\x7fELF")
    (folder / "kernel_1.cu").unlink()
    (folder / "kernel_1.cubin").unlink()
    return folder
