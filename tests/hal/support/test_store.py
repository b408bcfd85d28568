"""The folder of finished results: whole, bounded, and never a reason to fail."""

from __future__ import annotations

import os
from pathlib import Path

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
