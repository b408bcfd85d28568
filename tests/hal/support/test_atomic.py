"""Nothing half-written stays behind, whatever stops the writing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hal.support import atomic
from hal.support.atomic import staged_directory, write_atomic


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_text_and_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.json", "µs\r\n")
    write_atomic(tmp_path / "b.cubin", b"\x7fELF\n")
    assert (tmp_path / "a.json").read_bytes() == "µs\r\n".encode()
    assert (tmp_path / "b.cubin").read_bytes() == b"\x7fELF\n"
    assert names(tmp_path) == ["a.json", "b.cubin"]


def test_a_new_file_has_the_rights_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "a", "")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_keeps_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    write_atomic(tmp_path / "manifest.json", "old")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(atomic.os, "replace", fail)
    with pytest.raises(type(failure)):
        write_atomic(tmp_path / "manifest.json", "new")
    assert names(tmp_path) == ["manifest.json"]
    assert (tmp_path / "manifest.json").read_text() == "old"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fdopen

    def onto_full_disk(handle: int, mode: str) -> object:
        os.close(handle)
        return real(os.open("/dev/full", os.O_WRONLY), mode)

    monkeypatch.setattr(atomic.os, "fdopen", onto_full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "kernel.cu", "x" * 100_000)
    assert names(tmp_path) == []


def test_a_staged_directory_appears_when_complete(tmp_path: Path) -> None:
    with staged_directory(tmp_path / "out" / "M0") as staging:
        (staging / "manifest.json").write_text("{}")
        assert not (tmp_path / "out" / "M0").exists()
    assert names(tmp_path / "out") == ["M0"]
    assert names(tmp_path / "out" / "M0") == ["manifest.json"]


def test_a_staged_directory_replaces_the_old_one_whole(tmp_path: Path) -> None:
    final = tmp_path / "M0"
    final.mkdir()
    (final / "kernel_9.cu").write_text("stale")
    with staged_directory(final) as staging:
        (staging / "kernel_0.cu").write_text("fresh")
        assert names(final) == ["kernel_9.cu"]
    assert names(tmp_path) == ["M0"]
    assert names(final) == ["kernel_0.cu"]


@pytest.mark.parametrize("failure", [ValueError("bad"), KeyboardInterrupt(), SystemExit(2)])
def test_a_failed_block_keeps_the_old_directory_and_nothing_else(tmp_path: Path, failure: BaseException) -> None:
    final = tmp_path / "M0"
    final.mkdir()
    (final / "kernel_0.cu").write_text("old")
    with pytest.raises(type(failure)), staged_directory(final) as staging:
        (staging / "kernel_0.cu").write_text("new")
        raise failure
    assert names(tmp_path) == ["M0"]
    assert (final / "kernel_0.cu").read_text() == "old"


def test_the_old_directory_comes_back_when_the_last_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "M0"
    final.mkdir()
    (final / "kernel_0.cu").write_text("old")
    real = os.rename

    def fail_for_the_new_one(source: Path, target: Path) -> None:
        if Path(source).suffix == ".part":
            full_disk()
        real(source, target)

    monkeypatch.setattr(atomic.os, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="No space left"), staged_directory(final) as staging:
        (staging / "kernel_0.cu").write_text("new")
    assert names(tmp_path) == ["M0"]
    assert (final / "kernel_0.cu").read_text() == "old"


def test_a_file_in_the_way_of_a_directory_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "M0").write_text("mine")
    with pytest.raises(NotADirectoryError), staged_directory(tmp_path / "M0"):
        pass
    assert names(tmp_path) == ["M0"]
    assert (tmp_path / "M0").read_text() == "mine"
