"""A process of our own that answers requests over pipes, a JSON object a line: what breaks, breaks there."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

from hal.support.errors import InputError


class Broken(Exception):
    """A child that ended or that does not answer."""


class Child:
    """One process, ``python -m module``, with some ``variables`` in its environment; its stderr is kept for the message
    when it breaks."""

    def __init__(self, module: str, variables: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(variables or {})},
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


def replies_on_stdout() -> TextIO:
    """Where a child writes its answers; what libraries print goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def send(replies: TextIO, value: dict[str, Any]) -> None:
    """Answer with one object."""
    replies.write(json.dumps(value) + "\n")
    replies.flush()
