"""A process per GPU that measures kernels: what a kernel breaks, it breaks there.

An access outside all memory makes every later call of its process fail, and a kernel may hang or take the process
down. So the one who asks (:class:`ChildRunner`) and the one who measures (``python -m roller.profile.gpu_worker``) talk
over pipes, a JSON object a line; whatever becomes of the child, its kernel is struck out and the next child goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TextIO

from codegen.bundle.reader import read_bundle
from hal.support.errors import InputError
from roller.profile.child import Broken, Child, replies_on_stdout, send
from roller.profile.gpu import Board, Measurement, MeasureOptions, OperatorBench, board_of

#: What a child runs.
MODULE = "roller.profile.gpu_worker"

#: Seconds that one answer may take: loading CuPy and the reference, or one kernel with its warm-up and its repeats.
ANSWER_SECONDS = 180.0


class Runner(Protocol):
    """Who measures the kernels of bundles on one GPU."""

    def board(self) -> Board:
        """The GPU."""

    def measure(self, directory: Path, ranks: Sequence[int]) -> Iterator[tuple[int, Measurement]]:
        """A measurement for every rank of the bundle in ``directory``, in order."""

    def close(self) -> None:
        """Give up the GPU."""


class LocalRunner:
    """Measures in this very process."""

    def __init__(self, device: int, options: MeasureOptions) -> None:
        self.device, self.options = device, options

    def board(self) -> Board:
        return board_of(self.device)

    def measure(self, directory: Path, ranks: Sequence[int]) -> Iterator[tuple[int, Measurement]]:
        bundle = read_bundle(directory)
        bench = OperatorBench(bundle, self.device, self.options)
        kernels = {kernel.rank: kernel for kernel in bundle.kernels}
        for rank in ranks:
            yield rank, bench.measure(kernels[rank])

    def close(self) -> None:
        return None


class ChildRunner:
    """Measures in child processes, one after another as they break; each serves until then."""

    def __init__(self, device: int, options: MeasureOptions, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.device, self.options, self.answer_seconds = device, options, answer_seconds
        self.child: Child | None = None
        self.closed = False

    def board(self) -> Board:
        child = self._running()
        child.ask({"ask": "board", "device": self.device})
        return Board(**self._answer(child, "the board")["board"])

    def measure(self, directory: Path, ranks: Sequence[int]) -> Iterator[tuple[int, Measurement]]:
        left = list(ranks)
        while left:
            child = self._running()
            child.ask(
                {
                    "ask": "measure",
                    "device": self.device,
                    "directory": str(directory.resolve()),
                    "ranks": left,
                    "options": asdict(self.options),
                }
            )
            self._answer(child, str(directory))  # the reference is ready
            while left:
                try:
                    measurement = Measurement(**child.answer(self.answer_seconds)["measurement"])
                except Broken as broken:
                    self._drop()
                    measurement = Measurement(
                        seconds=None,
                        spread_seconds=None,
                        repeats=0,
                        launches=0,
                        relative_error=None,
                        tolerance=0.0,
                        struck_out=str(broken),
                        loaded="",
                        lost=True,
                    )
                yield left.pop(0), measurement
                if measurement.lost:
                    self._drop()
                    break

    def _running(self) -> Child:
        if self.closed:
            raise InputError("profile", "was interrupted")
        if self.child is None:
            self.child = Child(MODULE)
        return self.child

    def _answer(self, child: Child, what: str) -> dict[str, Any]:
        """An answer without which nothing can go on."""
        try:
            return child.answer(self.answer_seconds)
        except Broken as broken:
            self._drop()
            raise InputError(what, f"cannot be measured: {broken}", "run roller profile with fewer kernels") from None

    def close(self) -> None:
        self.closed = True
        self._drop()

    def _drop(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.kill()


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer requests until there are no more, or until the GPU takes no more work."""

    for line in requests:
        request = json.loads(line)
        try:
            if request["ask"] == "board":
                send(replies, {"board": asdict(board_of(request["device"]))})
                continue
            bundle = read_bundle(request["directory"])
            bench = OperatorBench(bundle, request["device"], MeasureOptions(**request["options"]))
        except InputError as error:
            send(replies, {"error": [error.field, error.problem, error.remedy]})
            continue
        send(replies, {"ready": True})
        kernels = {kernel.rank: kernel for kernel in bundle.kernels}
        for rank in request["ranks"]:
            measurement = bench.measure(kernels[rank])
            send(replies, {"measurement": asdict(measurement)})
            if measurement.lost:
                return
        del bench  # its memory, before the next one's


def main() -> None:
    """Serve on stdin and stdout."""
    serve(sys.stdin, replies_on_stdout())


if __name__ == "__main__":
    main()
