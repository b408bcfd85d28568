"""Devices by name or from a file, and where their numbers come from.

The shipped devices are the ``devices/*.toml`` files of this package; a file of the user's own has the same format,
as TOML or JSON. ``device_schema`` describes it for editors.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hal.spec.device import DeviceSpec
from hal.spec.file import DEVICE_SUFFIXES, device_from_text, read_device
from hal.spec.numbers import leaves, source_of
from hal.support.errors import InputError
from hal.this_cpu import THIS_CPU, this_cpu

if TYPE_CHECKING:
    from hal.microbench.launcher import Board


def shipped_board(board: Board) -> DeviceSpec | None:
    """The shipped spec whose name or alias is what the driver calls this board, or None."""

    try:
        return load_device(board.title)
    except InputError:
        return None


def load_device(name_or_path: str | os.PathLike[str]) -> DeviceSpec:
    """The device of that name or alias (upper or lower case), or the one described in that file.

    ``cpu`` is this machine's own processor, measured when it is first asked for (`hal.this_cpu`). Text is taken for a
    path when it ends in ``.toml`` or ``.json`` or has a path separator in it. Shipped devices are read once; a file is
    read every time.
    """
    text = os.fspath(name_or_path)
    if "\0" in text:
        raise InputError("device", f"no device is called {text!r}", "`roller devices` lists the names")
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    if (
        isinstance(name_or_path, os.PathLike)
        or text.lower().endswith(DEVICE_SUFFIXES)
        or any(s in text for s in separators)
    ):
        return read_device(Path(text))
    wanted = _folded(text)
    if wanted == THIS_CPU:
        return this_cpu()
    if wanted in device_names():
        return _shipped(wanted)
    name = _owner(wanted)
    if name is None:
        raise _unknown(text)
    return _shipped(name)


@functools.cache
def device_names() -> tuple[str, ...]:
    """Names of the shipped devices, sorted."""
    from importlib.resources import files

    entries = files("hal").joinpath("devices").iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml")))


def all_devices() -> tuple[DeviceSpec, ...]:
    """The shipped devices, in order of name."""
    return tuple(_shipped(name) for name in device_names())


def device_aliases() -> dict[str, str]:
    """Every alias of a shipped device, as its file spells it, to the name of the device."""
    return {alias: device.name for device in all_devices() for alias in device.aliases}


def provenance_of(device: DeviceSpec, key_path: str) -> str:
    """Where a number of the device comes from, in words.

    ``key_path`` is that of one number (``layers.dram.bandwidth_bytes_per_second``), or of several with one source
    (``limits``); a leading ``device.`` is dropped.
    """
    path = key_path.removeprefix("device.")
    paths = [leaf for leaf, _ in leaves(device)]
    text = source_of(device.provenance, path)
    if text is None or not any(leaf == path or leaf.startswith(f"{path}.") for leaf in paths):
        import difflib

        close = difflib.get_close_matches(path, paths, n=1)
        raise InputError(
            f"device.{path}",
            f"{device.name} has no source under this key path",
            f"did you mean {close[0]}?" if close else "use a path such as layers.dram.bandwidth_bytes_per_second",
        )
    return text


@functools.cache
def _shipped(name: str) -> DeviceSpec:
    device = device_from_text(_text(name), f"{name}.toml")
    if device.name != name:
        raise InputError(f"{name}.toml: device.name", f"got {device.name!r}, expected {name!r}", "rename the file")
    return device


def _text(name: str) -> bytes:
    from importlib.resources import files

    return files("hal").joinpath("devices", f"{name}.toml").read_bytes()


@functools.cache
def _owner(alias: str) -> str | None:
    """The device that has a folded alias. Only files that quote it are read: all of them take a tenth of a second."""
    spelling = r"[\s_-]+".join(map(re.escape, alias.split("-")))
    quoted = re.compile(rf"""["']\s*{spelling}\s*["']""".encode(), re.IGNORECASE)
    for name in device_names():
        if quoted.search(_text(name)) and alias in map(_folded, _shipped(name).aliases):
            return name
    return None


def _folded(name: str) -> str:
    """``NVIDIA A100 80GB PCIe`` and ``nvidia_a100-80gb-pcie`` are one name."""
    return re.sub(r"[\s_-]+", "-", name.strip().casefold())


def _unknown(text: str) -> InputError:
    import difflib

    spellings = {_folded(spelling): spelling for spelling in (*device_aliases(), *device_names(), THIS_CPU)}
    close = [spellings[key] for key in difflib.get_close_matches(_folded(text), spellings, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(filter(None, [', '.join(close[:-1]), close[-1]]))}? " if close else ""
    where = "`roller devices` lists the names; a path to a .toml file works too"
    return InputError("device", f"no device is called {text!r}", hint + where)
