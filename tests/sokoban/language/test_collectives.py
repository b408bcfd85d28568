"""Collectives as JSON: read, and refused where an expression is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from hal.support.errors import InputError
from sokoban.language.collectives import COLLECTIVES, collective_from_data, is_collective
from sokoban.language.operators import operator_from_data

SUM: dict[str, Any] = {"op": "all_reduce", "bytes": 1024, "ranks": 8}


def test_a_collective_is_read_with_its_defaults() -> None:
    found = collective_from_data(SUM)
    assert (found.bytes, found.ranks, found.dtype, found.node) == (1024, 8, "bfloat16", None)
    assert collective_from_data({"op": "send", "bytes": 1}).ranks == 2


@pytest.mark.parametrize("name", COLLECTIVES)
def test_none_is_an_expression(name: str) -> None:
    data = {"op": name, "bytes": 1024}
    assert is_collective(data)
    with pytest.raises(InputError) as error:
        operator_from_data(data)
    assert str(error.value) == (
        f"op: {name!r} is a collective of several boards and no kernel of one; "
        "roller estimate --implementation library prices it"
    )


@pytest.mark.parametrize(
    "data", [{"op": "matmul"}, {"expr": "all_reduce"}, ["all_reduce"], {"op": ["all_reduce"]}, None]
)
def test_what_is_no_collective(data: object) -> None:
    assert not is_collective(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 1}, "ranks: got 1, expected 2 or more; one rank has no other to exchange with"),
        ({"ranks": None}, "ranks: Expected int, got null; the keys of a collective are op, bytes, ranks, "),
        ({"bytes": 0}, "bytes: got 0, expected 1 or more; write the size of a message"),
        ({"bytes": 1.5}, "bytes: Expected int, got float; the keys"),
        ({"size": 3}, ": Object contains unknown field size; the keys of a collective are op, bytes, ranks, "),
        ({"dtype": "float"}, "dtype: Invalid enum value 'float'; use one of float64, float32, "),
        ({"op": "send"}, "ranks: got 8, but a send is between 2; leave ranks out"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        collective_from_data(SUM | change)
    assert str(error.value).startswith(message)


def test_ranks_are_asked_for() -> None:
    with pytest.raises(InputError, match="ranks: is missing; write how many boards take part"):
        collective_from_data({"op": "all_gather", "bytes": 8})
