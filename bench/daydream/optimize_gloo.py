"""``python -m bench.daydream.optimize_gloo``: a plan for two ranks on this machine's cores, then both lists run.

One rank's plain training is recorded while the other trains, too, and all-reduces of several sizes are timed: a
latency and a bandwidth. `daydream optimize` makes the list of buckets from that. Then steps with DDP's default buckets
and with the plan's are run in turns, so that what else the machine does falls on both.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.daydream.recompute import Blocks, Mixed
from daydream.optimize.exchange import Exchange
from daydream.optimize.strategies import Optimized, optimized
from daydream.passes.basis.communication import MEBIBYTE
from daydream.passes.ddp import CALL_US, AllReduceCost
from daydream.record.record import record
from daydream.tasks.build import read_graph

#: The plan's steps may be longer than the default's by this share: what runs in turns still differs by as much.
LIMIT = 0.02

RANKS = 2

#: Blocks of 8.4 MB of gradients each, and samples of a step.
DEPTH, WIDTH, BATCH = 6, 512, 16

#: Bytes of the all-reduces that are timed, and how often each.
SIZES, REPEATS = (1 << 16, 1 << 20, 1 << 22, 1 << 24), 9


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=24, show_default=True, help="Of each list.")
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="In a round.")
def main(rounds: int, steps: int) -> None:
    """Exit code 1 if the plan is slower than DDP's default buckets."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_rank, (folder, rounds, steps), nprocs=RANKS)
        slower = float((Path(folder) / "ratio").read_text())
    raise SystemExit(int(slower > 1 + LIMIT))


def _rank(rank: int, folder: str, rounds: int, steps: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    trace = _recorded(Path(folder), rank)
    latency_us, bandwidth = _network()
    plan: list[list[float]] = [[]]
    if rank == 0:
        cost = AllReduceCost(RANKS, bandwidth, latency_us, 1.0)
        answer = optimized(Exchange.of(read_graph(trace), cost, CALL_US))
        plan = [_limits(answer)]
        _tell(answer, latency_us, bandwidth)
    dist.broadcast_object_list(plan)
    times = _in_turns({"default": None, "plan": plan[0]}, rounds, steps)
    if rank == 0:
        ratio = _compare(times)
        (Path(folder) / "ratio").write_text(str(ratio))
    dist.destroy_process_group()


def _training(limits: list[float] | None, wrapped: bool = True) -> Any:
    """A function that runs one step."""
    torch.manual_seed(0)
    inner = Blocks(nn.Linear(WIDTH, WIDTH), [Mixed(WIDTH) for _ in range(DEPTH)], nn.Linear(WIDTH, 16))
    # Limits may be fractions of MiB, whatever the annotation says.
    model: Any = DistributedDataParallel(inner, bucket_cap_mb_list=cast(Any, limits)) if wrapped else inner
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step, inner


def _recorded(folder: Path, rank: int) -> Path:
    """The trace of a plain training, on every rank at a time."""
    step, model = _training(None, wrapped=False)
    path = folder / f"rank{rank}.json"
    dist.barrier()
    with record(path, steps=3, model=model) as recorder:
        while recorder.written is None:
            step()
            recorder.step()
    dist.barrier()
    assert recorder.written is not None
    return recorder.written


def _network() -> tuple[float, float]:
    """Microseconds of each of the two steps of a ring of two, and GB/s: a line through the medians."""
    medians = []
    for size in SIZES:
        data, taken = torch.zeros(size // 4), []
        for _ in range(REPEATS):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(data)
            taken.append(1e6 * (time.perf_counter() - begin))
        medians.append(statistics.median(taken))
    slope, offset = np.polyfit(SIZES, medians, 1, w=1 / np.array(medians))
    return max(float(offset), 1.0) / 2, 1e-3 / float(slope)


def _limits(answer: Optimized) -> list[float]:
    best = answer.best
    first, limits = 0, []
    for last in best.best:
        size = sum(gradient.bytes for gradient in best.exchange.of_step[first : last + 1])
        limits.append(size / MEBIBYTE)
        first = last + 1
    return limits


def _tell(answer: Optimized, latency_us: float, bandwidth: float) -> None:
    before, best = answer.before, answer.best
    click.echo(f"all-reduces: {2 * latency_us:.0f} µs and {bandwidth:.2f} GB/s")
    click.echo(f"without exchange: {(before.step.done - before.step.begin) / 1e3:.1f} ms")
    click.echo(f"predicted: {before.lengths_us[before.usual] / 1e3:.1f} ms with {len(before.usual)} buckets by default")
    listed = ", ".join(f"{limit:.2f}" for limit in _limits(answer))
    click.echo(f"predicted: {best.length_us / 1e3:.1f} ms with {len(best.best)}, of {listed} MiB")


def _in_turns(lists: dict[str, list[float] | None], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step, by list: the mean of every round, the first of which warms up."""
    trainings = {name: _training(limits)[0] for name, limits in lists.items()}
    times: dict[str, list[float]] = {name: [] for name in lists}
    for number in range(rounds + 1):
        # Whoever goes first may find a warmer or a colder machine.
        for name in list(trainings)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                trainings[name]()
            if number:
                times[name].append((time.perf_counter() - begin) / steps)
    return times


def _compare(times: dict[str, list[float]]) -> float:
    """Time of the plan over that of the default: the median of the rounds' ratios, printed with both."""
    for name, taken in times.items():
        click.echo(f"measured: {1e3 * statistics.median(taken):.1f} ms, {name}")
    ratios = [plan / default for plan, default in zip(times["plan"], times["default"], strict=True)]
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    spread = f"the median of {len(ratios)} rounds; half of them {low:.3f} to {high:.3f}"
    click.echo(f"plan over default: {middle:.3f}, {spread}")
    return float(middle)


if __name__ == "__main__":
    main()
