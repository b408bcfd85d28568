"""Examples (``>>>``) in docstrings are what the functions return."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("hal", "sokoban", "codegen", "roller", "daydream", "bench")


#: Rooms whose modules import PyTorch, and modules that do.
WITH_PYTORCH = (
    "daydream.capture.", "daydream.planners.", "bench.accuracy.steps.kernelbench", "bench.accuracy.steps.plans",
    "roller.dynamo.",
)  # fmt: skip
#: Modules that import TVM.
WITH_TVM = ("codegen.gpu.source.text", "codegen.tir.statements")


def modules() -> list[str]:
    """Modules with an example in them, by name."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    with_examples = [path.relative_to(ROOT) for path in paths if ">>> " in path.read_text("utf-8")]
    return [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in with_examples]


def results(name: str) -> doctest.TestResults:
    return doctest.testmod(importlib.import_module(name))


@pytest.mark.parametrize("name", [name for name in modules() if not name.startswith((*WITH_PYTORCH, *WITH_TVM))])
def test_examples_return_what_is_shown(name: str) -> None:
    report = results(name)
    assert report.attempted > 0 and report.failed == 0


@pytest.mark.usefixtures("pytorch")
@pytest.mark.parametrize("name", [name for name in modules() if name.startswith(WITH_PYTORCH)])
def test_examples_with_pytorch_return_what_is_shown(name: str) -> None:
    report = results(name)
    assert report.attempted > 0 and report.failed == 0


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize("name", WITH_TVM)
def test_examples_of_lowered_text_return_what_is_shown(name: str) -> None:
    report = results(name)
    assert report.attempted > 0 and report.failed == 0
