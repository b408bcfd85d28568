"""Rows in slices: where they are tried, what they come to, and that they compute the operator."""

from __future__ import annotations

import pytest

from codegen.verify.gpu import verify_chain
from hal.catalog import load_device
from roller.algorithms.split_rows import NAME, SlicedRows, consider
from roller.construct.construct import construct
from roller.explain.page import explain
from roller.programs import find_programs
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data

A100 = load_device("a100")


def rows(op: str, *shape: int, dtype: str = "float32") -> KernelForm:
    return kernel_form(operator_from_data({"op": op, "shape": list(shape), "axis": -1, "dtype": dtype}))


def test_a_softmax_of_one_long_row_is_shared_by_all_units() -> None:
    programs = find_programs(rows("softmax", 1, 128256), A100, 4)
    best, alone = programs.ranked(1)[0], programs.direct[0]
    assert best.algorithm == NAME and len(best.parts) == 5
    assert best.main.schedule.grid_blocks(best.main.problem.sizes) > A100.unit_count
    assert best.estimate.seconds < alone.estimate.seconds / 3


def test_a_page_tells_its_kernels() -> None:
    programs = find_programs(rows("softmax", 1, 128256), A100, 4)
    page = explain(programs, 1, programs.ranked(1))
    assert "other blocks reduce other slices of a row" in page and "puts the slices together" in page


def test_every_kernel_of_the_chain_has_a_name_of_its_own_for_what_it_makes() -> None:
    form = rows("layer_norm", 4, 65536)
    considered = consider(PlacedForm(form, A100), construct(form, A100, 1).programs[0])
    chain = considered.programs[0]
    assert isinstance(chain.split, SlicedRows) and chain.split.slices.divides(form)
    assert [tensor.name for tensor in chain.workspace] == ["Sum_slices", "Sum", "Squares_slices", "Squares"]
    assert [tensor.shape for tensor in chain.workspace[:2]] == [(chain.split.slices.count, 4), (4,)]


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (rows("softmax", 4096, 1024), "blocks give each of the 108 SMs one"),
        (rows("softmax", 1, 512), "one kernel is as near to its bound as 5 launches could come"),
        (rows("softmax", 1, 1000003), "cannot be cut into whole slices"),
        (kernel_form(operator_from_data({"op": "matmul", "m": 8, "n": 8, "k": 8})), "no row is reduced more than once"),
    ],
    ids=["many rows", "short row", "prime row", "product"],
)
def test_where_it_cannot_gain_it_says_why(form: KernelForm, reason: str) -> None:
    considered = consider(PlacedForm(form, A100), construct(form, A100, 1).programs[0])
    assert not considered.programs and reason in considered.declined


def test_rows_that_read_along_their_columns_otherwise_are_not_cut() -> None:
    text = "R[b] = sum(j, max(T[3*j], X[b,j])); Y[b,j] = max(T[3*j], X[b,j]) / (abs(R[b]) + 1)"
    form = kernel_form(operator_from_data({"expr": text, "sizes": {"b": 1, "j": 524288}}))
    considered = consider(PlacedForm(form, A100), construct(form, A100, 1).programs[0])
    assert considered.declined == "j is not one dimension of all that it indexes"


@pytest.mark.slow
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["softmax", "layer_norm"])
def test_it_computes_what_the_operator_says(op: str, dtype: str) -> None:
    form = rows(op, 2, 200000, dtype=dtype)
    chain = consider(PlacedForm(form, A100), construct(form, A100, 1).programs[0]).programs[0]
    check = chain.check()
    assert check.form.sizes["i1"] < form.sizes["i1"]
    found = verify_chain(check, engine="emulator")
    assert found.passed, found.reason
