"""Nodes by name or from a file, and the node that a board usually sits in.

The shipped nodes are the ``nodes/*.toml`` files of this package; a file of the user's own has the same format, as
TOML or JSON.
"""

from __future__ import annotations

import difflib
import functools
import os
from pathlib import Path

from hal.spec.device import DeviceSpec
from hal.spec.file import DEVICE_SUFFIXES, file_bytes
from hal.spec.node import NodeSpec, node_from_text
from hal.support.errors import InputError, listed


def load_node(name_or_path: str | os.PathLike[str]) -> NodeSpec:
    """The node of that name or alias (upper or lower case), or the one described in that file.

    Text is taken for a path when it ends in ``.toml`` or ``.json``. Shipped nodes are read once.

    Raises:
        InputError: there is no such node, or the file describes none.
    """
    text = os.fspath(name_or_path)
    if isinstance(name_or_path, os.PathLike) or text.lower().endswith(DEVICE_SUFFIXES):
        return node_from_text(file_bytes(Path(text), "node"), text)
    node = _by_name(text)
    if node is not None:
        return node
    names = node_names()
    close = difflib.get_close_matches(text.strip().casefold(), names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    raise InputError("node", f"no node is called {text!r}", f"{hint}the nodes are {listed(names)}")


def is_node(name: str) -> bool:
    """True if a shipped node has this name or alias."""
    return _by_name(name) is not None


def _by_name(name: str) -> NodeSpec | None:
    wanted = name.strip().casefold()
    return next((node for node in all_nodes() if wanted in (node.name, *map(str.casefold, node.aliases))), None)


@functools.cache
def node_names() -> tuple[str, ...]:
    """Names of the shipped nodes, sorted."""
    from importlib.resources import files

    entries = files("hal").joinpath("nodes").iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml")))


@functools.cache
def all_nodes() -> tuple[NodeSpec, ...]:
    """The shipped nodes, in order of name."""
    return tuple(_shipped(name) for name in node_names())


def usual_node(device: DeviceSpec) -> NodeSpec | None:
    """The shipped node that comes with this board, or None."""
    return next((node for node in all_nodes() if device.name in node.devices), None)


def _shipped(name: str) -> NodeSpec:
    from importlib.resources import files

    file_name = f"{name}.toml"
    node = node_from_text(files("hal").joinpath("nodes", file_name).read_bytes(), file_name)
    if node.name != name:
        raise InputError(f"{file_name}: node.name", f"got {node.name!r}, expected {name!r}", "rename the file")
    return node
