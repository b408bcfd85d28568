"""The processes of the rivals, as the one that compares them sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from bench.cpu.timing import TurnError

ROOT = Path(__file__).resolve().parents[2]

#: A rival that has not answered after so many seconds is ended.
LIMIT_SECONDS = 600.0


class Contender(Protocol):
    """A rival that answers requests; tests have others."""

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply; ``reason`` in it says what went wrong."""

    def close(self) -> None:
        """No more requests."""


class Process:
    """A rival's process, started when it is first asked and again after it has died."""

    def __init__(
        self,
        name: str,
        cpus: Sequence[int],
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        cores = ",".join(map(str, cpus))
        self._command = [sys.executable, "-m", "bench.cpu.worker", name, cores, json.dumps(dict(options))]
        self._environment = {**os.environ, **environment}
        self._limit = limit_seconds
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply of the process, or why there is none: it died, or took too long and was ended."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._limit, end)
        timer.start()
        line = ""
        try:
            with suppress(BrokenPipeError):  # the missing answer says it
                process.stdin.write(json.dumps(dict(request)) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self._process = None
            code = process.wait()
            process.stdout.close()
            with suppress(BrokenPipeError):  # what it did not read
                process.stdin.close()
            why = f"gave no answer in {self._limit:.0f} s" if late.is_set() else f"its process ended with {code}"
            return {"reason": why}
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self._environment,
            cwd=ROOT,
        )
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def seconds_of_turn(contender: Contender, seconds: float) -> float:
    """One turn of a contender.

    Raises:
        TurnError: it could not take it.
    """
    reply = contender.ask({"do": "turn", "seconds": seconds})
    if "reason" in reply:
        raise TurnError(reply["reason"])
    return float(reply["seconds"])
