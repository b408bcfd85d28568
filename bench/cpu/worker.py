"""A rival in a process of its own: ``python -m bench.cpu.worker RIVAL CPUS OPTIONS``, a JSON object a line each way.

Requests are ``prepare`` (an operator with the files of its inputs), ``turn`` (seconds to spend) and ``quit``.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from bench.cpu.machine import pin


class Worker:
    """State of one process: a rival, and the operator that it was last prepared for."""

    def __init__(self, name: str, cpus: tuple[int, ...], options: Mapping[str, Any]) -> None:
        self.name, self.cpus, self.options = name, cpus, options
        self._calls: Iterator[Any] = iter(())
        self._self_timed = False

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply, whatever goes wrong: ``reason`` says why a rival has no result, ``no_rival`` that it does not
        compete in this operator."""
        from bench.cpu.rivals import NoRival, Unable

        try:
            return self._prepare(request) if request["do"] == "prepare" else self._turn(float(request["seconds"]))
        except NoRival:
            return {"no_rival": True}
        except Unable as error:
            return {"reason": str(error)}
        except Exception as error:
            return {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}

    def _prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        import numpy as np

        from bench.cpu.rivals import RIVALS, Operator

        started = time.perf_counter()
        self._calls = iter(())
        operator = Operator(request["spec"], self.cpus, self.options)
        prepared = RIVALS[self.name](operator)
        folder = Path(request["folder"])
        calls = []
        for number in range(request["sets"]):
            with np.load(folder / f"inputs{number}.npz") as file:
                calls.append(prepared.bind({name: file[name] for name in file}))
        reply: dict[str, Any] = {"facts": dict(prepared.facts), "check": None}
        if not prepared.self_timed:
            reply["check"] = self._check(calls, folder, request)
        reply["setup_seconds"] = time.perf_counter() - started
        self._calls, self._self_timed = itertools.cycle(calls), prepared.self_timed
        return reply

    def _check(self, calls: list[Any], folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs on the first and on the last inputs against the reference, the worse of the two."""
        import numpy as np

        worst = 0.0
        for number in request["checked"]:
            out = calls[number]()
            output = out if isinstance(out, np.ndarray) else out.numpy()
            wanted = np.load(folder / f"expected{number}.npy")
            if output.size != wanted.size:
                raise ValueError(f"the output has {output.size} elements, not {wanted.size}")
            worst = max(worst, relative_error(output.reshape(wanted.shape), wanted))
        tolerance = float(request["tolerance"])
        return {"relative_error": worst, "tolerance": tolerance, "passed": worst <= tolerance}

    def _turn(self, seconds: float) -> dict[str, Any]:
        from bench.cpu.rivals import timed

        return {"seconds": statistics.median(timed(self._calls, seconds, self_timed=self._self_timed))}


def relative_error(output: Any, wanted: Any) -> float:
    """Largest |found - wanted| / (|wanted| + rms of wanted), as for bundles; the largest float if not finite."""
    import numpy as np

    scale = np.abs(wanted) + np.sqrt(np.mean(np.square(wanted)))
    error = float(np.max(np.abs(output.astype(np.float64) - wanted) / np.maximum(scale, 1e-300)))
    return error if np.isfinite(error) else sys.float_info.max


def serve(worker: Worker, requests: IO[str], replies: IO[str]) -> None:
    """Answer requests until ``quit`` or the end of input."""
    for line in requests:
        request = json.loads(line)
        if request["do"] == "quit":
            return
        replies.write(json.dumps(worker.answer(request)) + "\n")
        replies.flush()


def main(arguments: list[str]) -> None:
    """Serve standard input. What libraries print goes to standard error."""
    name, cpus, options = arguments
    numbers = tuple(map(int, cpus.split(",")))
    pin(numbers)  # before a library starts threads, which inherit it
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Worker(name, numbers, json.loads(options)), sys.stdin, replies)


if __name__ == "__main__":
    main(sys.argv[1:])
