"""Functions of modules that are imported when they are called."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from daydream.capture.models.deferred import _from_last_names, deferred, frames_without_source

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


def test_frames_are_described_by_file_and_line() -> None:
    described = inspect.getframeinfo
    with frames_without_source():
        frame = inspect.getframeinfo(sys._getframe())
        assert inspect.getmodule(sys._getframe()) is sys.modules[__name__]
        assert inspect.getmodule(deferred).__name__ == "daydream.capture.models.deferred"
    assert (frame.filename, frame.function, frame.code_context) == (
        __file__, "test_frames_are_described_by_file_and_line", None
    )  # fmt: skip
    assert inspect.getframeinfo is described


def test_names_of_files_are_those_of_the_whole_text() -> None:
    """Functions of transformers that look for ``__all__``, once as they are and once on the end of the text."""
    import_utils = pytest.importorskip("transformers.utils.import_utils")
    texts = (
        'x = 1\n__all__ = ["a"]\n__all__ = [\n    "b",\n    "c",\n]\n',
        '__all__ = ["a", "b"]\n',
        "x = 1\n",
        "# __all__\n",
    )
    from_last = _from_last_names(import_utils.fetch__all__)
    assert [from_last(each) for each in texts] == [import_utils.fetch__all__(each) for each in texts]
