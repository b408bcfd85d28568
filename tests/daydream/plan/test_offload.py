"""What lies in the host's memory: time of the update there, copies, and what is left on the board."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from daydream.graph.memory import MemoryKind
from daydream.plan.layout import Layout
from daydream.plan.memory import rank_memory
from daydream.plan.offload import HostUpdate
from daydream.plan.planned import planned
from hal.catalog import load_device
from hal.node_catalog import load_node
from hal.support.errors import InputError

pytestmark = pytest.mark.usefixtures("pytorch")

DEVICE, NODE = load_device("h100"), load_node("hgx-h100")


def test_ranks_of_a_node_share_its_memory() -> None:
    assert NODE.host is not None
    one, eight = (HostUpdate(host=NODE.host, ranks=ranks) for ranks in (1, 8))
    # Adam reads and writes a parameter and two states in full, reads a gradient, and writes a parameter of 16 bits.
    seconds = one.update_seconds(1e9, 2, 4, 2)
    assert seconds == pytest.approx(30e9 / (0.46 * 614.4e9))
    assert eight.update_seconds(1e9, 2, 4, 2) == pytest.approx(8 * seconds)
    assert one.copy_seconds(63e9) == pytest.approx(1 / 0.8)


def test_states_leave_the_board_and_the_step_gets_longer(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16")
    steps = [planned(units, Layout(data=8, shard="zero1", offload=way), DEVICE, NODE) for way in ("none", "optimizer")]
    assert steps[0].memory.owners[MemoryKind.OPTIMIZER] > 0
    assert MemoryKind.OPTIMIZER not in steps[1].memory.owners
    assert steps[1].seconds > steps[0].seconds
    update = steps[1].costs.host_update
    assert update is not None and update.ranks == 8
    graph = steps[1].timeline.graph
    names = [graph.names[number] for number in graph.name.tolist()]
    assert {"gradients to the host", "update on the host", "parameters from the host"} <= set(names)


def test_parameters_come_from_the_host_before_they_are_gathered(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16")
    layout = Layout(data=8, shard="fsdp", offload="parameters")
    memory = rank_memory(units, layout, 0, DEVICE)
    assert not any(each.kind is MemoryKind.WEIGHTS and each.born == -1 for each in memory.main.held)
    graph = planned(units, layout, DEVICE, NODE).timeline.graph
    names = [graph.names[number] for number in graph.name.tolist()]
    gathers, copies = (sum(word in name for name in names) for word in ("all-gather", "from the host"))
    assert gathers == copies > 0


@pytest.mark.parametrize(
    ("layout", "node", "said"),
    [
        (Layout(data=2, offload="parameters"), NODE, "is of FSDP"),
        (Layout(data=2, offload="optimizer"), load_node("pcie-pair"), "pcie-pair"),
        (Layout(offload="optimizer"), None, "the board's node"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(layout: Layout, node: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        layout.check(node)
