"""Nodes: what is checked of their files, and what is said of a wrong one."""

from __future__ import annotations

import json
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

import hal
from hal.node_catalog import all_nodes, is_node, load_node, node_names, usual_node
from hal.spec.node import NodeSpec, node_from_text, node_leaves
from hal.spec.numbers import source_of
from hal.support.errors import InputError

TEXT = files("hal").joinpath("nodes", "hgx-h100.toml").read_text("utf-8")


def message_for(before: str, after: str) -> str:
    assert before in TEXT
    with pytest.raises(InputError) as error:
        node_from_text(TEXT.replace(before, after).encode(), "mine.toml")
    return str(error.value)


@pytest.mark.parametrize("node", all_nodes(), ids=lambda node: node.name)
def test_every_number_of_a_shipped_node_has_a_source(node: NodeSpec) -> None:
    numbers = dict(node_leaves(node))
    assert {"boards", "link.count", "collectives.step_seconds"} <= set(numbers)
    assert all(source_of(node.provenance, path) for path in numbers)


# GB/s of one board's links each way, as the datasheets have them.
DATASHEET = {
    "dgx-1": 150, "dgx-a100": 300, "gb200-nvl72": 900, "gb300-nvl72": 900, "hgx-b200": 900, "hgx-b300": 900,
    "hgx-h100": 450, "hgx-h200": 450, "l40s-server": 31.5, "pcie-pair": 31.5, "pcie3-server": 15.75,
    "pcie4-server": 31.5, "pcie5-server": 63,
}  # fmt: skip


def test_links_add_up_to_the_datasheets() -> None:
    assert node_names() == tuple(sorted(DATASHEET))
    for node in all_nodes():
        assert node.peak_bytes_per_second == pytest.approx(DATASHEET[node.name] * 1e9, rel=0.001)


def test_only_switches_from_hopper_on_reduce() -> None:
    assert {node.name for node in all_nodes() if not node.link.reduces} == {
        "dgx-1", "dgx-a100", "l40s-server", "pcie-pair", "pcie3-server", "pcie4-server", "pcie5-server",
    }  # fmt: skip


def test_nodes_by_name_alias_and_file(tmp_path: Path) -> None:
    assert load_node("HGX-H100") is load_node("dgx-h100")
    assert is_node("dgx-h100") and not is_node("h100")
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(tomllib.loads(TEXT)))
    assert load_node(mine) == load_node("hgx-h100")
    with pytest.raises(InputError, match=r"there is no such file; `roller devices` lists the nodes that need no file"):
        load_node(tmp_path / "other.toml")


def test_an_unknown_name_brings_the_closest() -> None:
    with pytest.raises(InputError) as error:
        load_node("hgx-h10")
    assert str(error.value).startswith("node: no node is called 'hgx-h10'; did you mean hgx-h100? the nodes are ")


def test_a_board_has_a_usual_node_or_none() -> None:
    assert usual_node(hal.load_device("h100")) is load_node("hgx-h100")
    assert usual_node(hal.load_device("h200")) is load_node("hgx-h200")
    assert usual_node(hal.load_device("k80")) is None
    owners = [name for node in all_nodes() for name in node.devices]
    assert len(owners) == len(set(owners))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("boards = 8", "boards = 1", "node.boards: got 1, expected 2 or more"),
        ("boards = 8", 'boards = "8"', "node.boards: Expected int, got str; docs/nodes.md describes every key"),
        ("generation = 4", "generation = 9", "node.link.generation: got 9, expected one of 2, 3, 4 and 5 for nvlink"),
        (
            "step_seconds = 0.85e-6",
            "step_seconds = -1e-6",
            "node.collectives.step_seconds: got -1e-06, expected a number above 0",
        ),
        (
            "335.5e9",
            "500e9",
            "node.collectives.bus_bytes_per_second: got 5e+11, expected at most link.count x bandwidth (4.5e+11)",
        ),
        (
            'topology = "switch"',
            'topology = "pair"',
            "node.boards: got 8, expected 2, as link.topology says",
        ),
        (
            'topology = "switch"',
            'topology = "all-to-all"',
            "node.link.reduces: got True, expected false: only a switch adds up, and topology is 'all-to-all'",
        ),
        ('topology = "switch"', 'topology = "star"', "node.link.topology: Invalid enum value 'star'"),
        ("count = 18", "", "node.link: Object missing required field count"),
        ("count = 18", "count = 18\nlinks = 18", "node.link: Object contains unknown field links"),
        (
            "48e9",
            "60e9",
            "node.network.reached_bytes_per_second: got 6e+10, expected at most the bandwidth",
        ),
        ('boards = "', 'ranks = "', 'node.boards: has no source; add "boards" to [provenance]'),
        ("[provenance]", '[provenance]\n"x.y" = "z"', "node.provenance.x.y: is the source of no number"),
        ('devices = ["h100-sxm-80gb"]', "devices = []", "node.devices: is empty"),
        ("boards = 8", "boards = ", "line 5"),
    ],
)
def test_what_cannot_be_true_is_named(before: str, after: str, message: str) -> None:
    assert message_for(before, after).startswith(f"mine.toml: {message}")


def test_equal_nodes_hash_equally() -> None:
    assert hash(node_from_text(TEXT.encode(), "a.toml")) == hash(load_node("hgx-h100"))
