"""``roller profile``: kernels of bundles timed on GPUs or on this machine's cores, and manifests ranked by that.

On a machine with a GPU it imports neither the compiler nor anything that the compiler needs.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hal.support.errors import InputError

if TYPE_CHECKING:
    from roller.profile.profile import KernelProfile, OperatorProfile

#: Software that the last line names, of what the profile knows.
_SOFTWARE = ("driver", "runtime")


@click.command("profile")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--device",
    "device_name",
    default=None,
    metavar="GPU",
    help="cuda:0, cuda:0,cuda:1 or all.  [default: cuda:0; for kernels of processors this machine's cores]",
)
@click.option(
    "--top-k", type=click.IntRange(1, 100), default=100, help="Kernels per operator, by prediction.  [default: all]"
)
@click.option(
    "--repeats",
    type=click.IntRange(3, 10000),
    default=None,
    help="Timings of a kernel.  [default: 20; on processors 15]",
)
@click.option("--jobs", "cluster", default=None, metavar="URL", help="Run on a cluster: tcp://… (Dask) or ray://…")
@click.option(
    "--sanitize/--no-sanitize",
    default=False,
    help="Launch every kernel under compute-sanitizer first, and strike out those in which it finds a fault.",
)
@click.option("--cache/--no-cache", "cached", default=True, help="Take times of kernels known from before.")
@click.option("--json/--no-json", "as_json", default=False, help="One JSON object per operator on stdout.")
def profile_command(
    directory: Path,
    *,
    device_name: str | None,
    top_k: int,
    repeats: int | None,
    cluster: str | None,
    sanitize: bool,
    cached: bool,
    as_json: bool,
) -> None:
    """Time the kernels of the bundle DIR, or of all bundles in DIR, and rank their manifests by it.

    A kernel's time counts only if its output agrees with the operator's reference. Exit code 1 when an operator has no
    such kernel.
    """
    from roller.profile.profile import default_cache, is_for_cpu

    if is_for_cpu(directory):
        profiled = _on_cores(directory, device_name, cluster, top_k, repeats, sanitize)
    else:
        # What is known of a kernel says nothing of the sanitizer.
        cache = default_cache() if cached and not sanitize else None
        profiled = _on_gpus(directory, device_name or "cuda:0", cluster, top_k, repeats, cache, sanitize)
    results = []
    for result in profiled:
        results.append(result)
        if as_json:
            click.echo(profile_json(result))
    if not as_json:
        print_profiles(results)
        if sanitize:
            click.echo(_sanitized(results))
    if any(result.best is None for result in results):
        sys.exit(1)


def _on_gpus(
    directory: Path,
    device_name: str,
    cluster: str | None,
    top_k: int,
    repeats: int | None,
    cache: Path | None,
    sanitize: bool,
) -> Iterator[OperatorProfile]:
    from roller.profile import profile
    from roller.profile.gpu import MeasureOptions

    measure = MeasureOptions() if repeats is None else MeasureOptions(repeats=repeats)
    options = profile.ProfileOptions(top_k, measure, cache)
    if sanitize:
        from roller.profile.sanitizer import SanitizingRunner, find_sanitizer

        if cluster is not None:
            raise InputError("--sanitize", "watches processes of this machine, no cluster's", "leave --jobs out")
        find_sanitizer()
        yield from profile.profile(directory, profile.parse_devices(device_name), options, SanitizingRunner)
    elif cluster is None:
        yield from profile.profile(directory, profile.parse_devices(device_name), options)
    else:
        from roller.profile.clusters import cluster_executor

        with cluster_executor(cluster) as executor:
            yield from profile.profile_on_cluster(directory, executor, options)


#: What may be written for this machine's cores.
_THIS_MACHINE = (None, "cpu")


def _on_cores(
    directory: Path, device_name: str | None, cluster: str | None, top_k: int, repeats: int | None, sanitize: bool
) -> Iterator[OperatorProfile]:
    from roller.profile.cpu import CpuMeasureOptions
    from roller.profile.profile import ProfileOptions, profile_in_process

    for option, given in (("--device", device_name), ("--jobs", cluster)):
        if given not in _THIS_MACHINE:
            problem = f"{directory} holds kernels for processors, which are timed on this machine's cores"
            raise InputError(option, problem, "leave it out")
    if sanitize:
        raise InputError("--sanitize", f"{directory} holds kernels for processors", "leave it out")
    measure = CpuMeasureOptions() if repeats is None else CpuMeasureOptions(rounds=repeats)
    return profile_in_process(directory, ProfileOptions(top_k), measure)


def profile_json(result: OperatorProfile) -> str:
    """One operator as one line of JSON."""
    return json.dumps(
        {
            "name": result.name,
            "device": result.device,
            "board": result.board.name,
            "capability": result.board.capability,
            "versions": result.board.versions,
            "out": str(result.directory),
            "profiling_seconds": result.seconds,
            "kernels": [_kernel_json(rank, kernel) for rank, kernel in enumerate(result.kernels, start=1)],
        },
        ensure_ascii=False,
    )


def _kernel_json(rank: int, kernel: KernelProfile) -> dict[str, Any]:
    m = kernel.measurement
    return {
        "rank": rank,
        "predicted_rank": kernel.entry.predicted_rank,
        "source": kernel.entry.source,
        "profiled_seconds": m.seconds,
        "spread_seconds": m.spread_seconds,
        "seconds": kernel.entry.seconds,
        "prediction_error": kernel.prediction_error,
        "relative_error": m.relative_error,
        "tolerance": m.tolerance,
        "repeats": m.repeats,
        "launches": m.launches,
        "struck_out": m.struck_out,
        "loaded": m.loaded,
        "cached": kernel.cached,
    }


def print_profiles(results: list[OperatorProfile]) -> None:
    """All kernels of a single operator, or the best kernel of every operator of a folder; then what was struck out."""
    from rich.console import Console

    table = _kernels_table(results[0]) if len(results) == 1 else _operators_table(results)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=200, highlight=False)
    console.print(table)
    for result in results:
        for kernel in result.kernels:
            if kernel.measurement.struck_out:
                click.echo(f"struck out: {result.name} {kernel.entry.source}: {kernel.measurement.struck_out}")
    click.echo(_summary(results))


def _kernels_table(result: OperatorProfile) -> Any:
    from hal.support.tables import new_table

    numbers = ("was", "measured", "spread", "predicted", "off by")
    table = new_table(("rank",), numbers, ("error", "loaded", "kernel"))
    for rank, kernel in enumerate(result.kernels, start=1):
        m = kernel.measurement
        table.add_row(
            str(rank),
            str(kernel.entry.predicted_rank),
            _microseconds(m.seconds),
            _microseconds(m.spread_seconds),
            _microseconds(kernel.entry.seconds),
            _percent(kernel.prediction_error),
            "-" if m.relative_error is None else f"{m.relative_error:.0e}",
            (m.loaded or "-") + (", known before" if kernel.cached else ""),
            kernel.entry.source,
        )
    return table


def _operators_table(results: Iterable[OperatorProfile]) -> Any:
    from hal.support.tables import new_table

    numbers = ("best was", "measured", "spread", "predicted", "off by", "rank 1 took", "struck out")
    table = new_table(("operator",), numbers)
    for result in results:
        struck = sum(bool(kernel.measurement.struck_out) for kernel in result.kernels)
        first = next((k.measurement.seconds for k in result.kernels if k.entry.predicted_rank == 1), None)
        best = result.best
        table.add_row(
            result.name,
            "-" if best is None else str(best.entry.predicted_rank),
            _microseconds(None if best is None else best.measurement.seconds),
            _microseconds(None if best is None else best.measurement.spread_seconds),
            _microseconds(None if best is None else best.entry.seconds),
            _percent(None if best is None else best.prediction_error),
            _microseconds(first),
            str(struck),
        )
    return table


def _summary(results: list[OperatorProfile]) -> str:
    kernels = [kernel for result in results for kernel in result.kernels]
    errors = [abs(error) for kernel in kernels if (error := kernel.prediction_error) is not None]
    struck = sum(bool(kernel.measurement.struck_out) for kernel in kernels)
    board = results[0].board
    text = f"{_count(len(errors), 'kernel')} of {_count(len(results), 'operator')} timed on {board.name}"
    if struck:
        text += f", {struck} struck out"
    if errors:
        text += f"; predictions off by {statistics.median(errors):.0%} (median)"
    software = ", ".join(f"{name} {board.versions[name]}" for name in _SOFTWARE if name in board.versions)
    return f"{text}; {software}" if software else text


def _sanitized(results: list[OperatorProfile]) -> str:
    from roller.profile.sanitizer import PROGRAM, TOOLS

    struck = [kernel.measurement.struck_out for result in results for kernel in result.kernels]
    clean = sum(not reason.startswith(tuple(f"{tool}:" for tool in TOOLS)) for reason in struck)
    return f"{clean} of {_count(len(struck), 'kernel')} clean under {PROGRAM}: {', '.join(TOOLS)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.2f} µs"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.0%}"
