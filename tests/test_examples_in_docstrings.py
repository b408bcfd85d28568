"""Examples (``>>>``) in docstrings are what the functions return."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("hal", "sokoban", "codegen", "roller", "daydream", "bench")


def modules() -> list[str]:
    """Modules with an example in them, by name."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    with_examples = [path.relative_to(ROOT) for path in paths if ">>> " in path.read_text("utf-8")]
    return [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in with_examples]


@pytest.mark.parametrize("name", modules())
def test_examples_return_what_is_shown(name: str) -> None:
    report = doctest.testmod(importlib.import_module(name))
    assert report.attempted > 0 and report.failed == 0
