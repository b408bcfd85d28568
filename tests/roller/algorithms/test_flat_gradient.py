"""Gradients of filters by copies of the image and of the output's gradient: which, what they come to, and that they
compute the operator."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.verify.gpu import verify_chain
from roller.algorithms.chain import ChainProgram
from roller.algorithms.flat_gradient import FlatGradient, consider, gradient_of
from roller.construct.construct import construct
from roller.estimate.gradients import gradients
from roller.explain.page import explain
from roller.programs import find_programs
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from tests.roller.algorithms.test_flat_image import A100, H100, HALVES, V100, sound


def form_of(**changes: Any) -> KernelForm:
    """The gradient of a convolution's filters."""
    operator = operator_from_data(changes if "expr" in changes else {**HALVES, **changes})
    return kernel_form(next(each for each in gradients(operator) if each.label == "gradient of W").expr)


def chains_of(form: KernelForm, device: Any = A100) -> tuple[ChainProgram, ...]:
    return consider(PlacedForm(form, device), construct(form, device, 1).programs[0]).programs


def test_the_sum_runs_over_the_places_of_all_images() -> None:
    form = form_of()
    chain = next(each for each in chains_of(form) if each.split == FlatGradient(12, 32 * 30 * 30 // 12))
    assert [part.label for part in chain.parts] == [
        "copies the image", "copies the output's gradient", "multiplies each of 12 slices of places",
        "puts the slices together",
    ]  # fmt: skip
    # One image more, into which the last taps of the last image reach.
    assert [(tensor.name, tensor.caller_shape, tensor.dtype) for tensor in chain.workspace] == [
        ("grad_W_image", (33, 30, 30, 64), "float16"),
        ("grad_W_outer", (32, 30, 30, 128), "float16"),
        ("grad_W_slices", (12, 3, 3, 64, 128), "float32"),
    ]
    product = chain.parts[2].problem
    assert isinstance(product, KernelForm) and product.roles is not None
    assert (product.roles.m, product.roles.n, product.roles.k) == ("c", "f", "place")
    assert chain.parts[2].schedule.instruction == "mma_16x8x16"
    assert chains_of(form, H100)[0].parts[2].schedule.instruction == "wgmma_64xNx16"


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        # Two grids of two taps for three taps by strides of two: one of four is none.
        ({"stride": 2}, [(33, 15, 15, 2, 2, 64), (32, 15, 15, 128), (2, 2, 2, 2, 2, 64, 128)]),
        ({"dilation": 2, "padding": 2}, [(33, 32, 32, 64), (32, 32, 32, 128), (2, 3, 3, 64, 128)]),
        ({"c": 3, "f": 30}, [(33, 30, 30, 8), (32, 30, 30, 32), (2, 3, 3, 8, 32)]),
    ],
)
def test_strides_dilation_and_few_channels(changes: dict[str, Any], shapes: list[Any]) -> None:
    form = form_of(**changes)
    places = shapes[1][0] * shapes[1][1] * shapes[1][2]
    problems = FlatGradient(2, places // 2).problems(form)
    assert [problem.expr.output.caller_shape for problem in problems[:3]] == shapes


def test_a_convolution_is_no_gradient_of_its_filters() -> None:
    for changes in ({}, {"stride": 2}, {"dilation": 2, "padding": 2}, {"kh": 8, "kw": 8, "stride": 4}):
        assert gradient_of(kernel_form(operator_from_data({**HALVES, **changes}))) is None
        assert gradient_of(form_of(**changes)) is not None


def test_it_is_several_times_as_fast_and_a_page_tells_of_it() -> None:
    form = form_of(c=256, f=256)
    for device in (A100, H100):
        found = find_programs(form, device, 2)
        first = found.ranked(1)[0]
        assert first.algorithm == "flat-image"
        assert first.estimate.seconds < found.direct[0].estimate.seconds / 5
        assert "copies the output's gradient" in explain(found, 1, found.ranked(1))


@pytest.mark.parametrize(
    ("form", "device", "reason"),
    [
        (form_of(dtype="float32"), A100, "has no matrix instruction that multiplies float32"),
        (form_of(dtype="bfloat16"), V100, "has no matrix instruction that multiplies bfloat16"),
        (form_of(n=2, c=16, f=16, h=12, w=12), A100, "4 kernels take"),
    ],
)
def test_where_it_cannot_gain_it_says_why(form: KernelForm, device: Any, reason: str) -> None:
    considered = consider(PlacedForm(form, device), construct(form, device, 1).programs[0])
    assert not considered.programs and reason in considered.declined


#: Filters of one small tile.
SMALL = {"n": 128, "f": 32}
CASES = {
    "channels last": form_of(**SMALL, layout="NHWC", h=27),
    "stride": form_of(**SMALL, stride=2, h=57, w=56),
    "dilation": form_of(**SMALL, dilation=2, padding=2, dtype="bfloat16"),
    "picture": form_of(c=3, h=112, w=112, kh=7, kw=7, padding=3, stride=2, f=64),
    "valid": form_of(padding="VALID", c=32, f=64),
    "rounded": form_of(**SMALL, dtype="float32", allow_tf32=True),
    "sound": form_of(**sound(16, 128, 500)),
    "sound of few filters": form_of(**sound(128, 32, 250)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("case", "device"),
    [
        *((case, A100) for case in CASES if case != "sound of few filters"),
        *(("sound of few filters", H100), ("channels last", V100)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_it_computes_what_the_operator_says(case: str, device: Any) -> None:
    check = chains_of(CASES[case], device)[0].check()
    assert sum(check.form.sizes.values()) < sum(CASES[case].sizes.values())
    found = verify_chain(check, engine="emulator")
    assert found.passed, found.reason
