"""Rows added where places say: which sums are such, what they are worth, and what kernels of them cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.catalog import load_device
from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm
from sokoban.kernel.stages import operator_form
from sokoban.language.expression import statement_text
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.model.gpu.kinds.scatters import estimate_scatter
from sokoban.schedule.patches import LineSchedule, column_blocks, scatter_vector

SIZES = {"i": 40, "t": 300, "c": 96}


def form(text: str, **dtypes: str) -> KernelForm:
    sizes = {axis: size for axis, size in SIZES.items() if f"{axis}" in text.replace("select", "")}
    return operator_form(operator_from_data({"expr": text, "sizes": sizes, "dtypes": {"I": "int32"} | dtypes}))


def test_rows_are_added_in_order_and_what_names_none_nowhere() -> None:
    operator = operator_from_data({"op": "scatter_add", "rows": 3, "columns": 2, "count": 5})
    assert statement_text(operator.statements[0]) == "Y[n, c] = sum([t], select((I[t] == (n)), X[t, c], 0))"
    rows = np.arange(10.0).reshape(5, 2)
    result = evaluate(operator, {"I": np.array([2, 0, 2, 3, -1]), "X": rows})
    assert result.tolist() == [[2, 3], [0, 0], [4, 6]]
    assert operator.name == "scatter_add_5x2_to_3"


def test_a_line_of_places_for_each_row() -> None:
    kernel = form("Y[i,c] = sum(t, select(I[t] == i, X[t,c] * 2, 0)) + B[c]").line_kernel
    assert kernel.scatter is not None and kernel.scatter.columns == ("c",)
    assert (kernel.row_axes, kernel.lines, kernel.length, kernel.columns) == (("i",), 40, 300, 96)
    schedule = LineSchedule(threads=32, lines=8)
    assert scatter_vector(kernel) == 4 and column_blocks(kernel, schedule) == 1 and schedule.blocks(kernel) == 5
    assert form("Y[i,c] = sum(t, select(i == I[t], X[t,c], 0))").flops == 300 * 96
    assert scatter_vector(form("Y[c,i] = sum(t, select(I[t] == i, X[t,c], 0))").line_kernel) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Y[i,c] = sum(t, select(I[t] == i, X[t,c], 1))",
        "Y[i,c] = sum(t, select(I[t] <= i, X[t,c], 0))",
        "Y[i,c] = sum(t, select(I[t] == i + 1, X[t,c], 0))",
        "Y[i,c] = sum(t, select(I[t] == i, X[t,c] * i, 0))",
        "Y[i,c] = max(t, select(I[t] == i, X[t,c], 0))",
        "Y[i] = sum(t, select(I[t] == i, X[t], 0))",
    ],
)
def test_other_sums_are_tiles(text: str) -> None:
    assert form(text).is_tile


def test_places_of_floats_are_none() -> None:
    assert form("Y[i,c] = sum(t, select(I[t] == i, X[t,c], 0))", I="float32").is_tile


def test_test_data_name_rows_and_some_that_are_none() -> None:
    operator = operator_from_data({"op": "scatter_add", "rows": 30, "columns": 4, "count": 500})
    places = random_inputs(operator, 0)["I"]
    outside = (places < 0) | (places >= 30)
    assert 5 < outside.sum() < 80 and len(set(places[~outside].tolist())) == 30


def test_an_embeddings_gradient_takes_little_more_than_its_bytes() -> None:
    data = {"op": "scatter_add", "rows": 32000, "columns": 768, "count": 4096}
    kernel = operator_form(operator_from_data(data)).line_kernel
    for name in ("v100", "a100", "h100-sxm"):
        device = load_device(name)
        seconds = estimate_scatter(kernel, LineSchedule(threads=64, lines=8), device).seconds
        bytes_seconds = 4 * (32000 * 768 + 4096 * 769) / device.dram.bandwidth_bytes_per_second
        assert bytes_seconds < seconds < 1.5 * bytes_seconds


@pytest.mark.parametrize(
    ("changes", "problem"), [({"rows": 0}, "rows: expected int >= 1"), ({"places": 3}, "unknown key 'places'")]
)
def test_errors(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        operator_from_data({"op": "scatter_add", "rows": 3, "columns": 2, "count": 5} | changes)
