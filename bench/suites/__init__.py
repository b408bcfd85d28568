"""The operator suites, JSON files in the format that ``roller compile`` reads.

``roller119`` holds the 119 operators of the thesis's evaluation, ``modern`` shapes of today's networks and odd sizes,
``groups`` products of rows in groups and of eight bits with scales of blocks, ``types`` products of other types, some
of which a board may lack, ``mutants`` thirty operators whose kernels are of all kinds, ``axis_values`` some forty that
compute with the values of axes, ``axis_values_types`` some of other element types.
"""

from __future__ import annotations

from pathlib import Path

from hal.support.errors import InputError

_DIRECTORY = Path(__file__).parent


def suite_names() -> tuple[str, ...]:
    """The suites there are, by name."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.json")))


def suite_path(name: str) -> Path:
    """The file of a suite: ``"roller119"`` -> ``bench/suites/roller119.json``."""
    if name not in suite_names():
        raise InputError("suite", f"there is no suite {name!r}", f"use one of {', '.join(suite_names())}")
    return _DIRECTORY / f"{name}.json"
