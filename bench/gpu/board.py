"""The board's state while it is measured: clocks, power and temperature by nvidia-smi, versions of the software."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

QUERY = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu")
#: What a sample holds: seconds since the epoch, then MHz, MHz, watts, degrees Celsius, per cent.
COLUMNS = ("time", "sm_mhz", "memory_mhz", "watts", "celsius", "utilization")
EVERY_MS = 500

COMMAND = (
    "nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}",
)  # fmt: skip
PACKAGES = ("numpy", "torch", "triton", "cupy", "transformers", "msgspec")


class Sampler:
    """Reads lines of nvidia-smi in the background. Without it there are no samples."""

    def __init__(self, command: Sequence[str] = COMMAND, index: int = 0) -> None:
        self._command = [*command, f"--id={index}"] if command[0] == "nvidia-smi" else list(command)
        self._samples: list[list[float | None]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Sampler:
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )  # fmt: skip
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            fields = [_number(text) for text in line.split(",")]
            if len(fields) == len(QUERY):
                self._samples.append([round(time.time(), 3), *fields])

    def take(self) -> list[list[float | None]]:
        """The samples since the last call."""
        taken, self._samples = self._samples, []
        return taken

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def environment(properties: dict[str, Any]) -> dict[str, Any]:
    """Versions, driver and the board's properties."""
    torch = importlib.import_module("torch")
    return {
        "date": datetime.date.today().isoformat(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "driver": _driver(),
        "properties": properties,
    }


def _version(name: str) -> str | None:
    """CuPy's distributions are named after the CUDA that they are built for."""
    for distribution in (name, *(f"{name}-cuda{major}x" for major in (11, 12, 13) if name == "cupy")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def _driver() -> dict[str, str]:
    """Driver, power limit and highest clocks, as nvidia-smi prints them."""
    keys = ("name", "driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem")
    command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.splitlines()
    return dict(zip(keys, (text.strip() for text in lines[0].split(",")), strict=False)) if lines else {}
