"""``python -m bench.accuracy.halves``: RATIONAL's constants chosen on half of Ansor's operators, judged on the others.

A draw puts every second operator of each kind, in random order, into one half. From a random place of a grid, a search
coordinate by coordinate takes the constants that serve that half best; the other half is predicted with these. What
the model says of operators that nobody chose constants on is the mean over many draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import click
import numpy as np
from rich.table import Table

from bench.accuracy.ansor import TILED, Log
from bench.accuracy.data import data_directory
from bench.accuracy.effects import Effect, without
from bench.accuracy.schedules import CHOICES, DEVICE, Score, logs, predict, score
from hal.catalog import load_device
from sokoban.model.gpu import breakdown, fetch, occupancy, operands, stages, step

#: A constant; of a ramp both ends.
Value = float | tuple[float, float]

#: Constant -> the modules that hold it, and the values to choose from. They are about compilers and overlap; figures of
#: the board are not among them.
CONSTANTS: Mapping[str, tuple[Sequence[ModuleType], Sequence[Value]]] = {
    "UNHIDDEN": ((breakdown,), (0.1, 0.18, 0.25, 0.35, 0.5)),
    "HIDING": ((breakdown,), (0.0, 0.15, 0.3)),
    "UNHIDDEN_WAIT": ((breakdown,), (0.5, 0.75, 1.0, 1.3)),
    # Never none: one program in a hundred spills without need, too few for a half to show what is at stake.
    "HOISTING_RISK": ((breakdown,), (0.15, 0.2, 0.25, 0.35)),
    "HOISTED_WORDS": ((breakdown,), ((4.0, 6.0), (4.0, 7.0), (5.0, 8.0))),
    "HOISTING_ROOM": ((breakdown,), (60.0, 80.0, 100.0, 130.0)),
    "GUARDED_UNROLLED_LOADS": ((fetch,), (1.5, 2.0, 2.5, 3.0, 4.0)),
    "LOADED_LATENCY": ((stages,), (1.1, 1.28, 1.5)),
    "STEP_LATENCY": ((stages,), (1.8, 2.35, 3.0)),
    "LINE_WAVEFRONTS": ((fetch, operands), (0.15, 0.3, 0.5)),
    "FETCHED_REGISTERS": ((occupancy, step), (16, 24, 32)),
}

#: How often the search goes through all constants.
ROUNDS = 2

#: Times the best program's time, above which a program is as bad as any.
WORST = 5.0

#: What is asked of the operators that no constant was chosen on: mean first choice, best of ten and median error.
BARS = (1.18, 1.05, 0.15)

Choice = tuple[Value, ...]


@dataclass(frozen=True)
class Bench:
    """Logs, and what the model says of each with any choice of constants, kept for other draws."""

    logs: Sequence[Log]
    found: dict[Choice, list[Score]] = field(default_factory=dict)

    def scores(self, choice: Choice) -> list[Score]:
        """A score per log, with the constants ``choice`` in the order of :data:`CONSTANTS`."""
        if choice not in self.found:
            chosen = zip(CONSTANTS.items(), choice, strict=True)
            replaced = tuple((module, {name: value}) for (name, (modules, _)), value in chosen for module in modules)
            device = load_device(DEVICE)
            with without([Effect("constants", replaced)]), np.errstate(divide="ignore", invalid="ignore"):
                self.found[choice] = [
                    score(log.kind, log.label, predict(log, device), log.measured) for log in self.logs
                ]
        return self.found[choice]


@dataclass(frozen=True)
class Draw:
    """Means of first choice, best of ten and median error over both halves, and the constants chosen on the first."""

    chosen: Choice
    inside: tuple[float, float, float]
    outside: tuple[float, float, float]


def draw(bench: Bench, seed: int) -> Draw:
    """One half chosen, searched and judged by the other."""
    chance = np.random.default_rng(seed)
    half = np.zeros(len(bench.logs), dtype=bool)
    kinds = np.array([log.kind for log in bench.logs])
    for kind in dict.fromkeys(kinds.tolist()):
        members = chance.permutation(np.flatnonzero(kinds == kind))
        half[members[: len(members) // 2]] = True
    grids = [values for _, values in CONSTANTS.values()]
    best = tuple(values[int(chance.integers(len(values)))] for values in grids)
    for _ in range(ROUNDS):
        for place in chance.permutation(len(grids)).tolist():
            options = [(*best[:place], value, *best[place + 1 :]) for value in grids[place]]
            best = min(options, key=lambda choice: _loss(bench.scores(choice), half))
    found = bench.scores(best)
    return Draw(best, _means(found, half), _means(found, ~half))


def _loss(scores: Sequence[Score], half: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    """Small where the ten first choices are good and errors small.

    A single first choice is luck more than anything else, so that all ten count, none for more than :data:`WORST`.
    """
    _, ten, error = _means(scores, half)
    mine = [score for score, chosen in zip(scores, half.tolist(), strict=True) if chosen]
    return float(np.mean([_first_ten(each) for each in mine])) + ten + error


def _first_ten(score: Score) -> float:
    """Mean measured time of the ten programs that the model puts first, over the best of all."""
    first = np.argsort(score.predicted, kind="stable")[:CHOICES]
    return float(np.minimum(score.measured[first] / score.measured.min(), WORST).mean())


def _means(scores: Sequence[Score], half: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[float, float, float]:
    mine = [score for score, chosen in zip(scores, half.tolist(), strict=True) if chosen]
    first, ten, error = ([getattr(s, name) for s in mine] for name in ("first", "best_of_ten", "median_error"))
    return float(np.mean(first)), float(np.mean(ten)), float(np.mean(error))


def halves_table(draws: Sequence[Draw]) -> Table:
    """A row per draw, and means."""
    view = Table(box=None, pad_edge=False, title="Ansor's programs, constants chosen on half of the operators")
    view.title_justify = "left"
    view.add_column("draw")
    for side in ("chosen on", "others"):
        for column in ("first choice", "best of ten", "median error"):
            view.add_column(f"{side}: {column}", justify="right")
    for number, each in enumerate(draws):
        view.add_row(str(number), *_cells(each.inside), *_cells(each.outside))
    inside, outside = (np.mean([getattr(each, side) for each in draws], axis=0) for side in ("inside", "outside"))
    view.add_row("mean", *_cells(inside), *_cells(outside), style="bold")
    view.add_row("asked", "", "", "", *_cells(BARS))
    return view


def _cells(figures: Iterable[float]) -> tuple[str, str, str]:
    first, ten, error = figures
    return f"{first:.3f}", f"{ten:.3f}", f"{error:.1%}"


@click.command()
@click.option("--data", type=click.Path(path_type=Path), default=None, help="The measured data.")
@click.option("--draws", default=20, show_default=True, help="How many halves are drawn.")
def main(data: Path | None, draws: int) -> None:
    """Choose the model's constants on random halves of Ansor's operators and judge them by the other halves."""
    from hal.support.tables import print_line, print_table

    bench = Bench(logs(data_directory(data), tuple(TILED)))
    found = [draw(bench, seed) for seed in range(draws)]
    print_table(halves_table(found))
    for place, name in enumerate(CONSTANTS):
        print_line(f"{name}: {', '.join(str(each.chosen[place]) for each in found)}")


if __name__ == "__main__":
    main()
