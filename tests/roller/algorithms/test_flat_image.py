"""Convolutions by a copy of their image: which are taken, what they come to, and that they compute the operator."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.verify.gpu import verify_chain
from hal.catalog import load_device
from roller.algorithms.chain import ChainProgram
from roller.algorithms.flat_image import NAME, consider
from roller.construct.construct import construct
from roller.estimate.gradients import gradients
from roller.explain.page import explain
from roller.programs import find_programs
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data

A100, H100, V100 = (load_device(name) for name in ("a100", "h100", "v100"))

HALVES = {
    "op": "conv2d", "n": 32, "c": 64, "h": 28, "w": 28, "f": 128, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16",
}  # fmt: skip


def sound(images: int, filters: int, places: int) -> dict[str, Any]:
    """A convolution along one axis."""
    return {
        "expr": "Y[n,f,x] = sum([c,k], X[n,c,x+k-1 | pad=0] * W[f,c,k])", "shapes": {"X": [images, 64, places]},
        "sizes": {"n": images, "c": 64, "f": filters, "x": places, "k": 3}, "dtype": "float16",
    }  # fmt: skip


VOLUME = {
    "expr": "Y[f,d,y,x] = sum([c,a,b,e], X[c,d+a-1,y+b-1,x+e-1 | pad=0] * W[f,c,a,b,e])", "dtype": "float16",
    "sizes": {"c": 64, "f": 64, "d": 32, "y": 14, "x": 14, "a": 3, "b": 3, "e": 3}, "shapes": {"X": [64, 32, 14, 14]},
}  # fmt: skip


def form_of(**changes: Any) -> KernelForm:
    data = changes if "expr" in changes else {**HALVES, **changes}
    return kernel_form(operator_from_data(data))


def chain_of(form: KernelForm, device: Any = A100) -> ChainProgram:
    (program,) = consider(PlacedForm(form, device), construct(form, device, 1).programs[0]).programs
    return program


def test_the_product_is_one_of_matrices_over_the_places_of_an_image() -> None:
    chain = chain_of(form_of())
    assert [part.label for part in chain.parts] == [
        "copies the image", "turns the filters", "multiplies", "puts results in their places",
    ]  # fmt: skip
    assert [(tensor.name, tensor.caller_shape, tensor.dtype) for tensor in chain.workspace] == [
        ("Y_image", (32, 30, 30, 64), "float16"),
        ("Y_filters", (3, 3, 64, 128), "float16"),
        ("Y_places", (32, 28 * 30 - 2, 128), "float16"),
    ]
    product = chain.parts[2].problem
    assert isinstance(product, KernelForm) and product.roles is not None
    assert (product.roles.m, product.roles.n, product.roles.k) == ("place", "f", "c")
    assert chain.parts[2].schedule.instruction == "mma_16x8x16"


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        ({"layout": "NHWC"}, [(32, 30, 30, 64), (32, 838, 128)]),  # filters lie right as they are
        ({"stride": 2}, [(32, 15, 15, 2, 2, 64), (2, 2, 2, 2, 64, 128), (32, 209, 128)]),
        ({"dilation": 2, "padding": 2}, [(32, 32, 32, 64), (3, 3, 64, 128), (32, 892, 128)]),
        ({"c": 3}, [(32, 30, 30, 8), (3, 3, 8, 128), (32, 838, 128)]),  # eight halves are 16 bytes
        ({"kh": 4, "kw": 4, "stride": 4, "padding": 0}, [(32, 7, 7, 4, 4, 64), (1, 1, 4, 4, 64, 128), (32, 49, 128)]),
        ({"n": 1, "epilogue": ["relu"]}, [(30, 30, 64), (3, 3, 64, 128), (838, 128)]),
    ],
)
def test_strides_and_few_channels_are_channels_of_the_copy(changes: dict[str, Any], shapes: list[Any]) -> None:
    form = form_of(**changes)
    assert [tensor.caller_shape for tensor in _tensors(form)] == shapes


def _tensors(form: KernelForm) -> list[Any]:
    from roller.algorithms.flat_image import FlatImage

    return [problem.expr.output for problem in FlatImage().problems(form)[:-1]]


def test_sums_that_more_is_computed_of_keep_their_type() -> None:
    assert [tensor.dtype for tensor in _tensors(form_of(epilogue=["relu"]))] == ["float16", "float16", "float32"]


def test_it_competes_with_one_kernel_and_a_page_tells_of_it() -> None:
    form = form_of(n=64, c=256, f=256)
    for device in (A100, H100):
        programs = find_programs(form, device, 2)
        first = programs.ranked(1)[0]
        assert first.algorithm == NAME
        assert first.estimate.seconds < programs.direct[0].estimate.seconds / 3
        assert "the image is copied with its padding written out" in explain(programs, 1, programs.ranked(1))


@pytest.mark.parametrize(
    ("form", "device", "reason"),
    [
        (form_of(dtype="float32"), A100, "has no matrix instruction that multiplies float32"),
        (form_of(dtype="bfloat16"), V100, "has no matrix instruction that multiplies bfloat16"),
        (form_of(kh=1, kw=1, padding=0), A100, "it is no convolution"),
        (form_of(groups=2), A100, "it is no convolution"),
        (form_of(n=1, c=16, f=16), A100, "4 kernels take"),
    ],
)
def test_where_it_cannot_gain_it_says_why(form: KernelForm, device: Any, reason: str) -> None:
    considered = consider(PlacedForm(form, device), construct(form, device, 1).programs[0])
    assert not considered.programs and reason in considered.declined


#: Many small images: tiles are small, and an image has more than one.
SMALL = {"n": 64, "f": 64, "h": 18, "w": 14}
RELU_OF_BIAS = [{"function": "bias_add", "axis": "f"}, "relu"]
CASES = {
    "rows": form_of(**SMALL | {"epilogue": RELU_OF_BIAS, "h": 17, "w": 15}),
    "channels last": form_of(**SMALL, layout="NHWC"),
    "stride": form_of(**SMALL | {"stride": 2, "h": 37, "w": 28}),
    "picture": form_of(n=128, c=3, h=56, w=56, kh=7, kw=7, padding=3, stride=2, f=32),
    "patches": form_of(c=3, h=112, w=112, kh=16, kw=16, padding=0, stride=16, f=256),
    "valid": form_of(**SMALL, padding="VALID", kh=5),
    "dilation": form_of(**SMALL, dilation=2, padding=2),
    "residual": form_of(**SMALL, epilogue=[{"function": "residual_add"}, "relu"]),
    "rounded": form_of(**SMALL, dtype="float32", allow_tf32=True),
    "sound": form_of(**sound(64, 64, 250)),
    "volume": form_of(**VOLUME),
    "rows of many filters": form_of(**SMALL | {"epilogue": RELU_OF_BIAS, "h": 17, "w": 15, "f": 128}),
    "stride of many filters": form_of(**SMALL | {"stride": 2, "h": 37, "w": 28, "c": 32, "f": 128}),
}


@pytest.mark.slow
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("case", "device"),
    # What bulk copies bring moved by taps, and the rest in front of any product.
    [
        *((case, H100) for case in ("rows of many filters", "stride of many filters", "rounded", "volume")),
        *((case, A100) for case in CASES if not case.endswith("filters")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_it_computes_what_the_operator_says(case: str, device: Any) -> None:
    chain = chain_of(CASES[case], device)
    check = chain.check()
    assert sum(check.form.sizes.values()) < sum(CASES[case].sizes.values())
    by_bulk_copies = device is H100 and case != "rounded"
    assert by_bulk_copies == any(part.schedule.instruction == "wgmma_64xNx16" for part in chain.parts)
    found = verify_chain(check, engine="emulator")
    assert found.passed, found.reason


@pytest.mark.slow
@pytest.mark.usefixtures("emulator")
def test_filters_that_are_read_backwards_are_turned() -> None:
    gradient = next(g for g in gradients(operator_from_data({**HALVES, "n": 64})) if g.label == "gradient of X")
    found = verify_chain(chain_of(kernel_form(gradient.expr)).check(), engine="emulator")
    assert found.passed, found.reason
