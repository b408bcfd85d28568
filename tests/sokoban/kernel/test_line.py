"""Operators of lines in canonical form: one kernel where one is enough, a sequence otherwise."""

from __future__ import annotations

import pytest

from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.stages import operator_form
from sokoban.language.expression import statement_text
from sokoban.language.parser import parse_program
from sokoban.schedule.patches import LineSchedule, lies_across, line_vector, turns

SIZES = {"i": 6, "j": 8, "k": 20}


def form(text: str, **dtypes: str) -> KernelForm:
    used = {axis: size for axis, size in SIZES.items() if axis in text.replace("sum", "").replace("min", "")}
    return operator_form(parse_program(text, used, dtypes))


def test_axes_fuse_but_for_the_one_of_lines() -> None:
    kernel = form("Y[i,j,k] = cumsum(k, X[i,j,k] * B[k])").line_kernel
    assert (kernel.axis, kernel.row_axes, kernel.lines, kernel.length) == ("k", ("i.j",), 48, 20)
    across = form("Y[i,j,k] = cumsum(i, X[i,j,k])").line_kernel
    assert (across.axis, across.row_axes) == ("i", ("j.k",))


def test_values_before_and_behind_belong_to_the_kernel() -> None:
    kernel = form("E[i,j] = exp(X[i,j]); C[i,j] = cumsum(j, E[i,j], reverse); Y[j,i] = C[i,j] / 2 + B[i]").line_kernel
    assert statement_text(kernel.line) == "C[i, j] = cumsum(j, exp(X[i, j]), reverse)"
    assert statement_text(kernel.final) == "Y[j, i] = ((C[i, j] / 2) + B[i])"
    assert kernel.is_scan and kernel.is_reversed and not kernel.is_exclusive
    assert [load.tensor for load in kernel.reads] == ["X", "B"]
    assert form("Y[i,j] = cumsum(j, X[i,j]) * 2").flops == 2 * 48


def test_ranks_are_an_axis_of_results_alone() -> None:
    kernel = form("Y[i,j] = max(k, X[i,k], j)").line_kernel
    assert (kernel.axis, kernel.rank_axis, kernel.ranks, kernel.row_axes, kernel.lines) == ("k", "j", 8, ("i",), 6)
    one = parse_program("Y[i,r] = argmax(k, X[i,k], r)", {"i": 6, "k": 20, "r": 1}, {})
    assert statement_text(kernel_form(one).line_kernel.line) == "Y_acc[i] = argmax([k], X[i, k])"
    many = parse_program("Y[i,r] = max(k, X[i,k], r)", {"i": 6, "k": 99, "r": 65}, {})
    with pytest.raises(InputError, match="65 values by rank; kernels have at most 64; use a size of r up to 64"):
        kernel_form(many)


def test_several_lines_or_reductions_are_a_sequence() -> None:
    stages = form("S[i] = max(j, X[i,j]); C[i,j] = cumsum(j, X[i,j] - S[i]); Y[i] = argmax(j, C[i,j])").stages
    assert [stage.kind for stage in stages] == ["tile", "line", "line"]
    moved = form("C[i,j] = cumsum(j, X[i,j]); Y[i,j] = C[i, j - 1 | pad=0]").stages
    assert [stage.kind for stage in moved] == ["line", "tile"]
    with pytest.raises(InputError, match="goes along an axis in order, and S is no value of it"):
        kernel_form(parse_program("S[i] = sum(j, X[i,j]); Y[i,j] = cumsum(j, X[i,j] / S[i])", {"i": 3, "j": 4}, {}))


def test_lines_of_one_element_are_none() -> None:
    one = parse_program("Y[i,j] = cumprod(j, X[i,j], exclusive)", {"i": 3, "j": 1}, {})
    assert [statement_text(each) for each in kernel_form(one).expr.statements] == ["Y[i] = 1"]
    place = parse_program("Y[i] = argmax(j, X[i,j])", {"i": 3, "j": 1}, {})
    assert kernel_form(place).is_tile


def test_vectors_lie_along_lines_that_they_divide() -> None:
    shared = LineSchedule(threads=32, lines=2)
    assert line_vector(form("Y[i,k] = cumsum(k, X[i,k])").line_kernel, shared) == 4
    assert line_vector(form("Y[i,k] = cumsum(k, X[i,k])", X="float16", Y="float16").line_kernel, shared) == 4
    assert line_vector(form("Y[i,j] = cumsum(j, X[i,j])", X="float16", Y="float16").line_kernel, shared) == 8
    assert line_vector(form("Y[i,j] = cumsum(i, X[i,j])").line_kernel, shared) == 1
    long = parse_program("Y[i,j] = cumsum(j, X[i,j])", {"i": 3, "j": 1000}, {})
    assert turns(operator_form(long).line_kernel, shared) == 8
    assert shared.blocks(operator_form(long).line_kernel) == 2


def test_lanes_of_processors_have_neighbouring_lines_where_nothing_lies_along_them() -> None:
    assert lies_across(form("Y[i,j] = cumsum(i, X[i,j])").line_kernel)
    assert not lies_across(form("Y[i,j] = cumsum(j, X[i,j])").line_kernel)
    assert not lies_across(form("Y[j,i] = cumsum(j, X[i,j])").line_kernel)
