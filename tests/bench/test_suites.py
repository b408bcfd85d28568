"""The suites hold what they claim to: the thesis's operators as measured, today's shapes in the same format."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.speed.construction import ConstructionTimes, suite_forms
from bench.speed.suite_report import SuiteReport, on_board
from bench.suites import suite_names, suite_path
from bench.suites.attention import drawn
from hal.catalog import load_device
from hal.support.errors import InputError
from sokoban.language.named.attention import Attention
from sokoban.language.operators import operator_from_data

OPS_CSV = Path(__file__).parents[2].parent / "shared" / "data" / "roller119" / "ops.csv"


def operators(name: str) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = json.loads(suite_path(name).read_bytes())
    return data


def test_the_thesis_suite_holds_119_operators_of_six_kinds() -> None:
    kinds = Counter(op["name"][0] for op in operators("roller119"))
    assert kinds == {"M": 7, "C": 44, "D": 23, "E": 28, "P": 13, "R": 4}
    assert sum(kinds.values()) == 119


def test_operators_of_a_kind_are_numbered_from_zero() -> None:
    names = [op["name"] for op in operators("roller119")]
    kinds = Counter(name[0] for name in names)
    assert names == [f"{kind}{number}" for kind in "MCDEPR" for number in range(kinds[kind])]


@pytest.mark.skipif(not OPS_CSV.is_file(), reason="the measured configurations are not next to this checkout")
def test_the_thesis_suite_agrees_with_the_measured_configurations() -> None:
    with OPS_CSV.open(newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    suite = {op["name"]: op for op in operators("roller119")}
    assert list(suite) == list(rows)
    for name, op in suite.items():
        row = rows[name]
        if op["op"] in ("elementwise", "reduce"):
            assert {"relu": "relu", "sum": "reduce_sum"}[op["function"]] == row["op"]
            assert "x".join(map(str, op["shape"])) == row["shape"]
            assert " ".join(map(str, op.get("axes", []))) == row["axes"]
        else:
            assert op["op"] == row["op"]
            sizes = {key: int(row[key]) for key in op if key not in ("name", "op", "dtype", "padding")}
            assert {key: op[key] for key in sizes} == sizes
            assert op.get("padding", "") == row["padding"]
        assert op["dtype"] == row["dtype"]


def test_the_thesis_suite_holds_no_measurements() -> None:
    known = {"name", "op", "dtype", "function", "shape", "axes", "padding", "stride", "m", "k", *"nchwf", "kh", "kw"}
    assert {key for op in operators("roller119") for key in op} <= known


def test_the_modern_suite_covers_every_kind_of_operator_in_both_precisions() -> None:
    suite = operators("modern")
    assert {op["op"] for op in suite} == {
        "matmul", "batch_matmul", "conv2d", "depthwise_conv2d", "avg_pool2d", "max_pool2d",
        "reduce", "elementwise", "softmax", "layer_norm", "transpose",
    }  # fmt: skip
    assert {op["dtype"] for op in suite} == {"float16", "float32"}
    assert all(
        op["accumulate"] == "float32" for op in suite if op["op"].endswith("matmul") and op["dtype"] == "float16"
    )


def test_the_modern_suite_has_every_gemm_of_a_layer_at_every_token_count() -> None:
    gemms = Counter((op["n"], op["k"]) for op in operators("modern") if op["name"].rpartition("_tokens")[1])
    tokens = 4  # 1, 16, 128, 2048
    assert gemms[14336, 4096] == gemms[4096, 14336] == gemms[4096, 4096] == gemms[1024, 4096] - tokens == tokens
    assert gemms[3072, 1024] == tokens


@pytest.mark.parametrize("name", suite_names())
def test_a_suite_is_one_line_per_operator_with_names_of_their_own(name: str) -> None:
    lines = suite_path(name).read_text().splitlines()
    suite = operators(name)
    assert (lines[0], lines[-1]) == ("[", "]")
    assert [json.loads(line.rstrip(",")) for line in lines[1:-1]] == suite
    assert len({op["name"] for op in suite}) == len(suite)


@pytest.mark.parametrize("name", suite_names())
def test_a_suite_is_read_by_the_operator_reader(name: str) -> None:
    reader = pytest.importorskip("sokoban.language.operators")
    expressions = reader.load_operators(suite_path(name))
    assert [expression.name for expression in expressions] == [op["name"] for op in operators(name)]


def test_an_unknown_suite_is_named_with_those_there_are() -> None:
    with pytest.raises(InputError) as caught:
        suite_path("roller120")
    assert str(caught.value) == f"suite: there is no suite 'roller120'; use one of {', '.join(suite_names())}"


def test_the_types_suite_says_what_a_board_lacks() -> None:
    forms = suite_forms("types")
    assert {"tfloat32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"} == {
        form.roles.dtype for form in forms.values() if form.roles is not None
    }
    here, absent = on_board(forms, load_device("l4"))
    assert (list(here), absent) == (list(forms), [])
    here, absent = on_board(forms, load_device("a100"))
    assert absent == ["llama3_8b_gate_2048_e4m3", "llama3_8b_down_16_e4m3", "llama3_8b_gradient_e5m2"]
    times = ConstructionTimes(dict.fromkeys(here, 1e-3))
    assert (
        f"not on this board        {', '.join(absent)}"
        in SuiteReport(
            suite="types", device="a100", times=times, results=None, compile_seconds=None, absent=absent
        ).lines()
    )


def test_drawn_attention_in_pages_has_a_pool_with_room_for_all_sequences() -> None:
    for data in drawn(40, 0, ("float16", "float32"), pages=True):
        attention = operator_from_data(data).operator_as(Attention)
        assert attention is not None and attention.pages is not None
        pages = attention.pages
        assert pages.pool > data["b"] * pages.per_sequence


def test_drawn_attention_has_lengths_where_they_are_asked_for() -> None:
    for data in drawn(20, 0, ("float16",), pages=True, lengths=True):
        attention = operator_from_data(data).operator_as(Attention)
        assert attention is not None and attention.pages is not None and attention.least_keys is not None
