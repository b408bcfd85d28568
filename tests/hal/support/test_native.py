"""C that comes with the package: compiled once, kept, and done without where it cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hal.support.native import NativeLibrary


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLER_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "roller" / "native"


def source(folder: Path, text: str) -> Path:
    path = folder / "twice.c"
    path.write_text(text)
    return path


@pytest.mark.usefixtures("c_compiler")
def test_a_library_is_compiled_once_and_found_by_the_next_process(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = source(tmp_path, "int twice(int value) { return 2 * value; }\n")
    library = NativeLibrary(path).built()
    assert library is not None and library.twice(21) == 42
    assert [file.suffix for file in cache.iterdir()] == [".so"]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = NativeLibrary(path).library()
    assert found is not None and found.twice(4) == 8


@pytest.mark.usefixtures("c_compiler", "cache")
def test_what_does_not_compile_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    broken = NativeLibrary(source(tmp_path, "int twice(\n"))
    assert broken.built() is None and broken.library() is None
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache")
def test_there_is_no_library_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert NativeLibrary(source(tmp_path, "int one;\n")).built() is None


def test_nothing_is_compiled_where_nothing_is_to_be_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLER_CACHE", "0")
    assert NativeLibrary(source(tmp_path, "int one;\n")).built() is None
    assert not cache.exists()
