"""Winograd's convolutions: which operators they are for, what they compute, how exactly, and when they are chosen."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from codegen.tolerance import TOLERANCE
from codegen.verify.gpu import verify_chain
from hal.catalog import load_device
from roller.algorithms.chain import Considered
from roller.algorithms.convolution import convolution_of
from roller.algorithms.winograd import MATRICES, Tiles, amplification, consider
from roller.construct.construct import construct
from roller.estimate.gradients import gradients
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data

V100 = load_device("v100")
RESNET = {
    "op": "conv2d", "n": 32, "c": 64, "h": 56, "w": 56, "f": 64, "kh": 3, "kw": 3, "padding": "SAME"
}  # fmt: skip


def form_of(**changes: Any) -> KernelForm:
    return kernel_form(operator_from_data({**RESNET, **changes}))


def considered(form: KernelForm, device: str = "v100") -> Considered:
    board = load_device(device)
    return consider(PlacedForm(form, board), construct(form, board, 1).programs[0])


# The identity


@pytest.mark.parametrize("size", MATRICES)
def test_the_matrices_compute_a_correlation_exactly(size: int) -> None:
    """``Aᵀ[(G g) · (Bᵀ d)]`` in rational numbers, for every unit vector of filter and data: it is bilinear."""
    output, data, filters = [
        [[Fraction(number).limit_denominator(24) for number in row] for row in matrix] for matrix in MATRICES[size]
    ]
    for tap in range(3):
        for place in range(size + 2):
            products = [row_g[tap] * row_b[place] for row_g, row_b in zip(filters, data, strict=True)]
            results = [sum(a * p for a, p in zip(row, products, strict=True)) for row in output]
            assert results == [Fraction(place == first + tap) for first in range(size)]


def test_errors_grow_as_theory_says() -> None:
    """Products in float32 in place of exact ones, the transforms exact: the error of a direct sum, amplified."""
    generator = np.random.default_rng(0)
    for size, (output, data, filters) in MATRICES.items():
        a, b, g = (np.array(matrix, dtype=np.float64) for matrix in (output, data, filters))
        tiles, channels = 400, 64
        patches = generator.uniform(-1, 1, (channels, tiles, size + 2, size + 2))
        weights = generator.uniform(-1, 1, (channels, 3, 3))
        u, v = g @ weights @ g.T, b @ patches @ b.T
        exact = (u[:, None] * v).sum(axis=0)
        rounded = np.zeros(exact.shape, np.float32)
        direct, direct_rounded = np.zeros(tiles), np.zeros(tiles, np.float32)
        for c in range(channels):
            rounded += (u[c] * v[c]).astype(np.float32)
            for i in range(3):
                for j in range(3):
                    direct += weights[c, i, j] * patches[c, :, i, j]
            direct_rounded += (weights[c] * patches[c, :, :3, :3]).sum(axis=(1, 2)).astype(np.float32)
        errors = (a @ (rounded - exact) @ a.T).std(axis=0).max()
        assert errors / (direct_rounded - direct).std() == pytest.approx(amplification(size), rel=0.35)
    assert amplification(2) < 2 < 30 < amplification(4) < 32


# For which operators


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"layout": "NHWC"}, {"padding": "VALID"}, {"padding": [0, 1, 2, 1]}, {"n": 1},
        {"epilogue": [{"function": "bias_add", "axis": "f"}, "relu"]},
    ],
)  # fmt: skip
def test_convolutions_are_known_by_what_they_compute(changes: dict[str, Any]) -> None:
    found = convolution_of(form_of(**changes))
    assert found is not None
    assert (found.filters, found.channels, found.rows, found.columns) == ("f", "c", "oh", "ow")
    assert found.images == (None if changes.get("n") == 1 else "n")
    assert found.channels_last is (changes.get("layout") == "NHWC")


def test_a_backward_pass_reads_its_filters_backwards() -> None:
    gradient = next(g for g in gradients(operator_from_data(RESNET)) if g.label == "gradient of X")
    found = convolution_of(kernel_form(gradient.expr))
    assert found is not None and found.flipped == (True, True) and found.channels == "f"


@pytest.mark.parametrize("changes", [{"stride": 2}, {"dilation": 2}, {"kh": 5}, {"groups": 2}, {"kh": 1, "kw": 1}])
def test_other_convolutions_are_left_alone(changes: dict[str, Any]) -> None:
    assert considered(form_of(**changes)).declined == "it is no 3x3 convolution of stride 1"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float16"}, "transforms are done in float32"),
        ({"c": 3}, "there are fewer than 8 channels or filters"),
        ({"n": 1, "c": 8, "f": 8, "h": 8, "w": 8}, "F(2x2, 3x3) takes at least"),
    ],
)
def test_what_cannot_gain_is_declined_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    assert considered(form_of(**changes)).declined.startswith(reason)


# What it takes


@pytest.mark.parametrize("device", ["v100", "a100"])
def test_many_channels_gain_most(device: str) -> None:
    gains = []
    for changes in ({}, {"c": 256, "f": 256, "h": 14, "w": 14, "n": 128}):
        form = form_of(**changes)
        direct = construct(form, load_device(device), 1).programs[0].estimate.seconds
        gains.append(direct / considered(form, device).programs[0].estimate.seconds)
    assert 1.0 < gains[0] < gains[1]


def test_no_stage_takes_less_than_its_traffic() -> None:
    """V and M are written and read: nothing of them is hidden from the prediction."""
    program = considered(form_of()).programs[0]
    filters, patches, products = (tensor.size_bytes for tensor in program.workspace)
    least = 2 * (filters + patches + products) / V100.dram.bandwidth_bytes_per_second
    assert program.estimate.seconds > least + 4 * V100.launch_overhead_seconds
    assert patches == 4 * 36 * 64 * 32 * 14 * 14


# What it computes


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize("size", MATRICES)
@pytest.mark.parametrize(
    "changes",
    [
        {"c": 16, "f": 16, "epilogue": [{"function": "bias_add", "axis": "f"}, "relu"]},
        {"c": 16, "f": 16, "layout": "NHWC", "h": 15, "w": 13},
        {"c": 16, "f": 26, "padding": "VALID", "h": 17, "w": 23},
        {"n": 1, "h": 7, "w": 30, "c": 70},
    ],
)
def test_a_chain_agrees_with_the_reference(size: int, changes: dict[str, Any]) -> None:
    program = priced(form_of(**changes), size)
    result = verify_chain(program.check())
    assert result.passed, result
    assert result.relative_error is not None and result.relative_error <= (1e-5 if size == 2 else 5e-5)


@pytest.mark.usefixtures("opencl")
def test_a_backward_pass_agrees_with_the_reference() -> None:
    gradient = next(g for g in gradients(operator_from_data({**RESNET, "n": 2})) if g.label == "gradient of X")
    result = verify_chain(priced(kernel_form(gradient.expr), 4).check())
    assert result.passed, result


def test_the_tolerance_follows_from_amplification_and_channels() -> None:
    few, many = (Tiles(4).tolerance(form_of(c=c)) for c in (64, 1024))
    assert few is not None and many is not None
    assert many == pytest.approx(4 * few)
    assert few < TOLERANCE["float32"] < many < 1e-3
    assert (Tiles(2).tolerance(form_of(c=1024)) or 0.0) < TOLERANCE["float32"]


def priced(form: KernelForm, size: int) -> Any:
    from roller.algorithms.winograd import _program

    return _program(form, V100, Tiles(size))
