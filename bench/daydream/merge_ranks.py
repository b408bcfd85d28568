"""``python -m bench.daydream.merge_ranks``: jobs with planted clocks merged, and the time that many ranks take.

The first table has jobs whose hosts' clocks are wrong by known offsets and drifts, and whose last rank is slow: how far
from the truth the aligned clocks are anywhere in the recording; how far the replayed steps are from the recorded ones;
and how far steps predicted for the job without a slow rank are from those that it then has; with clocks aligned and as
recorded. The second has a job of as many as `--ranks` ranks, of which ever more are merged, each in a process of its
own; the promise is 256 ranks of 20,000 events in two minutes and 8 GiB.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np

from bench.daydream.synthetic_ranks import Job, recordings, true_times, write
from daydream.ranks.equal import simulate_ranks
from daydream.ranks.merge import Merged, merge, read_ranks
from daydream.ranks.report import replay_error
from daydream.ranks.skew import step_lengths_by_rank

#: What is promised.
OFFSET_LIMIT_US, SECONDS_LIMIT, GIB_LIMIT = 5.0, 120.0, 8.0

#: How much longer the kernels of the last rank take in a planted job.
SLOW = 1.2

#: Layers and steps of the large job: 20,000 events a rank.
_LARGE = {"steps": 4, "layers": 820, "buckets": 20, "kernel_us": 60.0}


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A job with planted clocks, merged.

    Attributes:
        hosts, ranks: of the job.
        spread_us: by how much clocks differ, one standard deviation.
        worst_us: largest distance of an aligned clock from the truth, at the recording's begin or end.
        error: of the replay.
        error_as_recorded: of the replay with clocks as recorded.
        predicted: by what share the step that is predicted for a fast last rank is off the one that it then has.
        predicted_as_recorded: the same with clocks as recorded.
    """

    hosts: int
    ranks: int
    spread_us: float
    worst_us: float
    error: float
    error_as_recorded: float
    predicted: float
    predicted_as_recorded: float


def planted_job(hosts: int, per_host: int, spread_us: float, seed: int, *, steps: int = 6) -> Job:
    """A job whose clocks are apart by about `spread_us`, and drift by about 20 µs a second; one rank is slow."""
    draw = np.random.default_rng(seed)
    load = np.ones(hosts * per_host)
    load[-1] = SLOW
    return Job(
        ranks=hosts * per_host,
        per_host=per_host,
        steps=steps,
        load=tuple(load.tolist()),
        offset_us=tuple(draw.normal(0.0, spread_us, hosts).tolist()),
        drift=tuple(draw.normal(0.0, 2e-5, hosts).tolist()),
        seed=seed,
    )


def worst_clock_us(job: Job, merged: Merged) -> float:
    """The largest distance of a rank's aligned clock from the first host's, in the recording, microseconds."""
    span = merged.graph.recorded_us
    ends = np.array([0.0, float(np.nanmax(span) - np.nanmin(span))])
    worst = 0.0
    for rank in range(job.ranks):
        recorded_us, truth_us = true_times(job, rank, ends)
        place = np.full(len(ends), rank)
        worst = max(worst, float(np.abs(merged.clocks.aligned(place, recorded_us) - truth_us).max()))
    return worst


def planted(hosts: int, per_host: int, spread_us: float, seed: int) -> Planted:
    """Writes such a job, merges it and compares."""
    job = planted_job(hosts, per_host, spread_us, seed)
    with tempfile.TemporaryDirectory() as folder:
        ranks = read_ranks(write(job, Path(folder)))
    merged, as_recorded = merge(ranks), merge(ranks, aligned=False)
    errors = [
        replay_error(each, simulate_ranks(each.graph), range(len(each.graph.steps))) for each in (merged, as_recorded)
    ]
    truth_us = _true_step_us(replace(job, load=()))
    return Planted(
        hosts=hosts,
        ranks=job.ranks,
        spread_us=spread_us,
        worst_us=worst_clock_us(job, merged),
        error=errors[0],
        error_as_recorded=errors[1],
        predicted=abs(_predicted_step_us(merged) / truth_us - 1.0),
        predicted_as_recorded=abs(_predicted_step_us(as_recorded) / truth_us - 1.0),
    )


def _true_step_us(job: Job) -> float:
    """Mean length of the job's steps on its ranks, but for the first, to which they come apart."""
    lengths = [
        event["dur"]
        for _, document in recordings(job)
        for event in document["traceEvents"]
        if event["name"].startswith("ProfilerStep") and event["name"] != "ProfilerStep#0"
    ]
    return float(np.mean(lengths))


def _predicted_step_us(merged: Merged) -> float:
    """Mean length of the steps, but for the first, if the last rank's kernels take what the others' do."""
    graph = merged.graph
    last = np.array([thread.process == graph.ranks[-1] for thread in graph.threads], np.bool_)
    rows = graph.select(name="sgemm", gpu=True)
    faster = graph.scaled(rows[last[graph.thread[rows]]], 1.0 / SLOW)
    return float(step_lengths_by_rank(simulate_ranks(faster))[:, 1:].mean())


# Many ranks


@dataclass(frozen=True)
class Cost:
    """Cost of merging and replaying so many ranks: wall clock, processor time, and the largest memory."""

    ranks: int
    seconds: float
    processor_seconds: float
    gib: float


def cost(files: Sequence[Path]) -> Cost:
    """Merges files in a process of its own, as the command does, its findings included."""
    started = time.perf_counter()
    code = f"from bench.daydream.merge_ranks import measure; measure({[str(path) for path in files]!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wall = time.perf_counter() - started
    figures = json.loads(done.stdout.splitlines()[-1])
    return Cost(len(files), wall, figures["processor_seconds"], figures["gib"])


def measure(files: Sequence[str]) -> None:
    """Runs ``daydream merge`` in this process and prints what it took."""
    from click.testing import CliRunner

    from daydream.cli import main as daydream

    done = CliRunner().invoke(daydream, ["merge", "--partial", "--json", *files])
    if done.exit_code:
        raise SystemExit(done.output)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    # What getrusage says of memory includes the process that started this one.
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    gib = int(peak[1]) / 2**20 if peak else used[0].ru_maxrss / 2**20
    print(json.dumps({"processor_seconds": seconds, "gib": gib}))


def draw(costs: Sequence[Cost], path: Path) -> None:
    """A picture of the costs by ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (time_axes, memory_axes) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    ranks = [each.ranks for each in costs]
    time_axes.plot(ranks, [each.processor_seconds for each in costs], "o-", label="processor time")
    time_axes.plot(ranks, [each.seconds for each in costs], "s--", color="0.6", label="wall clock, machine shared")
    time_axes.set(xlabel="ranks of 20,000 events", ylabel="seconds", xlim=(0, None), ylim=(0, None))
    time_axes.legend(frameon=False)
    memory_axes.plot(ranks, [each.gib for each in costs], "o-", color="tab:green")
    memory_axes.set(xlabel="ranks of 20,000 events", ylabel="GiB at the peak", xlim=(0, None), ylim=(0, None))
    for axes in (time_axes, memory_axes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


# The command


@click.command()
@click.option("--ranks", type=click.IntRange(8), default=256, show_default=True, help="Ranks of the large job.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Where to draw costs.")
def main(ranks: int, picture: Path | None) -> None:
    """Print both tables."""
    click.echo(
        "| hosts | ranks | clocks apart by, ms | worst aligned clock, µs "
        "| replay | as recorded | prediction | as recorded |"
    )
    click.echo("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for hosts, per_host in ((2, 1), (2, 8), (8, 1), (8, 4)):
        for spread_us in (300.0, 3000.0, 30000.0):
            job = planted(hosts, per_host, spread_us, seed=hosts)
            click.echo(
                f"| {job.hosts} | {job.ranks} | {job.spread_us / 1e3:g} | {job.worst_us:.2f} | {job.error:.2%} | "
                f"{job.error_as_recorded:.1%} | {job.predicted:.2%} | {job.predicted_as_recorded:.1%} |"
            )
    click.echo("\n| ranks | wall clock, s | processor, s | GiB |\n|--:|--:|--:|--:|")
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        files = write(Job(ranks=ranks, per_host=8, **_LARGE), Path(folder))  # type: ignore[arg-type]
        for count in (ranks // 8, ranks // 4, ranks // 2, ranks):
            costs.append(cost(files[:count]))
            largest = costs[-1]
            click.echo(f"| {count} | {largest.seconds:.1f} | {largest.processor_seconds:.1f} | {largest.gib:.2f} |")
    if picture is not None:
        draw(costs, picture)


if __name__ == "__main__":
    main()
