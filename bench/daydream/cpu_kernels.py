"""Kernels for the operators of a trace: the best that Roller makes, and deliberately slow ones of the same operators.

Slow is the best kernel with registers for one vector of results: every multiply-add waits for the one before it, and
nothing that was loaded is used twice. ``python -m bench.daydream.cpu_kernels FAST SLOW`` writes such bundles, in a
process of its own because compilers and PyTorch need not share one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from codegen import staged_directory
from codegen.bundle.manifest import read_manifest, to_json
from codegen.bundle.records import KernelRecord
from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.schedule.tile import TileSchedule, sizes

ROLLER = (sys.executable, "-m", "roller.cli")
MANIFEST = "manifest.json"


def compiled(operators: Path, out: Path, candidates: int) -> Path:
    """Bundles of the operators in a file, so many kernels each, ranked by measurement."""
    _run(*ROLLER, "compile", str(operators), "--device", "cpu", "--out", str(out), "--top-k", str(candidates))
    return profiled(out)


def slowed(fast: Path, slow: Path) -> Path:
    """Slow kernels of the matrix products and convolutions in a folder of bundles, the others as they are."""
    _run(sys.executable, "-m", "bench.daydream.cpu_kernels", str(fast), str(slow))
    return profiled(slow)


def profiled(folder: Path) -> Path:
    """The folder of bundles with its kernels timed on this machine's cores."""
    _run(*ROLLER, "profile", str(folder))
    return folder


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise InputError(" ".join(command[1:5]), last[0], "run it by itself to see more")


def write_slow(fast: Path, slow: Path) -> None:
    """A copy of every bundle in a folder; those of matrix products and convolutions with one slow kernel instead."""
    from codegen.bundle.operators import operator_of

    slow.mkdir(parents=True, exist_ok=True)
    for folder in sorted(path.parent for path in fast.glob(f"*/{MANIFEST}")):
        form = kernel_form(operator_of(read_manifest(folder)))
        target = slow / folder.name
        if form.is_tile and form.reduction is not None:
            _write_slow_bundle(folder, form, target)
        else:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target)


def _write_slow_bundle(folder: Path, form: KernelForm, target: Path) -> None:
    from codegen.cpu.lower import lower
    from codegen.cpu.shared_object import build_shared_object
    from codegen.target import Target
    from codegen.tir.lowering import LoweringRequest
    from hal.catalog import load_device
    from hal.microbench.cpu.topology import read_topology
    from sokoban.model.rational import estimate_schedules

    manifest, lanes = read_manifest(folder), read_topology().simd_bits // 32
    best = manifest.kernels[0]
    schedule = slow_schedule(form, _schedule(folder / best.schedule), lanes)
    processor = Target("llvm", manifest.architecture, lanes)
    lowered = lower(LoweringRequest(form, schedule, f"{best.entry}_slow", processor))
    library = build_shared_object(lowered, manifest.architecture, len(form.expr.inputs) + 1)
    predicted = estimate_schedules(form, load_device("cpu"), [schedule])
    record = KernelRecord(
        rank=1, entry=library.entry, source="slow.s", binary="slow.so", schedule="slow.schedule.json",
        grid=(library.blocks, 1, 1), block=(1, 1, 1), shared_bytes=library.scratch_bytes,
        dynamic_shared_bytes=library.scratch_bytes, registers=None, spill_bytes=None,
        seconds=float(predicted.seconds[0]), bound="", stage_seconds={}, tiles={"registers": dict(schedule.thread)},
        policy="one vector of results", verified=None, verification=None,
    )  # fmt: skip
    with staged_directory(target) as staged:
        (staged / "slow.so").write_bytes(library.data)
        (staged / "slow.s").write_text(library.assembly, "utf-8")
        (staged / "slow.schedule.json").write_bytes(to_json(schedule.to_json()))
        (staged / MANIFEST).write_bytes(to_json(replace(manifest, kernels=(record,))))


def slow_schedule(form: KernelForm, schedule: TileSchedule, lanes: int) -> TileSchedule:
    """The schedule with a register tile of one vector along the axis that its registers hold vectors of."""
    from sokoban.schedule.cpu_tiles import vector_axis

    along = vector_axis(form.final.axes, schedule.register_tile, lanes)
    thread = {axis: min(lanes, tile) if axis == along else 1 for axis, tile in schedule.register_tile.items()}
    return TileSchedule(block=schedule.block, thread=sizes(thread), step=schedule.step, cached=schedule.cached)


def _schedule(path: Path) -> TileSchedule:
    data = json.loads(path.read_bytes())
    thread = {axis: size * data["vthreads"].get(axis, 1) for axis, size in data["thread"].items()}
    return TileSchedule(
        block=sizes(data["block"]), thread=sizes(thread), step=sizes(data["step"]), cached=tuple(data["cached"])
    )


if __name__ == "__main__":
    write_slow(Path(sys.argv[1]), Path(sys.argv[2]))
