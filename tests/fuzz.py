"""``make fuzz MINUTES=n``: every test that draws, with new draws, for n minutes on all cores.

Rounds of ``pytest`` run side by side, each with a seed of its own; seeds count up from the one that is printed first.
A failure is printed as soon as its round ends, with the command that repeats it, and again at the end; interrupting
ends the rounds earlier. The exit status is 1 where anything failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.property_tests import DRAWS, REPEAT

ROOT = Path(__file__).resolve().parent.parent

#: Seconds that a round has to report what it knows once the time is over.
_GRACE_SECONDS = 60

#: What pytest returns where all passed, where some failed, and where it was interrupted.
_PASSED, _FAILED, _INTERRUPTED = 0, 1, 2


@dataclass
class Rounds:
    """What all rounds share.

    Attributes:
        files: those that hold tests that draw, relative to the repository.
        seeds: one for each round to come.
        deadline: in seconds of the monotonic clock.
        complete: rounds that ran to their end.
        failures: of each test that failed, by name, the command that repeats its first failure.
        broken: a round did not even run.
        running: rounds that are under way.
    """

    files: tuple[str, ...]
    seeds: Iterator[int]
    deadline: float
    complete: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    broken: bool = False
    running: set[subprocess.Popen[str]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Round after round until the time is over."""
        while time.monotonic() < self.deadline and not self.broken:
            with self.lock:
                seed = next(self.seeds)
                process = self._started(seed)
                self.running.add(process)
            try:
                status, output = _ended(process, max(0.0, self.deadline - time.monotonic()))
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            with self.lock:
                self.running.remove(process)
                self._note(status, output, seed)

    def stop(self) -> None:
        """The time is over now."""
        with self.lock:
            self.deadline = time.monotonic()
            for process in self.running:
                process.send_signal(signal.SIGINT)

    def _started(self, seed: int) -> subprocess.Popen[str]:
        options = ("--hypothesis-profile=new", f"--hypothesis-seed={seed}", "-p", "no:cacheprovider", "-m", DRAWS)
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "--no-header", *options, *self.files],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _note(self, status: int, output: str, seed: int) -> None:
        self.complete += status in (_PASSED, _FAILED)
        commands = [line.removeprefix(REPEAT) for line in output.splitlines() if line.startswith(REPEAT)]
        unknown = {command.split(maxsplit=3)[3]: command for command in commands}
        unknown = {name: command for name, command in unknown.items() if name not in self.failures}
        self.failures.update(unknown)
        self.broken |= status not in (_PASSED, _FAILED, _INTERRUPTED) or (status == _FAILED and not commands)
        if unknown or self.broken:
            print(f"\n{output}", flush=True)
        else:
            print(f"seed {seed}: {output.strip().splitlines()[-1] if output.strip() else status}", flush=True)
            for command in commands:
                print(f"again, {REPEAT}{command}", flush=True)


def _ended(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    """Status and output; a round whose time is over is interrupted, and then says what failed until then."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return _INTERRUPTED, output
    return process.returncode, output


def drawing_files() -> tuple[str, ...]:
    """Files with tests that draw, relative to the repository; raises RuntimeError where they cannot be collected."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", DRAWS, "tests"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    # "tests/a/test_b.py: 12"
    return tuple(line.rpartition(":")[0] for line in done.stdout.splitlines() if line.startswith("tests/"))


def main() -> int:
    """Run as the module's docstring says; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="the first round's; drawn where none is given")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("files", nargs="*", help="test files; all that draw where none is given")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1, 10**9) if options.seed is None else options.seed
    print(f"seed {seed}; to repeat: make fuzz MINUTES={options.minutes:g} SEED={seed}", flush=True)
    deadline = time.monotonic() + 60 * options.minutes
    rounds = Rounds(tuple(options.files) or drawing_files(), itertools.count(seed), deadline)
    threads = [threading.Thread(target=rounds.run) for _ in range(max(1, options.processes))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        rounds.stop()
        for thread in threads:
            thread.join()
    print(f"\n{rounds.complete} rounds from seed {seed}; {len(rounds.failures)} tests failed", flush=True)
    for command in rounds.failures.values():
        print(f"{REPEAT}{command}")
    return 1 if rounds.failures or rounds.broken else 0


if __name__ == "__main__":
    sys.exit(main())
