"""The backend in place of what was recorded: faster kernels by the ratio of prices, fused element-wise kernels."""

from __future__ import annotations

import pytest

from daydream.operators.pricing import heavy_rows, price
from daydream.passes.kernels.backend import backend
from hal.catalog import load_device
from hal.support.errors import InputError
from tests.daydream.recorded import operator, recorded

V100 = load_device("v100")


def step():
    """A grouped convolution, whose kernels of the library are slow, a product, and two element-wise kernels."""
    return recorded(
        [
            operator("aten::cudnn_convolution", [[8, 64, 28, 28], [128, 64, 3, 3]], kernels=[("volta_scudnn", 900.0)]),
            operator("aten::mm", [[64, 1024], [1024, 512]], kernels=[("volta_sgemm", 50.0)]),
            operator("aten::add", [[64, 512], [64, 512]], kernels=[("vectorized_elementwise_kernel<add>", 9.0)]),
            operator("aten::relu", [[64, 512]], kernels=[("vectorized_elementwise_kernel<relu>", 6.0)]),
        ]
    )  # fmt: skip


def test_a_call_takes_its_recorded_time_by_the_ratio_of_prices_where_ours_is_faster():
    graph = step()
    rows = heavy_rows(graph)
    ours, theirs = (price(graph, rows, V100, which).calls for which in ("best", "library"))
    expected = [900.0, 50.0]
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one.price_us < other.price_us:
            expected[number] *= one.price_us / other.price_us
    assert expected != [900.0, 50.0]
    outcome = backend(graph, fuse=False)
    kernels = outcome.graph.select(gpu=True)
    assert outcome.graph.duration_us[kernels].tolist() == pytest.approx([*expected, 9.0, 6.0])
    assert outcome.notes[0].endswith(" of 2 convolutions, products and attentions by kernels of Roller")


def test_element_wise_kernels_become_one():
    outcome = backend(step())
    assert len(outcome.graph.select(gpu=True)) == 3
    assert any("element-wise kernels became" in note for note in outcome.notes)


def test_a_step_without_products_and_other_backends_are_refused():
    with pytest.raises(InputError, match="daydream predict --compile=roller"):
        backend(recorded([operator("aten::relu", [[8]], kernels=[("relu", 1.0)])]))
    with pytest.raises(InputError, match="name"):
        backend(step(), name="inductor")
