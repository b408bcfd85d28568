"""docs/nodes.md says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hal.node_catalog import all_nodes
from hal.spec.node import Collectives, Host, Link, Network, NodeSpec, node_from_text
from hal.support.errors import InputError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "nodes.md").read_text("utf-8")


def test_the_table_of_nodes_shows_the_shipped_numbers() -> None:
    for node in all_nodes():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{node.name}` |"))
        boards, links, rate, joined, network = [cell.strip() for cell in row.strip("|").split("|")][1:]
        assert boards.startswith(f"{node.boards}")
        assert links.startswith(f"{node.link.count} ")
        assert float(rate) == pytest.approx(node.peak_bytes_per_second / 1e9, abs=0.051)
        assert ("adds up" in joined) == node.link.reduces
        assert network == (
            f"{node.network.title}, {node.network.bandwidth_bytes_per_second / 1e9:g} GB/s a board"
            if node.network
            else "nothing"
        )


def test_every_key_of_a_node_file_is_on_the_page() -> None:
    for record in (NodeSpec, Link, Collectives, Network, Host):
        for key in record.__struct_fields__:
            assert f"`{key}`" in PAGE or f"[{key}]" in PAGE, key


def test_the_example_error_is_a_real_one() -> None:
    text = (ROOT / "hal" / "nodes" / "dgx-a100.toml").read_text("utf-8")
    with pytest.raises(InputError) as error:
        node_from_text(text.replace('"switch"', '"pair"').encode(), "mine.toml")
    assert f"`{error.value}`" in PAGE
