"""The calls into hal.microbench and what bundles say, each in one function, so that a change there has one place here.

What hal needs for device files is msgspec, which a GPU machine may lack: prepare.py carries it along with the bundles
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
    """Measurements of ``roller microbench``, in less time than it takes by itself.

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
        "measurements": {key: _without_samples(measurement.record()) for key, measurement in run.measurements.items()},
        "failures": run.failures,
        "device": None,
    }
    try:
        figures["device"] = toml_text(spec_from(launcher.board, run.measurements))
    except ValueError as error:  # a number that every device file has could not be measured
        figures["device_error"] = str(error)
    return figures


def _without_samples(record: dict[str, Any]) -> dict[str, Any]:
    """Medians and spread are enough here; infinities, which JSON lacks, become null."""
    fields = {key: value for key, value in record.items() if key != "samples"}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in fields.items()
    }


def manifest_of(bundle: Path) -> dict[str, Any]:
    """The manifest of a bundle, without the types that msgspec would give it."""
    manifest: dict[str, Any] = json.loads((bundle / "manifest.json").read_bytes())
    return manifest
