"""Kernels launched under NVIDIA's compute-sanitizer before they are timed: what it finds strikes them out.

Each tool watches a process that launches one kernel once, over tensors of exactly their size, each an allocation of its
own: the first byte beyond one belongs to no other tensor. It needs NumPy and CuPy alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from codegen.bundle.reader import read_bundle
from codegen.bundle.records import Bundle
from codegen.runtime.arrays import cupy_module
from codegen.runtime.gpu import load_kernel
from hal.support.errors import InputError
from roller.profile.gpu import POISON, MeasureOptions, input_bytes
from roller.profile.gpu_worker import GpuRunner
from roller.profile.measurement import Board, Measurement

PROGRAM = "compute-sanitizer"

#: Its tools: accesses outside allocations, races in shared memory, barriers that not all threads reach.
TOOLS = ("memcheck", "racecheck", "synccheck")

#: Exit status that the program is asked for where a tool found something.
FAULT_EXIT_CODE = 86

#: Seconds that one launch may take: racecheck slows a kernel down some hundred times.
LAUNCH_SECONDS = 900.0

#: What a report's lines begin with; lines that are no finding of theirs; what follows a finding and is about the host.
_MARK, _HEADS, _BACKTRACE = "=========", ("COMPUTE-SANITIZER", "Internal"), ("Saved host backtrace", "Host Frame")


def find_sanitizer() -> str:
    """The program.

    Raises:
        InputError: it is not installed.
    """
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    path = shutil.which(PROGRAM, path=os.pathsep.join([os.environ.get("PATH", ""), *(f"{h}/bin" for h in homes if h)]))
    if path is None:
        remedy = "install the CUDA toolkit, whose bin folder has it, or set CUDA_HOME to one"
        raise InputError("--sanitize", f"there is no {PROGRAM}", remedy)
    return path


class SanitizingRunner:
    """Launches kernels under all tools and measures those in which none found a fault; a
    :class:`roller.profile.child.Runner`."""

    def __init__(self, device: int, options: MeasureOptions) -> None:
        self.program, self.device = find_sanitizer(), device
        self.measuring = GpuRunner(device, options)
        self.watched: subprocess.Popen[str] | None = None
        self.closed = False

    def board(self) -> Board:
        return self.measuring.board()

    def measure(self, directory: Path, ranks: Sequence[int]) -> Iterator[tuple[int, Measurement]]:
        for rank in ranks:
            fault = next((fault for tool in TOOLS if (fault := self._fault(tool, directory, rank))), "")
            if fault:
                yield rank, Measurement.refused(fault, tolerance=0.0, loaded="")
            else:
                yield from self.measuring.measure(directory, [rank])

    def close(self) -> None:
        self.closed = True
        if self.watched is not None:
            self.watched.kill()
        self.measuring.close()

    def _fault(self, tool: str, directory: Path, rank: int) -> str:
        """Fault that a tool reports when a kernel is launched; empty where there is none."""
        if self.closed:
            raise InputError("profile", "was interrupted")
        with tempfile.TemporaryDirectory(prefix="roller-sanitize-") as folder:
            report = Path(folder) / "report"
            command = [
                self.program,
                "--tool",
                tool,
                "--error-exitcode",
                str(FAULT_EXIT_CODE),
                "--log-file",
                str(report),
            ]
            command += [sys.executable, "-m", "roller.profile.sanitizer", str(directory.resolve())]
            self.watched = subprocess.Popen(
                [*command, str(rank), str(self.device)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            try:
                _, said = self.watched.communicate(timeout=LAUNCH_SECONDS)
            except subprocess.TimeoutExpired:
                self.watched.kill()
                self.watched.communicate()
                return f"{tool}: no end after {LAUNCH_SECONDS:.0f} s"
            status, text = self.watched.returncode, report.read_text() if report.is_file() else ""
        if status == 0:
            return ""
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
        return f"{tool}: {first_finding(text) or last or f'ended with status {status}'}"


def first_finding(report: str) -> str:
    """The first finding of a report in one line; empty where there is none.

    >>> first_finding('''========= COMPUTE-SANITIZER
    ... ========= Invalid __global__ write of size 4 bytes
    ... =========     at twice_kernel+0x70
    ... =========     by thread (40,0,0) in block (0,0,0)
    ... =========     Saved host backtrace up to driver entry point at kernel launch time
    ... =========
    ... ========= ERROR SUMMARY: 1 error''')
    'Invalid __global__ write of size 4 bytes, at twice_kernel+0x70, by thread (40,0,0) in block (0,0,0)'
    """
    finding: list[str] = []
    for line in report.splitlines():
        text = line.removeprefix(_MARK).strip()
        if not line.startswith(_MARK) or text.startswith(_HEADS) or (not finding and not text):
            continue
        if not text or text.startswith(_BACKTRACE) or "SUMMARY:" in text:
            break
        finding.append(text)
    return ", ".join(finding)


def launch_once(bundle: Bundle, rank: int, device: int) -> None:
    """Launch a kernel over test data, nothing else on the GPU, and wait for it.

    Raises:
        InputError: the kernel cannot be loaded.
    """
    cupy = cupy_module()
    # An allocation per array: a pool's are parts of larger ones.
    cupy.cuda.set_allocator(None)
    entry = next(kernel for kernel in bundle.kernels if kernel.rank == rank)
    ranges = bundle.reference.ranges if bundle.reference else {}
    data = [input_bytes(argument, number, ranges) for number, argument in enumerate(bundle.inputs)]
    with cupy.cuda.Device(device):
        arrays = [cupy.asarray(stored) for stored in (*data, np.full(bundle.output.size_bytes, POISON, np.uint8))]
        load_kernel(bundle, entry, device).launch([array.data.ptr for array in arrays], bundle.output.size_bytes)
        cupy.cuda.get_current_stream().synchronize()


def main() -> None:
    """``python -m roller.profile.sanitizer BUNDLE RANK DEVICE``: what the tools watch."""
    directory, rank, device = sys.argv[1:]
    try:
        launch_once(read_bundle(Path(directory)), int(rank), int(device))
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
