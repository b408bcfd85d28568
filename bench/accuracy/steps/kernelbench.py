"""KernelBench's problems in PyTorch on two H100: captured operators priced, eager and compiled, against measured times.

The operators of a problem are those of the data, in order; which reads what another wrote follows from the sizes: a
tensor is the last of its dimensions that was read or written, a second one in the same call the last but one, or new;
the result of the last operator outlives the call. Problems whose operators are cut off are left out. Constants were
chosen on problems of even numbers at most; those of odd numbers judge them.

A few problems were measured as other programs than the ones whose operators are known (number 12 of the first level as
a product with a matrix that has its elements on the diagonal): they stay in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from daydream.capture.captured import Capture, CapturedOperator, CapturedStorage
from daydream.graph.graph import Phase
from daydream.operators.inputs import Dims, Inputs, RecordedTensor
from daydream.operators.rules import launches_nothing
from hal.catalog import load_device

#: Operators of a problem in the data at most: those with as many are cut off.
MOST_OPERATORS = 60

#: Largest median and mean error asked for, in per cent, of eager times and the median of compiled ones.
MEDIAN_BAR, MEAN_BAR, COMPILED_BAR = 8.0, 15.0, 15.0

#: Rows of the table of the worst.
WORST = 12

#: Results whose type is not that of the first argument: name -> types of further results.
_PLACES = {
    "max_pool2d_with_indices": "long int", "max_pool3d_with_indices": "long int", "max": "long int", "min": "long int",
    "sort": "long int", "topk": "long int", "native_dropout": "bool",
}  # fmt: skip

#: Results of another type than the first argument.
_ALONE = {"argmax": "long int", "argmin": "long int", "eq": "bool"}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A measured problem on a board.

    Attributes:
        name: as in the data, ``level1/3_...``.
        board: its device file.
        eager: measured seconds of a call.
        compiled: likewise, by ``torch.compile``.
        capture: its operators.
    """

    name: str
    board: str
    eager: float
    compiled: float
    capture: Capture

    @property
    def level(self) -> str:
        """Single operators, fusions, or networks."""
        return self.name.partition("/")[0]

    @property
    def chosen_on(self) -> bool:
        """Whether constants may have been chosen on it."""
        return int(self.name.partition("/")[2].partition("_")[0]) % 2 == 0


@dataclass(frozen=True, kw_only=True)
class Score:
    """A problem and its predicted seconds, eager and compiled."""

    problem: Problem
    eager: float
    compiled: float


# Read


def read_problems(path: Path) -> list[Problem]:
    """The rows of a file whose operators are complete."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    return [
        Problem(
            name=row["problem"],
            board=row["board"],
            eager=row["eager_ms"] / 1e3,
            compiled=row["compiled_ms"] / 1e3,
            capture=capture_of(row["problem"], row["operators"]),
        )
        for row in rows
        if len(row["operators"]) < MOST_OPERATORS
    ]


def capture_of(title: str, listed: Sequence[Sequence[Any]]) -> Capture:
    """A forward pass from operators as ``[name, [[sizes, type], ...], values, [sizes, ...]]``.

    >>> relu = ["aten::relu", [[[8, 4], "float"]], [""], [[8, 4]]]
    >>> [operator.read for operator in capture_of("twice", [relu, relu]).operators]
    [(0,), (1,)]
    """
    storages: list[CapturedStorage] = []
    recent: dict[Dims, list[int]] = {}

    def storage(tensor: RecordedTensor, kind: str) -> int:
        storages.append(CapturedStorage(tensor.bytes, kind))
        return len(storages) - 1

    operators = []
    for name, given, values, made in listed:
        stem = name.removeprefix("aten::")
        inputs = _inputs(stem, [_tensor(*each) for each in given], tuple(values))
        tensors = [tensor for tensor in (*inputs.tensors, *sum(inputs.lists, ())) if tensor is not None]
        kind = given[0][1] if given else "float"
        kinds = [_ALONE.get(stem, kind), *[_PLACES.get(stem, kind)] * (len(made) - 1)]
        outputs = tuple(_tensor(dims, each) for dims, each in zip(made, kinds, strict=False))
        read: tuple[int, ...] = ()
        for each in tensors:
            known = [place for place in reversed(recent.setdefault(each.dims, [])) if place not in read]
            if not known:
                known = [storage(each, "input")]
                recent[each.dims].insert(0, known[0])
            read += (known[0],)
        in_place = stem.endswith("_")
        new = () if in_place else tuple(storage(each, "step") for each in outputs)
        written = read[:1] if in_place else new
        for each, place in zip(outputs, new, strict=False):
            recent.setdefault(each.dims, []).append(place)
        operators.append(
            CapturedOperator(
                name=name,
                overload=_overload(stem),
                inputs=inputs,
                outputs=outputs,
                module=-1,
                phase=Phase.FORWARD,
                launches=not launches_nothing(name, inputs, outputs),
                read=read,
                written=written,
                made=new,
            )
        )
    return Capture(
        title=title, operators=tuple(_freed(operators)), modules=(), parameters=(), storages=tuple(storages)
    )  # fmt: skip


def _freed(operators: Sequence[CapturedOperator]) -> list[CapturedOperator]:
    """The operators with what each is the last to read; results of the last one stay."""
    last = {place: number for number, each in enumerate(operators) for place in (*each.read, *each.written)}
    made = {place for each in operators for place in each.made} - set(operators[-1].written)
    return [
        replace(each, freed=tuple(place for place in sorted(made) if last[place] == number))
        for number, each in enumerate(operators)
    ]


@cache
def _overload(stem: str) -> str:
    """The overload of tensors of an operator, which the data does not name."""
    import torch

    names: list[str] = getattr(getattr(torch.ops.aten, stem, None), "overloads", list)()
    return next((name for name in ("Tensor", "Tensor_Scalar", "default") if name in names), "default")


def _tensor(dims: Sequence[int], kind: str) -> RecordedTensor:
    strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
    return RecordedTensor(tuple(dims), kind, tuple(strides))


def _inputs(stem: str, tensors: Sequence[RecordedTensor], values: tuple[str, ...]) -> Inputs:
    """Arguments: tensors stand where there is no value; those of a joining operator are a list."""
    if stem in ("cat", "stack"):
        return Inputs((None,) * len(values), values, (tuple(tensors), *[()] * (len(values) - 1)))
    if stem == "_cudnn_rnn":
        # Weights are a list between the input and the state.
        weights = [tensor for tensor in tensors[1:] if len(tensor.dims) < 3]
        states = [tensor for tensor in tensors[1:] if len(tensor.dims) == 3]
        places: list[RecordedTensor | None] = [None] * len(values)
        places[0] = tensors[0]
        places[4 : 4 + len(states)] = states
        lists: list[tuple[RecordedTensor, ...]] = [()] * len(values)
        lists[1] = tuple(weights)
        return Inputs(tuple(places), values, tuple(lists))
    waiting = list(tensors)
    return Inputs(tuple(waiting.pop(0) if value == "" and waiting else None for value in values), values)


# Predicted


def evaluate(problems: Sequence[Problem]) -> list[Score]:
    """What every problem takes on its board, in order."""
    from daydream.capture.fusion.inductor import fused
    from daydream.prediction.step import predicted

    scores = []
    for problem in problems:
        device = load_device(problem.board)
        eager, compiled = (
            predicted(capture, [device])[0].step_seconds for capture in (problem.capture, fused(problem.capture))
        )
        scores.append(Score(problem=problem, eager=eager, compiled=compiled))
    return scores


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """Errors by board, level and half, what is worst, and a picture in ``out``; none where the file is missing."""
    path = data / "kernelbench" / "problems.jsonl"
    if not path.is_file():
        return []
    scores = evaluate(read_problems(path))
    chart(scores, out / "kernelbench.png")
    return [error_table(scores), worst_table(scores)]


def error_table(scores: Sequence[Score]) -> Table:
    """Median and mean errors of eager and compiled times."""
    view = Table(box=None, pad_edge=False, title="KernelBench in PyTorch, float32", title_justify="left")
    for column in ("board", "problems", "half"):
        view.add_column(column)
    for column in ("rows", "median error", "mean error", "beyond a factor of two", "compiled: median", "asked"):
        view.add_column(column, justify="right")
    boards = {score.problem.board: load_device(score.problem.board).title for score in scores}
    levels = {"level1": "operators", "level2": "fusions", "level3": "networks", "": "all"}
    halves: Mapping[str, tuple[bool, ...]] = {"chosen on": (True,), "others": (False,), "both": (True, False)}
    for board, title in boards.items():
        for level, word in levels.items():
            for half, ways in halves.items():
                mine = [
                    score
                    for score in scores
                    if score.problem.board == board
                    and score.problem.level.startswith(level)
                    and score.problem.chosen_on in ways
                ]
                if not mine or (level and half == "both"):
                    continue
                asked = f"{MEDIAN_BAR:g}%, {MEAN_BAR:g}%, {COMPILED_BAR:g}%" if half == "both" else ""
                style = "bold" if not level else None
                view.add_row(title, word, half, str(len(mine)), *_figures(mine), asked, style=style)
    return view


def _figures(scores: Sequence[Score]) -> tuple[str, ...]:
    ratios = np.array([score.eager / score.problem.eager for score in scores])
    compiled = np.array([score.compiled / score.problem.compiled for score in scores])
    errors, far = np.abs(ratios - 1), int(((ratios < 0.5) | (ratios > 2)).sum())
    return f"{np.median(errors):.1%}", f"{errors.mean():.1%}", str(far), f"{np.median(np.abs(compiled - 1)):.1%}"


def worst_table(scores: Sequence[Score]) -> Table:
    """The problems with the largest errors, by the ratio of both times."""
    view = Table(box=None, pad_edge=False, title="The worst of KernelBench", title_justify="left")
    for column in ("board", "problem"):
        view.add_column(column)
    for column in ("measured ms", "predicted ms", "predicted/measured"):
        view.add_column(column, justify="right")
    ranked = sorted(scores, key=lambda score: -abs(math.log(score.eager / score.problem.eager)))
    for score in ranked[:WORST]:
        name = score.problem.name.partition("/")[2].removesuffix(".py").replace("_", " ")
        ratio = score.eager / score.problem.eager
        cells = (f"{score.problem.eager * 1e3:.3g}", f"{score.eager * 1e3:.3g}", f"{ratio:.2f}")
        view.add_row(score.problem.board, f"{score.problem.level} {name}", *cells)
    return view


def chart(scores: Sequence[Score], path: Path) -> None:
    """Predicted over measured times, eager and compiled."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    for axis, way in zip(axes, ("eager", "compiled"), strict=True):
        for level in sorted({score.problem.level for score in scores}):
            mine = [score for score in scores if score.problem.level == level]
            measured = np.array([getattr(score.problem, way) for score in mine])
            ratios = np.array([getattr(score, way) for score in mine]) / measured
            axis.scatter(measured * 1e3, ratios, s=9, label=level)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="measured, ms", title=way, ylim=(0.1, 10))
    axes[0].set_ylabel("predicted / measured")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
