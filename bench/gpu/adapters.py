"""The calls into hal.microbench and roller.profile.profile, each in one function, so that a change there has one place
here.

What hal needs for device files is msgspec, which a GPU machine may lack: prepare.py carries it beside the bundles
(`carried`).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def carried(bundles: Path | None) -> None:
    """Let packages that prepare.py carried for this Python be found, after those that are installed."""
    if bundles is not None:
        site = bundles / "site" / f"cp{sys.version_info[0]}{sys.version_info[1]}"
        if site.is_dir() and str(site) not in sys.path:
            sys.path.append(str(site))


def microbench(device: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """What ``roller microbench`` measures, in less time than it takes by itself.

    Returns:
        ``measurements`` by key, ``failures`` by quantity, and ``device``, the device file that they make, or null with
        the reason under ``device_error``.

    Raises:
        ImportError: what the micro-benchmarks need is missing.
    """
    from hal.microbench import Settings, measure_gpu, spec_from, toml_text
    from hal.microbench.cupy_launcher import CupyLauncher

    launcher = CupyLauncher(device)
    settings = Settings(repeats=7, target_seconds=2e-3, long_seconds=3.0)
    run = measure_gpu(launcher, settings=settings, progress=progress)
    figures: dict[str, Any] = {
        "measurements": {key: _without_samples(found.record()) for key, found in run.found.items()},
        "failures": run.failures,
        "device": None,
    }
    try:
        figures["device"] = toml_text(spec_from(launcher.board, run.found))
    except ValueError as error:  # a number that every device file has could not be measured
        figures["device_error"] = str(error)
    return figures


def _without_samples(record: dict[str, Any]) -> dict[str, Any]:
    """Medians and spread are enough here; infinities, which JSON lacks, become null."""
    kept = {key: value for key, value in record.items() if key != "samples"}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in kept.items()
    }


def profiled(bundle: Path, device: int) -> list[dict[str, Any]]:
    """The kernels of a bundle measured by ``roller profile``'s own code, fastest first.

    Inputs rotate there instead of L2 being flushed, and every kernel has a process to break; this takes seconds for
    a bundle. Nothing is written into the bundle.
    """
    from roller.profile.gpu import MeasureOptions
    from roller.profile.gpu_worker import GpuRunner
    from roller.profile.profile import ProfileOptions, profile_bundle

    options = ProfileOptions(measure=MeasureOptions(repeats=10, warmup_seconds=0.2, limit_seconds=0.5))
    runner = GpuRunner(device, options.measure)
    try:
        found = profile_bundle(bundle, runner, runner.board(), options)
    finally:
        runner.close()
    return [_kernel_record(kernel) for kernel in found.kernels]


def _kernel_record(kernel: Any) -> dict[str, Any]:
    """A ``roller.profile.profile.KernelProfile`` as an item of the section ``profile``."""
    entry, m = kernel.entry, kernel.measurement
    record: dict[str, Any] = {
        "entry": entry.entry,
        "rank": entry.predicted_rank,
        "predicted_seconds": entry.seconds,
        "check": {
            "relative_error": m.relative_error, "tolerance": m.tolerance, "passed": not m.struck_out, "share": 1.0,
        },
        "reason": m.struck_out,
    }  # fmt: skip
    if m.seconds is not None:
        half = (m.spread_seconds or 0.0) / 2
        record["cold"] = {
            "median": m.seconds, "low": m.seconds - half, "high": m.seconds + half, "count": m.repeats,
        }  # fmt: skip
    return record


def kind_of(bundle: Path, kernel: dict[str, Any]) -> str:
    """What a kernel of a bundle multiplies by and how its operands come: ``wgmma_64xNx16, clusters of 2``; of a chain
    the algorithm."""
    policy = str(kernel.get("policy", ""))
    if kernel.get("launches"):
        return policy.partition(",")[0]
    schedule: dict[str, Any] = {}
    if (path := bundle / str(kernel.get("schedule", ""))).is_file():
        schedule = json.loads(path.read_bytes())
    words = [str(schedule.get("instruction", "fma"))]
    words += ["attention"] if "keys" in schedule else []
    cluster = schedule.get("cluster", 0)
    words += [f"clusters of {cluster}" if cluster > 1 else "bulk copies"] if cluster else []
    return ", ".join(words)


def manifest_of(bundle: Path) -> dict[str, Any]:
    """The manifest of a bundle, without the types that msgspec would give it."""
    manifest: dict[str, Any] = json.loads((bundle / "manifest.json").read_bytes())
    return manifest
