"""What MetaSchedule found is kept after every operator and not searched again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.cpu import tune as tune_module
from bench.cpu.tune import tune, wanted
from bench.cpu.tuned import Store, Tuning, read_tuned, slug
from hal.support.errors import InputError
from sokoban.language.expression import TensorExpr

FIRST = {"name": "first", "op": "matmul", "m": 8, "n": 8, "k": 8}
SECOND = {"name": "second", "op": "softmax", "shape": [4, 8]}


def found(trials: int, trace: str = "[[],[]]") -> Tuning:
    return Tuning(trials=trials, tried=trials, failed=1, seconds=9.5, best_seconds=1e-4, day="2026-11-21", trace=trace)


class FakeSearcher:
    """Finds something for everything; interrupted before the search number `breaks_at`."""

    def __init__(self, breaks_at: int = 99) -> None:
        self.searched: list[tuple[str, int]] = []
        self.breaks_at = breaks_at

    def tune(self, expr: TensorExpr, trials: int) -> Tuning:
        if len(self.searched) == self.breaks_at:
            raise KeyboardInterrupt
        self.searched.append((expr.name, trials))
        return found(trials)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "tuned", "Intel(R) Xeon(R) @ 2.50GHz", "cascadelake", 2, "0.27")


def test_the_file_is_named_after_processor_threads_and_version(store: Store) -> None:
    assert store.path.name == "intel-xeon-2-50ghz-cascadelake-2threads-tvm0.27.json"
    assert slug("AMD EPYC 9B45 znver5") == "amd-epyc-9b45-znver5"


def test_a_search_goes_on_where_it_was_interrupted(store: Store) -> None:
    todo = list(wanted([FIRST, SECOND], 64, 512, ["first"]))
    broken = FakeSearcher(breaks_at=1)
    with pytest.raises(KeyboardInterrupt):
        tune(todo, store, lambda: broken, again=False)
    assert store.find(FIRST, 64) == found(64) and store.find(SECOND, 64) is None
    rest = FakeSearcher()
    assert tune(todo, store, lambda: rest, again=False) == 0
    assert rest.searched == [("second", 64), ("first", 512)]
    assert set(store.read().operators["first"].searches) == {"64", "512"}


def test_nothing_to_do_starts_no_searcher(store: Store) -> None:
    store.add(FIRST, found(64))
    lines: list[str] = []
    assert tune([(FIRST, 64)], store, lambda: pytest.fail("started"), again=False, progress=lines.append) == 0
    assert lines == [f"1 of 1 searches are in {store.path.name}"]


def test_again_searches_for_everything(store: Store) -> None:
    store.add(FIRST, found(64, "old"))
    assert tune([(FIRST, 64)], store, FakeSearcher, again=True) == 0
    assert store.find(FIRST, 64) == found(64)


def test_a_search_that_fails_is_reported_and_the_others_go_on(store: Store) -> None:
    class Failing(FakeSearcher):
        def tune(self, expr: TensorExpr, trials: int) -> Tuning:
            if expr.name == "first":
                raise RuntimeError("no\nschedule")
            return super().tune(expr, trials)

    lines: list[str] = []
    assert tune([(FIRST, 64), (SECOND, 64)], store, Failing, again=False, progress=lines.append) == 1
    assert lines[1] == "first, 64 trials: RuntimeError: no schedule"
    assert store.find(FIRST, 64) is None and store.find(SECOND, 64) is not None


def test_an_operator_that_changed_is_not_tuned(store: Store) -> None:
    store.add(FIRST, found(64))
    store.add(FIRST, found(512))
    changed = {**FIRST, "m": 16}
    assert store.find(changed, 64) is None
    store.add(changed, found(64))
    assert store.find(changed, 512) is None and store.find(changed, 64) is not None


def test_nothing_is_left_behind_next_to_the_file(store: Store) -> None:
    store.add(FIRST, found(64))
    assert [path.name for path in store.path.parent.iterdir()] == [store.path.name]


@pytest.mark.parametrize("data", [b"{", b'{"format": 1}'])
def test_a_damaged_file_is_refused_with_its_name(store: Store, data: bytes) -> None:
    store.path.parent.mkdir()
    store.path.write_bytes(data)
    with pytest.raises(InputError, match="tune again") as error:
        store.read()
    assert store.path.name in error.value.field


def test_another_format_is_refused(store: Store) -> None:
    store.add(FIRST, found(64))
    data: dict[str, Any] = json.loads(store.path.read_bytes())
    store.path.write_text(json.dumps({**data, "format": 2}))
    with pytest.raises(InputError, match="is 2, not 1"):
        read_tuned(store.path)


def test_the_command_tunes_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSearcher()
    monkeypatch.setattr(tune_module, "_metaschedule", lambda llvm, threads: fake)
    monkeypatch.setattr(tune_module, "pin", lambda cpus: True)
    arguments = ["--operators", "gemm_512,sum_rows", "--trials", "3", "--trials-more", "5", "--on", "gemm_512"]
    for _ in range(2):
        result = CliRunner().invoke(tune_module.main, [*arguments, "--threads", "1", "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
    assert fake.searched == [("gemm_512", 3), ("sum_rows", 3), ("gemm_512", 5)]
    assert "3 of 3 searches are in" in result.output


def test_the_command_names_an_operator_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(tune_module.main, ["--operators", "gemm_7", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "'gemm_7' is not in cpu24.json" in result.output
