"""Parts of a sweep: in this process, in others, on a cluster, and after an interruption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from daydream.command.engines import answers
from hal.support.errors import InputError

DONE: list[int] = []


def square(part: dict[str, Any]) -> int:
    """A part that fails at 13."""
    number = int(part["number"])
    DONE.append(number)
    if number == 13:
        raise InputError("number", "is 13", "take another")
    return number * number


def parts(*numbers: int) -> list[dict[str, Any]]:
    return [{"number": number} for number in numbers]


def test_answers_come_in_order_and_equal_parts_are_done_once() -> None:
    DONE.clear()
    lines: list[str] = []
    assert answers(square, parts(3, 1, 3), jobs="1", progress=lines.append) == [9, 1, 9]
    assert DONE == [3, 1] and lines == ["2 of 3", "3 of 3"]


@pytest.mark.slow
def test_processes_answer_the_same() -> None:
    assert answers(square, parts(*range(5)), jobs="2") == [0, 1, 4, 9, 16]
    with pytest.raises(InputError, match="take another"):
        answers(square, parts(12, 13), jobs="2")


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    DONE.clear()
    kept = tmp_path / "kept.jsonl"
    with pytest.raises(InputError):
        answers(square, parts(2, 3, 13, 4), jobs="1", resume=kept)
    assert DONE == [2, 3, 13] and len(kept.read_text().splitlines()) == 2
    # The last line was being written when the machine went down.
    kept.write_text(kept.read_text() + '{"part": "0123')
    assert answers(square, parts(2, 3, 4), jobs="1", resume=kept) == [4, 9, 16]
    assert DONE == [2, 3, 13, 4]
    assert [json.loads(line)["answer"] for line in kept.read_text().splitlines()] == [4, 9, 16]


def test_a_cluster_is_asked_for_no_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    @contextmanager
    def executor(url: str, *, boards: bool = True) -> Iterator[Executor]:
        asked.append((url, boards))
        with ThreadPoolExecutor(2) as pool:
            yield pool

    monkeypatch.setattr("roller.profile.clusters.cluster_executor", executor)
    assert answers(square, parts(5, 6), jobs="tcp://host:8786") == [25, 36]
    assert asked == [("tcp://host:8786", False)]


@pytest.mark.parametrize(
    ("jobs", "text", "said"),
    [
        ("0", None, "write 1 to 1024"),
        ("ftp://host", None, "no cluster's URL"),
        ("1", "nonsense\n", "line 1: is no answer of a sweep"),
        ("1", '{"part": "a"}\n', "line 1: is no answer of a sweep"),
    ],
)
def test_what_cannot_be_is_refused(jobs: str, text: str | None, said: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    if text is not None:
        kept.write_text(text)
    with pytest.raises(InputError, match=said):
        answers(square, parts(1, 2), jobs=jobs, resume=kept)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no directory"):
        answers(square, parts(1), resume=tmp_path / "none" / "kept.jsonl")
