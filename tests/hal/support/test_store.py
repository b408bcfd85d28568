"""The folder of finished results: whole, bounded, and never a reason to fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hal.support.store as stores
from hal.support.store import Store, digest


def test_what_was_written_is_read_until_it_is_damaged(tmp_path: Path) -> None:
    store, key = Store(tmp_path / "kernels"), digest("a kernel")
    assert store.read(key) is None
    store.write(key, b"cubin")
    assert store.read(key) == b"cubin"
    (path,) = (tmp_path / "kernels").glob("??/*")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert store.read(key) is None
    assert store.usage() == (0, 0)


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    store, keys = Store(tmp_path), [digest(str(number)) for number in range(4)]
    for age, key in zip((10, 40, 20, 30), keys, strict=True):
        store.write(key, bytes(68))  # 100 bytes with the digest
        os.utime(tmp_path / key[:2] / key[2:], (1e9 - age, 1e9 - age))
    store.set_limit(300)  # cut to 240: two stay
    assert [store.read(key) is not None for key in keys] == [True, False, True, False]
    store.clear()
    assert (store.usage(), store.limit_bytes) == ((0, 0), 300)


def test_code_is_read_again_where_a_file_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ROLLER_CACHE", raising=False)
    monkeypatch.setattr(stores, "_ROOT", tmp_path)
    (tmp_path / "code" / "inner").mkdir(parents=True)
    file = tmp_path / "code" / "inner" / "one.py"
    file.write_text("a = 1")
    first = stores.code_digest("code")
    read = stores.code_texts
    monkeypatch.setattr(stores, "code_texts", lambda *folders: pytest.fail("read again"))
    assert stores.code_digest("code") == first
    monkeypatch.setattr(stores, "code_texts", read)
    file.write_text("a = 12")
    changed = stores.code_digest("code")
    file.write_text("a = 1")
    assert changed != first and stores.code_digest("code") == first


def test_stamps_leave_out_other_files_and_folders(tmp_path: Path) -> None:
    for name in ("a.py", "b.txt", "__pycache__/c.py", "inner/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [text.partition(" ")[0] for text in stores.stamps(str(tmp_path), (".py",))]
    assert names == [str(tmp_path / "a.py"), str(tmp_path / "inner" / "d.py")]
