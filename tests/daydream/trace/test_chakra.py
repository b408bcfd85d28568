"""Execution traces give a Kineto trace of the same run the sizes that it lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from daydream.answers import replay
from daydream.cli import main
from daydream.trace.files import read_trace
from daydream.trace.recorders.chakra import with_execution
from hal.support.errors import InputError
from tests.daydream.traces import Builder


def kineto(path: Path, **first: Any) -> Path:
    """A step of a product and of a sum of a list, without sizes."""
    builder = Builder(head={"deviceProperties": [{"id": 0, "name": "Tesla V100-SXM2-16GB"}]}).step(0, 0, 100)
    for number, name in enumerate(("aten::mm", "aten::cat"), start=1):
        builder.operator(name, 20 * number, 10, external=number, **{"Record function id": 7 + number, **first})
        builder.launch(20 * number + 2, 5, correlation=number, external=number)
        builder.kernel("sgemm", 20 * number + 8, 5, correlation=number, external=number)
    return builder.write(path)


def node(
    name: str, number: int, values: list[Any], shapes: list[Any], types: list[str], *, old: bool
) -> dict[str, Any]:
    if old:
        inputs = {"inputs": values, "input_shapes": shapes, "input_types": types, "rf_id": number}
        return {"id": number + 100, "name": name, **inputs}
    inputs = {"values": values, "shapes": shapes, "types": types, "strides": []}
    attributes = [{"name": "rf_id", "type": "uint64", "value": number}, {"name": "tid", "type": "uint64", "value": 1}]
    return {"id": number + 100, "name": name, "ctrl_deps": 2, "inputs": inputs, "attrs": attributes}


def execution(path: Path, *, old: bool = False) -> Path:
    tensors = [[1, 2, 0, 6, 4, "cuda:0"], [3, 4, 0, 6, 4, "cuda:0"]]
    nodes = [
        {"id": 2, "name": "[pytorch|profiler|execution_trace|process]"},
        node("aten::mm", 8, tensors, [[64, 32], [32, 16]], ["Tensor(float)", "Tensor(c10::Half)"], old=old),
        node(
            "aten::cat", 9, [tensors, 1, None], [[[4, 5], [4, 6]], [], []],
            ["GenericList[Tensor(float),Tensor(float)]", "Int", "None"], old=old,
        ),
    ]  # fmt: skip
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": nodes}))
    return path


@pytest.mark.parametrize("old", (False, True))
def test_operators_get_the_sizes_of_the_same_call(old: bool, tmp_path: Path) -> None:
    trace = with_execution(read_trace(kineto(tmp_path / "k.json")), execution(tmp_path / "et.json", old=old))
    product, cat = (arguments for arguments in trace.arguments if "Input Dims" in arguments)
    assert product["Input Dims"] == [[64, 32], [32, 16]]
    assert product["Input type"] == ["float", "c10::Half"]
    assert cat["Input Dims"] == [[[4, 5], [4, 6]], [], []]
    assert (cat["Input type"], cat["Concrete Inputs"]) == (["TensorList", "Scalar", ""], ["", "1", ""])
    assert trace.warnings == ("2 of 2 operators have their sizes from the execution trace",)


def test_the_report_counts_flops_with_it(tmp_path: Path) -> None:
    path, execution_file = kineto(tmp_path / "k.json"), execution(tmp_path / "et.json")
    result = CliRunner().invoke(main, ["report", str(path), "--execution-trace", str(execution_file), "--json"])
    figures = json.loads(result.stdout)["utilisation"]
    assert figures["model_flops"] == 2 * 64 * 32 * 16
    assert json.loads(CliRunner().invoke(main, ["report", str(path), "--json"]).stdout)["utilisation"]["flops"] is None


def test_sizes_of_the_trace_itself_stay(tmp_path: Path) -> None:
    trace = read_trace(kineto(tmp_path / "k.json", **{"Input Dims": [[1, 1]]}))
    linked = with_execution(trace, execution(tmp_path / "et.json"))
    assert linked.arguments == trace.arguments and linked.warnings == ()


def test_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    path, execution_file = kineto(tmp_path / "k.json", **{"Record function id": 0}), execution(tmp_path / "et.json")
    with pytest.raises(InputError, match=r"has no operator of .*; give the execution trace of the same run"):
        replay(path, execution=execution_file)
    with pytest.raises(InputError, match="is no execution trace of PyTorch"):
        replay(path, execution=path)
    with pytest.raises(InputError, match="is of one rank, and TRACE a folder of several"):
        replay(tmp_path, execution=execution_file)
    with pytest.raises(InputError, match="no such file"):
        replay(path, execution=tmp_path / "nowhere.json")
