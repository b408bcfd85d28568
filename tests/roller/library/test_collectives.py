"""Collectives: what must hold on every node, and how near measured ones are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.catalog import load_device
from hal.node_catalog import all_nodes, load_node
from hal.spec.node import NodeSpec, node_from_text
from hal.support.errors import InputError
from roller.library import library_time, library_times
from roller.library.collectives import HOST_SECONDS, collective_seconds, link_rate, node_for
from sokoban.language.collectives import COLLECTIVES

A100, H100, B200, PAIR = (load_node(name) for name in ("dgx-a100", "hgx-h100", "hgx-b200", "pcie-pair"))
MEASURED = Path(__file__).parents[3].parent / "shared" / "data" / "tensor_core" / "collectives.parquet"
NODES = {"a100_sxm": A100, "h100_sxm": H100, "b200_sxm": B200}


def seconds(collective: str, size: float, ranks: int, node: NodeSpec = H100, dtype: str = "bfloat16") -> float:
    return float(collective_seconds(collective, size, ranks, node, dtype=dtype).kernel_seconds)


def algorithms(collective: str, ranks: int, node: NodeSpec, dtype: str = "bfloat16") -> list[str]:
    """Which ways messages of 512 B to 512 MiB go, each where it first comes."""
    sizes = 512.0 * 2.0 ** np.arange(21)
    return list(dict.fromkeys(collective_seconds(collective, sizes, ranks, node, dtype=dtype).algorithm.tolist()))


def test_small_messages_take_the_nodes_latency() -> None:
    for node in (A100, H100, B200):
        for ranks in (2, 4, 8):
            expected = node.collectives.call_seconds + (ranks - 1) * node.collectives.step_seconds
            assert seconds("all_gather", 512, ranks, node) == pytest.approx(expected)


def test_large_messages_reach_the_nodes_bus_bandwidth() -> None:
    for node in (A100, H100, B200):
        bus = 2**30 * 7 / 8 / seconds("all_gather", 2**30, 8, node)
        assert bus == pytest.approx(node.collectives.bus_bytes_per_second, rel=0.05)


def test_protocols_change_over_as_messages_grow() -> None:
    assert algorithms("all_gather", 8, A100) == ["ring LL", "ring LL128", "ring Simple"]
    # Between four the first flag of Simple is no later than that of LL128, as the library has it.
    assert algorithms("all_gather", 4, A100) == ["ring LL", "ring Simple"]
    assert algorithms("alltoall", 8, H100) == ["peers LL", "peers Simple"]
    assert algorithms("all_reduce", 2, PAIR) == ["ring LL", "ring Simple"]


def test_the_switch_adds_up_where_it_can() -> None:
    assert algorithms("all_reduce", 8, H100)[-1] == "NVLS"
    assert algorithms("all_reduce", 8, A100)[-1] == "ring Simple"
    assert algorithms("all_reduce", 4, H100)[-1] == "ring Simple"
    assert algorithms("all_reduce", 8, H100, "int8")[-1] == "ring Simple"
    assert algorithms("reduce_scatter", 8, H100)[-1] == "ring Simple"
    assert seconds("all_reduce", 2**29, 8) < 0.9 * seconds("all_reduce", 2**29, 8, dtype="int8")


@settings(max_examples=30)
@given(
    st.sampled_from(COLLECTIVES[:5]),
    st.sampled_from([2, 4, 8]),
    st.floats(1, 2**33),
    st.sampled_from([A100, H100, B200]),
)
def test_no_collective_beats_its_links(collective: str, ranks: int, size: float, node: NodeSpec) -> None:
    found = collective_seconds(collective, size, ranks, node)
    # By the switch every byte leaves its board once, and so in an all-gather and a broadcast.
    sent = size if collective in ("all_reduce", "broadcast") else size * (ranks - 1) / ranks
    assert float(found.kernel_seconds) > max(sent / node.peak_bytes_per_second, node.collectives.call_seconds)
    assert sum(float(stage) for stage in found.stages.values()) == pytest.approx(float(found.kernel_seconds))
    assert float(found.call_seconds) >= HOST_SECONDS


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("node", all_nodes(), ids=lambda node: node.name)
def test_times_grow_with_messages_but_where_the_protocol_changes(collective: str, node: NodeSpec) -> None:
    sizes = 2.0 ** np.arange(1, 34)
    ranks = 2 if collective == "send" else node.boards
    found = collective_seconds(collective, sizes, ranks, node)
    same = found.algorithm[1:] == found.algorithm[:-1]
    assert np.all(np.diff(found.kernel_seconds)[same] >= -1e-12)
    assert np.all(np.isfinite(found.kernel_seconds))


def test_a_send_is_half_of_an_all_to_all_of_two() -> None:
    # Without the part that stays on the board.
    assert seconds("send", 2**24, 2) < seconds("alltoall", 2**25, 2) < 1.5 * seconds("send", 2**24, 2)


def test_boards_without_a_switch_share_their_links() -> None:
    text = (Path(__file__).parents[3] / "hal" / "nodes" / "dgx-a100.toml").read_text("utf-8")
    meshed = node_from_text(text.replace('"switch"', '"all-to-all"').encode(), "mine.toml")
    rates = link_rate(meshed, np.array([2.0, 8.0]))
    assert rates[1] == pytest.approx(7 * rates[0])
    assert seconds("all_gather", 2**28, 2, meshed) > 3 * seconds("all_gather", 2**28, 2, A100)


# More than one node


def test_the_network_carries_what_nodes_exchange() -> None:
    sizes, ranks = 2.0**30, np.array([8, 16, 64])
    found = collective_seconds("all_gather", sizes, ranks, A100)
    assert np.all(np.diff(found.kernel_seconds) > 0)
    assert found.algorithm.tolist() == ["ring Simple", "ring Simple and network", "ring Simple and network"]
    # Every board's adapter takes in its eighth of what the other seven nodes have.
    network = A100.network
    assert network is not None
    assert found.stages["links"][2] >= 7 / 8 * sizes / 8 / network.reached_bytes_per_second


def test_small_messages_pay_the_networks_latency() -> None:
    network = H100.network
    assert network is not None
    beyond = seconds("all_reduce", 1024, 32) - seconds("all_reduce", 1024, 8)
    assert beyond == pytest.approx(4 * network.latency_seconds, rel=0.01)


def test_an_all_to_all_between_nodes_is_the_networks() -> None:
    network = H100.network
    assert network is not None
    found = collective_seconds("alltoall", 2.0**30, 64, H100)
    assert float(found.kernel_seconds) == pytest.approx(7 / 8 * 2**30 / network.reached_bytes_per_second, rel=0.1)
    assert str(found.bound) == "links"


# What is refused


@pytest.mark.parametrize(
    ("ranks", "node", "message"),
    [
        (1, H100, "ranks: got 1, expected 2 or more; one rank has no other to exchange with"),
        (4, PAIR, "ranks: 4 are beyond the 2 boards of pcie-pair without a network; write fewer, or"),
        (12, H100, "ranks: 12 do not fill nodes of 8 boards; write a multiple of 8"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(ranks: int, node: NodeSpec, message: str) -> None:
    with pytest.raises(InputError) as error:
        collective_seconds("all_reduce", 1024, ranks, node)
    assert str(error.value).startswith(message)


def test_unknown_collectives_and_empty_messages_are_refused() -> None:
    with pytest.raises(InputError, match="op: no collective is called 'gather'"):
        collective_seconds("gather", 1024, 2, H100)
    with pytest.raises(InputError, match="bytes: got 0, expected 1 or more"):
        collective_seconds("all_gather", [1024, 0], 2, H100)


def test_a_node_must_have_the_board() -> None:
    with pytest.raises(InputError, match="node: dgx-a100 holds a100-sxm-80gb and a100-sxm-40gb, not h100-sxm-80gb"):
        node_for(load_device("h100"), "dgx-a100")
    with pytest.raises(InputError, match="node: k80 has no usual node; name one with --node"):
        node_for(load_device("k80"))


# As operators


def test_an_operator_is_the_call_on_the_boards_usual_node() -> None:
    found = library_time({"op": "all_reduce", "bytes": 2**29, "ranks": 8}, load_device("h100"))
    assert (found.seconds, found.kernel, found.kernels) == (seconds("all_reduce", 2**29, 8), "NVLS", 1)
    with pytest.raises(InputError, match="direction: a collective has no backward pass of its own"):
        library_time({"op": "all_reduce", "bytes": 8, "ranks": 8}, load_device("h100"), "backward")


def test_many_at_once_take_what_each_takes_alone() -> None:
    operators = [{"op": COLLECTIVES[i % 5], "bytes": 512 + i, "ranks": 2 + 2 * (i % 4)} for i in range(1_000)]
    times = library_times(operators, load_device("h100"))
    assert len(times) == 1_000
    assert times[7::199] == [library_time(operator, load_device("h100")) for operator in operators[7::199]]


# Measured


@pytest.mark.skipif(not MEASURED.exists(), reason="the measured data are not here")
def test_measured_collectives_are_met() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(MEASURED).to_pydict()
    columns = {name: np.array(values) for name, values in rows.items()}
    sizes = columns["elements_total"] * np.where(columns["dtype"] == "half", 2, 1)
    for board, node in NODES.items():
        errors: list[float] = []
        for name in np.unique(columns["collective"]):
            for dtype, ours in (("half", "float16"), ("int8", "int8")):
                chosen = (columns["board"] == board) & (columns["collective"] == name) & (columns["dtype"] == dtype)
                found = collective_seconds(name, sizes[chosen], columns["num_gpus"][chosen], node, dtype=ours)
                errors += np.abs(found.kernel_seconds / (columns["latency_ms"][chosen] * 1e-3) - 1).tolist()
        assert len(errors) == 504
        assert np.mean(errors) < 0.10, board
