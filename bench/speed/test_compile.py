"""The whole command, cold: a fresh interpreter, fresh worker processes, nothing in the OpenCL compiler's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

#: The promise, for one matmul with ten cubins.
MATMUL_LIMIT_SECONDS = 3.0


@pytest.mark.parametrize("example", ("matmul", "conv2d"))
def test_compile_cold(benchmark: Any, example: str, limits: bool) -> None:
    """`roller compile` of one operator: ten cubins, the best kernel verified."""
    runs: list[dict[str, Any]] = []
    benchmark.pedantic(lambda: runs.append(compile_cold(EXAMPLES / f"{example}.json")), rounds=3)
    last = runs[-1]
    benchmark.extra_info.update(
        cubins=sum(kernel["binary"] is not None for kernel in last["kernels"]),
        spilling=sum(bool(kernel["spill_bytes"]) for kernel in last["kernels"]),
        verified=last["kernels"][0]["verified"],
        construct_ms=round(1e3 * last["construct_seconds"], 3),
        total_ms=round(1e3 * last["total_seconds"], 1),
    )
    assert len(last["kernels"]) == 10
    if limits and example == "matmul":
        assert benchmark.stats.stats.median <= MATMUL_LIMIT_SECONDS


def compile_cold(file: Path) -> dict[str, Any]:
    """Run the command in a process of its own; the object that ``--json`` prints."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "roller.cli", "compile", str(file), "--device", "v100", "--no-cache", "--json"]
        done = subprocess.run(
            [*command, "--out", str(Path(directory) / "out")],
            env={**os.environ, "POCL_CACHE_DIR": str(Path(directory) / "pocl")},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result
