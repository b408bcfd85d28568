"""``python -m bench.cpu.tune``: MetaSchedule searches for the suite's operators, and what it finds is kept.

What has been found on this processor, with these threads and this TVM, is not searched again, so that the command goes
on where it was interrupted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import click

from bench.cpu.comparison import read_suite
from bench.cpu.machine import pin, this_machine, thread_environment
from bench.cpu.tuned import FOLDER, Store, Tuning
from hal.support.errors import InputError
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operator_from_data

Spec = Mapping[str, Any]

#: Operators whose 512 candidates are tried.
LONG_SEARCH = ("gemm_512", "gemm_1024", "conv3x3_64x56_nchw", "conv3x3_64x56_nhwc")


class Searcher(Protocol):
    """Search for schedules: `bench.cpu.metaschedule.Tuner`, in tests another."""

    def tune(self, expr: TensorExpr, trials: int) -> Tuning:
        """The best schedule of so many."""


def wanted(specs: Sequence[Spec], trials: int, more: int, on: Sequence[str]) -> Iterator[tuple[Spec, int]]:
    """Every operator with its trials, then those of the names `on` with more."""
    yield from ((spec, trials) for spec in specs)
    yield from ((spec, more) for spec in specs if spec["name"] in on)


def tune(
    todo: Sequence[tuple[Spec, int]],
    store: Store,
    searcher: Callable[[], Searcher],
    *,
    again: bool,
    progress: Callable[[str], None] = lambda line: None,
) -> int:
    """Search for what is not in the store yet (`again`: for everything), each kept at once.

    Returns:
        How many searches failed. Nothing is kept of them, and the others go on.
    """
    missing = [(spec, trials) for spec, trials in todo if again or store.find(spec, trials) is None]
    progress(f"{len(todo) - len(missing)} of {len(todo)} searches are in {store.path.name}")
    if not missing:
        return 0
    search, failed = searcher(), 0
    for spec, trials in missing:
        started = time.perf_counter()
        try:
            tuning = search.tune(operator_from_data(dict(spec)), trials)
        except Exception as error:
            failed += 1
            progress(f"{spec['name']}, {trials} trials: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        store.add(spec, tuning)
        best = "none ran" if tuning.best_seconds is None else f"best {tuning.best_seconds * 1e6:.1f} µs"
        took = time.perf_counter() - started
        progress(f"{spec['name']}, {trials} trials: {best}, {tuning.failed} of {tuning.tried} failed, {took:.0f} s")
    return failed


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--suite", default="cpu24", show_default=True, metavar="NAME|FILE", help="Operators.")
@click.option("--operators", default="", metavar="NAME,NAME", help="Only these of the suite.")
@click.option("--trials", type=click.IntRange(1), default=64, show_default=True, help="Candidates of every operator.")
@click.option("--trials-more", type=click.IntRange(1), default=None, help="Candidates of those that --on names.")
@click.option("--on", default=",".join(LONG_SEARCH), show_default=True, metavar="NAME,NAME")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True)
@click.option("--again", is_flag=True, help="Search again for what was found already.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=FOLDER,
              help="Where what is found goes.  [default: bench/cpu/tuned]")  # fmt: skip
def main(
    suite: str,
    operators: str,
    trials: int,
    trials_more: int | None,
    on: str,
    threads: int,
    again: bool,
    out: Path,
) -> None:
    """Let MetaSchedule tune the suite's operators on this machine; leave it alone meanwhile."""
    try:
        names = [name for name in operators.split(",") if name]
        specs = read_suite(suite, names)
        more = [name for name in on.split(",") if name] if trials_more is not None else []
        if more and not names:
            read_suite(suite, more)  # a name that is none of the suite's ends here
        machine = this_machine(threads)
        os.environ.update(thread_environment(machine.cpus))
        pin(machine.cpus)
        store = Store(out, machine.title, machine.llvm, threads, machine.packages["apache-tvm"])
        todo = list(wanted(specs, trials, trials_more or trials, more))
        failed = tune(todo, store, lambda: _metaschedule(machine.llvm, threads), again=again, progress=click.echo)
    except InputError as error:
        click.echo(f"bench.cpu.tune: {error}", err=True)
        sys.exit(2)
    click.echo(f"kept in {store.path}")
    if failed:
        sys.exit(1)


def _metaschedule(llvm: str, threads: int) -> Searcher:
    from bench.cpu.metaschedule import Tuner

    return Tuner(llvm, threads)


if __name__ == "__main__":
    main()
