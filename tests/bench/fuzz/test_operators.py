"""Operators drawn by number: well typed, of all productions, the same everywhere, in ranges that can be judged."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bench.fuzz.operators import operator
from bench.fuzz.productions import ALL, GATHERED, productions
from bench.fuzz.targets import FRAMES, NAMED, Target, targets
from bench.fuzz.values import Term, positive, product, quotient, total, within
from sokoban.language.functions import FUNCTIONS
from sokoban.language.operators import operator_from_data
from sokoban.language.parser import parse_program
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate

NAMED_LOWERINGS = [lowering for lowering, frames in FRAMES.items() if frames == (NAMED,)]


def test_a_number_is_one_operator() -> None:
    assert operator(7) == operator(7)
    assert operator(7)["name"] == "drawn_0_7"
    assert operator(7, seed=1) != operator(7) != operator(8)


@pytest.mark.slow
def test_operators_have_every_production_of_the_grammar() -> None:
    met: Counter[str] = Counter()
    for number in range(700):
        met.update(productions(operator_from_data(operator(number))))
    # Infinite pads are of pools alone.
    assert [row for row in ALL if not met[row] and "pad infinity" not in row] == []
    for row in ("inside pad infinity", "size 1", "prime size", "several statements", "several reductions"):
        assert met[row]
    dtypes = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "float8_e4m3fn", "float8_e5m2")
    assert all(met[f"reads {dtype}"] for dtype in dtypes)
    assert all(met[f"writes {dtype}"] for dtype in ("float16", "bfloat16", "float32", "float64", "int32"))


def test_productions_say_where_a_function_stands() -> None:
    text = "C[i] = sum(k, select(k <= i, X[2*k, i], 0) * (k + 1)); Y[i] = exp(C[i] - X[9 - i, i | pad=1]) + i"
    expr = parse_program(text, {"i": 3, "k": 5}, {}, shapes={"X": [9, 3]})
    met = productions(expr)
    assert {
        "sum of a reduction", "inside select", "inside le", "inside mul", "inside strided", "inside plain",
        "inside transposed", "inside reduced axis compared", "inside spatial axis compared",
        "inside reduced axis as a number", "outside exp", "outside sub", "outside reversed", "outside offset",
        "outside pad number", "outside diagonal", "outside spatial axis as a number", "prime size", "reads float32",
        "one tensor read in several ways",
    } <= met  # fmt: skip
    assert not {"outside select", "inside exp", "outside spatial axis compared", "size 1", "inside pad number"} & met


def test_every_function_can_be_drawn() -> None:
    assert {row.split()[1] for row in ALL if row.startswith("outside")} >= set(FUNCTIONS)


@pytest.mark.slow
def test_values_stay_finite() -> None:
    small = 0
    for number in range(400):
        expr = operator_from_data(operator(number))
        points = [np.prod([float(expr.sizes[axis]) for axis in statement.axes]) for statement in expr.statements]
        reduced = [axis for s in expr.statements if s.reduction for axis in s.reduction.axes]
        if max(points) * np.prod([float(expr.sizes[axis]) for axis in reduced]) > 2**15:
            continue
        small += 1
        value = evaluate(expr, random_inputs(expr, 0))
        has_infinite_pads = "pad=inf" in str(operator(number)) or "pad=-inf" in str(operator(number))
        assert np.isfinite(value).all() or has_infinite_pads, operator(number)
    assert small > 50


def bounds(term: Term) -> tuple[float, float]:
    return (round(term.low, 6), round(term.high, 6))


def test_bounds_follow_interval_arithmetic() -> None:
    x = Term("X[i]", -1.0, 2.0, 0.6, exact=True)
    assert bounds(total(x, x, "sub")) == (-3.0, 3.0)
    assert bounds(product(x, x)) == (-2.0, 4.0)
    assert bounds(positive(x)) == (0.5, 2.5)
    assert positive(positive(x)).text == "(abs(X[i]) + 0.5)"
    assert bounds(quotient(x, positive(x))) == (-4.0, 4.0)
    assert within(x, 4.0) is x
    assert bounds(within(Term("S", -64.0, 64.0, 16.0), 4.0)) == (-4.0, 4.0)
    # A peak may be anything: an exponential is taken of what is bounded.
    assert within(Term("X[i]", -1.0, 101.5, 0.6, peaked=True), 4.0).text == "tanh(X[i])"


@pytest.mark.parametrize("target", [target for target in targets() if target.lowering in NAMED_LOWERINGS][:12])
def test_named_operators_are_drawn_for_the_lowerings_that_they_alone_reach(target: Target) -> None:
    number = 2 * targets().index(target)
    expr = operator_from_data(operator(number))
    assert target.name in {tensor.dtype for tensor in expr.inputs}
    assert target.lowering != "flat-image" or expr.allow_tf32 == (target.name == "float32")


def test_places_are_read_where_they_are_wanted() -> None:
    target = Target("cpu.walks", "outside", GATHERED)
    assert f"outside {GATHERED}" in productions(operator_from_data(operator(2 * targets().index(target))))
