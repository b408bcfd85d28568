"""Regions of graphs as operators of ours: the float64 reference of the language against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sokoban.language.reference import evaluate
from tests.roller.dynamo.graphs import graph_of

torch = pytest.importorskip("torch")

from roller.dynamo.convolutions import writes_last_channels  # noqa: E402  (behind the skip without PyTorch)
from roller.dynamo.orders import LAST, in_memory, refresh  # noqa: E402
from roller.dynamo.regions import Region, regions_of  # noqa: E402

F = torch.nn.functional


def regions(function: Callable[..., Any], *inputs: Any) -> tuple[Any, list[Region]]:
    """The graph of a function and its regions."""
    module = graph_of(function, *inputs)
    return module, [each for each in regions_of(module.graph) if isinstance(each, Region)]


class Recorder(torch.fx.Interpreter):
    """Values of all nodes."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.values: dict[Any, Any] = {}

    def run_node(self, n: Any) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def assert_equal(function: Callable[..., Any], *inputs: Any, count: int = 1) -> list[Region]:
    """All regions of a function, each of which computes what PyTorch does."""
    module, found = regions(function, *inputs)
    assert len(found) == count
    recorder = Recorder(module)
    recorder.run(*(tensor.double() for tensor in inputs))
    for region in found:
        assert_computes(region, recorder)
    return found


def assert_computes(region: Region, recorder: Recorder) -> None:
    """The operator of a region gives what PyTorch does, element by element in memory."""
    arrays = {
        tensor.name: operand.elements(recorder.values[operand.node]).numpy().reshape(tensor.shape)
        for tensor, operand in zip(region.expr.inputs, region.operands, strict=True)
    }
    expected = in_memory(recorder.values[region.result].contiguous(memory_format=region.memory_format)).numpy()
    value = evaluate(region.expr, arrays).reshape(expected.shape)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def assert_all_orders_equal(function: Callable[..., Any], data: Any, *constants: Any, lanes: int = 4) -> Region:
    """The one region of a function whose other inputs never change, in every order of those."""
    module = graph_of(function, data, *constants)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for number, (node, tensor) in enumerate(zip(placeholders[1:], constants, strict=True)):
        module.register_buffer(f"constant_{number}", tensor.double())
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(f"constant_{number}")
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        module.graph.erase_node(node)
    module.recompile()

    def with_last_channels(node: Any, value: Any) -> Any:
        return value.contiguous(memory_format=LAST) if writes_last_channels(node, lanes) else value

    refresh(module.graph, adjust=with_last_channels)
    (region,) = [each for each in regions_of(module.graph, lanes) if isinstance(each, Region)]
    recorder = Recorder(module)
    recorder.run(data.double())
    for each in (region, *region.others):
        assert_computes(each, recorder)
    return region


def random(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


IMAGE, WEIGHTS, BIAS = random(2, 6, 9, 8), random(4, 6, 3, 3), random(4)


def test_a_convolution_takes_its_bias_the_residual_and_the_activation() -> None:
    residual = random(2, 4, 9, 8)
    (region,) = assert_equal(
        lambda x, w, b, r: torch.relu(F.conv2d(x, w, b, padding=1) + r), IMAGE, WEIGHTS, BIAS, residual
    )
    assert region.functions == "convolution add relu"


@pytest.mark.parametrize(
    "function", [F.gelu, F.silu, F.hardswish, F.hardsigmoid, torch.tanh, F.relu6, F.leaky_relu, F.elu]
)
def test_activations_are_taken_whatever_they_are_decomposed_into(function: Callable[..., Any]) -> None:
    (region,) = assert_equal(lambda x, w, b: function(F.conv2d(x, w, b, stride=2)), IMAGE, WEIGHTS, BIAS)
    assert region.result.name != "convolution"


def test_batch_norm_of_inference_is_taken_as_it_is_written_out() -> None:
    mean, variance, gamma, beta = (random(4).abs() for _ in range(4))
    assert_equal(
        lambda x, w, m, v, g, b: torch.relu(F.batch_norm(F.conv2d(x, w), m, v, g, b)),
        IMAGE, WEIGHTS, mean, variance, gamma, beta,
    )  # fmt: skip


def test_grouped_depthwise_dilated_and_one_dimensional_convolutions() -> None:
    assert_equal(lambda x, w, b: torch.relu(F.conv2d(x, w, b, groups=2)), IMAGE, random(4, 3, 3, 3), BIAS)
    assert_equal(
        lambda x, w, b: F.silu(F.conv2d(x, w, b, groups=6, padding=2, dilation=2)), IMAGE, random(6, 1, 3, 3), random(6)
    )
    assert_equal(lambda x, w, b: torch.relu(F.conv1d(x, w, b, padding=1)), random(2, 6, 11), random(4, 6, 3), BIAS)
    assert_equal(lambda x, w, b: F.conv1d(x, w, b, groups=6), random(2, 6, 11), random(6, 1, 3), random(6))


def test_a_linear_function_of_three_dimensions_reads_its_residual_in_that_shape() -> None:
    (region,) = assert_equal(
        lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, random(2, 5, 8), random(7, 8), random(7), random(2, 5, 7)
    )
    assert region.shape == (2, 5, 7)


def test_weights_that_change_are_read_where_they_lie() -> None:
    (region,) = assert_equal(lambda x, w: x @ w.t(), random(5, 8), random(7, 8))
    assert [operand.node.op for operand in region.operands] == ["placeholder", "placeholder"]


def test_weights_that_never_change_lie_in_panels() -> None:
    region = assert_all_orders_equal(lambda x, w, b: F.gelu(F.linear(x, w, b)), random(5, 6), random(24, 6), random(24))
    widths = [dict(other.anchor.sizes)["n"] for other in region.others]
    assert widths == [4, 8, 12]
    assert [other.operands[1].packing.extents for other in region.others] == [(6, 4, 6), (3, 8, 6), (2, 12, 6)]
    assert_all_orders_equal(lambda x, w: x @ w, random(5, 6), random(6, 24))


@pytest.mark.parametrize("images", [random(2, 6, 9, 8), random(2, 6, 9, 8).contiguous(memory_format=LAST)])
@pytest.mark.parametrize(
    ("window", "more", "others"),
    [
        (3, {"padding": 1}, 1),
        (3, {"stride": 2, "dilation": 2, "padding": 2}, 1),
        (1, {}, 1),
        (1, {"stride": 2}, 1),
        (1, {"padding": 1}, 1),
        (3, {"groups": 2}, 0),
        (3, {"groups": 6, "padding": 1}, 0),
        (1, {"groups": 6}, 0),
    ],
)
def test_convolutions_of_constant_weights_write_channels_last(
    images: Any, window: int, more: dict[str, int], others: int
) -> None:
    groups = more.get("groups", 1)
    filters = 6 if groups == 6 else 8
    region = assert_all_orders_equal(
        lambda x, w, b: torch.relu(F.conv2d(x, w, b, **more)),
        images, random(filters, 6 // groups, window, window), random(filters),
    )  # fmt: skip
    assert region.memory_format is LAST
    assert len(region.others) == others


def test_what_is_added_to_images_with_channels_last_is_read_in_their_order() -> None:
    residual, gate = random(2, 8, 9, 8), random(2, 8, 1, 1)
    region = assert_all_orders_equal(
        lambda x, w, r, g: F.conv2d(x, w) * g + r, IMAGE, random(8, 6, 1, 1), residual, gate
    )
    assert region.functions == "convolution mul add"
    assert {operand.memory_format for operand in region.operands} == {LAST, torch.contiguous_format}


def test_images_with_channels_last_leave_before_another_shape() -> None:
    region = assert_all_orders_equal(
        lambda x, w: torch.relu(F.conv2d(x, w).flatten(2)).transpose(1, 2), IMAGE, random(8, 6, 3, 3)
    )
    assert region.functions == "convolution"


def test_batched_products_with_a_scale_and_a_mask_for_all_heads() -> None:
    assert_equal(
        lambda q, k, mask: (q @ k.transpose(-1, -2)) * 0.125 + mask,
        random(2, 3, 5, 8), random(2, 3, 7, 8), random(1, 1, 5, 7),
    )  # fmt: skip


def test_a_value_that_others_read_ends_the_region() -> None:
    _, found = regions(lambda x, w, b: (lambda y: (torch.relu(y), y))(F.conv2d(x, w, b) * 2.0), IMAGE, WEIGHTS, BIAS)
    assert [region.functions for region in found] == ["convolution mul"]


def test_operands_that_are_broadcast_across_dimensions_end_the_region() -> None:
    _, found = regions(lambda x, w, r: F.linear(x, w) + r, random(2, 5, 8), random(7, 8), random(1, 5, 7))
    assert found[0].functions.split()[-1] != "add"


def test_other_products_stay_and_say_why() -> None:
    module = graph_of(lambda x, w: F.conv_transpose2d(x, w), IMAGE, random(6, 4, 3, 3))
    ((node, reason),) = list(regions_of(module.graph))
    assert (node.name, reason) == ("convolution", "a transposed convolution")
    module = graph_of(lambda x, w: x @ w, random(4, 5).double(), random(5, 6).double())
    ((_, reason),) = list(regions_of(module.graph))
    assert reason == "values of float64"
