"""``python -m bench.daydream.real_ranks``: jobs of two and four ranks on gloo, recorded, merged, predicted, and run.

Two tiny models are trained by DDP and FSDP2. From the recording of DDP with two ranks and its usual buckets alone the
steps of other buckets, of four ranks and of FSDP2 are predicted, then measured, all in turns and in one session. What
collectives take is a line that is measured with them, by size alone.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click
import msgspec
import numpy as np

from bench.daydream.gloo_models import Job
from bench.daydream.gloo_ranks import Ranks
from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import simulate
from daydream.passes import registered
from daydream.ranks.merge import merge, read_ranks
from hal.support.errors import InputError

#: What is promised: replayed steps, and predicted ones, are off by so much at most.
REPLAY_LIMIT, PREDICTED_LIMIT = 0.05, 0.12

#: Modules that FSDP2 wraps, as regular expressions.
UNITS = {"mlp": "[0-5]", "transformer": "[1-4]"}

#: Bytes of the collectives that are measured, and which.
SIZES = (512 << 10, 1 << 20, 3 << 20)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")

#: Bytes of a collective that carries nothing to speak of, and of the copies that are measured.
SMALL, _COPIED = 1 << 10, 1 << 20

#: Calls of collectives in a step of the tiny model under FSDP2: a gather in both passes and a reduce-scatter a layer.
_TINY_CALLS = 3 * 6

_IN_NETWORK = "DAYDREAM_BENCH_NETWORK"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a collective: microseconds without data, and GB/s of the data in all."""

    latency_us: float
    gbps: float

    def us(self, size: float) -> float:
        """Microseconds for `size` bytes.

        >>> Line(latency_us=100.0, gbps=0.5).us(1e6)
        2100.0
        """
        return self.latency_us + size / (self.gbps * 1e3)


def line(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line of least relative squares through times of several sizes, without a latency below none.

    >>> line([1000, 2000, 3000], [2e-6, 3e-6, 4e-6])
    Line(latency_us=1.0, gbps=1.0)
    """
    x, y = np.array(sizes, np.float64), np.array(seconds) * 1e6
    slope, latency = np.polyfit(x, y, 1, w=1 / y)
    if latency < 0:
        latency, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    return Line(latency_us=round(float(latency), 3), gbps=round(1e-3 / float(slope), 6))


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of the host among some ranks: collectives by name, copies in GB/s, a call of FSDP2 in microseconds."""

    lines: dict[str, Line]
    copy_gbps: float
    call_us: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A job: seconds of a step as predicted (or replayed) and as measured."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All of a session: what the host costs by number of ranks, replays of recordings, predictions."""

    network: str
    hosts: dict[str, Host]
    replays: list[Row]
    untraced: list[Row]
    predictions: list[Row]


def jobs_of(model: str) -> tuple[Job, list[Job]]:
    """The job that is recorded to predict from, and those that are predicted."""
    others = [Job(model=model, ranks=2, bucket_mb=size) for size in (1.0, 2.0)]
    others += [Job(model=model, ranks=4), Job(model=model, ranks=4, bucket_mb=1.0)]
    others += [Job(model=model, ranks=ranks, kind="fsdp") for ranks in (2, 4)]
    return Job(model=model, ranks=2), others


# Measured


class Measured(msgspec.Struct, kw_only=True):
    """Times of a session in seconds: steps by job, collectives by ranks, name and bytes, copies by ranks."""

    network: str
    models: list[str]
    recorded: dict[str, list[str]] = {}
    steps: dict[str, list[float]] = {}
    collectives: dict[str, list[float]] = {}
    copies: dict[str, list[float]] = {}

    def seconds(self, job: Job) -> float:
        """The median step of a job over all turns."""
        return statistics.median(self.steps[job.name])

    def host(self, ranks: int) -> Host:
        """Costs of the host among so many ranks."""

        def collective(name: str, size: int) -> float:
            return statistics.median(self.collectives[f"{ranks} {name} {size}"])

        lines = {name: line(SIZES, [collective(name, size) for size in SIZES]) for name in COLLECTIVES}
        sharded, unsharded = (self.seconds(Job(model="tiny", ranks=ranks, kind=kind)) for kind in ("fsdp", "plain"))
        small = (2 * collective("all_gather", SMALL) + collective("reduce_scatter", SMALL)) / 3
        call = max((sharded - unsharded) / _TINY_CALLS - small, 0.0)
        copy = _COPIED / statistics.median(self.copies[str(ranks)])
        return Host(lines=lines, copy_gbps=round(copy * 1e-9, 3), call_us=round(call * 1e6, 1))


class Session:
    """Pools of two and of four ranks, used in turns, and what they measured."""

    def __init__(self, pools: Mapping[int, Ranks], measured: Measured) -> None:
        self._pools, self.measured = pools, measured

    def record(self, job: Job, steps: int, turn: int, work: Path) -> None:
        """Records the job in this turn, a file for every rank."""
        folder = work / job.name / f"turn{turn}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._pools[job.ranks].tell("record", job, steps, str(folder))
        self.measured.recorded.setdefault(job.name, []).append(str(folder.relative_to(work)))

    def run(self, job: Job, steps: int) -> None:
        """A turn of a job: a step is as long as on the slowest rank."""
        times = zip(*self._pools[job.ranks].tell("run", job, steps), strict=True)
        self.measured.steps.setdefault(job.name, []).extend(max(ranks) for ranks in times)

    def collectives(self) -> None:
        """A turn of every collective, of copies, and of the tiny jobs."""
        for ranks, pool in self._pools.items():
            for name in COLLECTIVES:
                for size in (SMALL, *SIZES):
                    seconds = max(pool.tell("collective", name, size, 1, 2))
                    self.measured.collectives.setdefault(f"{ranks} {name} {size}", []).append(seconds)
            copy = statistics.median(pool.tell("copy", _COPIED))
            self.measured.copies.setdefault(str(ranks), []).append(copy)
            for kind in ("plain", "fsdp"):
                self.run(Job(model="tiny", ranks=ranks, kind=kind), 4)


def measured(models: Sequence[str], rounds: int, steps: int, work: Path, network: str) -> Measured:
    """Everything, recorded and measured in turns."""
    with Ranks(2) as two, Ranks(4) as four:
        session = Session({2: two, 4: four}, Measured(network=network, models=list(models)))
        for model in models:
            base, others = jobs_of(model)
            for turn in range(rounds):
                _say(f"{model}: turn {turn + 1} of {rounds}")
                session.collectives()
                for job in (base, *others):
                    # The job to predict from in every turn, one other in each.
                    if job == base or job == _usual(others)[turn % len(_usual(others))]:
                        session.record(job, steps, turn, work)
                    session.run(job, steps)
    return session.measured


def in_turns(jobs: Sequence[Job], rounds: int, steps: int) -> dict[str, float]:
    """Seconds of a step of jobs of two ranks, by name: medians over all turns."""
    with Ranks(2) as two:
        session = Session({2: two}, Measured(network="", models=[]))
        for _ in range(rounds):
            for job in jobs:
                session.run(job, steps)
    return {job.name: session.measured.seconds(job) for job in jobs}


def _usual(jobs: Sequence[Job]) -> list[Job]:
    """The jobs with usual buckets or none."""
    return [job for job in jobs if not job.bucket_mb]


# Predicted


def step_seconds(graphs: Iterable[TaskGraph]) -> float:
    """The median of the simulated full steps of all graphs."""
    timed = [(simulate(graph).step_us.tolist(), graph.steps) for graph in graphs]
    steps = [us for lengths, named in timed for us, step in zip(lengths, named, strict=True) if step.full]
    return statistics.median(steps) * 1e-6


def predicted(recorded: TaskGraph, job: Job, host: Host) -> TaskGraph:
    """The graph of a job, from the merged recording of another."""
    ring = job.ranks - 1
    reduce, gather, scatter = (host.lines[name] for name in COLLECTIVES)
    if job.kind == "ddp":
        # The passes know rings: 2 (n-1)/n S / B and 2 (n-1) latencies.
        outcome = registered()["rebucket"](
            recorded, workers=job.ranks, bandwidth=reduce.gbps * 2 * ring / job.ranks,
            latency_us=reduce.latency_us / (2 * ring), bucket_mb=job.bucket_mb,
        )  # fmt: skip
    else:
        outcome = registered()["fsdp"](
            recorded, wrap=UNITS[job.model], workers=job.ranks, copy_gbps=host.copy_gbps, call_us=host.call_us,
            bandwidth=gather.gbps * ring / job.ranks, latency_us=gather.latency_us / ring,
            reduce_bandwidth=scatter.gbps * ring / job.ranks, reduce_latency_us=scatter.latency_us / ring,
        )  # fmt: skip
    return outcome.graph


def results_of(session: Measured, work: Path) -> Results:
    """Recordings merged and replayed, and steps predicted."""
    hosts = {ranks: session.host(ranks) for ranks in (2, 4)}
    replays, untraced, predictions = [], [], []
    for model in session.models:
        base, others = jobs_of(model)
        for job in (base, *_usual(others)):
            turns = [merge(read_ranks([work / folder])) for folder in session.recorded.get(job.name, ())]
            if not turns:
                continue
            recorded = statistics.median([us for one in turns for us in one.measured_us[0].tolist()]) * 1e-6
            replayed = step_seconds(one.graph for one in turns)
            replays.append(Row(name=job.name, predicted=replayed, measured=recorded))
            untraced.append(Row(name=job.name, predicted=replayed, measured=session.seconds(job)))
            if job == base:
                graphs = [one.graph for one in turns]
        for job in (base, *others):
            seconds = step_seconds(predicted(graph, job, hosts[job.ranks]) for graph in graphs)
            predictions.append(Row(name=job.name, predicted=seconds, measured=session.seconds(job)))
    return Results(
        network=session.network, hosts={str(ranks): host for ranks, host in hosts.items()}, replays=replays,
        untraced=untraced, predictions=predictions,
    )  # fmt: skip


# Reports


def tables(results: Results) -> str:
    """The results as Markdown."""
    lines = ["| ranks | all-reduce | gather | reduce-scatter | copies | a call of FSDP2 |", "|--:|--:|--:|--:|--:|--:|"]
    for ranks, host in results.hosts.items():
        cells = [f"{one.latency_us / 1e3:.2f} ms + {one.gbps:.3f} GB/s" for one in host.lines.values()]
        lines.append(f"| {ranks} | {' | '.join(cells)} | {host.copy_gbps:.1f} GB/s | {host.call_us / 1e3:.2f} ms |")
    lines += ["", "| recorded | replayed, ms | recorded, ms | error | without profiler, ms | error |"]
    lines += ["|---|--:|--:|--:|--:|--:|"]
    for row, bare in zip(results.replays, results.untraced, strict=True):
        times = f"{row.predicted * 1e3:.1f} | {row.measured * 1e3:.1f} | {row.error:+.1%}"
        lines.append(f"| {row.name} | {times} | {bare.measured * 1e3:.1f} | {bare.error:+.1%} |")
    lines += ["", "| predicted from DDP on two ranks | predicted, ms | measured, ms | error |", "|---|--:|--:|--:|"]
    for row in results.predictions:
        lines.append(f"| {row.name} | {row.predicted * 1e3:.1f} | {row.measured * 1e3:.1f} | {row.error:+.1%} |")
    return "\n".join(lines) + "\n"


def draw(results: Results, path: Path) -> None:
    """A picture of the steps as measured and as predicted."""
    from matplotlib.figure import Figure

    rows = results.predictions
    figure = Figure(figsize=(9, 0.34 * len(rows) + 1.0), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(rows))
    axes.barh(places, [row.measured * 1e3 for row in rows], color="0.8", label="measured")
    axes.plot([row.predicted * 1e3 for row in rows], places, "|", ms=14, mew=2.5, color="tab:blue", label="predicted")
    axes.set_yticks(places, [row.name for row in rows])
    for place, row in zip(places.tolist(), rows, strict=True):
        axes.annotate(
            f"{row.error:+.1%}", (max(row.measured, row.predicted) * 1e3, place), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def met(results: Results) -> bool:
    """True if everything is within its limit."""
    replayed = all(abs(row.error) <= REPLAY_LIMIT for row in results.replays)
    return replayed and all(abs(row.error) <= PREDICTED_LIMIT for row in results.predictions)


def _say(text: str) -> None:
    click.echo(f"  {text}", err=True)


def enter_network(rate: str) -> None:
    """Starts this program again in a network namespace of its own, whose loopback passes `rate` (``250mbit``) in all.

    Raises:
        InputError: a program that this takes is missing.
    """
    for program in ("unshare", "ip", "tc"):
        if shutil.which(program) is None:
            raise InputError(
                "--network", f"needs the program {program}", "install iproute2 and util-linux, or leave it out"
            )
    limit = f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 128kb limit 16mb"
    command = ["unshare", "--net", "sh", "-c", f'{limit} && exec "$@"', "sh", sys.executable, "-m"]
    os.execvpe(command[0], [*command, "bench.daydream.real_ranks", *sys.argv[1:]], {**os.environ, _IN_NETWORK: rate})


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--models", default=",".join(UNITS), show_default=True, metavar="NAME,NAME", help="Which networks.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True, help="Turns of each job.")
@click.option(
    "--steps", type=click.IntRange(1, 1000), default=4, show_default=True, help="To record, and in each turn."
)
@click.option("--network", default="", metavar="RATE",
              help="Run in a network of this rate (250mbit), which takes root.  [default: as it is]")  # fmt: skip
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=Path("out/real-ranks"),
              help="Traces and measured.json.  [default: out/real-ranks]")  # fmt: skip
@click.option("--show", type=click.Path(exists=True, file_okay=False, path_type=Path), default=None, metavar="WORK",
              help="Predict from what lies there again, measure nothing.")  # fmt: skip
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Where to draw them.")
@click.option("--plan", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=None, metavar="PLAN.json",
              help="Only run the buckets of `daydream optimize` beside the usual ones.")  # fmt: skip
@click.option("--limits", is_flag=True, help="Exit with 1 where something is off by more than is promised.")
def main(
    *,
    models: str,
    rounds: int,
    steps: int,
    network: str,
    work: Path,
    show: Path | None,
    picture: Path | None,
    plan: Path | None,
    limits: bool,
) -> None:
    """Record jobs of several ranks on gloo, merge and replay them, predict others and run those."""
    try:
        results_file = (show or work) / "measured.json"
        if show is None and network and os.environ.get(_IN_NETWORK) != network:
            enter_network(network)
        if plan is not None:
            _run_plan(plan, _chosen(models), rounds, steps)
            return
        if show is None:
            session = measured(_chosen(models), rounds, steps, work, network)
            results_file.write_bytes(msgspec.json.format(msgspec.json.encode(session), indent=1) + b"\n")
        results = results_of(msgspec.json.decode(results_file.read_bytes(), type=Measured), results_file.parent)
    except InputError as error:
        click.echo(f"bench.daydream.real_ranks: {error}", err=True)
        sys.exit(2)
    click.echo(tables(results))
    if picture is not None:
        draw(results, picture)
    promise = f"replays within {REPLAY_LIMIT:.0%}, predictions within {PREDICTED_LIMIT:.0%}"
    click.echo(f"{promise}: {'yes' if met(results) else 'no'}")
    if limits and not met(results):
        sys.exit(1)


def _run_plan(path: Path, models: Sequence[str], rounds: int, steps: int) -> None:
    """Runs a plan's list of buckets and DDP's default in turns, and prints both.

    Raises:
        InputError: the plan has no list.
    """
    try:
        caps = tuple(float(size) for size in msgspec.json.decode(path.read_bytes())["ddp"]["bucket_cap_mb_list"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        raise InputError(str(path), "holds no ddp.bucket_cap_mb_list", "give a plan of `daydream optimize`") from None
    for model in models:
        usual, planned = Job(model=model, ranks=2), Job(model=model, ranks=2, buckets=caps)
        seconds = in_turns((usual, planned), rounds, steps)
        ratio = seconds[planned.name] / seconds[usual.name]
        listed = ", ".join(f"{name} {time * 1e3:.1f} ms" for name, time in seconds.items())
        click.echo(f"{listed}: {ratio:.3f} of the usual buckets' time")


def _chosen(text: str) -> list[str]:
    names = [name for part in text.split(",") if (name := part.strip())]
    for name in names:
        if name not in UNITS:
            raise InputError("--models", f"there is no {name!r}", f"name some of {', '.join(UNITS)}")
    return names


if __name__ == "__main__":
    main()
