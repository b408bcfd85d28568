"""Graphs whose parameters are constants: which of those that they were called with keep their code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from roller.dynamo import frozen as frozen_module  # noqa: E402  (behind the skip without PyTorch)
from roller.dynamo.frozen import FrozenGraph  # noqa: E402


class Scaling:
    """A graph of a factor and a tensor, which counts how often its code is made."""

    positions, other_positions, own = (0,), (1,), ()

    def __init__(self) -> None:
        self.made = 0

    def code(self, parameters: Sequence[Any], inputs: Sequence[Any]) -> Callable[..., Any]:
        self.made += 1
        factor = parameters[0].item()
        return lambda tensor: tensor * factor

    def package(self) -> None:
        return None


def factors(count: int) -> list[Any]:
    return [torch.nn.Parameter(torch.tensor(float(number))) for number in range(count)]


def test_blocks_that_are_called_in_turn_keep_their_code() -> None:
    source, blocks = Scaling(), factors(40)
    graph = FrozenGraph(source)
    for _ in range(3):
        assert [float(graph(block, torch.tensor(2.0))) for block in blocks] == [2.0 * n for n in range(40)]
    assert source.made == 40


def test_a_block_that_runs_several_times_in_a_row_keeps_its_code_from_the_second_round_on() -> None:
    source, blocks = Scaling(), factors(3)
    graph = FrozenGraph(source)
    made = []
    for _ in range(4):
        for block in blocks:
            graph(block, torch.tensor(1.0)), graph(block, torch.tensor(1.0))
        made.append(source.made)
    assert made[-1] == made[1] <= 6


def test_parameters_that_take_the_place_of_others_leave_none_of_their_code() -> None:
    graph = FrozenGraph(Scaling())
    for factor in factors(20):
        for _ in range(3):
            assert float(graph(factor, torch.tensor(1.0))) == factor.item()
        assert len(graph._codes) == 1


def test_parameters_that_are_called_once_each_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_module, "MOST_ONCE", 5)
    graph = FrozenGraph(Scaling())
    for factor in factors(20):
        graph(factor, torch.tensor(1.0))
    assert len(graph._codes) == 5


def test_blocks_that_come_no_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_module, "MOST_ROUNDS", 2)
    source, (first, second, *others) = Scaling(), factors(8)
    graph = FrozenGraph(source)
    for _ in range(3):
        graph(first, torch.tensor(1.0)), graph(second, torch.tensor(1.0))
    for other in others:
        for _ in range(9):
            graph(other, torch.tensor(1.0))
    assert len(graph._codes) == 1


def test_numbers_that_are_written_make_their_own_code_anew(caplog: pytest.LogCaptureFixture) -> None:
    source, (first, second) = Scaling(), factors(2)
    graph = FrozenGraph(source)
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="roller.backend"):
        graph(first, torch.tensor(1.0)), graph(second, torch.tensor(1.0)), graph(first, torch.tensor(1.0))
        assert not caplog.messages
        second.add_(4.0)
        assert float(graph(second, torch.tensor(1.0))) == 5.0
    assert source.made == 3 and len(caplog.messages) == 1 and "written to" in caplog.messages[0]
    assert float(graph(first, torch.tensor(1.0))) == 0.0 and source.made == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_writes_that_pytorch_does_not_count_are_noticed(dtype: torch.dtype) -> None:
    source, factor = Scaling(), torch.nn.Parameter(torch.tensor(2.0, dtype=dtype))
    graph = FrozenGraph(source)
    with torch.no_grad():
        assert float(graph(factor, torch.tensor(1.0))) == 2.0
        factor.data.mul_(3.0)
        assert float(graph(factor, torch.tensor(1.0))) == 6.0
        factor.data = torch.tensor(5.0, dtype=dtype)
        assert float(graph(factor, torch.tensor(1.0))) == 5.0
        assert float(graph(factor, torch.tensor(1.0))) == 5.0 and source.made == 3


class Labelled(torch.Tensor):
    """A tensor of a class of its own."""


def test_writes_to_tensors_of_other_classes_are_noticed() -> None:
    source, factor = Scaling(), torch.tensor(2.0).as_subclass(Labelled)
    graph = FrozenGraph(source)
    assert float(graph(factor, torch.tensor(1.0))) == 2.0
    factor.add_(1.0)
    assert float(graph(factor, torch.tensor(1.0))) == 3.0 and source.made == 2
