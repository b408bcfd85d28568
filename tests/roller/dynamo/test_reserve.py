"""Memory whose pages come while Dynamo traces."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hal.support.store import Store  # noqa: E402
from roller.dynamo import constants, reserve  # noqa: E402
from roller.dynamo.constants import dense_copies  # noqa: E402
from roller.dynamo.reserve import Reserve  # noqa: E402

SIZE = 33 << 20


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of a process that needed :data:`SIZE` bytes."""
    store = Store(tmp_path)
    Reserve(store).take(SIZE)
    return store


def test_the_first_compilation_has_memory_of_the_last_size(store: Store) -> None:
    one = Reserve(store)
    one.begin()
    reserved = one._storage
    assert reserved.nbytes() == SIZE
    assert one.take(SIZE).data_ptr() == reserved.data_ptr()
    assert one.take(SIZE).data_ptr() != reserved.data_ptr(), "memory is taken once"
    one.begin()
    assert one._storage is None, "a second compilation reserves nothing"


def test_memory_of_another_size_is_not_taken_and_the_new_size_is_kept(store: Store) -> None:
    one, other = Reserve(store), Reserve(store)
    one.begin()
    assert one.take(2 * SIZE).nbytes() == 2 * SIZE and one._storage is None
    other.begin()
    assert other._storage.nbytes() == 2 * SIZE
    other.drop()
    assert other._storage is None


@pytest.mark.parametrize(("kept", "free"), [("", 1e12), ("many", 1e12), (str(1 << 20), 1e12), (str(SIZE), SIZE)])
def test_nothing_is_reserved_without_a_size_or_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: str, free: float
) -> None:
    store = Store(tmp_path)
    store.write(Reserve._key(), kept.encode())
    monkeypatch.setattr(reserve, "_free_bytes", lambda: free)
    one = Reserve(store)
    one.begin()
    assert one._storage is None


@pytest.mark.skipif(constants._madvise() is None, reason="memory of its own is for Linux")
def test_copies_lie_in_what_was_reserved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numbers = torch.arange(SIZE // 8)
    store, interval = Store(tmp_path), sys.getswitchinterval()
    for is_reserved in (False, True):
        one = Reserve(store)
        monkeypatch.setattr(constants, "RESERVE", one)
        one.begin()
        assert (one._storage is not None) == is_reserved
        places = one._storage.data_ptr() if is_reserved else None
        (copy,), filled = dense_copies([(numbers, torch.preserve_format)])
        filled.result()
        assert torch.equal(copy, numbers) and sys.getswitchinterval() == interval
        assert places in (None, copy.untyped_storage().data_ptr())
