"""``python -m bench.cpu``: ours against the libraries and MetaSchedule on this machine's cores."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bench.cpu.comparison import Settings, compare, read_suite
from bench.cpu.machine import Machine, busy_notes, openmp_environment, this_machine, thread_environment
from bench.cpu.ours import check_bundles
from bench.cpu.pace import Pace
from bench.cpu.processes import Contender, Process
from bench.cpu.results import FORMAT, Results, read_results, write_results
from bench.cpu.rivals import RIVALS, blas_environment
from bench.cpu.tuned import FOLDER, Store
from bench.timed.statistics import WIDE
from hal.support.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
#: Where a comparison of a whole suite goes; one of some operators goes to `SOME`, which Git ignores.
RESULTS, SOME = ROOT / "bench" / "results" / "cpu", ROOT / "out" / "bench-cpu"
BUNDLES = ROOT / "out" / "cpu24"
DEFAULT_ADAPTER = "bench.cpu.ours:from_bundle"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--suite", default="cpu24", show_default=True, metavar="NAME|FILE", help="Operators.")
@click.option("--operators", default="", metavar="NAME,NAME", help="Only these of the suite.")
@click.option("--rivals", default=",".join(RIVALS), metavar="NAME,NAME", help=f"Some of {', '.join(RIVALS)}.")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="For everybody.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=31, show_default=True, help="Turns that each takes.")
@click.option("--turn", "turn_seconds", type=click.FloatRange(1e-4, 10), default=0.02, show_default=True,
              metavar="SECONDS", help="How long a turn takes.")  # fmt: skip
@click.option("--bundles", type=click.Path(file_okay=False, path_type=Path), default=None,
              help="Our kernels, a bundle per operator.  [default: out/cpu24]")  # fmt: skip
@click.option("--ours", "adapter", default=DEFAULT_ADAPTER, show_default=True, metavar="MODULE:FUNCTION",
              help="What gives our kernels.")  # fmt: skip
@click.option("--tuned", type=click.Path(dir_okay=False, path_type=Path), default=None,
              help="MetaSchedule's schedules, of another processor's file.  [default: this one's]")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=None,
              help="Where results.json and ratios.png go.  "
                   "[default: bench/results/cpu/DATE, or out/bench-cpu for a part]")  # fmt: skip
@click.option("--show", type=click.Path(dir_okay=False, path_type=Path), default=None,
              help="Print this results.json again, measure nothing.")  # fmt: skip
def main(
    *,
    suite: str,
    operators: str,
    rivals: str,
    threads: int,
    rounds: int,
    turn_seconds: float,
    bundles: Path | None,
    adapter: str,
    tuned: Path | None,
    out: Path | None,
    show: Path | None,
) -> None:
    """Measure our kernels against NumPy/OpenBLAS, PyTorch (oneDNN) and MetaSchedule's schedules, in turns."""
    try:
        if show is not None:
            results = read_results(show)
        else:
            check_bundles(bundles)
            chosen, names = _named(rivals), _split(operators)
            specs = read_suite(suite, names)
            machine = this_machine(threads)
            contenders = processes(chosen, machine, bundles or BUNDLES, adapter, tuned)
            pace = Pace(bundles or BUNDLES) if "ours" in chosen and adapter == DEFAULT_ADAPTER else None
            results = measured(specs, contenders, machine, suite, rounds, turn_seconds, pace)
            is_complete = not names and set(chosen) == set(RIVALS)
            keep(results, out or (RESULTS / results.started[:10] if is_complete else SOME))
        tell(results)
    except InputError as error:
        click.echo(f"bench.cpu: {error}", err=True)
        sys.exit(2)


def _split(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _named(text: str) -> list[str]:
    """The rivals of these names.

    Raises:
        InputError: there is none of a name.
    """
    names = _split(text)
    for name in names:
        if name not in RIVALS:
            raise InputError("--rivals", f"there is no {name!r}", f"name some of {', '.join(RIVALS)}")
    return names


def processes(
    names: Sequence[str], machine: Machine, bundles: Path, adapter: str, tuned: Path | None
) -> dict[str, Contender]:
    """A process per rival, all on the same processors."""
    tvm = machine.packages.get("apache-tvm", "")
    path = tuned or Store(FOLDER, machine.title, machine.llvm, machine.threads, tvm).path
    options: dict[str, dict[str, Any]] = {
        "ours": {"adapter": adapter, "bundles": str(bundles.resolve())},
        "metaschedule-64": {"tuned": str(path.resolve()), "trials": 64},
        "metaschedule-512": {"tuned": str(path.resolve()), "trials": 512},
    }
    environment = thread_environment(machine.cpus)
    openmp = openmp_environment(machine.cpus)
    special = {"openblas": blas_environment(machine.avx512), "torch": openmp, "torch-turned": openmp}
    return {
        name: Process(name, machine.cpus, options.get(name, {}), {**environment, **special.get(name, {})})
        for name in names
    }


def measured(
    specs: Sequence[Mapping[str, Any]],
    contenders: Mapping[str, Contender],
    machine: Machine,
    suite: str,
    rounds: int,
    turn_seconds: float,
    pace: Pace | None = None,
) -> Results:
    """The comparison; the contenders are closed at its end."""
    from msgspec.structs import replace

    from bench.cpu.tables import widest

    settings = Settings(rounds, turn_seconds, machine.private_bytes * machine.threads)
    started = datetime.datetime.now().isoformat(timespec="seconds")
    try:
        operators = compare(specs, contenders, settings, lambda name: click.echo(f"  {name}", err=True), pace)
    finally:
        for contender in contenders.values():
            contender.close()
    results = Results(
        format=FORMAT, started=started, machine=machine, suite=suite, rounds=rounds, turn_seconds=turn_seconds,
        notes=[], operators=operators,
    )  # fmt: skip
    return replace(results, notes=busy_notes(machine, widest(results), WIDE))


def keep(results: Results, out: Path) -> None:
    """Write ``results.json`` and ``ratios.png``; those of a former run of the same day give way."""
    from bench.cpu.plots import draw_ratios

    out.mkdir(parents=True, exist_ok=True)
    write_results(out / "results.json", results)
    click.echo(f"results in {out / 'results.json'}", err=True)
    try:
        if draw_ratios(results, out / "ratios.png"):
            click.echo(f"picture in {out / 'ratios.png'}", err=True)
    except ModuleNotFoundError as error:
        click.echo(f"bench.cpu: no picture: {error}; pip install -e '.[plot]'", err=True)


def tell(results: Results) -> None:
    """Print the comparison."""
    from bench.cpu.tables import machine_lines, ratio_table, struck_out_lines
    from hal.support.tables import print_line, print_table

    for line in machine_lines(results.machine):
        print_line(line)
    print_line("")
    print_table(ratio_table(results))
    print_line("time of each as a multiple of ours, quartiles of the rounds in brackets; in brackets alone: its time")
    print_line("first: RATIONAL's first choice over the best of its top 50, both measured")
    print_line("")
    for line in (*struck_out_lines(results), *results.notes):
        print_line(line)


if __name__ == "__main__":
    main()
