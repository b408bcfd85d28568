"""Functions of modules that are imported when they are called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from daydream.capture.models.deferred import deferred

SOURCE = "size = 3\n\n\ndef doubled(x):\n    return 2 * x\n"


@pytest.fixture
def slow_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module that can be imported and has not been."""
    name = "imported_late"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_function_imports_its_module_when_it_is_called(slow_module: str) -> None:
    with deferred(slow_module, "doubled"):
        from imported_late import doubled  # type: ignore[import-not-found]
    assert slow_module not in sys.modules
    assert doubled(4) == 8 and slow_module in sys.modules
    sys.modules.pop(slow_module)


def test_what_else_is_taken_imports_it_at_once(slow_module: str) -> None:
    with deferred(slow_module, "doubled"):
        from imported_late import doubled, size
    assert size == 3 and doubled(size) == 6
    assert sys.modules.pop(slow_module).size == 3


def test_a_module_that_is_there_stays_as_it_is(slow_module: str) -> None:
    import imported_late

    with deferred(slow_module, "doubled"):
        assert sys.modules[slow_module] is imported_late
    assert sys.modules.pop(slow_module) is imported_late
