"""Constants chosen on half of the operators: what a draw may look at, and what it is judged by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.accuracy import halves
from bench.accuracy.halves import CONSTANTS, Bench, Choice, Draw, draw, halves_table
from bench.accuracy.schedules import Score, score


class Made(Bench):
    """Eight operators whose best program is found with one value of one constant: the halves differ in which."""

    def scores(self, choice: Choice) -> list[Score]:
        self.found.setdefault(choice, [])
        right = choice[list(CONSTANTS).index("UNHIDDEN")] == 0.35
        measured = np.linspace(1.0, 4.0, 20)
        predicted = measured if right else measured[::-1].copy()
        return [score(log.kind, log.label, predicted, measured) for log in self.logs]


def bench_of(kinds: str) -> Bench:
    logs: Any = [SimpleNamespace(kind=kind, label=f"{kind}{number}") for number, kind in enumerate(kinds)]
    return Made(logs)


def test_a_draw_finds_the_value_that_serves_its_half() -> None:
    found = draw(bench_of("ccccddmm"), seed=1)
    assert found.chosen[list(CONSTANTS).index("UNHIDDEN")] == 0.35
    assert found.inside == found.outside == (1.0, 1.0, 0.0)


def test_draws_are_the_same_every_time() -> None:
    assert draw(bench_of("ccccddmm"), seed=1) == draw(bench_of("ccccddmm"), seed=1)


def test_every_constant_is_one_of_the_model_and_among_its_own_choices() -> None:
    for name, (modules, values) in CONSTANTS.items():
        for module in modules:
            assert getattr(module, name) in values


def test_a_choice_holds_for_its_own_evaluation_alone() -> None:
    before = {name: getattr(modules[0], name) for name, (modules, _) in CONSTANTS.items()}
    assert Bench([]).scores(tuple(values[0] for _, values in CONSTANTS.values())) == []
    assert before == {name: getattr(modules[0], name) for name, (modules, _) in CONSTANTS.items()}


def test_the_table_ends_with_means_and_what_is_asked() -> None:
    choice: Choice = tuple(values[0] for _, values in CONSTANTS.values())
    draws = [Draw(choice, (1.1, 1.0, 0.1), (1.2, 1.0, 0.2)), Draw(choice, (1.1, 1.0, 0.1), (1.0, 1.0, 0.1))]
    view = halves_table(draws)
    assert [list(column.cells)[-2:] for column in view.columns][4:] == [
        ["1.100", f"{halves.BARS[0]:.3f}"], ["1.000", f"{halves.BARS[1]:.3f}"], ["15.0%", "15.0%"],
    ]  # fmt: skip


def test_programs_far_behind_count_no_more_than_bad_ones() -> None:
    measured = np.array([1.0, 100.0])
    found = score("conv", "", np.array([2.0, 1.0]), measured)
    assert halves._first_ten(found) == pytest.approx((1.0 + halves.WORST) / 2)
