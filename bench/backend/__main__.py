"""``python -m bench.backend``: the table of networks, each against the better of Inductor and eager."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.backend.networks import NETWORKS
from hal.catalog import load_device
from hal.support.atomic import write_atomic
from hal.this_cpu import THIS_CPU

#: Time of the wall, or of the processor where other programs share it; with the latter several threads count each.
CLOCKS = ("wall", "processor")
RIVALS = ("eager", "inductor", "inductor, frozen", "inductor, max-autotune", "roller")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--network", "networks", multiple=True, type=click.Choice(list(NETWORKS)), help="Which; all by default.")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1, 256), default=(1,), show_default=True)
@click.option("--rival", "rivals", multiple=True, type=click.Choice(RIVALS), default=RIVALS, show_default=True)
@click.option("--threads", type=click.IntRange(1, 256), default=os.cpu_count(), help="Of PyTorch and of ours.")
@click.option("--clock", type=click.Choice(CLOCKS), default="wall", show_default=True, help="What calls are timed by.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=15, show_default=True, help="Turns of each rival.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False),
    help="Kernels of ours; none by default, so that all compile, for the processor as it is measured then.",
)
@click.option("--all-ours", is_flag=True, help="Leave nothing to the library that kernels of ours compute.")
@click.option(
    "--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results into this file."
)
@click.option("--show", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Show results; run nothing.")
def main(
    *, networks: tuple[str, ...], batches: tuple[int, ...], rivals: tuple[str, ...], threads: int, clock: str,
    rounds: int, cache: str | None, all_ours: bool, out: Path | None, show: Path | None,
) -> None:  # fmt: skip
    """Compile networks with the backend and with Inductor, and time them in turns, a process a network."""
    if show is not None:
        results = json.loads(show.read_bytes())
    else:
        runs = [(name, batch) for batch in batches for name in (networks or NETWORKS)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "ROLLER_NUM_THREADS": str(threads)}
        results = {"processor": load_device(THIS_CPU).title, "threads": threads, "clock": clock, "rounds": rounds}
        results["networks"] = []
        for name, batch in runs:
            request = {"name": name, "batch": batch, "rounds": rounds, "rivals": list(rivals), "cache": cache}
            request |= {"competes": not all_ours, "threads": threads, "clock": clock}
            command = [sys.executable, "-m", "bench.backend.run", json.dumps(request)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            results["networks"].append(json.loads(done.stdout.splitlines()[-1]))
            if out is not None:
                write_atomic(out, json.dumps(results, indent=1) + "\n")
    Console(width=150).print(table(results["networks"]))


def table(rows: list[dict[str, Any]]) -> Table:
    """A row for every network: times of all, ours against the best of the others."""
    rivals = [rival for rival in RIVALS if rival in rows[0]["milliseconds"]]
    shown = Table("network", "batch", *rivals, "best / ours", "predicted", "error", "in ours", "compiled in", box=None)
    ratios = []
    for row in rows:
        times = row["milliseconds"]
        others = [times[rival] for rival in rivals if rival != "roller"]
        ratio = min(others) / times["roller"] if others else float("nan")
        ratios.append(ratio)
        shown.add_row(
            row["network"],
            str(row["batch"]),
            *[f"{times[rival]:.2f} ms" for rival in rivals],
            f"{ratio:.2f}",
            f"{sum(row['predicted_milliseconds'].values()):.2f} ms",
            f"{row['error']:.0e}",
            f"{row['taken']} of {row['products']}, {row['share']:.0%}",
            f"{row['compile_seconds']['roller']:.1f} s",
        )
    shown.add_row("geometric mean", *[""] * (len(rivals) + 1), f"{statistics.geometric_mean(ratios):.2f}")
    return shown


if __name__ == "__main__":
    main()
