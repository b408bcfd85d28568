"""The journal loses nothing to a kill, and archives stay below their limit."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from bench.gpu.journal import Journal, archive, thinned


def test_items_are_there_after_a_kill(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin("training", "a")
    journal.add("training", "a", {"x": 1})
    journal.begin("training", "b")
    with journal.path.open("ab") as file:
        file.write(b'{"kind":"item","section":"training","key":"b","it')  # killed while writing
    again = Journal(tmp_path)
    assert again.items("training") == [{"key": "a", "x": 1}]
    assert not again.done("training", "b")
    again.add("training", "b", {"x": 2})
    assert Journal(tmp_path).items("training") == [{"key": "a", "x": 1}, {"key": "b", "x": 2}]


def test_an_item_begun_and_never_finished_is_abandoned_once(tmp_path: Path) -> None:
    Journal(tmp_path).begin("profile", "p")
    assert Journal(tmp_path).abandon("died of signal 11") == ("profile", "p")
    again = Journal(tmp_path)
    assert again.done("profile", "p") and again.items("profile") == []
    assert again.abandon("again") is None


def test_failures_are_forgotten_for_good(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add("profile", "p", {"error": "bad luck"})
    journal.add("profile", "q", {"x": 1})
    assert journal.drop_failures() == 1
    again = Journal(tmp_path)
    assert not again.done("profile", "p") and again.done("profile", "q")


def test_notes_are_merged_and_joined(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note("sections", {"a": 1})
    journal.note("sections", {"b": 2})
    journal.note("samples", [1])
    journal.note("samples", [2, 3])
    assert Journal(tmp_path).noted("sections") == {"a": 1, "b": 2}
    assert Journal(tmp_path).noted("samples") == [1, 2, 3]


def test_numbers_that_json_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        Journal(tmp_path).add("profile", "p", {"x": float("nan")})
    assert not Journal(tmp_path).done("profile", "p")


def test_an_archive_grows_to_its_limit_and_replaces_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "t.tar"
    assert archive(path, "a", b"1" * 1000) and archive(path, "b", b"2" * 1000)
    assert archive(path, "a", b"3")
    assert not archive(path, "c", os.urandom(20000), most_bytes=20000)
    with tarfile.open(path) as tar:
        assert sorted(tar.getnames()) == ["a", "b"]
        member = tar.extractfile("a")
        assert member is not None and member.read() == b"3"


def test_samples_are_thinned_evenly() -> None:
    assert thinned(list(range(10)), most=4) == [0, 3, 6, 9]
    assert thinned([], most=4) == []
