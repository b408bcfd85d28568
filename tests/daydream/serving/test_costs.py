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


def test_experts_on_more_boards_take_less_of_each_and_exchange_tokens(configuration: Callable[[str], str]) -> None:
    model, board = served_model(configuration("deepseek")), load_device("h100")
    one, eight, sixteen = (iteration_costs(model, board, Engine(experts=each, tokens=512)) for each in (0, 8, 16))
    routed = 3 * 16 * 512 * 256 * 3 * 2
    assert one.weights - eight.weights == pytest.approx(routed * 7 / 8)
    assert (eight.engine.groups, eight.engine.boards) == (8, 8)
    # Beyond a node tokens take the network.
    assert sixteen.body[512] > eight.body[512]


@pytest.mark.parametrize(("name", "engine"), [
    ("llama", Engine(experts=8)), ("deepseek", Engine(experts=3)), ("deepseek", Engine(ranks=4, experts=2)),
])  # fmt: skip
def test_experts_that_boards_cannot_have_are_refused(
    configuration: Callable[[str], str], name: str, engine: Engine
) -> None:
    with pytest.raises(InputError, match="--expert"):
        iteration_costs(served_model(configuration(name)), load_device("h100"), engine)


def test_a_head_that_drafts_is_a_block_with_the_models_logits(configuration: Callable[[str], str]) -> None:
    model, board = served_model(configuration("llama")), load_device("h100")
    engine = Engine(draft=3, acceptance=0.8, sequences=64, tokens=1024)
    prompt, head = (iteration_costs(model, board, engine, draft) for draft in (None, model.draft_head()))
    block = 512 * 1024 + 512 * 512 + 512 * 2048 + 512 * 1024 + 2 * 512
    assert head.weights - prompt.weights == pytest.approx(2 * (block + 2 * 512 * 512), rel=1e-3)
    assert head.cache_bytes == prompt.cache_bytes * 6 / 5
    assert head.draft is not None
    assert head.seconds(8, 500) - prompt.seconds(8, 500) > 3 * head.draft.head[8]
    assert engine.tokens_an_iteration == pytest.approx((1 - 0.8**4) / 0.2)
    # Four tokens of a sequence take little longer than one.
    assert prompt.seconds(8, 500) < 1.5 * iteration_costs(model, board, engine._replace(draft=0)).seconds(8, 500)
