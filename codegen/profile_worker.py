"""A process per GPU that measures kernels: what a kernel breaks, it breaks there.

An access outside all memory makes every later call of its process fail, and a kernel may hang or take the process
down. So the one who asks (:class:`ChildRunner`) and the one who measures (``python -m codegen.profile_worker``) talk
over pipes, a JSON object a line; whatever becomes of the child, its kernel is struck out and the next child goes on.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TextIO

from codegen.bundle_reader import read_bundle
from codegen.measure import Board, Measurement, MeasureOptions, OperatorBench, board_of
from hal.errors import InputError

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
        self.child: _Child | None = None
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
                except _Broken as broken:
                    self._drop()
                    measurement = Measurement(None, None, 0, 0, None, 0.0, str(broken), "", lost=True)
                yield left.pop(0), measurement
                if measurement.lost:
                    self._drop()
                    break

    def _running(self) -> _Child:
        if self.closed:
            raise InputError("profile", "was interrupted")
        if self.child is None:
            self.child = _Child()
        return self.child

    def _answer(self, child: _Child, what: str) -> dict[str, Any]:
        """An answer without which nothing can go on."""
        try:
            return child.answer(self.answer_seconds)
        except _Broken as broken:
            self._drop()
            raise InputError(what, f"cannot be measured: {broken}", "run roller profile with fewer kernels") from None

    def close(self) -> None:
        self.closed = True
        self._drop()

    def _drop(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.kill()


class _Broken(Exception):
    """A child that ended or that does not answer."""


class _Child:
    """One process; its stderr is kept for the message when it breaks."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "codegen.profile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.complaints: list[str] = []
        assert self.process.stdout is not None and self.process.stderr is not None
        threading.Thread(target=self._collect, args=(self.process.stdout,), daemon=True).start()
        self.listener = threading.Thread(target=self.complaints.extend, args=(self.process.stderr,), daemon=True)
        self.listener.start()

    def _collect(self, stream: TextIO) -> None:
        for line in stream:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request; where the child is gone the answer will tell."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            InputError: the child says that the request cannot be met.
            _Broken: it ended, or does not answer.
        """
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            raise _Broken(f"no answer for {seconds:.0f} s") from None
        if line is None:
            raise _Broken(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise InputError(*reply["error"])
        return reply

    def _last_words(self) -> str:
        status = self.process.wait()
        self.listener.join(1.0)
        said = next((line.strip() for line in reversed(self.complaints) if line.strip()), "")
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"the measuring process {how}" + (f": {said}" if said else "")

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer requests until there are no more, or until the GPU takes no more work."""

    def reply(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    for line in requests:
        request = json.loads(line)
        try:
            if request["ask"] == "board":
                reply({"board": asdict(board_of(request["device"]))})
                continue
            bundle = read_bundle(request["directory"])
            bench = OperatorBench(bundle, request["device"], MeasureOptions(**request["options"]))
        except InputError as error:
            reply({"error": [error.field, error.problem, error.remedy]})
            continue
        reply({"ready": True})
        kernels = {kernel.rank: kernel for kernel in bundle.kernels}
        for rank in request["ranks"]:
            measurement = bench.measure(kernels[rank])
            reply({"measurement": asdict(measurement)})
            if measurement.lost:
                return
        del bench  # its memory, before the next one's


def main() -> None:
    """Serve on stdin and stdout; what libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
