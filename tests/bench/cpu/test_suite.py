"""The 24 operators: all kinds, both layouts, every one with a call of PyTorch on the same tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.calls.operators import problem
from bench.cpu.comparison import read_suite
from bench.cpu.tune import LONG_SEARCH
from hal.support.errors import InputError
from sokoban.language.operators import operator_from_data
from tests.bench.cpu.samples import SUITE


def test_there_are_24_float32_operators_of_all_kinds() -> None:
    assert len({one["name"] for one in SUITE}) == len(SUITE) == 24
    assert {one["dtype"] for one in SUITE} == {"float32"}
    kinds = Counter(one["op"] for one in SUITE)
    assert kinds["conv2d"] == 7 and kinds["matmul"] == 5 and len(kinds) == 11
    layouts = Counter(one["layout"] for one in SUITE if one["op"] == "conv2d")
    assert set(layouts) == {"NCHW", "NHWC"}


def test_the_operators_of_the_long_search_are_in_it() -> None:
    assert len(LONG_SEARCH) == 4 and set(LONG_SEARCH) <= {one["name"] for one in SUITE}


@pytest.mark.parametrize("spec", SUITE, ids=lambda spec: spec["name"])
def test_pytorch_takes_the_tensors_that_we_take(spec: Mapping[str, Any]) -> None:
    expr, known = operator_from_data(dict(spec)), problem("cpu", spec)
    assert {tensor.name: tensor.caller_shape for tensor in expr.inputs} == dict(known.inputs)
    assert expr.output.caller_shape == known.output
    assert known.compulsory_bytes == sum(tensor.size_bytes for tensor in (*expr.inputs, expr.output))


def test_other_suites_and_files_can_be_named(tmp_path: Path) -> None:
    assert [one["name"] for one in read_suite("roller119", ["M0", "R2"])] == ["M0", "R2"]
    file = tmp_path / "mine.json"
    file.write_text('{"op": "matmul"}')
    with pytest.raises(InputError, match="no list of named operators"):
        read_suite(str(file), ())
    with pytest.raises(InputError, match="name a suite"):
        read_suite(str(tmp_path / "none.json"), ())
