"""Reductions in slices: the rewriting, where it applies, what it gains, and that it computes the right thing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from codegen.verify.gpu import verify, verify_chain
from hal.catalog import load_device
from roller.algorithms.chain import ChainProgram
from roller.algorithms.slices import Slices
from roller.algorithms.split_k import consider
from roller.construct.construct import construct
from roller.estimate.gradients import gradients
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.regions import storage_order
from sokoban.language.expression import statement_text
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.schedule.tile import TileSchedule

V100 = load_device("v100")

TALL = {"op": "matmul", "m": 64, "n": 64, "k": 65536}
CONVOLUTION = {"op": "conv2d", "n": 64, "c": 32, "h": 28, "w": 28, "f": 64, "kh": 3, "kw": 3, "padding": "SAME"}


def form_of(**operator: Any) -> KernelForm:
    return kernel_form(operator_from_data(operator))


def weight_gradient(**operator: Any) -> KernelForm:
    found = [each for each in gradients(operator_from_data(operator)) if each.label == "gradient of W"]
    return kernel_form(found[0].expr)


def chains(form: KernelForm, device: str = "v100") -> tuple[ChainProgram, ...]:
    board = load_device(device)
    return consider(PlacedForm(form, board), construct(form, board, 1).programs[0]).programs


def declined(form: KernelForm) -> str:
    return consider(PlacedForm(form, V100), construct(form, V100, 1).programs[0]).declined


def value_of(slices: Slices, form: KernelForm) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What the chain computes and what the operator is, both in float64."""
    known = random_inputs(form.expr, 3)
    expected = evaluate(form.expr, known)
    for problem in slices.problems(form):
        own = {tensor.name: known[tensor.name].reshape(tensor.shape) for tensor in problem.expr.inputs}
        known[problem.expr.output.name] = evaluate(problem.expr, own)
    return known[form.expr.output.name].reshape(expected.shape), expected


# The rewriting


def test_slices_that_fit_are_views_of_the_tensors() -> None:
    form = form_of(op="matmul", m=5, n=7, k=24, epilogue=["relu"])
    first, second = Slices("k", 4, 6).problems(form)
    assert [statement_text(s) for s in first.source.statements] == [
        "Out_slices[k_slice, m, n] = sum([k], (A[m, k_slice, k] * B[k_slice, k, n]))"
    ]
    assert [(t.name, t.shape, t.caller_shape) for t in first.expr.inputs] == [
        ("A", (5, 4, 6), (5, 24)), ("B", (4, 6, 7), (24, 7)),
    ]  # fmt: skip
    assert second.expr.output.caller_shape == (5, 7)
    assert "relu" in statement_text(second.source.statements[-1])


def test_scales_of_blocks_are_cut_with_their_blocks() -> None:
    form = form_of(op="scaled_matmul", m=64, n=2048, k=7168, precision="fp8-block")
    (text,) = [statement_text(s) for s in Slices("b", 4, 14).problems(form)[0].source.statements]
    assert text.endswith(
        "sum([b, k], (((X[m, b_slice, b, k] * W[c, n, b_slice, b, k]) * SX[b_slice, b, m]) * SW[c, b_slice, b]))"
    )
    programs = chains(form, "h100-sxm")
    assert {chain.split.axis for chain in programs} == {"b"}  # a block is no longer than a step already


def test_slices_that_do_not_fit_pad_the_last_one_with_zeros() -> None:
    form = form_of(op="matmul", m=5, n=7, k=23)
    first, _ = Slices("k", 4, 6).problems(form)
    (text,) = [statement_text(s) for s in first.source.statements]
    assert text == ("C_slices[k_slice, m, n] = sum([k], (A[m, k + 6*k_slice | pad=0] * B[k + 6*k_slice, n | pad=0]))")


@pytest.mark.parametrize(
    ("slices", "operator"),
    [
        (Slices("k", 4, 6), {"op": "matmul", "m": 5, "n": 7, "k": 24}),
        (Slices("k", 4, 6), {"op": "matmul", "m": 5, "n": 7, "k": 22, "epilogue": ["relu"]}),
        (Slices("k", 3, 5), {"op": "batch_matmul", "b": 2, "m": 4, "n": 3, "k": 15}),
        (Slices("k", 3, 5), {"op": "batch_matmul", "b": 2, "m": 4, "n": 3, "k": 14}),
        (Slices("c", 3, 2), {"op": "conv2d", "n": 2, "c": 6, "h": 5, "w": 5, "f": 3, "kh": 3, "kw": 3, "padding": 1}),
        (Slices("b", 2, 2), {"op": "scaled_matmul", "m": 3, "n": 256, "k": 512, "precision": "fp8-block"}),
        (Slices("k", 2, 6), {"expr": "M[i] = max(k, X[i, k] * k)", "sizes": {"i": 3, "k": 12}}),
        (Slices("k", 3, 4), {"expr": "S[i] = sum(k, X[i, k] * k)", "sizes": {"i": 3, "k": 12}}),
        (Slices("k", 3, 4), {"expr": "P[i] = prod(k, X[k, i])", "sizes": {"i": 3, "k": 12}}),
    ],
)
def test_a_chain_computes_its_operator(slices: Slices, operator: dict[str, Any]) -> None:
    result, expected = value_of(slices, form_of(**operator))
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_weights_are_cut_along_the_images() -> None:
    form = weight_gradient(**{**CONVOLUTION, "n": 6, "c": 3, "f": 4, "h": 5, "w": 5})
    result, expected = value_of(Slices("n", 3, 2), form)
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)


# Where it applies, and what it gains


@pytest.mark.parametrize("device", ["v100", "a100"])
@pytest.mark.parametrize(
    "operator", [TALL, {"op": "matmul", "m": 128, "n": 768, "k": 32768}, {**TALL, "dtype": "float16"}]
)
def test_few_blocks_and_a_long_reduction_gain(operator: dict[str, Any], device: str) -> None:
    form = form_of(**operator)
    direct = construct(form, load_device(device), 1).programs[0].estimate.seconds
    best = chains(form, device)[0]
    assert best.estimate.seconds < 0.9 * direct
    assert best.estimate.seconds == sum(part.estimate.seconds for part in best.parts)
    assert len(best.parts) == 2 and best.workspace[0].size_bytes == best.parts[1].problem.tensors[0].size_bytes


@pytest.mark.parametrize("device", ["v100", "a100"])
def test_gradients_of_weights_gain(device: str) -> None:
    form = weight_gradient(**CONVOLUTION)
    direct = construct(form, load_device(device), 1).programs[0].estimate.seconds
    assert chains(form, device)[0].estimate.seconds < 0.8 * direct


def test_programs_come_best_first_and_differ() -> None:
    programs = chains(form_of(**TALL))
    seconds = [program.estimate.seconds for program in programs]
    assert seconds == sorted(seconds) and len(programs) > 2
    assert len({program.variant for program in programs}) == len(programs)


@pytest.mark.parametrize("device", ["v100", "a100", "h100"])
@pytest.mark.parametrize("operator", [TALL, {"op": "matmul", "m": 128, "n": 768, "k": 32768}])
def test_slices_of_fp16_are_whole_and_multiplied_by_matrix_instructions(operator: dict[str, Any], device: str) -> None:
    form = form_of(**{**operator, "dtype": "float16"})
    for program in chains(form, device):
        assert isinstance(program.split, Slices) and program.split.divides(form)
    schedule = chains(form, device)[0].parts[0].schedule
    assert isinstance(schedule, TileSchedule) and schedule.instruction != "fma"


def test_what_only_matrix_instructions_multiply_is_cut_into_whole_slices_or_not_at_all() -> None:
    prime = form_of(op="matmul", m=128, n=256, k=32771, dtype="float8_e4m3fn")
    board = load_device("h100")
    found = consider(PlacedForm(prime, board), construct(prime, board, 1).programs[0])
    assert (found.programs, found.declined) == ((), "k cannot be cut into slices that are worth it")


@pytest.mark.usefixtures("opencl")
def test_slices_of_integers_are_exact() -> None:
    program = chains(form_of(op="matmul", m=32, n=64, k=16384, dtype="int8"), "a100")[0]
    result = verify_chain(program.check())
    assert result.passed and result.relative_error == 0.0
    assert program.workspace[0].dtype == "int32"


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        ({"op": "matmul", "m": 4096, "n": 4096, "k": 4096}, "its 1024 blocks fill the 80 SMs"),
        ({"op": "elementwise", "function": "relu", "shape": [1000]}, "there is no reduction to cut"),
        ({"op": "softmax", "shape": [64, 1000]}, "rows are reduced more than once"),
        ({"op": "matmul", "m": 8, "n": 8, "k": 64}, "one kernel is as near to its bound as two launches could come"),
    ],
)
def test_where_nothing_can_be_gained_it_says_so(operator: dict[str, Any], reason: str) -> None:
    assert declined(form_of(**operator)).startswith(reason)


def test_an_axis_that_windows_walk_is_not_cut() -> None:
    form = form_of(expr="Y[i] = sum(k, X[i + k])", sizes={"i": 4, "k": 1000000})
    assert "no axis of the reduction" in declined(form)


# Verified by running


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize(
    "operator",
    [
        {**TALL, "k": 8192, "epilogue": ["relu"]},
        {**TALL, "k": 8191},
        {**TALL, "k": 8192, "dtype": "float16"},
        {"op": "batch_matmul", "b": 2, "m": 64, "n": 64, "k": 8192},
        {"expr": "Y[i] = sum([a, b], X[a, i, b])", "sizes": {"i": 3, "a": 1024, "b": 512}},
        {"expr": "Y[i] = max(a, X[a, i])", "sizes": {"i": 3, "a": 100000}},
    ],
)
def test_the_best_chain_agrees_with_the_reference(operator: dict[str, Any]) -> None:
    program = chains(form_of(**operator))[0]
    result = verify_chain(program.check())
    assert result.passed, result
    assert result.relative_error is not None and result.relative_error <= (1e-3 if "dtype" in operator else 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("opencl")
def test_a_gradient_of_weights_agrees_with_the_reference() -> None:
    program = chains(weight_gradient(**CONVOLUTION | {"n": 256, "c": 16, "f": 32, "h": 14, "w": 14}))[0]
    result = verify_chain(program.check())
    assert result.passed, result
    # Cut down, but to more than one slice.
    assert 1 < result.axis_sizes["n"] <= 64


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize("sizes", [{"s": 64, "m": 64, "n": 64, "k": 256}, {"s": 9, "m": 1, "n": 40, "k": 100}])
def test_products_with_the_batch_in_the_middle_are_right(sizes: dict[str, int]) -> None:
    """What a first kernel reads: its tiles turn past the slices."""
    form = form_of(expr="C[s,m,n] = sum(k, A[m,s,k] * B[s,k,n])", sizes=sizes)
    for program in construct(form, V100, 3).programs:
        result = verify(form, program.schedule)
        assert result.passed, (program.schedule, result)


def test_tiles_turn_past_axes_that_all_operands_walk() -> None:
    form = form_of(expr="C[s,m,n] = sum(k, A[m,s,k] * B[s,k,n])", sizes={"s": 3, "m": 4, "n": 5, "k": 6})
    assert form.batch_axes == ("s",)
    (left, right) = form.body_loads
    assert storage_order(left, form.spatial, form.batch_axes) == (1, 2, 0)
    assert storage_order(right, form.spatial, form.batch_axes) == (0, 1, 2)
    # Where no other axis is walked, a batch axis has to do.
    depthwise = form_of(expr="Y[c,i] = sum(k, X[c,i + k] * W[c,k])", sizes={"c": 3, "i": 4, "k": 5})
    assert storage_order(depthwise.body_loads[1], depthwise.spatial, depthwise.batch_axes) == (1, 0)


@pytest.mark.usefixtures("opencl")
def test_a_wrong_second_kernel_is_caught() -> None:
    program = chains(form_of(**{**TALL, "k": 8192}))[0]
    check = program.check()
    few = check.steps[1].problem
    assert isinstance(few, KernelForm)
    shorter = [s for s in check.steps]
    shorter[1] = type(shorter[1])(Slices("k", 1, 8192).problems(check.form)[1], shorter[1].schedule)
    result = verify_chain(type(check)(check.form, tuple(shorter)))
    assert not result.passed
