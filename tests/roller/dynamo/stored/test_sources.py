"""The key of PyTorch's sources: worked out once, and known to later processes."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("torch")

from roller.dynamo.stored import sources


class Key:
    """PyTorch's function, as far as it is asked."""

    def __init__(self) -> None:
        self.known: bytes | None = None
        self.worked_out = 0

    def __call__(self) -> bytes:
        return self.known or b"key"

    def prefetch(self) -> Future[bytes] | None:
        self.worked_out += 1
        return None

    def set(self, key: bytes) -> None:
        if self.known is not None:
            raise RuntimeError("already set")
        self.known = key


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What a process has of the key, once its threads have ended."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    class Waited(Thread):
        def start(self) -> None:
            self.run()

    monkeypatch.setattr(sources.threading, "Thread", Waited)

    def begin(key: Any) -> Any:
        monkeypatch.setattr(sources, "torch_key", key)
        sources.begin_torch_key()
        return key

    return begin


def test_a_second_process_knows_the_key(begun: Any) -> None:
    assert begun(Key()).worked_out == 1
    second = begun(Key())
    assert second.known == b"key" and not second.worked_out


def test_a_key_that_was_asked_for_stays(begun: Any) -> None:
    begun(Key())
    asked = Key()
    asked.set(b"other")
    assert begun(asked).known == b"other"


def test_other_releases_work_it_out_themselves(begun: Any) -> None:
    assert begun(lambda: b"key")() == b"key"
