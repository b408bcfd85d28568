"""Steps of many boards as ``daydream plan`` predicts them, against measured ones: Megatron-LM and torchtitan.

Megatron's hosts need longer for a call than PyTorch's own modules do (its layers are Python around autograd functions,
checkpoints save the state of random numbers, collectives are asked for one by one), so that one factor of the host is
chosen: on every second row of the runs within a node, and the other rows are judged with it, and runs on more nodes.
Nothing else is chosen on any of these rows.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table
from scipy.optimize import minimize_scalar
from scipy.stats import spearmanr

from bench.accuracy.errors import Errors, asked
from bench.accuracy.steps.llama_model import llama_subject
from bench.accuracy.steps.megatron_model import gpt_subject
from bench.pictures import draw_comparison
from daydream.capture.options import CaptureOptions
from daydream.plan.layout import Layout
from daydream.plan.planned import PlannedStep, planned
from daydream.plan.source import planned_units
from daydream.plan.units import Units
from hal.catalog import load_device
from hal.node_catalog import load_node
from hal.spec.device import DeviceSpec
from hal.spec.node import NodeSpec
from hal.spec.power import with_power
from hal.support.tables import new_table

#: Largest mean errors asked for: vTrain's runs within a node and on more, torchtitan's time and memory; and their rank.
BARS = {"single": 0.15, "multi": 0.18, "time": 0.20, "memory": 0.15}
RANK = 0.97

#: What the host's factor may be.
HOSTS = (1.0, 8.0)

#: vTrain's cluster: four HDR adapters for eight boards (its example configuration has 800 Gbit/s for a node).
_VTRAIN_NETWORK = 12.5e9

#: torchtitan's boards: 96 GB of HBM2e at 2.4 TB/s, limited to 500 W of the 700 W (its benchmark pages).
_TITAN_BYTES, _TITAN_DRAM, _TITAN_POWER = 96 * 2**30, 2.4e12, 500 / 700
_H100_DRAM = 3.35e12


@dataclass(frozen=True, kw_only=True)
class Run:
    """A measured run of Megatron-LM.

    Attributes:
        layers, hidden, heads, sequence: of the model.
        batch: samples of a micro-batch.
        global_batch: samples of a step.
        tensor, data, pipeline: ranks.
        seconds: of a step.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    global_batch: int
    tensor: int
    data: int
    pipeline: int
    seconds: float

    @property
    def layout(self) -> Layout:
        """Megatron's: gradients are exchanged behind the backward pass, and hosts wait for messages."""
        return Layout(
            data=self.data, tensor=self.tensor, pipeline=self.pipeline,
            micro_batches=self.global_batch // self.data // self.batch, overlap=False, waits=True,
        )  # fmt: skip

    def step(self, node: NodeSpec, host: float) -> PlannedStep:
        """The run predicted."""
        units = _gpt(self.layers, self.hidden, self.heads, self.sequence, self.batch, self.tensor)
        return planned(units, self.layout, load_device("a100-sxm-80gb"), node, host=host)


def read_runs(path: Path) -> list[Run]:
    """The runs of one of vTrain's files."""
    with path.open(encoding="utf-8") as lines:
        rows = list(csv.reader(lines))[1:]
    skipped = len(rows[0]) - 11
    runs = []
    for row in rows:
        _, global_batch, batch, hidden, heads, layers, sequence, tensor, data, pipeline = map(int, row[skipped:-1])
        runs.append(
            Run(
                layers=layers,
                hidden=hidden,
                heads=heads,
                sequence=sequence,
                batch=batch,
                global_batch=global_batch,
                tensor=tensor,
                data=data,
                pipeline=pipeline,
                seconds=float(row[-1]) / 1e3,
            )
        )
    return runs


@cache
def _gpt(layers: int, hidden: int, heads: int, sequence: int, batch: int, tensor: int) -> Units:
    options = CaptureOptions(batch=batch, dtype="float16", optimizer="adamw", implementation="fused", checkpoint="full")
    make = partial(gpt_subject, layers=layers, hidden=hidden, heads=heads, sequence=sequence, batch=batch)
    return planned_units(make, options, tensor=tensor)


def chosen_host(runs: Sequence[Run], node: NodeSpec) -> float:
    """The factor of the host that serves runs best."""

    def error(host: float) -> float:
        return float(np.mean([abs(run.step(node, host).seconds / run.seconds - 1) for run in runs]))

    return float(minimize_scalar(error, bounds=HOSTS, method="bounded", options={"xatol": 0.05}).x)


# torchtitan


@dataclass(frozen=True, kw_only=True)
class TitanRun:
    """A row of torchtitan's pages with its prediction, and what was measured.

    Attributes:
        name: model, ranks and type.
        compiled: whether its blocks are.
        step: the prediction, in bfloat16.
        seconds: of a step; None where it was in another type, or exchanged in ways that are not modelled.
        gibibytes: reserved; None where unknown.
    """

    name: str
    compiled: bool
    step: PlannedStep
    seconds: float | None
    gibibytes: float | None


def titan_board() -> DeviceSpec:
    """The board of torchtitan's pages, from H100 SXM's file by its memory and its power limit."""
    board = with_power(load_device("h100-sxm-80gb"), _TITAN_POWER)
    rate = board.dram.bandwidth_bytes_per_second * _TITAN_DRAM / _H100_DRAM
    dram = msgspec.structs.replace(board.dram, bandwidth_bytes_per_second=rate, capacity_bytes=_TITAN_BYTES)
    layers = tuple(dram if each.name == "dram" else each for each in board.layers)
    return msgspec.structs.replace(board, layers=layers)


def titan_runs(path: Path) -> list[TitanRun]:
    """The rows in bfloat16 whose exchanges in layers are waited for, and the memory of all.

    Float8 keeps what bfloat16 keeps; ranks that share a sequence share the model by FSDP, too.
    """
    with path.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    board, node = titan_board(), load_node("hgx-h100")
    runs = []
    for row in rows:
        ways = dict(_way(part) for part in row["parallelism"].split())
        is_timed = row["precision"] == "bfloat16" and set(ways) <= {"fsdp", "tp"}
        if not is_timed and not row["memory_gib"]:
            continue
        parts = ways.get("cp", 1)
        batch, sequence, tensor = int(row["local_batch"]), int(row["sequence"]) // parts, ways.get("tp", 1)
        checkpoint = "full" if row["checkpointing"] == "full" else "selective"
        options = CaptureOptions(
            batch=batch, dtype="bfloat16", optimizer="adamw", implementation="fused", checkpoint=checkpoint
        )
        units = planned_units(
            partial(llama_subject, row["model"], sequence=sequence, batch=batch), options, tensor=tensor,
            sequence_parallel=tensor > 1, compiles=row["compile"] == "yes",
        )  # fmt: skip
        data = ways["fsdp"] * parts
        layout = Layout(data=data, tensor=tensor, shard="fsdp", reduce_bytes=4, sequence=tensor > 1)
        seconds = batch * sequence / tensor / float(row["tokens_per_second_per_gpu"])
        runs.append(
            TitanRun(
                name=f"{row['model']} {row['parallelism']}, {row['precision']}",
                compiled=row["compile"] == "yes",
                step=planned(units, layout, board, node),
                seconds=seconds if is_timed else None,
                gibibytes=float(row["memory_gib"]) if row["memory_gib"] else None,
            )
        )
    return runs


def _way(part: str) -> tuple[str, int]:
    """A direction and its ranks; those without a number count as one.

    >>> _way("fsdp8"), _way("async")
    (('fsdp', 8), ('async', 1))
    """
    name = part.rstrip("0123456789")
    return name, int(part[len(name) :] or 1)


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """Tables of both, and a picture of Megatron's runs in ``out``; none where the measured models are missing."""
    folder = data / "models"
    if not (folder / "vtrain_single.csv").is_file():
        return
    within, node = read_runs(folder / "vtrain_single.csv"), load_node("dgx-a100")
    beyond, cluster = read_runs(folder / "vtrain_multi.csv"), _with_network(node)
    halves = [within[0::2], within[1::2]]
    hosts = [chosen_host(half[::4], node) for half in halves]
    predicted = [[run.step(node, host).seconds for run in half] for half, host in zip(halves[::-1], hosts, strict=True)]
    many = [run.step(cluster, hosts[0]).seconds for run in beyond]
    view = new_table(
        ("runs", "host factor, chosen on", "rows", "mean error", "asked", "median", "worst", "rank by step"),
        title="Megatron-LM on A100s: steps predicted from code and plan (vTrain's runs)",
    )
    names = ("2 to 8 boards, even rows", "2 to 8 boards, odd rows")
    for name, half, times, host, source in zip(
        names, halves, predicted[::-1], hosts[::-1], ("odd", "even"), strict=True
    ):
        _megatron_row(view, name, f"{host:.2f}, {source} rows", half, times, BARS["single"])
    _megatron_row(view, "64 to 512 boards", f"{hosts[0]:.2f}, even rows within a node", beyond, many, BARS["multi"])
    seconds = [*predicted[1], *predicted[0], *many]
    runs = [*halves[0], *halves[1], *beyond]
    rank = spearmanr(seconds, [run.seconds for run in runs]).statistic
    view.add_row("all", "", str(len(runs)), "", "", "", "", f"{rank:.3f} (asked {RANK})")
    yield view
    _picture(within, beyond, [*_woven(predicted[1], predicted[0])], many, out / "plans.png")
    yield titan_table(titan_runs(folder / "torchtitan.csv"))


def _with_network(node: NodeSpec) -> NodeSpec:
    assert node.network is not None
    share = node.network.reached_bytes_per_second / node.network.bandwidth_bytes_per_second
    network = msgspec.structs.replace(
        node.network, bandwidth_bytes_per_second=_VTRAIN_NETWORK, reached_bytes_per_second=share * _VTRAIN_NETWORK
    )
    return msgspec.structs.replace(node, network=network)


def _woven(even: Sequence[float], odd: Sequence[float]) -> Iterable[float]:
    for place in range(len(even) + len(odd)):
        yield (odd if place % 2 else even)[place // 2]


def _megatron_row(view: Table, name: str, host: str, runs: Sequence[Run], times: Sequence[float], bar: float) -> None:
    measured = [run.seconds for run in runs]
    errors, rank = Errors.of(times, measured), spearmanr(times, measured).statistic
    ranks = f"{rank:.3f} (asked {RANK})"
    view.add_row(name, host, errors.count, errors.mean, asked(bar), errors.median, errors.worst, ranks)


def titan_table(runs: Sequence[TitanRun]) -> Table:
    """A line per run."""
    names = ("step s", "measured", "error", "asked", "reserved GiB", "measured", "error", "asked")
    title = "torchtitan on H100s of 500 W, predicted in bfloat16: nothing chosen on these rows"
    view = new_table(("run", "compiled", *names), title=title)
    for run in runs:
        time = _compared(run.step.seconds, run.seconds, "time", 2)
        memory = _compared(run.step.memory.reserved / 2**30, run.gibibytes, "memory", 1)
        view.add_row(run.name, "yes" if run.compiled else "no", *time, *memory)
    return view


def _compared(predicted: float, measured: float | None, bar: str, digits: int) -> list[str]:
    """Prediction, measurement, error and bar."""
    if measured is None:
        return ["-"] * 4
    error = f"**{100 * (predicted / measured - 1):+.1f} %**"
    return [f"{predicted:.{digits}f}", f"{measured:.{digits}f}", error, asked(BARS[bar])]


def _picture(
    within: Sequence[Run], beyond: Sequence[Run], times: Sequence[float], many: Sequence[float], path: Path
) -> None:
    """Predicted against measured steps, by what most ranks do."""
    panels: dict[str, dict[str, Any]] = {}
    for runs, seconds, title in ((within, times, "2 to 8 boards"), (beyond, many, "64 to 512 boards")):
        groups: dict[str, list[tuple[float, float]]] = {}
        for run, predicted in zip(runs, seconds, strict=True):
            mostly = max(("tensor", "pipeline", "data"), key=run.__getattribute__)
            groups.setdefault(f"mostly {mostly}", []).append((run.seconds, predicted))
        panels[f"{title}; dashed: 15 %"] = {name: tuple(np.array(pairs).T) for name, pairs in groups.items()}
    draw_comparison(path, "Megatron-LM on A100s", panels, unit="s", factor=1.15)
