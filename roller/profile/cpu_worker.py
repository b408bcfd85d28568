"""A process that measures kernels on this machine's cores: what a kernel breaks, it breaks there.

Its threads are kept on cores of their own, which the process that asks should not be: ``python -m
roller.profile.cpu_worker`` answers :class:`CpuRunner` over pipes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from codegen.bundle.reader import read_bundle
from hal.support.errors import InputError
from roller.profile.child import Broken, Child, replies_on_stdout, send
from roller.profile.cpu import CpuBench, CpuMeasureOptions, struck_out, this_board
from roller.profile.gpu import Board, Measurement
from roller.profile.gpu_worker import ANSWER_SECONDS

#: What a child runs.
MODULE = "roller.profile.cpu_worker"

#: NumPy computes the reference, on one thread: those of its libraries spin for tens of milliseconds after a product, on
#: cores that kernels are being timed on.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), "1")


class CpuRunner:
    """Measures in child processes, one after another as they break; a :class:`roller.profile.gpu_worker.Runner`."""

    def __init__(self, options: CpuMeasureOptions, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.options, self.answer_seconds = options, answer_seconds
        self.child: Child | None = None
        self.closed = False

    def board(self) -> Board:
        """This machine's processor; the child is ready then, so that what it imports is part of no measurement."""
        child = self._running()
        child.ask({"ask": "board"})
        try:
            return Board(**child.answer(self.answer_seconds)["board"])
        except Broken as broken:
            self._drop()
            raise InputError("this processor", f"cannot be described: {broken}", "report this machine") from None

    def measure(self, directory: Path, ranks: Sequence[int]) -> Iterator[tuple[int, Measurement]]:
        """A measurement for every rank of the bundle in ``directory``; all kernels take turns, so all come at the end.

        Raises:
            InputError: the operator cannot be read back, or measured.
        """
        found: dict[int, Measurement] = {}
        while left := [rank for rank in ranks if rank not in found]:
            found |= self._ask(directory, left)
        yield from ((rank, found[rank]) for rank in ranks)

    def _ask(self, directory: Path, ranks: list[int]) -> dict[int, Measurement]:
        """What a child measures of all these kernels; where it breaks, the end of the one that it was running."""
        running = None
        child = self._running()
        folder = str(directory.resolve())
        child.ask({"ask": "measure", "directory": folder, "ranks": ranks, "options": asdict(self.options)})
        try:
            while "running" in (answer := child.answer(self.answer_seconds)):
                running = int(answer["running"])
        except Broken as broken:
            self._drop()
            if running is None:
                problem = f"cannot be measured: {broken}"
                raise InputError(str(directory), problem, "compile the operator again") from None
            return {running: struck_out(str(broken), 0.0)}
        return {int(rank): Measurement(**one) for rank, one in answer["measurements"].items()}

    def _running(self) -> Child:
        if self.closed:
            raise InputError("profile", "was interrupted")
        if self.child is None:
            self.child = Child(MODULE, _ONE_THREAD)
        return self.child

    def close(self) -> None:
        """End the process."""
        self.closed = True
        self._drop()

    def _drop(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.kill()


def serve(requests: TextIO, replies: TextIO, *, pinned: bool = False) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        request = json.loads(line)
        if request["ask"] == "board":
            send(replies, {"board": asdict(this_board())})
            continue
        try:
            bundle = read_bundle(request["directory"])
            bench = CpuBench(bundle, CpuMeasureOptions(**request["options"]), pinned=pinned)
        except InputError as error:
            send(replies, {"error": [error.field, error.problem, error.remedy]})
            continue
        kernels = {kernel.rank: kernel for kernel in bundle.kernels}
        asked = [kernels[rank] for rank in request["ranks"]]
        measurements = bench.measure(asked, lambda rank: send(replies, {"running": rank}))
        send(replies, {"measurements": {rank: asdict(one) for rank, one in measurements.items()}})
        del bench  # its memory, before the next one's


def main() -> None:
    """Serve on stdin and stdout."""
    serve(sys.stdin, replies_on_stdout(), pinned=True)


if __name__ == "__main__":
    main()
