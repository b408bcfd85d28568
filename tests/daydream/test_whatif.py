"""Passes as they are written on the command line, and functions of the user's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import simulate
from daydream.passes import Outcome, WhatIf, parameters_of, registered
from daydream.whatif import PassRequest, apply_passes, parse_pass
from hal.support.errors import InputError
from tests.daydream.graphs import graph, launched, pairs


def shrink(
    graph: TaskGraph, *, factor: float = 2.0, steps_ahead: int = 1, only: str = "", deep: bool = False
) -> Outcome:
    """Shrinks every kernel."""
    changed = graph.scaled(graph.select(gpu=True, name=only or None), 1 / factor)
    return Outcome(changed, (f"{factor:g} {steps_ahead} {only} {deep}",))


def demand(graph: TaskGraph, *, bandwidth: float) -> Outcome:
    """Needs a parameter."""
    if bandwidth < 0:
        raise InputError("bandwidth", "-1 is out of range", "give 0 or more")
    return Outcome(graph, (str(bandwidth),))


@pytest.fixture(autouse=True)
def two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"shrink": shrink, "demand": demand}
    passes = {name: WhatIf(name, function, parameters_of(function)) for name, function in functions.items()}
    monkeypatch.setattr("daydream.passes.registered", lambda: passes)


def small() -> TaskGraph:
    return graph([*launched("a", 10), *launched("b", 4)], pairs(2))


def write(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("shrink", {}),
        ("shrink:factor=4", {"factor": 4.0}),
        ("shrink:factor=1e3,steps-ahead=-2", {"factor": 1000.0, "steps_ahead": -2}),
        ("shrink:steps_ahead=3,deep=yes", {"steps_ahead": 3, "deep": True}),
        ("shrink:deep=FALSE", {"deep": False}),
        ("shrink:factor=inf", {"factor": float("inf")}),
        ("shrink:only=a,b", {"only": "a,b"}),
        ("shrink:only=x{1,2},factor=3", {"only": "x{1,2}", "factor": 3.0}),
        ("shrink:only=at::native=(1)", {"only": "at::native=(1)"}),
        ("shrink:only=", {"only": ""}),
    ],
)
def test_parameters_have_the_types_of_the_pass(text: str, parameters: dict[str, object]) -> None:
    request = parse_pass(text)
    assert request.parameters == parameters
    assert {key: type(value) for key, value in request.parameters.items()} == {
        key: type(value) for key, value in parameters.items()
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shrnk", "--pass: no pass is called 'shrnk'; did you mean shrink? `daydream passes` lists all"),
        ("zzz", "--pass: no pass is called 'zzz'; `daydream passes` lists all"),
        ("", "--pass: no pass is called ''; `daydream passes` lists all"),
        (
            "shrink:fact=2",
            "--pass shrink: there is no key 'fact'; its keys are factor, steps-ahead, only and deep",
        ),
        ("shrink:factor", "--pass shrink: 'factor' sets nothing; write key=value,key=value"),
        ("shrink:factor=x", "--pass shrink: factor: 'x' is not a number; write factor=2"),
        ("shrink:factor=nan", "--pass shrink: factor: 'nan' is not a number; write factor=2"),
        ("shrink:steps-ahead=1.5", "--pass shrink: steps-ahead: '1.5' is not a whole number; write steps-ahead=1"),
        ("shrink:deep=maybe", "--pass shrink: deep: 'maybe' is not yes or no; write deep=yes or deep=no"),
        ("demand", "--pass demand: needs bandwidth; write demand:bandwidth=..."),
    ],
)
def test_what_cannot_be_meant_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_pass(text)
    assert str(error.value) == message


def test_passes_are_applied_in_their_order() -> None:
    changed, applied = apply_passes(small(), [parse_pass("shrink:only=a"), parse_pass("shrink:factor=4,deep=on")])
    # a: 10 / 2 / 4, b: 4 / 4.
    assert changed.duration_us[changed.select(gpu=True)].tolist() == [1.25, 1]
    assert [one.settings for one in applied] == [
        " (factor=2, steps-ahead=1, only=a, deep=no)", " (factor=4, steps-ahead=1, only=, deep=yes)",
    ]  # fmt: skip
    assert applied[1].notes == ("4 1  True",)


def test_a_pass_that_refuses_is_named() -> None:
    with pytest.raises(InputError, match=re.escape("--pass demand: bandwidth: -1 is out of range; give 0 or more")):
        apply_passes(small(), [parse_pass("demand:bandwidth=-1")])


# The user's own


HALVE = """\
from daydream.graph.graph import TaskGraph

def halve(graph: TaskGraph, *, factor: float = 0.5) -> TaskGraph:
    print("working")
    return graph.scaled(graph.select(gpu=True), factor)

def _helper(graph):
    return graph
"""


@pytest.mark.parametrize(("rest", "makespan"), [("", 8), (":halve", 8), (":factor=1.5", 22), (":halve:factor=0", 2)])
def test_a_file_with_a_function_is_a_pass(
    tmp_path: Path, rest: str, makespan: float, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, applied = apply_passes(small(), [parse_pass(write(tmp_path, HALVE) + rest)])
    # Launches 0-2, kernels of 10 and 4 from 1 on, times the factor.
    assert simulate(changed).makespan_us == makespan
    assert applied[0].name == "halve"
    # Standard output belongs to the answer.
    assert capsys.readouterr() == ("", "working\n")


def test_an_outcome_brings_its_notes(tmp_path: Path) -> None:
    text = "from daydream.passes import Outcome\ndef same(graph):\n    return Outcome(graph, ('nothing',))\n"
    assert apply_passes(small(), [parse_pass(write(tmp_path, text))])[1][0].notes == ("nothing",)


@pytest.mark.parametrize(
    ("text", "rest", "message"),
    [
        ("def f(graph:\n", "", "mine.py:1: SyntaxError: '(' was never closed"),
        ("x = 1\n1 / 0\n", "", "mine.py:2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('no')\n", "", "mine.py:2: SystemExit: no"),
        ("x = 1\n", "", "mine.py: has no function whose first parameter is called graph; write def f(graph): ..."),
        (HALVE, ":double", "mine.py: has no pass 'double'; it has halve"),
        (HALVE + "def other(graph): ...\n", "", "mine.py: has several passes: halve and other; write"),
        (HALVE, ":halve:speed=2", "mine.py:halve: there is no key 'speed'; its keys are factor"),
        ("def f(graph, *, sizes: list = ()): ...\n", "", "mine.py:1: f: sizes must be annotated as bool, int, float"),
    ],
)
def test_a_file_that_is_no_pass_is_one_line(tmp_path: Path, text: str, rest: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_pass(write(tmp_path, text) + rest)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return graph.nothing", "mine.py:4: AttributeError: 'TaskGraph' object has no attribute 'nothing'"),
        ("return None", "mine.py: f: returned NoneType; return the changed graph"),
        ("return graph.scaled(graph.select(), -1)", "mine.py:4: ValueError: a duration must be a finite number"),
        ("return replace(graph, duration_us=graph.duration_us * np.nan)", "mine.py: f: duration_us of"),
        ("return replace(graph, duration_us=graph.duration_us[:2])", "mine.py: f: duration_us has shape (2,)"),
        ("return replace(graph, edge_target=graph.edge_target + 9)", "mine.py: f: an edge leads to a task that does"),
        ("raise InputError('graph', 'has no copies')", "mine.py: f: graph: has no copies"),
    ],
)
def test_a_function_that_fails_is_one_line(tmp_path: Path, body: str, message: str) -> None:
    head = (
        "from dataclasses import replace; import numpy as np\n"
        "from hal.support.errors import InputError\ndef f(graph):\n    "
    )
    with pytest.raises(InputError) as error:
        apply_passes(small(), [parse_pass(write(tmp_path, head + body + "\n"))])
    assert message in str(error.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.py: No such file or directory; give a Python file"):
        parse_pass(str(tmp_path / "gone.py"))


def test_every_registered_pass_has_a_summary_and_parameters_that_can_be_written() -> None:
    for name, found in registered().items():
        assert name == found.name and found.summary.endswith("."), name


def test_bytes_that_a_pass_tells_are_kept() -> None:
    def less(graph: TaskGraph) -> Outcome:
        return Outcome(graph, ("less",), {"feature maps": -5.0})

    request = PassRequest(text="less", name="less", function=less, parameters={}, defaults={})
    _, (applied,) = apply_passes(small(), [request])
    assert applied.memory_bytes == {"feature maps": -5.0}
    assert apply_passes(small(), [parse_pass("shrink")])[1][0].memory_bytes is None
