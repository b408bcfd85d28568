"""Seconds of iterations on boards: what grows, what a precision and tensor ranks change, and how much fits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from daydream.serving.costs import Engine, batch_sizes, iteration_costs
from daydream.serving.parts import served_model
from hal.catalog import load_device
from hal.support.errors import InputError

pytestmark = pytest.mark.usefixtures("pytorch")


def test_iterations_take_longer_the_more_they_compute(configuration: Callable[[str], str]) -> None:
    costs = iteration_costs(served_model(configuration("llama")), load_device("h100"), Engine(tokens=2048))
    assert np.all(np.diff(costs.body[1:]) > -0.1 * costs.body[1:-1])
    assert costs.body[2048] > 1.5 * costs.body[1]
    assert costs.seconds(64, 4000) > costs.seconds(64, 100) > costs.seconds(1, 100)
    assert costs.seconds(0, 0, 2048, 1024) > costs.seconds(0, 0, 256, 128)


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek"])
def test_no_decoding_step_beats_its_roofline(configuration: Callable[[str], str], name: str) -> None:
    costs = iteration_costs(served_model(configuration(name)), load_device("h200"), Engine())
    assert all(costs.seconds(batch, 4096) > costs.roofline(batch, 4096) for batch in (1, 16, 256))


def test_narrow_weights_and_cache_leave_more_room(configuration: Callable[[str], str]) -> None:
    model, board = served_model(configuration("llama")), load_device("h100")
    wide, narrow = (iteration_costs(model, board, Engine(precision=numbers, cache=cache))
                    for numbers, cache in (("16-bit", "16-bit"), ("fp8-tensorwise", "fp8")))  # fmt: skip
    assert narrow.weights < wide.weights
    assert narrow.cache_tokens > 1.9 * wide.cache_tokens


def test_boards_that_share_layers_exchange_and_keep_parts(configuration: Callable[[str], str]) -> None:
    model, board = served_model(configuration("llama")), load_device("h100")
    one, four = (iteration_costs(model, board, Engine(ranks=ranks)) for ranks in (1, 4))
    assert four.weights == pytest.approx(one.weights / 4)
    # A model so small is not worth the exchange.
    assert four.body[1] > one.body[1]


def test_ranks_that_do_not_divide_a_layer_are_refused(configuration: Callable[[str], str]) -> None:
    with pytest.raises(InputError, match="3 boards cannot share"):
        iteration_costs(served_model(configuration("llama")), load_device("h100"), Engine(ranks=3))


def test_batches_end_where_graphs_and_tiles_do() -> None:
    sizes = batch_sizes(20000)
    assert sizes[-1] == 20000
    assert np.all(np.diff(sizes) > 0)
    assert set(sizes[(sizes > 512) & (sizes < 2048)] % 128) == {0}
