"""Time of the search for buckets with and without each way to speed it up: dPRO's table 5.

``python -m bench.daydream.optimize_search``: ResNet-50 and GPT-2, predicted on an H100, among eight of them. Each line
of the table has one more of dPRO's techniques, then one more pruning. A tilde marks what would take too long: the mean
time of some candidates times how many there are. Every other line was run, and found the same list. Times are of the
processor.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import click
import numpy as np

from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import simulate
from daydream.optimize.coarse import CoarseStep, coarsened
from daydream.optimize.exchange import Ends, Exchange
from daydream.optimize.ranks import replicated
from daydream.optimize.search import Prunings, best_buckets, walked
from daydream.optimize.strategies import best_limit
from daydream.passes.ddp import CALL_US, AllReduceCost
from hal.node_catalog import load_node

Answer = TypeVar("Answer")

#: Ranks, on boards of one node or in a slower network.
RANKS = 8

#: Networks by name: of one node, 100 and 10 Gbit/s.
NETWORKS = {"hgx-h100": 0.0, "12.5 GB/s": 12.5, "1.25 GB/s": 1.25}

#: Replays whose mean time stands for all, of coarse steps and of whole graphs.
SAMPLES, SIMULATIONS = 50, 3

#: Options of `daydream predict` for both models.
_OPTIONS = {
    "sequence": None, "image": None, "class_name": None, "mode": "training", "optimizer": None,
    "optimizer_kernels": "foreach", "attention": "auto", "compiles": False, "implementation": "library",
    "channels_last": False, "checkpoint": "none",
}  # fmt: skip


def main() -> None:
    """Print both tables as Markdown."""
    steps = dict(_steps())
    click.echo("| | " + " | ".join(f"{model}, {network}" for model, network in steps) + " |")
    click.echo("|---|" + "---|" * len(steps))
    columns = [search_times(exchange) for exchange in steps.values()]
    for line in columns[0]:
        click.echo(f"| {line} | " + " | ".join(column[line] for column in columns) + " |")
    click.echo()
    click.echo("| | " + " | ".join(f"{model}, {network}" for model, network in steps) + " |")
    click.echo("|---|" + "---|" * len(steps))
    all_lists = [lists(exchange) for exchange in steps.values()]
    for line in all_lists[0]:
        click.echo(f"| {line} | " + " | ".join(column[line] for column in all_lists) + " |")


def _steps() -> Iterator[tuple[tuple[str, str], Exchange]]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "gpt2.json"
        config.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
        graphs = {
            "ResNet-50": predicted_graph("timm:resnet50", 64, {"dtype": "float32"}),
            "GPT-2": predicted_graph(f"hf:{config}", 8, {"dtype": "bfloat16", "sequence": 1024}),
        }
    node = load_node("hgx-h100")
    for model, graph in graphs.items():
        for network, bandwidth in NETWORKS.items():
            cost = AllReduceCost(RANKS, bandwidth or 1.0, 5.0, 1.34, None if bandwidth else node)
            yield (model, network), Exchange.of(graph, cost, CALL_US)


def predicted_graph(model: str, batch: int, options: dict[str, object]) -> TaskGraph:
    """The graph of a model's step on an H100."""
    from daydream.command.predict import chosen_devices, predicted_steps
    from daydream.prediction.trace import predicted_trace
    from daydream.tasks.build import build_graph

    (step,) = predicted_steps(model, chosen_devices("h100"), [batch], {**_OPTIONS, **options})
    return build_graph(predicted_trace(step))


def search_times(exchange: Exchange) -> dict[str, str]:
    """Seconds of a search by what it uses, as text."""
    step = coarsened(exchange)
    usual = exchange.usual()
    none = Prunings(bound=False, tensors=False, groups=False)
    _, coarsening = _timed(lambda: coarsened(exchange))
    unpruned, seconds = _timed(lambda: best_buckets(step, [usual], none))
    simulation_seconds = _mean(lambda: simulate(replicated(exchange.with_buckets(usual), RANKS)), SIMULATIONS)
    coarse = _mean_replay(step)
    times = {
        "gradients, tasks of a rank": f"{len(step)}, {len(exchange.graph)}",
        "candidates": f"{unpruned.tried}",
        "of all that follows, the coarsened view": f"{coarsening:.2f} s",
        "strawman: every candidate a simulation of all ranks": f"~{simulation_seconds * unpruned.tried:,.0f} s",
        "+ coarsened view": f"~{RANKS * (coarsening + coarse * unpruned.tried):,.1f} s",
        "+ partial replay": f"~{RANKS * (coarsening + seconds):.2f} s",
        "+ symmetry": f"{coarsening + seconds:.2f} s",
    }
    for name, prunings in (
        ("+ theorem 3", Prunings(bound=False, tensors=False, groups=True)),
        ("+ theorem 2", Prunings(bound=False, tensors=True, groups=True)),
        ("+ bound", Prunings()),
    ):
        pruned, seconds = _timed(lambda prunings=prunings: best_buckets(step, [usual], prunings))  # type: ignore[misc]
        assert abs(pruned.length_us - unpruned.length_us) < 1e-3, (pruned, unpruned)
        times[name] = f"{coarsening + seconds:.2f} s, {pruned.tried} tried"
    return times


def lists(exchange: Exchange) -> dict[str, str]:
    """Milliseconds of a step, and buckets, by how the buckets are chosen."""
    step = coarsened(exchange)
    usual, (limit, limited) = exchange.usual(), best_limit(exchange, step)
    ends_by_choice = {
        "without exchange, ms": f"{(step.done - step.begin) / 1e3:.3f}",
        "DDP's default": _cell(step, usual),
        "best `bucket_cap_mb`": f"{_cell(step, limited)}: {limit:g}",
        "algorithm 1's walk": _cell(step, walked(step)),
        "best list": _cell(step, best_buckets(step, [usual, limited]).ends),
    }
    return ends_by_choice


def _cell(step: CoarseStep, ends: Ends) -> str:
    return f"{step.replay(ends) / 1e3:.3f} ({len(ends)})"


def _timed(work: Callable[[], Answer]) -> tuple[Answer, float]:
    begin = time.process_time()
    answer = work()
    return answer, time.process_time() - begin


def _mean(work: Callable[[], object], times: int) -> float:
    return _timed(lambda: [work() for _ in range(times)])[1] / times


def _mean_replay(step: CoarseStep) -> float:
    """Seconds of a replay from the first bucket on of lists drawn at random."""
    draws = np.random.default_rng(0)
    count = len(step)
    drawn = [(*np.flatnonzero(draws.random(count - 1) < 0.1).tolist(), count - 1) for _ in range(SAMPLES)]
    return _timed(lambda: [step.replay(ends) for ends in drawn])[1] / SAMPLES


if __name__ == "__main__":
    main()
