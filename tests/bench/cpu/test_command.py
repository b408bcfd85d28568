"""The command end to end on two tiny operators, and what it does with rivals that fail."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench.cpu import processes
from bench.cpu.__main__ import main
from bench.cpu.comparison import Settings, compare, compared, write_inputs
from bench.cpu.machine import busy_notes
from bench.cpu.processes import Process, seconds_of_turn
from bench.cpu.results import read_results
from bench.cpu.rivals import Call, Operator, Prepared
from bench.cpu.timing import TurnError
from bench.cpu.worker import Worker, serve
from sokoban.language.operators import operator_from_data
from tests.bench.cpu.samples import MACHINE

TINY: list[dict[str, Any]] = [
    {"name": "product", "op": "matmul", "m": 16, "n": 16, "k": 16, "dtype": "float32"},
    {"name": "sums", "op": "reduce", "function": "sum", "shape": [8, 16], "axes": [1], "dtype": "float32"},
]
SETTINGS = Settings(rounds=3, turn_seconds=1e-4, private_bytes=0)


def product_by_hand(operator: Operator) -> Prepared:
    """An adapter for `--ours`, which has only one operator."""
    if operator.spec["op"] != "matmul":
        raise RuntimeError("has no\nsuch kernel")
    facts = {"predicted_seconds": 1e-6}

    def bind(inputs: Mapping[str, Any]) -> Call:
        return lambda: inputs["A"] @ inputs["B"]

    return Prepared(bind, facts)


def wrong_after_the_first(operator: Operator) -> Prepared:
    """One that keeps the result on the first inputs for all."""
    kept: list[Any] = []

    def bind(inputs: Mapping[str, Any]) -> Call:
        kept.append(inputs["A"] @ inputs["B"])
        return lambda: kept[0]

    return Prepared(bind)


@pytest.mark.usefixtures("pytorch")
def test_the_command_compares_two_tiny_operators(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    suite = tmp_path / "tiny.json"
    suite.write_text(json.dumps(TINY))
    result = CliRunner().invoke(
        main,
        [
            "--suite", str(suite), "--threads", "1", "--rounds", "3", "--turn", "0.001",
            "--rivals", "ours,openblas,torch", "--ours", f"{__name__}:product_by_hand", "--out", str(tmp_path / "out"),
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    kept = read_results(tmp_path / "out" / "results.json")
    product, sums = kept.operators
    assert [one.who for one in product.entries] == ["ours", "openblas", "torch"]
    for one in product.entries:
        assert one.check is not None and one.check.passed and one.time is not None and len(one.rounds) == 3, one
    ours, torch = sums.entries  # OpenBLAS does not compete in sums
    assert ours.reason == "RuntimeError: has no such kernel" and ours.time is None
    assert torch.who == "torch" and torch.time is not None
    assert (tmp_path / "out" / "ratios.png").exists()
    shown = result.output + capfd.readouterr().out
    assert "ours struck out: RuntimeError: has no such kernel (sums)" in shown


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rivals", "numba"], "--rivals: there is no 'numba'"),
        (["--operators", "gemm_7"], "'gemm_7' is not in cpu24.json"),
        (["--suite", "none"], "there is no suite 'none'"),
        (["--threads", "250"], "250 is more than there are cores"),
        (["--show", "/nowhere/results.json"], "/nowhere/results.json"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_one_line(arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert problem in result.output and result.output.count("\n") == 1


class InProcess:
    """A rival that answers here, without a process."""

    def __init__(self, adapter: str) -> None:
        self.worker = Worker("ours", (0,), {"adapter": f"{__name__}:{adapter}"})

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self.worker.answer(request)

    def close(self) -> None:
        pass


class Dying:
    """One whose process ends in its second turn."""

    def __init__(self) -> None:
        self.turns = 0

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["do"] == "prepare":
            return {"facts": {}, "check": None, "setup_seconds": 0.0}
        self.turns += 1
        return {"seconds": 1.0} if self.turns == 1 else {"reason": "its process ended with -11"}

    def close(self) -> None:
        pass


def test_a_rival_that_computes_something_else_on_further_inputs_is_struck_out(tmp_path: Path) -> None:
    found = compared(TINY[0], {"ours": InProcess("wrong_after_the_first")}, SETTINGS, tmp_path)
    (entry,) = found.entries
    assert entry.reason == "differs from the reference" and entry.time is None
    assert entry.check is not None and entry.check.relative_error > 0.1


def test_a_process_that_dies_between_turns_leaves_the_others_alone() -> None:
    rivals = {"torch": Dying(), "ours": InProcess("product_by_hand")}
    (found,) = compare(TINY[:1], rivals, SETTINGS)
    dead, ours = found.entries
    assert dead.reason == "its process ended with -11" and dead.time is None and dead.rounds == []
    assert ours.time is not None and ours.time.count == 3 and ours.facts.predicted_seconds == 1e-6


def test_enough_inputs_take_turns_to_empty_the_private_caches() -> None:
    settings = Settings(rounds=1, turn_seconds=1.0, private_bytes=1000)
    assert [settings.sets(size) for size in (10, 400, 10_000)] == [16, 5, 2]


def test_references_are_there_for_the_first_and_the_last_inputs(tmp_path: Path) -> None:
    assert write_inputs(operator_from_data(TINY[0]), 3, tmp_path) == [0, 2]
    first, last = (np.load(tmp_path / f"expected{number}.npy") for number in (0, 2))
    assert first.dtype == np.float64 and not np.allclose(first, last)
    assert sorted(path.name for path in tmp_path.glob("inputs*")) == ["inputs0.npz", "inputs1.npz", "inputs2.npz"]


def test_a_worker_answers_line_by_line_until_it_is_asked_to_quit() -> None:
    worker = Worker("ours", (0,), {"adapter": "bench.cpu.ours:nothing"})
    replies = io.StringIO()
    prepare = json.dumps({"do": "prepare", "spec": TINY[0], "folder": "", "sets": 0})
    serve(worker, io.StringIO(f'{prepare}\n{{"do": "quit"}}\n{prepare}\n'), replies)
    (line,) = replies.getvalue().splitlines()
    assert json.loads(line)["reason"].startswith("InputError: --ours")


def test_a_process_that_ends_is_reported_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process("ours", (0,), {}, {})
    process._command = ["/bin/false"]
    for _ in range(2):
        assert process.ask({"do": "turn"}) == {"reason": "its process ended with 1"}
    with pytest.raises(TurnError, match="ended with 1"):
        seconds_of_turn(process, 1.0)
    process.close()


def test_a_process_that_hangs_is_ended() -> None:
    process = Process("ours", (0,), {}, {}, limit_seconds=0.2)
    process._command = ["/bin/sleep", "60"]
    assert process.ask({"do": "turn"}) == {"reason": "gave no answer in 0 s"}
    assert processes.LIMIT_SECONDS > 60


def test_a_busy_machine_is_noted() -> None:
    from msgspec.structs import replace

    assert busy_notes(MACHINE, ("gemm_512 by torch", 0.05), 0.1) == []
    notes = busy_notes(replace(MACHINE, load=1.5, pinned=False), ("gemm_512 by torch", 0.3), 0.1)
    assert len(notes) == 3 and "load 1.50 on 2 cores" in notes[0] and "gemm_512 by torch are 30%" in notes[1]
