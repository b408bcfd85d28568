"""A run over many operators: resumed where it ended, failures written down, the tables of what met what."""

from __future__ import annotations

import json
import time
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import pytest

from bench.fuzz import campaign as module
from bench.fuzz.campaign import Worker, campaign, problem_of
from bench.fuzz.log import Log
from bench.fuzz.operators import operator
from bench.fuzz.tables import POSSIBLE, Met, lines_of
from hal.support.errors import InputError
from sokoban.language.operators import load_operators


def record_of(number: int, outcome: str = "agrees", **more: Any) -> dict[str, Any]:
    run = {"device": "v100", "kind": "rows", "engine": "emulator", "outcome": outcome, "reason": "off",
           "met": {"rows": ["inside exp"]}}  # fmt: skip
    return {"number": number, "took": {"v100": "rows"}, "refused": {}, "runs": [run], "core_seconds": 0.5, **more}


class InProcess(Worker):
    """Examines nothing: every operator agrees but those told otherwise."""

    def __init__(self, wrong: tuple[int, ...] = (), hanging: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.wrong, self.hanging, self.examined = wrong, hanging, list[int]()

    def call(self, function: Any, *arguments: Any, timeout: float = 0.0) -> Any:
        if function.__name__ == "shrunk_operator":
            return {"name": arguments[0]["name"], "expr": "Y[i] = X[i]", "sizes": {"i": 3}}
        self.examined.append(arguments[0])
        if arguments[0] in self.hanging:
            raise FutureTimeout
        return record_of(arguments[0], "wrong" if arguments[0] in self.wrong else "agrees")


def silent(line: str) -> None:
    del line


@pytest.mark.usefixtures("device_compiler", "emulator")
def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    first, second = InProcess(), InProcess()
    assert campaign(Log(tmp_path), 0, 1.0, 3, silent, first).operators == 3
    totals = campaign(Log(tmp_path), 0, 1.0, 2, silent, second)
    assert (first.examined, second.examined) == ([0, 1, 2], [3, 4])
    assert totals.operators == 5 and totals.core_seconds == 2.5 and not totals.failures


@pytest.mark.usefixtures("device_compiler", "emulator")
def test_other_code_starts_its_count_anew_with_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign(Log(tmp_path), 0, 1.0, 3, silent, InProcess(wrong=(1,)))
    monkeypatch.setattr(module, "code_digest", lambda: "other")
    worker = InProcess()
    assert campaign(Log(tmp_path), 0, 1.0, 2, silent, worker).operators == 2
    assert worker.examined == [1, 3]


@pytest.mark.usefixtures("device_compiler", "emulator")
def test_a_failing_operator_is_shrunk_and_written_as_a_file_of_operators(tmp_path: Path) -> None:
    lines: list[str] = []
    totals = campaign(Log(tmp_path), 0, 1.0, 3, lines.append, InProcess(wrong=(1,), hanging=(2,)))
    assert totals.failures == {1: "v100 rows: off", 2: "Timeout: longer than 600 s"}
    small, whole = (tmp_path / "findings" / f"drawn_0_{number}.json" for number in (1, 2))
    assert [expr.name for expr in load_operators(small)] == ["drawn_0_1"]
    assert json.loads(small.read_text())["expr"] == "Y[i] = X[i]"
    assert json.loads(whole.read_text()) == operator(2)
    assert lines[0] == "operator 1: v100 rows: off" and "2 operators failed" in lines[-1]


def test_a_line_that_an_interruption_cut_is_left_out(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append({"number": 1})
    with log.path.open("a") as file:
        file.write('{"number": 2, "ru')
    assert [record["number"] for record in log.records()] == [1]
    log.path.write_text('{"number"\n')
    with pytest.raises(InputError, match="is no record"):
        list(log.records())


def test_an_operator_without_any_kernel_is_a_failure() -> None:
    assert problem_of(record_of(1, "refused")) == "no kernel: off"
    assert problem_of(record_of(1, "agrees")) == ""
    assert problem_of(record_of(1, built="v100 rows: error")) == "v100 rows: error"
    assert problem_of(record_of(1, traceback="Traceback\nValueError: x")) == "ValueError: x"


def test_the_table_names_pairs_that_never_met() -> None:
    met = Met.of([record_of(1), record_of(2), record_of(3, "refused")])
    assert met.cells["rows"]["inside exp"] == 2 and met.kernels["rows"] == 2
    assert met.took["v100"]["rows"] == 3
    missing = met.missing()
    assert "inside exp" not in missing["rows"] and "inside log" in missing["rows"]
    assert set(missing) == set(POSSIBLE)
    text = "\n".join(lines_of(met))
    assert "v100: rows 3" in text and "refused: rows:" in text
    # A matrix unit multiplies loads: functions are met in its epilogue alone.
    assert "inside exp" not in POSSIBLE["mma"] and "outside exp" in POSSIBLE["mma"]


def test_workers_examine_in_a_process_of_their_own() -> None:
    worker = Worker()
    try:
        assert worker.call(operator, 3) == operator(3)
        with pytest.raises(FutureTimeout):
            worker.call(time.sleep, 3600, timeout=0.1)
        assert worker.call(operator, 4) == operator(4)
    finally:
        worker.close(kill=True)
