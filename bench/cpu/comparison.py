"""The comparison: inputs and references made, every rival checked, those that are right timed in turns."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.cpu.pace import Pace
from bench.cpu.processes import Contender, seconds_of_turn
from bench.cpu.results import Entry, Facts, OperatorResult
from bench.cpu.timing import interleaved
from bench.suites import suite_path
from bench.timed.statistics import Check, spread
from codegen.tolerance import tolerance_of
from hal.support.errors import InputError
from roller.profile.cpu import rotating_sets
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate

Spec = Mapping[str, Any]
DEFAULT_SUITE = Path(__file__).parent / "cpu24.json"


@dataclass(frozen=True)
class Settings:
    """Options of measuring: rounds, seconds of a turn, bytes of all private caches together."""

    rounds: int
    turn_seconds: float
    private_bytes: int

    def sets(self, input_bytes: int) -> int:
        """Number of sets of inputs of so many bytes that take turns."""
        return rotating_sets(input_bytes, self.private_bytes)


def read_suite(suite: str, names: Sequence[str]) -> list[Spec]:
    """The operators of ``cpu24``, another suite or a JSON file, all or those of these names.

    Raises:
        InputError: there is none, it is not a list of operators, or one of the names is not in it.
    """
    path = (
        Path(suite) if suite.endswith(".json") else DEFAULT_SUITE if suite == DEFAULT_SUITE.stem else suite_path(suite)
    )
    try:
        specs = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(str(path), str(error), "name a suite such as cpu24") from None
    if not isinstance(specs, list) or not all(isinstance(one, dict) and "name" in one for one in specs):
        raise InputError(str(path), "is no list of named operators", "write one as bench/cpu/cpu24.json")
    all_names = [one["name"] for one in specs]
    for name in names:
        if name not in all_names:
            raise InputError("--operators", f"{name!r} is not in {path.name}", f"name some of {', '.join(all_names)}")
    return [one for one in specs if not names or one["name"] in names]


def compare(
    specs: Sequence[Spec],
    contenders: Mapping[str, Contender],
    settings: Settings,
    progress: Callable[[str], None] = lambda name: None,
    pace: Pace | None = None,
) -> list[OperatorResult]:
    """Every operator by everybody, one after the other; between them ``pace`` measures the machine."""
    results = []
    if pace is not None:
        pace.turn()
    for spec in specs:
        progress(str(spec["name"]))
        with tempfile.TemporaryDirectory(prefix="bench-cpu-") as folder:
            result = compared(spec, contenders, settings, Path(folder))
        if pace is not None:
            pace.turn()
            result = _with_prediction(result, pace.seconds(spec))
        results.append(result)
    return results


def _with_prediction(one: OperatorResult, seconds: float | None) -> OperatorResult:
    """The result with what was predicted of ours from a spec of the same minute."""
    replace = msgspec.structs.replace
    entries = [
        replace(entry, facts=replace(entry.facts, predicted_then_seconds=seconds)) if entry.who == "ours" else entry
        for entry in one.entries
    ]
    return replace(one, entries=entries)


def compared(spec: Spec, contenders: Mapping[str, Contender], settings: Settings, folder: Path) -> OperatorResult:
    """One operator by everybody; its inputs and references pass through `folder`."""
    from bench.calls.operators import problem

    expr = operator_from_data(dict(spec))
    facts = problem("cpu", spec)
    sets = settings.sets(sum(tensor.size_bytes for tensor in expr.inputs))
    checked = write_inputs(expr, sets, folder)
    request = {
        "do": "prepare", "spec": dict(spec), "folder": str(folder), "sets": sets, "checked": checked,
        "tolerance": tolerance_of(expr),
    }  # fmt: skip
    replies = {name: contender.ask(request) for name, contender in contenders.items()}
    entries = {name: _entered(name, reply) for name, reply in replies.items() if not reply.get("no_rival")}
    turns = {
        name: lambda contender=contenders[name]: seconds_of_turn(contender, settings.turn_seconds)
        for name, entry in entries.items()
        if not entry.reason
    }
    seconds, failed = interleaved(turns, settings.rounds)
    for name, rounds in seconds.items():
        entries[name] = msgspec.structs.replace(entries[name], time=spread(rounds), rounds=rounds)
    for name, reason in failed.items():
        entries[name] = msgspec.structs.replace(entries[name], reason=reason)
    return OperatorResult(
        name=facts.name, op=facts.op, spec=dict(spec), flop=facts.flop, bytes=facts.compulsory_bytes, sets=sets,
        entries=list(entries.values()),
    )  # fmt: skip


def write_inputs(expr: TensorExpr, sets: int, folder: Path) -> list[int]:
    """Write the sets of inputs, and the float64 results of the first and the last; returns which those are."""
    checked = [0, sets - 1]
    for number in range(sets):
        values = random_inputs(expr, seed=number)
        arrays = {
            tensor.name: values[tensor.name].reshape(tensor.caller_shape).astype(np.float32) for tensor in expr.inputs
        }
        # mypy takes the dictionary for savez's own keyword.
        np.savez(folder / f"inputs{number}.npz", **arrays)  # type: ignore[arg-type]
        if number in checked:
            np.save(folder / f"expected{number}.npy", evaluate(expr, values).reshape(expr.output.caller_shape))
    return checked


def _entered(name: str, reply: Mapping[str, Any]) -> Entry:
    """A rival that was prepared; with a reason where it cannot be timed."""
    if "reason" in reply:
        return Entry(who=name, reason=reply["reason"])
    check = msgspec.convert(reply["check"], Check | None)
    reason = "" if check is None or check.passed else "differs from the reference"
    facts = msgspec.convert(reply["facts"], Facts)
    return Entry(who=name, reason=reason, check=check, facts=facts, setup_seconds=reply["setup_seconds"])
