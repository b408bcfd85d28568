"""``python bench/gpu/harvest.py --out DIR --bundles DIR --minutes 8``: measure everything on the GPU of this machine.

Runs from a plain checkout with NumPy, CuPy, PyTorch and Triton. A second run with the same ``--out`` goes on where the
first one ended. See docs/harvest.md.

The measurements run in a process of their own: one that crashes or hangs is started again without the item that did it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.gpu.journal import Journal
    from bench.gpu.sections import Harvest

ROOT = Path(__file__).resolve().parents[2]

#: Exit code of a worker whose GPU answers no more.
BROKEN = 75
#: A worker that finishes nothing for this long hangs.
PATIENCE_SECONDS = 150.0
MOST_RESTARTS = 12
#: Kept back for writing results and for an item that takes longer than the ones before it.
RESERVE_SECONDS = 15.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 if nothing at all could be measured, else 0."""
    options = _options(sys.argv[1:] if arguments is None else arguments)
    if options.worker:
        return work(options, options.until)
    from bench.gpu.journal import Journal

    journal = Journal(options.out)
    if options.retry:
        say(options, f"{journal.drop_failures()} failed items are tried again")
    return supervise(options, journal, _worker_command(options))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="harvest.py", description="Measure kernels, libraries and training steps on the GPU of this machine."
    )
    parser.add_argument("--out", type=Path, required=True, help="where results go; a second run goes on there")
    parser.add_argument("--bundles", type=Path, help="kernels that bench/gpu/prepare.py compiled")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything (default 8)")
    parser.add_argument("--sections", default="", help="comma-separated: microbench,profile,operators,training")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU (default 0)")
    parser.add_argument("--retry", action="store_true", help="try items again that failed in an earlier run")
    parser.add_argument("--own-models", action="store_true", help="own BERT and GPT-2 even where transformers is there")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, without any GPU")
    parser.add_argument("--most-operators", type=int, help="only the first N operators")
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    from bench.gpu.journal import SECTIONS

    options.sections = [name for name in options.sections.split(",") if name] or list(SECTIONS)
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"--sections: there is no section {unknown[0]!r}; use {', '.join(SECTIONS)}")
    if not 0 < options.minutes < 24 * 60:
        parser.error(f"--minutes: {options.minutes:g} is no time to measure in; use a number such as 8")
    if options.bundles is not None and not options.bundles.is_dir():
        parser.error(f"--bundles: there is no directory {options.bundles}; make it with python bench/gpu/prepare.py")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out: {options.out} is not a directory; name another one")
    # Workers run in the checkout's folder, wherever the harvest was started.
    options.out = options.out.resolve()
    options.bundles = options.bundles and options.bundles.resolve()
    return options


def say(options: argparse.Namespace, text: str) -> None:
    """A line on standard output and in ``harvest.log``."""
    line = f"{datetime.datetime.now().strftime('%H:%M:%S')} {text}"
    print(line, flush=True)
    with (options.out / "harvest.log").open("a") as file:
        file.write(line + "\n")


# The supervisor


def _worker_command(options: argparse.Namespace) -> list[str]:
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--out", str(options.out)]
    command += ["--sections", ",".join(options.sections), "--device", str(options.device)]
    for name, value in (("--bundles", options.bundles), ("--most-operators", options.most_operators)):
        command += [name, str(value)] if value is not None else []
    for name, flag in (("--dry-run", options.dry_run), ("--own-models", options.own_models)):
        command += [name] if flag else []
    return command


def supervise(options: argparse.Namespace, journal: Journal, command: list[str]) -> int:
    """Run workers until one has finished or the time is up, then write the results."""
    started = time.time()
    until = started + 60 * options.minutes
    journal.note("started", datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))  # noqa: UP017
    journal.note("dry_run", options.dry_run)
    try:
        with _terminating():
            _run_workers(options, command, until)
    finally:
        journal = type(journal)(options.out)
        path = journal.write_results()
        counts = {name: len(journal.items(name)) for name in options.sections}
        text = ", ".join(f"{count} {name}" for name, count in counts.items())
        say(options, f"{text} in {time.time() - started:.0f} s: {path}")
    return 0 if any(counts.values()) else 1


def _run_workers(options: argparse.Namespace, command: list[str], until: float) -> None:
    """One worker after another, until one comes to its end or nothing is to be hoped from a further one."""
    from bench.gpu.journal import Journal

    path = options.out / "journal.jsonl"
    for _ in range(MOST_RESTARTS + 1):
        ended = _watch([*command, "--until", str(until - RESERVE_SECONDS)], path, until, options.patience)
        if not ended:
            return
        lost = Journal(options.out).abandon(ended)
        say(options, f"the worker {ended}" + (f" in {' '.join(lost)}" if lost else ""))
        if ended == _TIME_UP or (lost is None and ended != _LOST) or time.time() > until - RESERVE_SECONDS:
            return


_TIME_UP = "was stopped at the end of the time"
_LOST = "lost the GPU"


def _watch(command: list[str], journal: Path, until: float, patience: float) -> str:
    """Run a worker to its end. Returns the empty text if it finished, else how it ended."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        size, since = -1, time.time()
        while process.poll() is None:
            now = time.time()
            grown = journal.stat().st_size if journal.exists() else 0
            if grown != size:
                size, since = grown, now
            if now > until:
                return _TIME_UP
            if now - since > patience:
                return f"hung for {patience:g} s"
            time.sleep(0.2)
        code = process.returncode
        if code == BROKEN:
            return _LOST
        return f"died of signal {-code}" if code < 0 else f"ended with exit code {code}" if code else ""
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own session: compilers of torch.compile go too
            process.wait()


@contextlib.contextmanager
def _terminating() -> Iterator[None]:
    """SIGTERM ends the worker and then writes the results, as the end of the time does."""

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# The worker


def work(options: argparse.Namespace, until: float) -> int:
    """Measure until the time `until` (seconds since the epoch); returns the exit code."""
    from bench.gpu.adapters import carried

    carried(options.bundles)
    from bench.gpu.board import Sampler, environment
    from bench.gpu.fakes import SMI, FakeMachine
    from bench.gpu.journal import Journal
    from bench.gpu.machine import CudaMachine
    from bench.gpu.sections import Harvest

    machine = FakeMachine() if options.dry_run else CudaMachine(options.device)
    journal = Journal(options.out)
    journal.note("environment", environment(machine.properties()))
    bundles = dry_bundles(options.out, options.most_operators) if options.dry_run else options.bundles
    harvest = Harvest(
        machine=machine, journal=journal, bundles=bundles, small=options.dry_run, most_operators=options.most_operators,
        own_models=options.own_models,
    )  # fmt: skip
    sampling = Sampler(SMI) if options.dry_run else Sampler(index=options.device)
    with _one_thread() if options.dry_run else contextlib.nullcontext(), sampling as sampler:
        _prepare(options.dry_run, harvest)
        return measure_sections(harvest, options.sections, until, sampler.take, lambda text: say(options, text))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch on one thread of the CPU: tiny operators would only wait for the others."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dry_bundles(out: Path, most: int | None) -> Path:
    """Bundles for the fake, in the folder of a dry run's results: one right kernel and one wrong one each."""
    from bench.gpu.fakes import write_bundle
    from bench.gpu.sections import first_problems

    root = out / "dry-bundles"
    if not root.exists():
        for one in first_problems(small=True, most=most):
            write_bundle(root, one)
    return root


def _prepare(dry_run: bool, harvest: Harvest) -> None:
    """Let the library search for its best algorithm, and bring the clocks up."""
    import torch

    from bench.gpu.timing import warm_up

    torch.backends.cudnn.benchmark = True
    side = 16 if dry_run else 4096
    a = torch.ones(side, side, device=harvest.machine.device)
    warm_up(harvest.machine, lambda: a @ a, 0.01 if dry_run else 1.0)


def measure_sections(
    harvest: Harvest,
    names: Sequence[str],
    until: float,
    samples: Callable[[], list[Any]],
    tell: Callable[[str], None],
) -> int:
    """Each section with its share of what is left of the time; returns the worker's exit code."""
    from bench.gpu.sections import ALL, Broken, run_section

    finished = harvest.journal.noted("sections") or {}
    chosen = [
        one for one in ALL if one.name in names and finished.get(one.name, {}).get("until") != until
    ]  # a worker that was started again leaves what this run has had its time for
    for number, section in enumerate(chosen):
        shares = sum(one.share for one in chosen[number:])
        seconds = max(until - time.time(), 0.0) * section.share / shares
        try:
            summary = run_section(harvest, section, seconds, tell)
        except Broken as error:
            harvest.journal.note("samples", samples())
            tell(f"{section.name}: the GPU answers no more: {error}")
            return BROKEN
        harvest.journal.note("samples", samples())
        harvest.journal.note("sections", {section.name: {**summary, "until": until}})
        harvest.journal.write_results()
        tell(
            f"{section.name}: {summary['done']} done, {summary['failed']} failed, {summary['left_out']} left out,"
            f" {summary['seconds']:.0f} of {seconds:.0f} s"
        )
    return 0


if __name__ == "__main__":
    # The folder of this file holds names of the standard library's; packages are found from the root.
    sys.path[0] = str(ROOT)
    from bench.gpu import harvest as module

    sys.exit(module.main())
