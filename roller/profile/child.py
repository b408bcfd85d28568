"""Processes that measure kernels: what a kernel breaks, it breaks there.

An access outside all memory makes every later call of its process fail, and a kernel may hang or take the process
down. So the one who asks (:class:`ChildRunner`) and the one who measures (:func:`serve`) talk over pipes, a JSON object
a line; whatever becomes of the child, its kernel is struck out and the next child goes on.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO

from hal.support.errors import InputError
from roller.profile.measurement import Board, Measurement

#: Seconds that one answer may take: loading libraries and the reference, or one kernel with its warm-up and repeats.
ANSWER_SECONDS = 180.0


class Runner(Protocol):
    """Who measures the kernels of bundles on one GPU, or on this machine's cores."""

    def board(self) -> Board:
        """The GPU or processor."""

    def measure(self, directory: Path, ranks: Sequence[int]) -> Iterator[tuple[int, Measurement]]:
        """A measurement for every rank of the bundle in ``directory``, in order."""

    def close(self) -> None:
        """Give up the GPU or the cores."""


class Broken(Exception):
    """A child that ended or that does not answer."""


class Child:
    """One process, ``python -m module``, with some ``variables`` in its environment; its stderr is kept for the message
    when it breaks."""

    def __init__(self, module: str, variables: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables},
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
            Broken: it ended, or does not answer.
        """
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            raise Broken(f"no answer for {seconds:.0f} s") from None
        if line is None:
            raise Broken(self._last_words())
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


class ChildRunner:
    """Asks child processes, one after another as they break; each serves until then.

    Attributes:
        module: what a child runs.
        variables: what its environment has besides this process's.
    """

    module: ClassVar[str]
    variables: ClassVar[Mapping[str, str]] = {}

    def __init__(self, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.answer_seconds = answer_seconds
        self.child: Child | None = None
        self.closed = False

    def running(self) -> Child:
        """The child, started where there is none.

        Raises:
            InputError: the runner was closed.
        """
        if self.closed:
            raise InputError("profile", "was interrupted")
        if self.child is None:
            self.child = Child(self.module, self.variables)
        return self.child

    def answer(self) -> dict[str, Any]:
        """The child's next answer; a child that breaks is gone.

        Raises:
            InputError: the child says that the request cannot be met.
            Broken: it ended, or does not answer.
        """
        try:
            return self.running().answer(self.answer_seconds)
        except Broken:
            self.drop()
            raise

    def close(self) -> None:
        """End the child, and start no other."""
        self.closed = True
        self.drop()

    def drop(self) -> None:
        """End the child; the next request starts another."""
        child, self.child = self.child, None
        if child is not None:
            child.kill()


# The other end of the pipes


class Ended(Exception):
    """Nothing more can be measured in this process."""


#: Sends one answer.
Reply = Callable[[dict[str, Any]], None]


def serve(requests: Iterable[str], replies: TextIO, answer: Callable[[dict[str, Any], Reply], None]) -> None:
    """Answer requests until there are no more, or until ``answer`` raises :class:`Ended`.

    Args:
        requests: JSON objects, a line each.
        replies: where answers go, a line each.
        answer: called with a request and a function that sends answers to it. An InputError is sent as an answer.
    """

    def reply(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    for line in requests:
        try:
            answer(json.loads(line), reply)
        except InputError as error:
            reply({"error": [error.field, error.problem, error.remedy]})
        except Ended:
            return


def replies_on_stdout() -> TextIO:
    """Where a child writes its answers; what libraries print goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies
